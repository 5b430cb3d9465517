"""Samples on offer to programs: which wait, who holds which, until when. Pure: the clock is an argument.

```
        add             lease               settle: the score or the failure that a program posted
 sample ----> waiting ---------> leased -----------> gone
                 ^                 | release, or not renewed in time (a loss)
                 +-----------------+ after `most_losses` losses: gone, with ProgramsLost
```

Behind each offer stands a lease of the ledger, which the worker holds and renews. The leases here are shorter and say
which program has the sample meanwhile; each has an id of its own that nobody can guess, so a program that lost a sample
cannot settle it any more.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from streamrl.consumers.reward import Score
from streamrl.errors import StreamrlError

_REMEMBERED: Final = 4096
"""Settled leases that are remembered, so that a program may post again what it got no answer to."""


class ProgramsLost(StreamrlError, RuntimeError):
    """So many programs took a sample and were not heard of again that it seems to be the sample's fault."""


@dataclass(eq=False, slots=True)
class SampleOffer:
    """One sample.

    Attributes:
        body: the sample as JSON.
        settle: is told the end, once: a score, or what the sample fails with.
        lease: id of the program's lease; empty while it waits.
        seconds: length of that lease.
        until: when it ends.
        losses: programs that let it run out.
    """

    body: bytes
    settle: Callable[[Score | Exception], None]
    lease: str = ""
    seconds: float = 0.0
    until: float = 0.0
    losses: int = 0


class Offers:
    """All samples on offer.

    Attributes:
        taken: samples settled with a score.
        failed: samples settled with a failure.
        lost: leases that were not renewed in time.
    """

    def __init__(self, most_losses: int) -> None:
        self.taken = 0
        self.failed = 0
        self.lost = 0
        self._most_losses = most_losses
        self._waiting: deque[SampleOffer] = deque()
        self._leased: dict[str, SampleOffer] = {}
        self._settled: OrderedDict[str, None] = OrderedDict()

    @property
    def waiting(self) -> int:
        """Samples that no program has."""
        return len(self._waiting)

    @property
    def leased(self) -> int:
        """Samples that programs have."""
        return len(self._leased)

    def add(self, offer: SampleOffer) -> None:
        """Offer a new sample, behind the others."""
        self._waiting.append(offer)

    def withdraw(self, offer: SampleOffer) -> None:
        """Take a sample back, whoever has it; a repeat, and one that is settled, changes nothing."""
        if offer.lease:
            self._leased.pop(offer.lease, None)
        elif offer in self._waiting:
            self._waiting.remove(offer)

    def lease(self, count: int, seconds: float, now: float, most_bytes: int) -> list[SampleOffer]:
        """Give the oldest waiting samples away, each under a new lease; only the first may exceed `most_bytes`."""
        given: list[SampleOffer] = []
        size = 0
        while self._waiting and len(given) < count:
            size += len(self._waiting[0].body)
            if given and size > most_bytes:
                break
            offer = self._waiting.popleft()
            offer.lease, offer.seconds, offer.until = secrets.token_urlsafe(15), seconds, now + seconds
            self._leased[offer.lease] = offer
            given.append(offer)
        return given

    def renew(self, leases: Iterable[str], now: float) -> list[str]:
        """Prolong leases by their length from now on; return those that exist no more, in the order given."""
        lost: list[str] = []
        for lease in leases:
            offer = self._leased.get(lease)
            if offer is None:
                lost.append(lease)
            else:
                offer.until = now + offer.seconds
        return lost

    def release(self, leases: Iterable[str]) -> list[str]:
        """Put samples back in front, which is no loss; return the leases that exist no more, in the order given."""
        lost: list[str] = []
        for lease in leases:
            offer = self._leased.get(lease)
            if offer is None:
                lost.append(lease)
            else:
                self._put_back(offer)
        return lost

    def settle(self, lease: str, end: Score | Exception) -> bool:
        """End a leased sample with its score or failure; False: the lease exists no more.

        A repeat answers what the first call did, and changes nothing.
        """
        offer = self._leased.pop(lease, None)
        if offer is None:
            return lease in self._settled
        self._settled[lease] = None
        if len(self._settled) > _REMEMBERED:
            self._settled.popitem(last=False)
        if isinstance(end, Score):
            self.taken += 1
        else:
            self.failed += 1
        offer.settle(end)
        return True

    def expire(self, now: float) -> bool:
        """End the leases that are over; True when samples wait again."""
        over = [offer for offer in self._leased.values() if offer.until <= now]
        back = False
        for offer in over:
            self.lost += 1
            offer.losses += 1
            if offer.losses < self._most_losses:
                self._put_back(offer)
                back = True
                continue
            del self._leased[offer.lease]
            self.failed += 1
            offer.settle(
                ProgramsLost(
                    f"{offer.losses} programs took this sample from the gateway and were not heard of again",
                    "look why they die of it, or let them renew their leases",
                )
            )
        return back

    def next_end(self) -> float | None:
        """When the next lease ends; None without leases."""
        return min((offer.until for offer in self._leased.values()), default=None)

    def _put_back(self, offer: SampleOffer) -> None:
        del self._leased[offer.lease]
        offer.lease = ""
        self._waiting.appendleft(offer)
