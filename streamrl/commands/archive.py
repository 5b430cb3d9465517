"""`streamrl archive`: what is kept of closed groups, and its export."""

from __future__ import annotations

import datetime as dt
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from streamrl.archive.reader import ArchivedGroup, ArchiveReading, archive_files, read_archive, read_file
from streamrl.commands import output
from streamrl.commands.archive_rows import Format, export_rows
from streamrl.commands.rundir import find_run
from streamrl.errors import ConfigError, ExitCode, UsageError, WireError
from streamrl.monitor.lines import date_time, duration, size

LIST_SCHEMA: Final = "streamrl.archive/1"
EXPORT_SCHEMA: Final = "streamrl.archive.export/1"
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def ls(chosen: Path | None, source: Path | None, *, json: bool) -> int:
    """List the files of an archive with what is in them; 1 when one is damaged."""
    path = source or find_run(chosen).path
    files = [
        _file(file, evaluation=evaluation)
        for evaluation in (False, True)
        for file in ([] if evaluation and path.is_file() else archive_files(path, evaluation=evaluation))
    ]
    if not files:
        read_archive(path)  # says how one comes to be
    code = int(ExitCode.FAILURE if any(found["problem"] for found in files) else ExitCode.OK)
    if json:
        output.write_json(LIST_SCHEMA, {"source": str(path), "files": files})
        return code
    for found in files:
        kind = "held-out groups" if found["evaluation"] else "groups"
        when = f"{date_time(found['from'])} to {date_time(found['to'])}" if found["from"] else "time unknown"
        line = f"{found['file']}  {size(found['bytes'])}  {found['groups']} {kind}  {found['samples']} samples  {when}"
        output.write(line + (f"  DAMAGED: {found['problem']}" if found["problem"] else ""))
    return code


def _file(file: Path, *, evaluation: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"file": str(file), "bytes": file.stat().st_size, "evaluation": evaluation}
    groups = samples = dead = 0
    first, last, problem = 0.0, 0.0, None
    try:
        for group in read_file(file)[1]:
            if group.lost:
                continue
            groups, samples, dead = groups + 1, samples + len(group.samples), dead + len(group.causes)
            first, last = first or group.at, max(last, group.at)
    except (WireError, ConfigError) as error:
        problem = error.message
    return found | {
        "groups": groups,
        "samples": samples,
        "dead": dead,
        "from": first or None,
        "to": last or None,
        "problem": problem,
    }


def export(
    chosen: Path | None,
    source: Path | None,
    out: str,
    kind: Format | None,
    *,
    since: str | None,
    evaluation: bool,
    tokens: bool,
    force: bool,
    json: bool,
) -> int:
    """Write archived groups as rows to a file, or as JSON lines to stdout when `out` is `-`; 1: damaged groups."""
    path = None if out == "-" else Path(out)
    kind = kind or ("parquet" if path is not None and path.suffix == ".parquet" else "jsonl")
    if path is None and (kind == "parquet" or json):
        raise UsageError("--out - gives JSON lines and nothing else", "name a file")
    reading = read_archive(source or find_run(chosen).path, evaluation=evaluation)
    started = time.monotonic()
    count = export_rows(later_than(reading, since_of(since)), path, kind, tokens=tokens, force=force)
    note_problems(reading)
    code = int(ExitCode.FAILURE if reading.problems else ExitCode.OK)
    if path is None:
        return code
    written = path.stat().st_size
    data = {"file": str(path.resolve()), "format": kind, "rows": count, "bytes": written}
    data["problems"] = reading.problems
    if json:
        output.write_json(EXPORT_SCHEMA, data)
    else:
        took = duration(time.monotonic() - started)
        output.write(f"{count} responses are in {path} ({kind}, {size(written)}, {took})")
    return code


def later_than(groups: ArchiveReading, since: float) -> Iterator[ArchivedGroup]:
    """The groups that were archived at or after `since`; all of them for 0."""
    return (group for group in groups if group.at >= since)


def since_of(text: str | None, now: float | None = None) -> float:
    """What `--since` says, in seconds since 1970; 0 for None.

    Args:
        text: `90s`, `30m`, `2h`, `1d` before now, or a date with or without a time (ISO 8601; local time unless it says
            otherwise).
        now: for tests.

    Raises:
        UsageError: it is neither.
    """
    if text is None:
        return 0.0
    value = text.strip()
    try:
        if value and value[-1] in _UNITS and 0 <= (ago := float(value[:-1])) < math.inf:
            return (time.time() if now is None else now) - ago * _UNITS[value[-1]]
        return dt.datetime.fromisoformat(value).astimezone().timestamp()
    except (ValueError, OverflowError) as error:
        raise UsageError(
            f"--since {text} is no time", "write 30m, 2h, 1d, or 2026-01-31 or 2026-01-31T12:00"
        ) from error


def note_problems(reading: ArchiveReading) -> None:
    """Say on stderr what of an archive could not be read."""
    for problem in reading.problems:
        output.note(f"warning: {problem}")
