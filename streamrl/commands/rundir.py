"""Which run a command means, and the few values of its `run.json` that a quick look needs.

The values are read with orjson alone: importing the typed configuration costs `streamrl lag` 100 ms.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from streamrl.errors import ConfigError

RUNS: Final = Path("runs")


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """A run on disk.

    Attributes:
        path: its directory.
        config: the resolved configuration as `run.json` has it (dict of sections).
    """

    path: Path
    config: dict[str, Any]

    @property
    def name(self) -> str:
        """Name of the run: its keys in Redis carry it."""
        return str(self.config["name"])

    @property
    def redis_url(self) -> str | None:
        """URL of a foreign Redis; None when the run has its own."""
        url = self.config["redis"]["url"]
        return None if url is None else str(url)

    @property
    def password_file(self) -> Path | None:
        """File with the password of Redis."""
        file = self.config["redis"]["password_file"]
        return None if file is None else Path(file)

    @property
    def budget(self) -> int:
        """Groups admitted and not yet trained, at most (as `RunConfig.budget`)."""
        return int((self.config["max_staleness"] + 1) * self.config["learner"]["groups_per_step"])

    @property
    def hard_cap(self) -> int:
        """Live groups, at most (as `RunConfig.hard_cap`)."""
        intervals = 2 if self.config["checkpoint"]["background"] else 1
        groups = self.config["learner"]["groups_per_step"]
        return int(self.budget + intervals * self.config["checkpoint"]["every"] * groups)


def find_run(chosen: Path | None) -> RunDirectory:
    """Return the run in `chosen`, or the newest run in `runs/` when None.

    Raises:
        ConfigError: no run there, or its `run.json` is none of ours.
    """
    path = chosen if chosen is not None else newest_run(RUNS)
    if path is None:
        raise ConfigError(f"no run in {RUNS.resolve()}", "start one: `streamrl up RUN.yaml`; or name one: --run DIR")
    file = path / "run.json"
    try:
        config = orjson.loads(file.read_bytes())["config"]
        return _checked(RunDirectory(path=path, config=config))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(f"{path} is no run directory: run.json is missing", "name one with --run DIR") from error
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{file} is not the run.json of a run: {error!r}", "name another with --run DIR") from error


def newest_run(folder: Path) -> Path | None:
    """The directory in `folder` whose `run.json` was written last; None when there is none."""
    files = [file for file in folder.glob("*/run.json") if file.is_file()]
    return max(files, key=lambda file: file.stat().st_mtime_ns).parent if files else None


def _checked(run: RunDirectory) -> RunDirectory:
    """Touch every value that is used later, so that a foreign file is refused here and not in the middle."""
    _ = (run.name, run.redis_url, run.password_file, run.budget, run.hard_cap)
    return run
