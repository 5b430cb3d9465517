"""A run's supervisor over Redis: what it says of itself, and what people on any machine ask of it.

A supervisor has an id that is new for each start, so that what was asked of one is never done by its successor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from streamrl.queues.connection import Connection
from streamrl.queues.keys import BEAT_TTL, SUPERVISOR, Keys
from streamrl.queues.registry import RoleRegistry
from streamrl.queues.replies import entries, pairs, text

KEPT_LINES: Final = 1000
"""Log lines of each role that Redis keeps."""
LONGEST_LINE: Final = 2048
"""Bytes of a line in Redis; the file of the role has it whole."""
_ASKED_TTL: Final = 86400
_END: Final = b"end"
_COUNT: Final = b"count:"


@dataclass(frozen=True, slots=True)
class Asked:
    """What people asked of a supervisor: how hastily to end (0: not), and how many members a role is to have."""

    end: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LoggedLine:
    id: str
    line: bytes


@dataclass(frozen=True, slots=True)
class Published:
    """What a run keeps in Redis for machines without its directory; `digest` names the manifests that it is of."""

    run_file: bytes
    weights_token: str | None = None
    digest: str = ""


class Supervision:
    def __init__(self, connection: Connection, run: str) -> None:
        self._connection = connection
        self._keys = Keys(run)
        self._registry = RoleRegistry(connection, self._keys)

    # What the supervisor says.

    async def publish(self, run: Published) -> None:
        """Keep what a role needs of the run directory where a machine without it finds it."""
        token = () if run.weights_token is None else (self._keys.weights_token, run.weights_token)
        written = (self._keys.run_file, run.run_file, self._keys.run_digest, run.digest, *token)
        await self._connection.read("MSET", *written)  # one command: nobody sees a mixture of two

    async def beat(self, fields: Mapping[str, str | int | float]) -> None:
        """Replace what it says of itself; it vanishes `BEAT_TTL` seconds later. `id` is one of the fields."""
        await self._registry.beat(SUPERVISOR, fields, BEAT_TTL)

    async def claim(self, supervisor: str) -> bool:
        """Be the one supervisor of the run for the next `BEAT_TTL` seconds; False: another one is."""
        milliseconds = int(BEAT_TTL * 1000)
        return bool(await self._connection.call("lock", [self._keys.supervising], [supervisor, milliseconds]))

    async def leave(self, supervisor: str) -> None:
        """Leave the place to a successor at once. Changes nothing if another supervisor has it."""
        keys = [self._keys.supervising, self._keys.role(SUPERVISOR)]
        await self._connection.call("lock", keys, [supervisor, 0])

    async def add_lines(self, lines: Mapping[str, Sequence[bytes]]) -> None:
        """Append log lines by role, and forget the oldest. After a lost reply a line may be there twice."""
        for role, batch in lines.items():
            await self._connection.read("SADD", self._keys.logs, role)
            add = ("XADD", self._keys.log(role), "MAXLEN", "~", str(KEPT_LINES), "*", "l")
            # together: one round trip
            await asyncio.gather(*(self._connection.read(*add, line[:LONGEST_LINE]) for line in batch))

    async def asked(self, supervisor: str) -> Asked:
        fields = pairs(await self._connection.read("HGETALL", self._keys.asked(supervisor)))
        numbers = {name: int(value) for name, value in fields.items() if value.isdigit()}
        counts = {text(name[len(_COUNT) :]): count for name, count in numbers.items() if name.startswith(_COUNT)}
        return Asked(numbers.get(_END, 0), counts)

    # What people see and ask.

    async def run_file(self) -> bytes | None:
        found: bytes | None = await self._connection.read("GET", self._keys.run_file)
        return found

    async def published(self) -> Published | None:
        """What the run keeps for its roles; users who only look have no right to the token in it."""
        keys = (self._keys.run_file, self._keys.weights_token, self._keys.run_digest)
        run_file, token, digest = await self._connection.read("MGET", *keys)
        if run_file is None:
            return None
        return Published(run_file, None if token is None else text(token), text(digest or b""))

    async def supervisor(self) -> dict[str, str] | None:
        """What the supervisor said last; None if it has been silent for `BEAT_TTL` seconds."""
        return (await self._registry.read(SUPERVISOR)).get(SUPERVISOR)

    async def ask_end(self, supervisor: str, haste: int) -> None:
        """Ask a supervisor to end its run: 1 drain, 2 terminate, 3 kill. A repeat changes nothing."""
        await self._ask(supervisor, "end", haste)

    async def ask_count(self, supervisor: str, role: str, count: int) -> None:
        """Ask a supervisor for so many members of a role. A repeat changes nothing."""
        await self._ask(supervisor, f"count:{role}", count)

    async def _ask(self, supervisor: str, name: str, value: int) -> None:
        key = self._keys.asked(supervisor)
        await self._connection.read("HSET", key, name, str(value))
        await self._connection.read("EXPIRE", key, str(_ASKED_TTL))

    async def logged(self) -> list[str]:
        """Names of the roles whose lines are kept."""
        return sorted(map(text, await self._connection.read("SMEMBERS", self._keys.logs)))

    async def lines(self, role: str, after: str = "") -> list[LoggedLine]:
        """Log lines of a role that Redis keeps, from the one after `after` on."""
        start = f"({after}" if after else "-"
        rows = entries(await self._connection.read("XRANGE", self._keys.log(role), start, "+"))
        return [LoggedLine(number, fields[b"l"]) for number, fields in rows]


def parsed(said: Mapping[str, str], field: str) -> Any:
    """A field of the supervisor's that is JSON (`states`, `members`); None if it is missing or cannot be read."""
    try:
        return orjson.loads(said[field])
    except (KeyError, orjson.JSONDecodeError):
        return None
