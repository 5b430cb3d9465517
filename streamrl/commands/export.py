"""`streamrl export`: a checkpoint as a Hugging Face directory; the learner need not run."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from streamrl.commands import output
from streamrl.commands.options import JsonOption, RunOption
from streamrl.commands.rundir import find_run
from streamrl.errors import CannotCreate, UsageError, need_packages
from streamrl.monitor.lines import size
from streamrl.store import ObjectStore


def export(
    *,
    out: Annotated[
        str | None, typer.Option("--out", metavar="DIR", help="Directory to write, or the URL of a store (s3://).")
    ] = None,
    push: Annotated[
        str | None,
        typer.Option("--push", metavar="OWNER/NAME", help="Push it to a model hub with a card (token: HF_TOKEN)."),
    ] = None,
    run: RunOption = None,
    checkpoint: Annotated[
        int | None, typer.Option("--checkpoint", min=0, metavar="STEP", help="Step of the checkpoint; else the newest.")
    ] = None,
    average: Annotated[bool, typer.Option("--ema", help="Export the average of the weights (learner.ema).")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace what is in DIR.")] = False,
    json: JsonOption = False,
) -> int:
    """Write a checkpoint as a Hugging Face directory, or push it to a hub. The run need not be running."""
    if out is None and push is None:
        raise UsageError("nowhere to export to", "name a directory with --out, or a repository with --push")
    target = find_run(run)
    store = ObjectStore(out, "--out") if out is not None and "://" in out else None
    if out is not None:
        _check_empty(Path(out), store, force=force)
    need_packages("an export", "torch", "transformers", "safetensors")
    from streamrl.learner.checkpoint import Checkpoints
    from streamrl.learner.export import choose_checkpoint, copy_model, export_checkpoint

    checkpoints = Checkpoints.of(target.config, target.path)
    meta = choose_checkpoint(checkpoints, checkpoint)
    folder = checkpoints.path(meta.position)
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(output.ProgressLine())
        local = Path(out or "")
        if store is not None or out is None:
            local = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="export-", dir=target.path))) / "model"

        def written(done: int, total: int) -> None:
            progress.show(f"exported {size(done)} of {size(total)}", last=done == total and sys.stderr.isatty())

        found = export_checkpoint(target.config, folder, meta, local, average=average, on_progress=written)
        if store is not None:
            copy_model(local, store)
        url = None
        if push is not None:
            from streamrl.commands.hub import model_card, push_model  # an HTTP client, which takes a while

            (local / "README.md").write_text(model_card(target.config, target.path, meta.step, push))
            url = push_model(local, push)
    data = {
        "run": target.name,
        "checkpoint": found.checkpoint,
        "step": meta.step,
        "average": average,
        "directory": out if store is not None or out is None else str(local.resolve()),
        "url": url,
        "files": found.files,
        "bytes": found.bytes,
    }
    where = " and ".join(place for place in (out, url) if place)
    said = f"ckpt-{meta.name} (step {meta.step}) is in {where}: {size(found.bytes)}"
    output.answer("streamrl.export/1", data, [said], json=json)
    return 0


def _check_empty(out: Path, store: ObjectStore | None, *, force: bool) -> None:
    if store is not None:
        store.probe()
        full = bool(store.names())
    elif out.exists() and not out.is_dir():
        raise CannotCreate(f"{out} is not a directory", "name another one")
    else:
        full = out.is_dir() and any(out.iterdir())
    if full and not force:
        where = out if store is None else store.url
        raise CannotCreate(f"{where} is not empty", "name another directory, or replace it with --force")
