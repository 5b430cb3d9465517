"""Requests of a person to go back to the weights of an earlier version, and what the learner answers.

Two fields of the state hash: `rollback` (id, epoch, version) is written by the command line, `rolled` (id, answer,
text) by the learner that holds the fence. A request waits for the next learner when none is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from streamrl.errors import Fenced
from streamrl.queues.connection import Connection
from streamrl.queues.keys import Keys

_MAX_TEXT: Final = 500


class Answer(StrEnum):
    """What became of a request."""

    WAITING = "waiting"
    SHOWN = "shown"
    """The old weights are published under a new version, whose number is the text."""
    DONE = "done"
    """They are in a durable checkpoint, too; the text is the new version."""
    REFUSED = "refused"
    """Nothing was changed; the text says why."""


@dataclass(frozen=True)
class Request:
    """A request and its answer.

    Attributes:
        id: made up by who asks.
        epoch: of the version to go back to.
        version: its number.
        answer: of the learner.
        text: of the answer.
    """

    id: str
    epoch: int
    version: int
    answer: Answer = Answer.WAITING
    text: str = ""


class RollbackDesk:
    """Where requests are handed in and answered.

    Args:
        connection: to Redis.
        keys: of the training ledger.
    """

    def __init__(self, connection: Connection, keys: Keys) -> None:
        self._connection, self._keys = connection, keys

    async def ask(self, name: str, epoch: int, version: int) -> None:
        """Hand in a request; it takes the place of an older one. A repeat with the same id changes nothing."""
        await self._connection.call("ask_rollback", [self._keys.state], [name, epoch, version])

    async def look(self) -> Request | None:
        """The newest request; None when there never was one, or nonsense is in its place."""
        asked, rolled = await self._connection.read("HMGET", self._keys.state, "rollback", "rolled")
        return parse((asked or b"").decode(errors="replace"), (rolled or b"").decode(errors="replace"))

    async def answer(self, nonce: str, name: str, answer: Answer, text: str) -> None:
        """Answer a request. A repeat changes nothing.

        Raises:
            Fenced: a newer learner took over.
        """
        keys = [self._keys.state, self._keys.scored]
        if not await self._connection.call("answer_rollback", keys, [nonce, name, answer.value, text[:_MAX_TEXT]]):
            raise Fenced("answer_rollback: a newer learner has taken over")


def parse(asked: str, rolled: str) -> Request | None:
    """The request that the two fields of the state hash tell of; None when there is none, or nonsense in its place."""
    name, epoch, version = [*asked.split(" "), "", "", ""][:3]
    if not (name and epoch.isdecimal() and version.isdecimal()):
        return None
    who, answer, text = [*rolled.split(" ", 2), "", ""][:3]
    if who != name or answer not in {known.value for known in Answer}:
        return Request(name, int(epoch), int(version))
    return Request(name, int(epoch), int(version), Answer(answer), text)
