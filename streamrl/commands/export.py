"""`streamrl export`: a checkpoint as a Hugging Face directory; the learner need not run."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from streamrl.commands import output
from streamrl.commands.rundir import find_run
from streamrl.errors import CannotCreate, ConfigError

SCHEMA: Final = "streamrl.export/1"


def export(chosen: Path | None, step: int | None, out: Path, *, average: bool, force: bool, json: bool) -> int:
    """Write the checkpoint of a step, the newest when None, to `out`.

    Raises:
        ConfigError: there is no such checkpoint, or the model that training started from is gone.
        Refused: the checkpoint is of another format or model, or of a recording.
        CannotCreate: something is there and `force` is not set, or there is no room.
    """
    run = find_run(chosen)
    if out.exists() and not out.is_dir():
        raise CannotCreate(f"{out} is no directory", "name another one")
    if out.is_dir() and any(out.iterdir()) and not force:
        raise CannotCreate(f"{out} is not empty", "name another directory, or replace it with --force")
    missing = [name for name in ("torch", "transformers", "safetensors") if not find_spec(name)]
    if missing:
        raise ConfigError(f"an export needs {', '.join(missing)}", "pip install 'streamrl[train]'")
    from streamrl.learner.checkpoint import Checkpoints
    from streamrl.learner.export import choose_checkpoint, export_checkpoint
    from streamrl.runfile import read_saved

    config = read_saved(run.path / "run.json").config
    checkpoints = Checkpoints(run.path / "checkpoints", make=False)
    meta = choose_checkpoint(checkpoints, step)
    folder = checkpoints.path(meta.position)
    found = export_checkpoint(config, folder, meta, out, average=average, on_progress=_progress)
    data = {
        "run": run.name,
        "checkpoint": found.checkpoint,
        "step": meta.step,
        "average": average,
        "directory": str(out.resolve()),
        "files": found.files,
        "bytes": found.bytes,
    }
    if json:
        output.write_json(SCHEMA, data)
    else:
        output.write(f"ckpt-{meta.name} (step {meta.step}) is in {out}: {found.bytes >> 20} MiB")
    return 0


def _progress(done: int, total: int) -> None:
    if sys.stderr.isatty() or done < total:
        output.note(f"exported {done >> 20} of {total >> 20} MiB")
