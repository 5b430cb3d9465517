"""Stream entries that nobody of ours wrote.

Whoever has the URL of Redis can add to a stream. Such an entry would meet every later reader, and a role that dies of
it dies again after each restart; so it is removed where it is found, with an error in the log that shows it. What is
removed is no group and no sample: those live in hashes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

from streamrl.queues import replies
from streamrl.queues.connection import Connection

logger = logging.getLogger(__name__)

LOOKS: Final = 20
_PAGE: Final = 500
_SHOWN: Final = 20

Row: TypeAlias = tuple[str, dict[bytes, bytes]]
"""Id and fields of an entry."""


def is_ours(fields: Mapping[bytes, bytes], numbers: Sequence[bytes], others: Sequence[bytes] = ()) -> bool:
    """Whether an entry has the fields of one of ours: `numbers` as decimal numbers, and `others`."""
    return all(replies.is_number(fields.get(name, b"")) for name in numbers) and all(name in fields for name in others)


async def read_ours(
    connection: Connection,
    stream: str,
    command: Sequence[str | int],
    numbers: Sequence[bytes],
    others: Sequence[bytes] = (),
) -> list[Row]:
    """Read a stream and return the entries that are ours; the others are removed. A repeat changes nothing.

    Somebody who adds faster than this removes cannot hold it up: each look goes on behind the last one, and there are
    at most `LOOKS`. After those (an error in the log) fewer entries than COUNT are returned, though there may be more.

    Args:
        connection: of this process.
        stream: key.
        command: XRANGE or XREVRANGE, then what follows the key: two ends, then nothing or COUNT and a number.
        numbers: fields that hold decimal numbers.
        others: further fields of one of our entries.
    """
    name, start, end, *limit = command
    wanted = int(limit[1]) if limit else None
    found: list[Row] = []
    page = wanted
    for _ in range(LOOKS):
        rows = replies.entries(await connection.read(name, stream, start, end, *(("COUNT", page) if page else ())))
        ours = [(entry, fields) for entry, fields in rows if is_ours(fields, numbers, others)]
        if len(ours) < len(rows):
            await _remove(connection, stream, [row for row in rows if not is_ours(row[1], numbers, others)])
        found += ours
        if wanted is None or page is None or len(found) >= wanted or len(rows) < page:
            return found[:wanted]
        start, page = f"({rows[-1][0]}", max(wanted, _PAGE)
    logger.error("somebody fills a stream with entries that are none of ours", extra={"stream": stream})
    return found


def report(stream: str, removed: Sequence[Mapping[bytes, bytes]]) -> None:
    """Say in the log what was removed; of many entries the first ones are shown."""
    for fields in removed[:_SHOWN]:
        extra = {"stream": stream, "fields": repr(fields)[:500], "of": len(removed)}
        logger.error("removed an entry that is none of ours", extra=extra)


async def _remove(connection: Connection, stream: str, rows: Sequence[Row]) -> None:
    report(stream, [fields for _, fields in rows])
    for first in range(0, len(rows), _PAGE):
        await connection.read("XDEL", stream, *(entry for entry, _ in rows[first : first + _PAGE]))
