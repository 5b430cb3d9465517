"""The log of one process of a role, kept by the supervisor."""

from __future__ import annotations

import logging
import time
from collections import deque
from pathlib import Path
from typing import BinaryIO, Final

import orjson

logger = logging.getLogger(__name__)

RING_LINES: Final = 200
LONGEST_LINE: Final = 64 << 10


class RoleLog:
    """The log of one process: its stdout and stderr.

    JSON objects are kept; any other line (a traceback of the interpreter, a warning of a library) becomes one with
    `event`, `role`, `at` and `level: "raw"`. A line over 64 KiB is cut. If the file cannot be written (full disk), its
    lines are lost and counted in `lost`, and the process goes on. At `max_bytes` the file is rotated to `path` with
    `.1` appended.
    """

    def __init__(self, role: str, path: Path, max_bytes: int) -> None:
        self.role = role
        self.tail: deque[bytes] = deque(maxlen=RING_LINES)
        self.lost = 0
        self._path = path
        self._max_bytes = max_bytes
        self._rest = b""
        self._skipping = False
        self._file: BinaryIO | None = None
        self._size = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Take a piece of output; return the whole lines in it, as JSON without newlines."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._skipping and lines:  # the end of a line that was cut before
            lines.pop(0)
            self._skipping = False
        if len(self._rest) > LONGEST_LINE:
            if not self._skipping:
                lines.append(self._rest)
            self._rest, self._skipping = b"", True
        return self._keep([line for line in lines if line.strip()])

    def close(self) -> list[bytes]:
        """Take the last line even without its newline, and close the file. The log can be fed again afterwards."""
        rest, self._rest = self._rest, b""
        lines = self._keep([rest] if rest.strip() and not self._skipping else [])
        self._skipping = False
        if self._file is not None:
            self._file.close()
            self._file = None
        return lines

    def note(self, event: str, **fields: object) -> bytes:
        """Write a line of the supervisor's own into this log and return it."""
        line = orjson.dumps({"at": time.time(), "level": "info", "role": self.role, "event": event, **fields})
        return self._keep([line])[0]

    def _keep(self, lines: list[bytes]) -> list[bytes]:
        kept = [self._as_json(line) for line in lines]
        self.tail.extend(kept)
        if kept:
            try:
                self._write(b"\n".join(kept) + b"\n")
            except OSError as error:
                if not self.lost:
                    logger.warning("log file cannot be written", extra={"file": str(self._path), "why": str(error)})
                self.lost += len(kept)
        return kept

    def _as_json(self, line: bytes) -> bytes:
        line = line[:LONGEST_LINE].rstrip(b"\r")
        if line.startswith(b"{"):
            try:
                orjson.loads(line)
            except orjson.JSONDecodeError:
                pass  # only looks like one: kept as text below
            else:
                return line
        text = line.decode(errors="replace")
        return orjson.dumps({"at": time.time(), "level": "raw", "role": self.role, "event": text})

    def _write(self, data: bytes) -> None:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab", buffering=0)
            self._size = self._file.tell()
        if self._size and self._size + len(data) > self._max_bytes:
            self._file.close()
            self._file = None
            self._path.rename(self._path.with_name(f"{self._path.name}.1"))
            self._file = self._path.open("ab", buffering=0)
            self._size = 0
        self._size += self._file.write(data)
