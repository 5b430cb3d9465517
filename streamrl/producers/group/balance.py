"""Which server a request goes to. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

FULL: Final = 0.9
"""Cache use from which a server gets nothing while others have room."""
_BLOCK: Final = 16
"""Tokens of one block of a prefix cache; a shorter prefix is not kept by it."""


@dataclass(frozen=True, slots=True)
class Place:
    """A server with room for one more request.

    Attributes:
        tokens: of its requests in flight: prompts, and of each response what is expected or, when more, what there is.
        limit: requests that it can make use of at the same time; servers of unequal size get unequal shares.
        cache_use: 0 to 1.
    """

    tokens: int
    limit: int
    cache_use: float = 0.0

    @property
    def burden(self) -> float:
        """Tokens for each request that it can make use of."""
        return self.tokens / self.limit


def choose(places: Sequence[Place], *, cost: int, shared: int, together: int, before: int | None = None) -> int:
    """Return the index of the place for a request.

    The least busy one, those with a full cache last. A request whose prefix is at `before` stays there while that costs
    less than what it waits for: the server may be busier than the least busy one by as much as a whole group.

    Args:
        places: at least one.
        cost: tokens of the request, prompt and expected response.
        shared: tokens that it has in common with those that went to `before`.
        together: requests that share a prefix, usually.
        before: where requests with the same prefix went; None when that place has no room, or there was none.
    """
    best = min(range(len(places)), key=lambda at: (places[at].cache_use >= FULL, places[at].burden))
    if before is None or shared < _BLOCK:
        return best
    kept = places[before]
    if kept.cache_use >= FULL > places[best].cache_use:
        return best
    return before if kept.burden - places[best].burden <= together * cost / kept.limit else best
