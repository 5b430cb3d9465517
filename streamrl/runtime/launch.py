"""The run directory before a run: made, taken up again, or put aside."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from streamrl.config import RunConfig
from streamrl.errors import CannotCreate, ConfigError, UsageError
from streamrl.runfile import RUNS, LoadedConfig, read_saved, save
from streamrl.runtime.lock import supervisor_lock
from streamrl.runtime.plan import plan
from streamrl.runtime.preflight import Check, preflight
from streamrl.weight_sync.files import make_token

FIXED: Final = (
    "name",
    "seed",
    "redis.url",
    "model.path",
    "model.tokenizer",
    "data.train",
    "data.held_out",
    "data.shuffle",
    "data.max_prompt_tokens",
    "model.context",
    "sampling.group_size",
    "sampling.temperature",
    "recording.mode",
    "recording.path",
    "sampling.greedy_baseline",
)
"""Values that a run keeps for life: ledger, data order, checkpoints and waiting groups depend on them."""

_OURS: Final = frozenset({"logs", "metrics", "checkpoints", "run.json.draft", "run.draft", "supervisor.lock"})


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A run directory that a supervisor can take over.

    `resumed` says that there was something in it, `changed` which values differ from the last time, `put_aside` where
    `--fresh` moved what was there before. `checks` is what the preflight found.
    """

    run_dir: Path
    config: RunConfig
    resumed: bool
    changed: tuple[str, ...]
    put_aside: Path | None
    checks: tuple[Check, ...]


def prepare_run(
    loaded: LoadedConfig, run_dir: Path | None = None, *, fresh: bool = False, resume: bool = False
) -> PreparedRun:
    """Check everything, then make the run directory or take up the one that is there, and write `run.json`.

    Without `fresh` and `resume` a directory with a run in it is resumed. Repeating the call is harmless.

    Args:
        loaded: configuration with its origins.
        run_dir: directory of the run; `runs/NAME` when None.
        fresh: put aside what is there, as `DIR.old-TIME`.
        resume: there must be a run in the directory.

    Raises:
        UsageError: both flags, or `resume` without a run.
        Refused: the run is running.
        ConfigError: the run in the directory was started with other values that it must keep (the message names
            them), or the preflight found a mistake.
        CannotCreate: no permission or no space.
    """
    config = loaded.config
    folder = run_dir if run_dir is not None else RUNS / config.name
    if fresh and resume:
        raise UsageError("--fresh and --resume exclude each other")
    there = (folder / "run.json").exists()
    recording = config.recording.path
    if fresh and recording is not None and recording.is_relative_to(folder.resolve()):
        raise UsageError(f"--fresh would put {recording} aside", "train it in a directory of its own: --run DIR")
    if resume and not there:
        raise UsageError(f"there is no run in {folder} to resume", "leave out --resume to start one")
    if folder.exists() and not there and any(path.name not in _OURS for path in folder.iterdir()):
        raise CannotCreate(f"{folder} is not empty and holds no run", "name another directory with --run, or remove it")
    changed = _changed(config, folder) if there and not fresh else ()
    checks = tuple(preflight(config, folder))
    put_aside = None
    with _os_errors(folder):
        if there:
            with supervisor_lock(folder):  # refused while the run is running
                put_aside = _put_aside(folder) if fresh else None
        for name in ("logs", "metrics", "checkpoints"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        save(loaded, folder / "run.json")
    if config.weights.pulled:
        make_token(folder)  # here, so that no replica has to wait for the learner, wherever it was copied to
    return PreparedRun(folder, config, there and not fresh, changed, put_aside, checks)


def describe(config: RunConfig, run_dir: Path) -> list[str]:
    """What a supervisor would start, one line per process with what it is given (`up --dry-run`). Starts nothing."""
    lines = []
    for unit in plan(config, run_dir):
        for position, name in enumerate(unit.processes):
            command = unit.command(position, "START")
            env = " ".join(f"{key}={value}" for key, value in sorted(command.env.items()) if "SUPERVISOR" not in key)
            lines.append(f"{name}: {env} {' '.join(command.argv)}")
    return lines


def _changed(config: RunConfig, folder: Path) -> tuple[str, ...]:
    """Return the dotted keys whose values differ from those the run was started with; refuse those it must keep."""
    before, now = read_saved(folder / "run.json").config, config
    differ = tuple(sorted(_differences(before.model_dump(mode="json"), now.model_dump(mode="json"))))
    kept = [key for key in differ if key in FIXED]
    if kept:
        values = ", ".join(f"{key} was {_value(before, key)!r} and is {_value(now, key)!r}" for key in kept)
        raise ConfigError(f"{folder} has a run with other values: {values}", "--fresh starts anew, --run DIR elsewhere")
    return differ


def _differences(before: Any, now: Any, key: str = "") -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for name in {*before, *now}:
            yield from _differences(before.get(name), now.get(name), f"{key}.{name}" if key else name)
    elif before != now:
        yield key


def _value(config: RunConfig, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return str(value) if isinstance(value, Path) else value


def _put_aside(folder: Path) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    names = (folder.with_name(f"{folder.name}.old-{stamp}{suffix}") for suffix in ("", *(f"-{n}" for n in range(100))))
    target = next(name for name in names if not name.exists())
    folder.rename(target)
    return target


@contextlib.contextmanager
def _os_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except CannotCreate:
        raise
    except OSError as error:
        raise CannotCreate(f"{error.filename or folder}: {error.strerror}", "check space and permissions") from error
