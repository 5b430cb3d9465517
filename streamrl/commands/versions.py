"""`streamrl weights ls` and `show`: what is known of each version of the weights."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import orjson

from streamrl.commands import output
from streamrl.commands.attach import live_probe
from streamrl.commands.rundir import RunDirectory, find_run
from streamrl.errors import LedgerDamaged, Unreachable, UsageError
from streamrl.monitor.lines import date_time
from streamrl.queues.rollback import Request, parse
from streamrl.queues.snapshot import take

if TYPE_CHECKING:
    from streamrl.weight_sync.manifest import Manifest, Pair

LIST_SCHEMA: Final = "streamrl.weights/1"
SHOW_SCHEMA: Final = "streamrl.weights.show/1"


def ls(chosen: Path | None, *, everything: bool, json: bool) -> int:
    """List the versions that are here, pinned or held by a replica, newest first; `everything`: all that were made."""
    run = find_run(chosen)
    rows = _rows(run)
    if not everything:
        rows = [row for row in rows if row["present"] or row["pinned"] or row["replicas"]]
    if json:
        output.write_json(LIST_SCHEMA, {"versions": rows, "rollback": _rollback(run)})
        return 0
    if not rows:
        output.note("no version is here" + ("" if everything else "; --all lists those whose files are gone"))
        return 0
    _print(rows)
    return 0


def show(chosen: Path | None, version: str, *, json: bool) -> int:
    """Show one version: its figures, files and tensors."""
    run = find_run(chosen)
    number = number_of(run, version)
    row = next((row for row in _rows(run) if row["version"] == number), None)
    if row is None:
        raise UsageError(f"there never was a version {number}", "`streamrl weights ls --all` shows all")
    manifest = _places(run).get((row["epoch"], number))
    data: dict[str, Any] = {**row, "base": None, "adapter": None, "shards": [], "tensors": []}
    if manifest is not None:
        if (adapter := manifest.adapter) is not None:
            data["adapter"] = f"{adapter.kind} of rank {adapter.rank}, alpha {adapter.alpha:g}, for {adapter.base}"
        data["base"] = None if manifest.base is None else manifest.base[1]
        data["shards"] = [{"file": s.file, "bytes": s.bytes, "kind": s.kind} for s in manifest.shards]
        data["tensors"] = [
            {"name": t.name, "dtype": t.dtype, "shape": t.shape, "parts": len(t.parts)} for t in manifest.tensors
        ]
    if json:
        output.write_json(SHOW_SCHEMA, data)
        return 0
    for key, value in {**data, "at": _at(row), "bytes": _bytes(row), "density": _density(row)}.items():
        if key not in {"shards", "tensors"} and value not in (None, [], ""):
            text = {True: "yes", False: "no"}[value] if isinstance(value, bool) else value
            output.write(f"{key:10}  {', '.join(text) if isinstance(text, list) else text}")
    for shard in data["shards"]:
        output.write(f"file        {shard['file']}  {shard['kind']}  {size(shard['bytes'])}")
    for tensor in data["tensors"]:
        output.write(f"tensor      {tensor['name']}  {tensor['dtype']}  {tensor['shape']}")
    if manifest is None:
        output.note("its files are gone: only the record is left")
    return 0


def number_of(run: RunDirectory, version: str) -> int:
    """The number of the version that a person names: by it, or as `newest` of those whose files are here.

    Raises:
        UsageError: it is neither, or no files are here.
    """
    if version == "newest":
        found = _places(run)
        if not found:
            raise UsageError("no version is here", "`streamrl weights ls --all` lists those whose files are gone")
        return max(found)[1]
    if not (version.isascii() and version.isdigit()):
        raise UsageError(f"{version} is no version", "name a number that `streamrl weights ls` shows, or newest")
    return int(version)


def root_of(run: RunDirectory) -> Path:
    """Folder on this host in which the learner's host keeps the versions of a run."""
    from streamrl.weight_sync.files import store_of

    return store_of(run.config["weights"]["transport"], run.path).root


def _places(run: RunDirectory) -> dict[Pair, Manifest]:
    """All manifests that can be read; of a pinned version that of its copy on the transport, which says more."""
    from streamrl.weight_sync.manifest import PINNED, versions

    return versions(run.path / PINNED) | versions(root_of(run))


def _rows(run: RunDirectory) -> list[dict[str, Any]]:
    """What is known of each version, newest first, from manifests, the log of versions, records and replicas."""
    from streamrl.learner.chain import read_versions
    from streamrl.weight_sync.manifest import PINNED, versions

    root = root_of(run)
    present, pinned = versions(root), versions(run.path / PINNED)
    steps = {(note.epoch, note.version): note.step for note in read_versions(run.path / "checkpoints")}
    steps |= {pair: manifest.step for pair, manifest in [*pinned.items(), *present.items()]}
    records = _records(run)
    holders = _holders(run)
    rows = []
    for pair in sorted(steps, key=lambda pair: (pair[1], pair[0]), reverse=True):
        manifest, record = present.get(pair) or pinned.get(pair), records.get(pair, {})
        rows.append(
            {
                "version": pair[1],
                "epoch": pair[0],
                "step": steps[pair],
                "at": _time(pair, root, run, record),
                "bytes": record.get("publish_bytes", None if manifest is None else manifest.total_bytes),
                "kind": record.get("publish_kind", None if manifest is None else manifest.kind),
                "density": record.get("publish_density"),
                "present": pair in present,
                "pinned": pair in pinned,
                "replicas": holders.pop(pair[1], []),
            }
        )
    return rows


def _time(pair: Pair, root: Path, run: RunDirectory, record: dict[str, Any]) -> float | None:
    """When a version was published, in seconds since 1970; None when nothing of it is left but its number."""
    from streamrl.weight_sync.manifest import MANIFEST_FILE, PINNED, folder_name

    for folder in (root, run.path / PINNED):
        try:
            return (folder / folder_name(*pair) / MANIFEST_FILE).stat().st_mtime
        except OSError:
            continue
    at = record.get("at")
    return float(at) if isinstance(at, (int, float)) else None


def _records(run: RunDirectory) -> dict[Pair, dict[str, Any]]:
    """Lines of the learner's records by the version that they tell of; a line that a crash cut off is skipped."""
    found: dict[Pair, dict[str, Any]] = {}
    for line in _lines(run.path / "metrics" / "learner.0.jsonl"):
        try:
            record = orjson.loads(line)
            found.setdefault((int(record["epoch"]), int(record["published"])), record)
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
            continue
    return found


def _lines(path: Path) -> Iterable[bytes]:
    return path.read_bytes().splitlines() if path.exists() else []


def _holders(run: RunDirectory) -> dict[int, list[str]]:
    """Rollout replicas by the version they generate with; nothing when Redis is not there."""
    try:
        probe = live_probe(run)
        if probe is None:
            return {}
        with probe:
            versions = take(probe, run.name).role_versions
    except (Unreachable, LedgerDamaged) as error:
        output.note(f"who holds what is unknown: {error.message}")
        return {}
    holders: dict[int, list[str]] = {}
    for name, version in versions.items():
        if name.startswith("rollout"):
            holders.setdefault(version, []).append(name)
    return holders


def asked(run: RunDirectory) -> Request | None:
    """The newest request to go back, from a Redis that is running."""
    try:
        probe = live_probe(run)
        if probe is None:
            return None
        with probe:
            state = take(probe, run.name).train.state
    except (Unreachable, LedgerDamaged):
        return None
    return parse(state.get("rollback", ""), state.get("rolled", ""))


def _rollback(run: RunDirectory) -> dict[str, Any] | None:
    request = asked(run)
    if request is None:
        return None
    return {"version": request.version, "answer": request.answer.value, "text": request.text}


def _print(rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("VERSION", "EPOCH", "STEP", "TIME", "SIZE", "KIND", "CHANGED", "WHERE", "REPLICAS"):
        table.add_column(name, justify="left" if name in {"TIME", "KIND", "WHERE", "REPLICAS"} else "right")
    for row in rows:
        where = ", ".join(name for name in ("present", "pinned") if row[name])
        numbers = (str(row[name]) for name in ("version", "epoch", "step"))
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


def size(count: int) -> str:
    """Bytes for people."""
    return f"{count / (1 << 20):.1f} MiB" if count >= 1 << 20 else f"{count / 1024:.1f} KiB"
