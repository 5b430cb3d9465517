"""Logging of a role: one JSON object per line on stderr, which the supervisor (or a container) collects.

Fields: `at` (seconds since 1970), `level`, `role`, `logger`, `event`, everything given as `extra=`, and `exception`.
Extras never replace a field of the record: `extra={"at": ...}` is written as `at_`.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Final

import orjson
import structlog
from structlog.typing import EventDict, WrappedLogger

from streamrl.errors import CannotCreate

RECORD_FIELDS: Final = frozenset({"at", "level", "role", "logger", "event", "exception"})
"""What a line says of itself. Something else that is given under such a name is written as `NAME_`."""
_copy_extras: Final = structlog.stdlib.ExtraAdder()


def log_as_json(role: str, level: int = logging.INFO) -> None:
    """Send all logging of this process, `warnings` included, as JSON lines to stderr. A repeat replaces the set-up."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_formatter(role))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    logging.captureWarnings(True)


class _LossyFile(RotatingFileHandler):
    """Loses lines while the file cannot be written, and says so once on stderr: a log is not worth a run."""

    _said = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (the name that logging calls)
        """Take the error of a line that was not written. One that cannot be formatted is a bug, and always shown."""
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._said:
            self._said = True
            sys.stderr.write(f"{self.baseFilename} cannot be written: {error}\n")

    def close(self) -> None:
        """Close the file, with what can still be written."""
        try:
            super().close()
        except OSError as error:
            self._said = self._said or bool(sys.stderr.write(f"{self.baseFilename} cannot be written: {error}\n"))


@contextlib.contextmanager
def log_to_file(role: str, path: Path, max_bytes: int, level: int = logging.INFO) -> Iterator[None]:
    """Send what is logged in this process to a file of JSON lines, for the length of this block.

    The file is rotated at `max_bytes`; one old file is kept. `CannotCreate` when it cannot be opened.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = _LossyFile(path, maxBytes=max_bytes, backupCount=1)
    except OSError as error:
        raise CannotCreate(f"{path}: {error.strerror}", "check space and permissions") from error
    handler.setFormatter(_formatter(role))
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


def _add_extras(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    record: logging.LogRecord = event["_record"]
    given = _copy_extras(logger, method, {"_record": record})
    del given["_record"]
    event.update({f"{name}_" if name in RECORD_FIELDS else name: value for name, value in given.items()})
    return event


def _formatter(role: str) -> logging.Formatter:
    def stamp(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        record: logging.LogRecord | None = event.get("_record")
        return {"at": record.created if record else time.time(), "role": role, **event}

    formatter: logging.Formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[
            structlog.stdlib.add_log_level,
            structlog.stdlib.add_logger_name,
            _add_extras,
        ],
        processors=[
            stamp,
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(serializer=_serialize),
        ],
    )
    return formatter


def _serialize(event: dict[str, Any], **_options: Any) -> str:
    return orjson.dumps(event, default=str, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS).decode()
