"""Logging of a role: one JSON object per line on stderr, which the supervisor (or a container) collects.

Fields: `at` (seconds since 1970), `level`, `role`, `logger`, `event`, everything given as `extra=`, and `exception`.
Extras never replace a field of the record: `extra={"at": ...}` is written as `at_`.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Final

import orjson
from typing_extensions import override

from streamrl.errors import writing

RECORD_FIELDS: Final = frozenset({"at", "level", "role", "logger", "event", "exception"})
"""Fields of every line. An extra of the same name is written as `NAME_`."""
_ATTRIBUTES: Final = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
"""What every record has; all else was given as `extra=`."""


def log_as_json(role: str, level: int = logging.INFO) -> None:
    """Send all logging of this process, `warnings` included, as JSON lines to stderr. A repeat starts anew."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLine(role))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    logging.captureWarnings(True)


class _LossyFile(RotatingFileHandler):
    """Loses lines while the file cannot be written, and says so once on stderr: the run goes on."""

    _said = False

    @override
    def handleError(self, record: logging.LogRecord) -> None:
        # A line that cannot be formatted is a bug, and always shown.
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._said:
            self._said = True
            sys.stderr.write(f"{self.baseFilename} cannot be written: {error}\n")

    @override
    def close(self) -> None:
        try:
            super().close()
        except OSError as error:
            self._said = self._said or bool(sys.stderr.write(f"{self.baseFilename} cannot be written: {error}\n"))


@contextlib.contextmanager
def log_to_file(role: str, path: Path, max_bytes: int, level: int = logging.INFO) -> Iterator[None]:
    """Log to a file of JSON lines for this block; at `max_bytes` it is rotated, and one old file is kept."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = _LossyFile(path, maxBytes=max_bytes, backupCount=1)
    handler.setFormatter(_JsonLine(role))
    target = logging.getLogger()
    before = target.level
    target.addHandler(handler)
    target.setLevel(level)
    try:
        yield
    finally:
        target.removeHandler(handler)
        target.setLevel(before)
        handler.close()


class _JsonLine(logging.Formatter):
    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    @override
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {"at": record.created, "role": self._role, "event": record.getMessage()}
        line |= {"level": record.levelname.lower(), "logger": record.name}
        given = record.__dict__.items()
        # Ray adds names with an underscore to every record of its process.
        extras = {name: value for name, value in given if name not in _ATTRIBUTES and name[:1] != "_"}
        line |= {f"{name}_" if name in RECORD_FIELDS else name: value for name, value in extras.items()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS).decode()
