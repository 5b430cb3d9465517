"""Reading what Redis answers (RESP3, bytes), and removing stream entries of other programs.

Any program that has the URL of Redis can add to a stream. Every later reader would meet such an entry, and a role that
fails on it would fail again after each restart. So it is removed where it is found, and logged. No group and no sample
is lost with it: those live in hashes.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

logger = logging.getLogger(__name__)

_PAGE: Final = 500
_SHOWN: Final = 20
_NUMBER: Final = re.compile(rb"-?\d{1,18}")

Row: TypeAlias = tuple[str, dict[bytes, bytes]]
"""Id and fields of a stream entry."""


def is_number(value: bytes) -> bool:
    """Whether bytes are a decimal number as streamrl writes them."""
    return _NUMBER.fullmatch(value) is not None


def read_number(shown: str) -> float | None:
    """A number from a role's heartbeat; None for anything else, so that the screen survives it."""
    try:
        found = float(shown)
    except ValueError:
        return None
    return found if math.isfinite(found) else None


def text(value: bytes) -> str:
    return value.decode(errors="replace")


def pairs(flat: Sequence[bytes] | Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """Fields of a hash or an entry: flat in scripts and streams, a map in the reply of HGETALL."""
    if isinstance(flat, Mapping):
        return dict(flat)
    return dict(zip(flat[::2], flat[1::2], strict=True))


def entries(reply: Iterable[Sequence[Any]] | None) -> list[Row]:
    """Entries of XRANGE, or of one stream of XREADGROUP, without deleted ones."""
    return [(entry.decode(), pairs(fields)) for entry, fields in reply or () if fields is not None]


def streams(reply: Mapping[bytes, Any] | None) -> dict[str, list[Row]]:
    """Reply of XREAD or XREADGROUP: entries by stream; empty after a time-out."""
    return {name.decode(): entries(rows) for name, rows in (reply or {}).items()}


def is_ours(fields: Mapping[bytes, bytes], numbers: Sequence[bytes], others: Sequence[bytes] = ()) -> bool:
    return all(is_number(fields.get(name, b"")) for name in numbers) and all(name in fields for name in others)


async def read_ours(
    read: Callable[..., Awaitable[Any]],
    stream: str,
    start: str,
    numbers: Sequence[bytes],
    others: Sequence[bytes] = (),
) -> list[Row]:
    """Read a stream from `start` on, return our entries and remove the others. A repeat changes nothing."""
    rows = entries(await read("XRANGE", stream, start, "+"))
    ours = [row for row in rows if is_ours(row[1], numbers, others)]
    if len(ours) < len(rows):
        await _remove(read, stream, [row for row in rows if not is_ours(row[1], numbers, others)])
    return ours


def report_foreign(stream: str, removed: Sequence[Mapping[bytes, bytes]]) -> None:
    for fields in removed[:_SHOWN]:
        extra = {"stream": stream, "fields": repr(fields)[:500], "of": len(removed)}
        logger.error("removed a foreign entry", extra=extra)


async def _remove(read: Callable[..., Awaitable[Any]], stream: str, rows: Sequence[Row]) -> None:
    report_foreign(stream, [fields for _, fields in rows])
    for first in range(0, len(rows), _PAGE):
        await read("XDEL", stream, *(entry for entry, _ in rows[first : first + _PAGE]))
