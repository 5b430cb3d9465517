"""`streamrl weights`: what is known of each version of the weights."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from streamrl.commands import output
from streamrl.commands.options import JsonOption, RunOption
from streamrl.commands.rundir import RunDirectory, find_run, live
from streamrl.errors import LedgerDamaged, Unreachable, UsageError
from streamrl.monitor.lines import date_time, size
from streamrl.monitor.snapshot import Snapshot, take
from streamrl.monitor.tail import Tail

if TYPE_CHECKING:
    from streamrl.weight_sync.manifest import Manifest, Pair

app = typer.Typer(no_args_is_help=True, add_completion=False)
VersionArgument = Annotated[
    str,
    typer.Argument(metavar="VERSION", help="Version number from `weights ls`, or `newest`."),
]


@app.command("ls")
def ls(
    run: RunOption = None,
    everything: Annotated[bool, typer.Option("--all", help="Also versions whose files are gone.")] = False,
    json: JsonOption = False,
) -> int:
    """List versions, newest first: step, size, share of changed values, where they are, which replicas have them.

    The files of a version are removed when newer versions come; `streamrl export` keeps a model. A size is that of the
    files: a delta holds only the values that changed since the version before.
    """
    target = find_run(run)
    rows = _rows(target)
    if not everything:
        rows = [row for row in rows if row["present"] or row["replicas"]]
    if json:
        output.write_json("streamrl.weights/1", {"versions": rows})
        return 0
    if not rows:
        output.note("no version is here" + ("" if everything else "; --all also lists versions without files"))
        return 0
    _print(rows)
    return 0


@app.command("show")
def show(version: VersionArgument, run: RunOption = None, json: JsonOption = False) -> int:
    """Show one version with its files and tensors. Exit code 2 if there never was one."""
    target = find_run(run)
    number = _number(target, version)
    row = next((row for row in _rows(target) if row["version"] == number), None)
    if row is None:
        raise UsageError(f"there never was a version {number}", "`streamrl weights ls --all` shows all")
    manifest = _places(target).get((row["epoch"], number))
    data: dict[str, Any] = {**row, "base": None, "adapter": None, "shards": [], "tensors": []}
    if manifest is not None:
        if (adapter := manifest.adapter) is not None:
            data["adapter"] = f"{adapter.kind} of rank {adapter.rank}, alpha {adapter.alpha:g}, for {adapter.base}"
        data["base"] = None if manifest.base is None else manifest.base[1]
        data["shards"] = [{"file": s.file, "bytes": s.bytes} for s in manifest.files]
        tensors = [*manifest.tensors, *(manifest.quantised.tensors if manifest.quantised else ())]
        data["tensors"] = [{"name": t.name, "dtype": t.dtype, "shape": t.shape} for t in tensors]
    output.answer("streamrl.weights.show/1", data, _lines(data), json=json)
    if manifest is None and not json:
        output.note("its files are gone: only the record is left")
    return 0


def _lines(data: dict[str, Any]) -> Iterator[str]:
    for key, value in {**data, "at": _at(data), "bytes": _bytes(data), "density": _density(data)}.items():
        if key not in {"shards", "tensors"} and value not in (None, [], ""):
            text = {True: "yes", False: "no"}[value] if isinstance(value, bool) else value
            yield f"{key:10}  {', '.join(text) if isinstance(text, list) else text}"
    yield from (f"file        {each['file']}  {size(each['bytes'])}" for each in data["shards"])
    yield from (f"tensor      {each['name']}  {each['dtype']}  {each['shape']}" for each in data["tensors"])


def _number(run: RunDirectory, version: str) -> int:
    """`newest` is the newest version with files here."""
    if version == "newest":
        found = _places(run)
        if not found:
            raise UsageError("no version is here", "`streamrl weights ls --all` also lists versions without files")
        return max(found)[1]
    if not (version.isascii() and version.isdigit()):
        raise UsageError(f"{version} is not a version", "name a number that `streamrl weights ls` shows, or newest")
    return int(version)


def _root(run: RunDirectory) -> Path:
    from streamrl.weight_sync.files import store_of

    return store_of(run.config.weights.transport, run.path).root


def _places(run: RunDirectory) -> dict[Pair, Manifest]:
    from streamrl.weight_sync.manifest import versions

    return versions(_root(run))


def _rows(run: RunDirectory) -> list[dict[str, Any]]:
    from streamrl.weight_sync.manifest import versions

    root = _root(run)
    present = versions(root)
    records = _records(run)
    steps = {pair: record.get("publish_step") for pair, record in records.items()}
    steps |= {pair: manifest.step for pair, manifest in present.items()}
    holders = _holders(run)
    rows = []
    for pair in sorted(steps, key=lambda pair: (pair[1], pair[0]), reverse=True):
        manifest, record = present.get(pair), records.get(pair, {})
        rows.append(
            {
                "version": pair[1],
                "epoch": pair[0],
                "step": steps[pair],
                "at": _time(pair, root, record),
                "bytes": record.get("publish_bytes", None if manifest is None else manifest.total_bytes),
                "kind": record.get("publish_kind", None if manifest is None else manifest.kind),
                "density": record.get("publish_density"),
                "present": pair in present,
                "replicas": holders.pop(pair[1], []),
            }
        )
    return rows


def _time(pair: Pair, root: Path, record: dict[str, Any]) -> float | None:
    """When a version was published, in seconds since 1970; None if only its number is left."""
    from streamrl.weight_sync.manifest import MANIFEST_FILE, folder_name

    with contextlib.suppress(OSError):
        return (root / folder_name(*pair) / MANIFEST_FILE).stat().st_mtime
    at = record.get("at")
    return float(at) if isinstance(at, (int, float)) else None


def _records(run: RunDirectory) -> dict[Pair, dict[str, Any]]:
    """The learner's metrics by the version they describe; a line that a crash cut off is skipped."""
    found: dict[Pair, dict[str, Any]] = {}
    for record in Tail(run.path / "metrics" / "learner.0.jsonl").read():
        with contextlib.suppress(KeyError, TypeError, ValueError):
            found.setdefault((int(record["epoch"]), int(record["published"])), record)
    return found


def _holders(run: RunDirectory) -> dict[int, list[str]]:
    """Rollout replicas by the version they generate with; empty if Redis does not answer."""
    try:
        snapshot = asyncio.run(_look(run))
    except (Unreachable, LedgerDamaged) as error:
        output.note(f"which replicas have a version is unknown: {error.message}")
        return {}
    holders: dict[int, list[str]] = {}
    for name, version in (snapshot.role_versions if snapshot is not None else {}).items():
        if name.startswith("rollout"):
            holders.setdefault(version, []).append(name)
    return holders


async def _look(run: RunDirectory) -> Snapshot | None:
    async with live(run) as connection:
        return None if connection is None else await take(connection, run.name)


def _print(rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("VERSION", "EPOCH", "STEP", "TIME", "SIZE", "KIND", "CHANGED", "WHERE", "REPLICAS"):
        table.add_column(name, justify="left" if name in {"TIME", "KIND", "WHERE", "REPLICAS"} else "right")
    for row in rows:
        where = "present" if row["present"] else ""
        numbers = ("" if row[name] is None else str(row[name]) for name in ("version", "epoch", "step"))
        table.add_row(
            *numbers, _at(row), _bytes(row), row["kind"] or "", _density(row), where, ", ".join(row["replicas"])
        )
    output.console().print(table)


def _at(row: dict[str, Any]) -> str:
    return "" if row["at"] is None else date_time(row["at"])


def _bytes(row: dict[str, Any]) -> str:
    return "" if row["bytes"] is None else size(row["bytes"])


def _density(row: dict[str, Any]) -> str:
    return "" if row["density"] is None else f"{100 * row['density']:.2f} %"
