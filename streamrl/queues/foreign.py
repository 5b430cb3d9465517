"""Stream entries that nobody of ours wrote.

Whoever has the URL of Redis can add to a stream. Such an entry would meet every later reader, and a role that dies of
it dies again after each restart; so it is removed where it is found, with an error in the log that shows it. What is
removed is no group and no sample: those live in hashes.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

from streamrl.queues import replies
from streamrl.queues.connection import Connection

logger = logging.getLogger(__name__)

_NUMBER: Final = re.compile(rb"-?\d{1,18}")

Row: TypeAlias = tuple[str, dict[bytes, bytes]]
"""Id and fields of an entry."""


def is_ours(fields: Mapping[bytes, bytes], numbers: Sequence[bytes], others: Sequence[bytes] = ()) -> bool:
    """Whether an entry has the fields of one of ours: `numbers` as decimal numbers, and `others`."""
    return all(_NUMBER.fullmatch(fields.get(name, b"")) for name in numbers) and all(name in fields for name in others)


async def read_ours(
    connection: Connection,
    stream: str,
    command: Sequence[str | int],
    numbers: Sequence[bytes],
    others: Sequence[bytes] = (),
) -> list[Row]:
    """Read a stream and return the entries that are ours; the others are removed. A repeat changes nothing.

    Args:
        connection: of this process.
        stream: key.
        command: XRANGE or XREVRANGE, then what follows the key.
        numbers: fields that hold decimal numbers.
        others: further fields of one of our entries.
    """
    name, *rest = command
    while True:
        rows = replies.entries(await connection.read(name, stream, *rest))
        foreign = [(entry, fields) for entry, fields in rows if not is_ours(fields, numbers, others)]
        if not foreign:
            return rows
        for entry, fields in foreign:
            logger.error(
                "removed an entry that is none of ours", extra={"stream": stream, "fields": repr(fields)[:500]}
            )
            await connection.read("XDEL", stream, entry)
