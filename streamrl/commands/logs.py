"""`streamrl logs`: logs of the roles and of the engine servers they start, merged by time, and followed."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from streamrl.commands import output
from streamrl.commands.options import AnywhereOption, JsonOption
from streamrl.commands.rundir import KnownRun, find_anywhere, live
from streamrl.errors import UsageError
from streamrl.monitor.lines import log_line
from streamrl.monitor.tail import Tail, record_of
from streamrl.queues.supervision import Supervision

_POLL: Final = 0.2
# vLLM: "(APIServer pid=7) INFO 11-20 13:15:21 [file.py:1] words"; SGLang and uvicorn: "[2026-11-20 13:15:21] words".
_STAMP: Final = re.compile(r"(?:(\d{4})-)?(\d\d)-(\d\d) (\d\d:\d\d:\d\d)")
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")
_LOUD: Final = re.compile(r"\b(WARNING|ERROR|CRITICAL)\b")
_HEAD: Final = 80


@dataclass(frozen=True, slots=True)
class PrintedLine:
    """One line; `at` is in seconds since 1970 (without a time, that of the line before)."""

    role: str
    at: float
    record: dict[str, Any]


class LogFile:
    def __init__(self, path: Path) -> None:
        self.role = _name(path)
        self._server = ".jsonl" not in path.name
        self._tail = Tail(path)
        self._at = 0.0

    def read(self) -> Iterator[PrintedLine]:
        for line in self._tail.read():
            record = server_record(line, time.time()) if self._server else line
            at = record.get("at", record.get("time"))
            if isinstance(at, (int, float)):
                self._at = float(at)
            yield PrintedLine(self.role, self._at, record)


def logs(
    *,
    roles: Annotated[
        list[str] | None, typer.Argument(metavar="ROLE", help="rollout means every replica; rollout.0 only that one.")
    ] = None,
    run: AnywhereOption = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new lines until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Number of past lines.")] = 100,
    json: JsonOption = False,
) -> int:
    """Show the logs of all roles, or of some, in order of time, with the logs of the engine servers that they start.

    Of a run on another machine (`--run redis://...`) Redis has the last thousand lines of each role, without servers.
    """
    roles = roles or []
    found = find_anywhere(run)
    if found.path is None:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(_over_redis(found, roles, lines, follow=follow, json=json))
        return 0
    folder = found.path / "logs"
    files = [LogFile(path) for path in _wanted(folder, roles)]
    if not files and roles and not follow:
        known = ", ".join(_name(path) for path in _wanted(folder, [])) or "none yet"
        raise UsageError(f"no log of {' '.join(roles)} in {folder}", f"known: {known}")
    rotated = [LogFile(old) for path in _wanted(folder, roles) if (old := path.with_name(f"{path.name}.1")).exists()]
    past = sorted((line for file in [*rotated, *files] for line in file.read()), key=lambda line: line.at)
    width = max((len(file.role) for file in files), default=8)
    for line in deque(past, maxlen=lines):
        _show(line, width, json=json)
    if not follow:
        return 0
    try:
        _follow(folder, roles, files, json=json)
    except KeyboardInterrupt:
        return 0
    return 0


def _wanted(folder: Path, roles: Sequence[str]) -> list[Path]:
    """Files of the roles, with those of their replicas and servers."""
    paths = sorted(path for pattern in ("*.jsonl", "*.log") for path in folder.glob(pattern))
    return [path for path in paths if _is_of(_name(path), roles)]


def _is_of(name: str, roles: Sequence[str]) -> bool:
    return not roles or any(f"{name}.".startswith(f"{role}.") for role in roles)


def _name(path: Path) -> str:
    """Name of the writer of a file, rotated or not: `rollout.0`, `engine.0.server`."""
    return path.name.removesuffix(".1").removesuffix(".jsonl").removesuffix(".log")


def _follow(folder: Path, roles: Sequence[str], files: list[LogFile], *, json: bool) -> None:
    known = {file.role for file in files}
    while True:
        for path in _wanted(folder, roles):
            if _name(path) not in known:
                known.add(_name(path))
                files.append(LogFile(path))
        fresh = sorted((line for file in files for line in file.read()), key=lambda line: line.at)
        for line in fresh:
            _show(line, max(map(len, known)), json=json)
        time.sleep(_POLL)


async def _over_redis(run: KnownRun, roles: Sequence[str], lines: int, *, follow: bool, json: bool) -> None:
    seen: dict[str, str] = {}
    async with live(run) as connection:
        if connection is None:
            raise AssertionError("a run without a directory has a Redis with a URL")
        supervision = Supervision(connection, run.name)
        most: int | None = lines
        while True:
            fresh = []
            for role in [name for name in await supervision.logged() if _is_of(name, roles)]:
                for logged in await supervision.lines(role, seen.get(role, "")):
                    seen[role] = logged.id
                    record = record_of(logged.line)
                    at = record.get("at")
                    fresh.append(PrintedLine(role, float(at) if isinstance(at, (int, float)) else 0.0, record))
            fresh.sort(key=lambda line: line.at)
            for line in deque(fresh, maxlen=most):
                _show(line, max(map(len, seen), default=8), json=json)
            if not follow:
                return
            most = None
            await asyncio.sleep(_POLL)


def _show(line: PrintedLine, width: int, *, json: bool) -> None:
    if json:
        output.write_json("streamrl.logs/1", {"role": line.role, **line.record})
    else:
        output.write(log_line(line.role, line.at, line.record, width))


def server_record(record: dict[str, Any], now: float) -> dict[str, Any]:
    """A record with the time and level in its text, and the text without colours.

    A record with a time of its own is returned as it is. A stamp without a year is the last such day before tomorrow.
    """
    if "at" in record or "event" not in record:
        return record
    text = _COLOUR.sub("", str(record["event"])).rstrip("\r").rpartition("\r")[2]  # of a progress bar the last state
    found: dict[str, Any] = {"event": text}
    head = text[:_HEAD]
    stamp = _STAMP.search(head)
    if stamp is not None and (at := _seconds(stamp, now)) is not None:
        found["at"] = at
    loud = _LOUD.search(head)
    if loud is not None:
        found["level"] = loud.group(1).lower()
    return found


def _seconds(stamp: re.Match[str], now: float) -> float | None:
    year, month, day, clock = stamp.groups()
    this_year = time.localtime(now).tm_year
    for guess in (year,) if year else (this_year, this_year - 1):
        try:
            at = time.mktime(time.strptime(f"{guess}-{month}-{day} {clock}", "%Y-%m-%d %H:%M:%S"))
        except ValueError:
            continue
        if year or at < now + 86400:
            return at
    return None
