"""`streamrl export`: a checkpoint as a Hugging Face directory; the learner need not run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from streamrl.commands import output
from streamrl.commands.options import JsonOption, RunOption
from streamrl.commands.rundir import find_run
from streamrl.errors import CannotCreate, need_packages
from streamrl.monitor.lines import size


def export(
    *,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Directory to write.")],
    run: RunOption = None,
    checkpoint: Annotated[
        int | None, typer.Option("--checkpoint", min=0, metavar="STEP", help="Step of the checkpoint; else the newest.")
    ] = None,
    average: Annotated[bool, typer.Option("--ema", help="Export the average of the weights (learner.ema).")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace what is in DIR.")] = False,
    json: JsonOption = False,
) -> int:
    """Write a checkpoint as a Hugging Face directory. The run need not be running."""
    target = find_run(run)
    if out.exists() and not out.is_dir():
        raise CannotCreate(f"{out} is not a directory", "name another one")
    if out.is_dir() and any(out.iterdir()) and not force:
        raise CannotCreate(f"{out} is not empty", "name another directory, or replace it with --force")
    need_packages("an export", "torch", "transformers", "safetensors")
    from streamrl.learner.checkpoint import Checkpoints
    from streamrl.learner.export import choose_checkpoint, export_checkpoint

    checkpoints = Checkpoints.of(target.path, make=False)
    meta = choose_checkpoint(checkpoints, checkpoint)
    folder = checkpoints.path(meta.position)
    with output.ProgressLine() as progress:

        def written(done: int, total: int) -> None:
            progress.show(f"exported {size(done)} of {size(total)}", last=done == total and sys.stderr.isatty())

        found = export_checkpoint(target.config, folder, meta, out, average=average, on_progress=written)
    data = {
        "run": target.name,
        "checkpoint": found.checkpoint,
        "step": meta.step,
        "average": average,
        "directory": str(out.resolve()),
        "files": found.files,
        "bytes": found.bytes,
    }
    said = f"ckpt-{meta.name} (step {meta.step}) is in {out}: {size(found.bytes)}"
    output.answer("streamrl.export/1", data, [said], json=json)
    return 0
