"""One request of a group of servers, from `generate` to its completion, on however many servers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from streamrl.engine import Completion, Listener, Request
from streamrl.errors import DataError, Unreachable
from streamrl.producers.group.flights import ServerDied
from streamrl.producers.group.prefix import Prefix
from streamrl.weight_sync.manifest import Pair

if TYPE_CHECKING:
    from streamrl.producers.group.member import Member

ALONE: Final = 2
"""Servers that died under a request before it gave a single token; after so many it is tried on a server of its own."""
BREAKS: Final = 3
"""Times in a row that a response may break off without a token."""


class Work:
    """A request in a group.

    Args:
        request: as the caller gave it.
        prefix: empty.
        listener: of the caller.

    Attributes:
        member: the server that it is on.
        place: resolves to the server that it is to go to, None when it was aborted before.
        aborting: the caller wants its end.
        deaths: servers that died under it before they gave a token, in a row.
        sampled: tokens that were sampled for it, also those that were lost with a server.
        placed_at: version of its server when it came there.
    """

    def __init__(self, request: Request, prefix: Prefix, listener: Listener | None) -> None:
        self.request = request
        self.prefix = prefix
        self.member: Member | None = None
        self.place: asyncio.Future[Member | None] = asyncio.get_running_loop().create_future()
        self.aborting = False
        self.deaths = 0
        self.sampled = 0
        self.placed_at: Pair = (0, 0)
        self._listener = listener
        self._live = True
        self._told = 0
        self._breaks = 0
        self._here = 0

    @property
    def alone(self) -> bool:
        """Whether it is under suspicion, and must not share a server with others."""
        return self.deaths >= ALONE

    def tokens(self, expected: float) -> int:
        """Tokens that it takes up on a server: the prompt, and of the response what is expected or is there."""
        ahead = min(self.request.max_new_tokens, round(expected))
        return len(self.request.tokens) + max(ahead, len(self.prefix) + self._here)

    def begin(self, member: Member) -> None:
        """Go to a server."""
        self.member, self.placed_at, self._here, self._live = member, member.pair, 0, True

    def hear(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Tokens from the server that it is on.

        The caller hears of them at once until the first new weights; after that only when it is sure that they stay.
        """
        self._here += len(tokens)
        self.sampled += len(tokens)
        self._live = self._live and self.member is not None and not self.member.touched_since(self)
        if self._live and self._listener is not None:
            self._listener(tokens, logprobs)
            self._told += len(tokens)

    def leave(self, error: Unreachable) -> None:
        """Its server died: keep what is sure of what it left.

        Raises:
            DataError: servers die of this request.
        """
        gained = 0
        if isinstance(error, ServerDied):
            gained = self.prefix.add(error.tokens, error.logprobs, error.runs, error.proved)
        self._settle_prefix()
        alone = self.alone
        self.deaths = 0 if gained else self.deaths + 1
        if alone and not gained:
            raise DataError(
                f"{self.deaths} servers died of request {self.request.id!r} before its first token, the last one"
                f" with nothing else to do: {error.message}"
            )

    def take_along(self, piece: Completion) -> None:
        """It was sent away by its server, which is being removed: what was sampled there stays."""
        self.prefix.add(piece.tokens.tolist(), piece.logprobs.tolist(), piece.runs, len(piece.tokens))
        self._settle_prefix()

    def broke_off(self, piece: Completion) -> bool:
        """Nobody asked for the end of a response, but a server that lives ended it; return whether to go on with it.

        It is gone on with until that has brought nothing for `BREAKS` times in a row. Where the server could not say
        which version sampled what, only the tokens up to the first change of the weights are sure.
        """
        proved = next((first for first, _ in piece.runs[1:]), len(piece.tokens))
        gained = self.prefix.add(piece.tokens.tolist(), piece.logprobs.tolist(), piece.runs, proved)
        self._settle_prefix()
        self._breaks = 0 if gained else self._breaks + 1
        return self._breaks < BREAKS

    def finish(self, last: Completion, seconds: float) -> Completion:
        """The whole response, from the completion of what was asked for last."""
        self.sampled += len(last.tokens) - self._here
        whole = self.prefix.completed(last, seconds)
        self._tell(whole.tokens.tolist(), whole.logprobs.tolist())
        return whole

    def _settle_prefix(self) -> None:
        self._here = 0
        sure = self.prefix.ended("abort", 0.0)
        self._tell(sure.tokens.tolist(), sure.logprobs.tolist())

    def _tell(self, tokens: list[int], logprobs: list[float]) -> None:
        """Tell the caller what it has not heard of all that is sure."""
        if self._listener is not None and len(tokens) > self._told:
            self._listener(tokens[self._told :], logprobs[self._told :])
            self._told = len(tokens)
