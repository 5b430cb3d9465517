"""`streamrl render`: a run as files for another engine that places its roles."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from streamrl.commands import output
from streamrl.commands.config import DEFAULT_FILE, configuration
from streamrl.commands.options import RunFile, SetOption
from streamrl.errors import CannotCreate, UsageError, writing
from streamrl.runfile import RUNS

app = typer.Typer(no_args_is_help=True, add_completion=False)
IntoOption = Annotated[Path | None, typer.Option("--into", metavar="DIR", help="Folder to write into; ENGINE/NAME.")]


@app.command("kubernetes")
def kubernetes(
    file: RunFile = None,
    into: IntoOption = None,
    overrides: SetOption = None,
    engine_nodes: Annotated[
        int, typer.Option("--engine-nodes", min=1, metavar="N", help="Nodes that each engine server is spread over.")
    ] = 1,
) -> int:
    """Write manifests: a kustomize base, and overlays for GPUs and for scaling by our own lag.

    The run file, its data and its model are read in the cluster from the volume `work`, under the name of the run file.
    """
    from streamrl.runtime.placement import kubernetes as engine

    loaded, _ = configuration(file, None, overrides or [], resume=False)
    run_file = file if file is not None else DEFAULT_FILE
    folder = into if into is not None else Path("kubernetes") / loaded.config.name
    _write(folder, engine.render(loaded.config, run_file, overrides or [], engine_nodes=engine_nodes))
    output.note(f"hint: the guide Kubernetes says what to set; then: kubectl apply -k {folder}/base")
    return 0


@app.command("compose")
def compose(file: RunFile = None, into: IntoOption = None, overrides: SetOption = None) -> int:
    """Write a file of Docker Compose: all roles of the run as containers of one host.

    The folder of the run file is their folder /work: data, model and reward code lie in it.
    """
    from streamrl.runtime.placement import compose as engine

    loaded, _ = configuration(file, None, overrides or [], resume=False)
    folder = into if into is not None else Path("compose") / loaded.config.name
    run_file = (file if file is not None else DEFAULT_FILE).resolve()
    _write(folder, engine.render(loaded.config, run_file, folder.resolve(), overrides or []))
    output.note(f"hint: the guide Docker Compose says what to set; then: docker compose -f {folder}/{engine.FILE} up")
    return 0


@app.command("slurm")
def slurm(file: RunFile = None, into: IntoOption = None, overrides: SetOption = None) -> int:
    """Write job scripts, and `submit.sh`, which checks the run and submits them.

    They name the run file and the run directory from their own folder, so that the three can be copied together.
    """
    from streamrl.runtime.placement import slurm as engine

    loaded, run_dir = configuration(file, None, overrides or [], resume=False)
    folder = into if into is not None else Path("slurm") / loaded.config.name
    run_file = file if file is not None else DEFAULT_FILE
    run_dir = run_dir if run_dir is not None else RUNS / loaded.config.name
    near_file, near_dir = (Path(os.path.relpath(place, folder)) for place in (run_file, run_dir))
    given = {key for key, origin in loaded.origins.items() if origin != "default"}
    _write(folder, engine.render(loaded.config, near_file, near_dir, overrides or [], given))
    (folder / "submit.sh").chmod(0o755)
    output.note(f"hint: look at the #SBATCH lines (partition, account, time), then: {folder}/submit.sh")
    return 0


def _write(folder: Path, files: dict[str, str]) -> None:
    """Write the files; a repeat replaces them. Nothing else may be in the folder."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file", "name a folder with --into")
    strange = [str(path) for path in folder.rglob("*") if path.is_file() and _foreign(folder, path, files)]
    if strange:
        raise CannotCreate(f"{folder} holds other files: {', '.join(strange[:3])}", "name another folder with --into")
    with writing(inside=folder):
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
            output.write(str(folder / name))


def _foreign(folder: Path, path: Path, files: dict[str, str]) -> bool:
    return path.relative_to(folder).as_posix() not in files and "secrets" not in path.parts
