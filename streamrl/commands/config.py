"""`streamrl config`: the resolved configuration, its origins, and its JSON Schema."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import orjson
import typer

from streamrl.commands import output
from streamrl.commands.options import JsonOption, RunFile, SetOption
from streamrl.commands.rundir import find_run
from streamrl.config import RunConfig
from streamrl.errors import UsageError
from streamrl.queues.access import redact
from streamrl.runfile import OF_A_GPU, RUNS, LoadedConfig, leaves, load, read_saved

if TYPE_CHECKING:
    from streamrl.runtime.preflight import Check

DEFAULT_FILE: Final = Path("run.yaml")

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.command("show")
def show(
    file: Annotated[Path | None, typer.Argument(metavar="RUN.yaml", help="Run file; the defaults if left out.")] = None,
    run: Annotated[
        Path | None,
        typer.Option("--run", metavar="DIR", envvar="STREAMRL_RUN", help="Show a run instead of a file."),
    ] = None,
    overrides: SetOption = None,
    origin: Annotated[bool, typer.Option("--origin", help="Show where each value comes from.")] = False,
    json: JsonOption = False,
) -> int:
    """Show every value of a run file, or of a run (--run)."""
    if file is not None and run is not None:
        raise UsageError("name a run file or --run, not both")
    if run is not None and overrides:
        raise UsageError("--set changes a run file, not an existing run", "leave out --run or --set")
    loaded = read_saved(run / "run.json") if run is not None else load(file, overrides or [])
    values = without_secrets(loaded)
    rows = [(key, orjson.dumps(value).decode()) for key, value in leaves(values)]
    width, value_width = max(len(key) for key, _ in rows), min(60, max(len(value) for _, value in rows))
    lines = (
        f"{key:{width}}  {value:{value_width}}  {said if origin or said == OF_A_GPU else ''}".rstrip()
        for key, value in rows
        for said in [origin_of(loaded, key)]
    )
    output.answer("streamrl.config/1", {"config": values, "origins": loaded.origins}, lines, json=json)
    return 0


@app.command("validate")
def validate(file: RunFile = None, overrides: SetOption = None, json: JsonOption = False) -> int:
    """Check a run file as `up --dry-run` does: keys, model, data, rewards, and what the run needs of this machine.

    All checks are shown. The exit code is that of the first one that failed.
    """
    from streamrl.runtime.preflight import check_all

    loaded, _ = configuration(file, None, overrides or [], resume=False)
    checks = check_all(loaded.config, RUNS / loaded.config.name)
    failed = next((check.error for check in checks if check.error is not None), None)
    if json:
        shown = [
            {
                "name": check.name,
                "found": check.found,
                "error": check.error.message if check.error else None,
                "hint": check.error.hint if check.error else None,
            }
            for check in checks
        ]
        output.write_json(
            "streamrl.config.validate/1", {"valid": failed is None, "name": loaded.config.name, "checks": shown}
        )
    else:
        write_checks(checks)
    if failed is not None:
        raise failed
    if not json:
        output.write(f"{file or 'run.yaml'}: valid")
    return 0


def configuration(
    file: Path | None, run: Path | None, overrides: Sequence[str], *, resume: bool
) -> tuple[LoadedConfig, Path | None]:
    """The configuration that `up` takes (`run.yaml` if no file is named), and the named directory."""
    if file is None and resume:
        if overrides:
            raise UsageError("--set changes a run file: name it", "streamrl up RUN.yaml --resume --set ...")
        found = find_run(run)
        return read_saved(found.path / "run.json"), found.path
    if file is None and DEFAULT_FILE.exists():
        file = DEFAULT_FILE
    if file is None and not overrides:
        raise UsageError("no run file", "name one, write one with `streamrl init`, or go on with --resume")
    loaded = load(file, overrides)
    if loaded.config.recording.mode == "read" and loaded.config.data.epochs is None:
        loaded = load(file, [*overrides, "data.epochs=1"])  # a recording has an end
    return loaded, run


def write_checks(checks: Sequence[Check]) -> None:
    for check in checks:
        output.write(f"check  {check.name}: {check.found if check.error is None else f'FAILED: {check.error.message}'}")


@app.command("schema")
def schema() -> int:
    """Print the JSON Schema of a run file, for editors."""
    output.write(orjson.dumps(RunConfig.model_json_schema(), option=orjson.OPT_INDENT_2).decode())
    return 0


def without_secrets(loaded: LoadedConfig) -> dict[str, Any]:
    """The configuration as JSON values, without a password in `redis.url`."""
    values = loaded.config.model_dump(mode="json")
    if values["redis"]["url"] is not None:
        values["redis"]["url"] = redact(values["redis"]["url"])
    return values


def origin_of(loaded: LoadedConfig, key: str) -> str:
    """Origin of a dotted key; a value inside a list or mapping has the origin of that list or mapping."""
    while key:
        if key in loaded.origins:
            return loaded.origins[key]
        key = key.rpartition(".")[0]
    return "default"
