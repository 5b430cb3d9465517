"""Reading files of JSON lines that are still being written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson


class Tail:
    """Whole lines of a growing JSONL file, each once.

    A missing file is empty; one that was rotated or cut is read from its start. A line that is no JSON object comes as
    `{"event": the line}`, so that nothing a role wrote is hidden.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inode = -1
        self._offset = 0

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the lines since the last call; a last line without its newline waits for the next call."""
        try:
            with self.path.open("rb") as file:
                facts = self.path.stat()
                if facts.st_ino != self._inode or facts.st_size < self._offset:
                    self._inode, self._offset = facts.st_ino, 0
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.split(b"\n"):
            if line.strip():
                yield record_of(line)


def record_of(line: bytes) -> dict[str, Any]:
    """A line that is no JSON object is its `event`."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        record = None
    return record if isinstance(record, dict) else {"event": line.decode(errors="replace")}
