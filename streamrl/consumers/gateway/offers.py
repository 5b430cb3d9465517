"""Samples on offer to programs: which wait, which are leased, until when. Pure: the clock is an argument.

```
        add             lease               settle: the score or the failure that a program posted
 sample ----> waiting ---------> leased -----------> gone
                 ^                 | release, or not renewed in time (a loss)
                 +-----------------+ after `most_losses` losses: gone, with ProgramsLost
```

The worker holds and renews a lease of the ledger for each offer. The leases here are shorter and say which program has
the sample. Their ids cannot be guessed, so a program cannot settle a sample that it lost.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from streamrl.consumers.reward import Score
from streamrl.errors import StreamrlError

MIN_LEASE, MAX_LEASE = 1.0, 600.0
_REMEMBERED: Final = 4096
"""Settled leases that are remembered, so that a program that got no answer may post again."""


class ProgramsLost(StreamrlError, RuntimeError):
    """Several programs took a sample and none answered, so the sample is probably the cause."""


class ProgramFailed(StreamrlError, ValueError):
    """A program could not score a sample. A `ValueError`, because other samples are not affected."""


@dataclass(eq=False, slots=True)
class SampleOffer:
    """One sample, as JSON. `settle` is called once, with the score or the error that the sample fails with."""

    body: bytes
    settle: Callable[[Score | Exception], None]
    lease: str = ""  # id of the program's lease; empty while the sample waits
    seconds: float = 0.0  # length of that lease
    until: float = 0.0
    losses: int = 0  # leases that a program did not renew


class Offers:
    def __init__(self, most_losses: int) -> None:
        self.taken = self.failed = self.lost = 0
        self._most_losses = most_losses
        self._waiting: deque[SampleOffer] = deque()
        self._leased: dict[str, SampleOffer] = {}
        self._settled: OrderedDict[str, None] = OrderedDict()

    def counts(self) -> dict[str, int]:
        return {
            "waiting": len(self._waiting),
            "leased": len(self._leased),
            "taken": self.taken,
            "failed": self.failed,
            "lost": self.lost,
        }

    def add(self, offer: SampleOffer) -> None:
        self._waiting.append(offer)

    def withdraw(self, offer: SampleOffer) -> None:
        """Take a sample back, also from a program. Does nothing if it was settled or withdrawn before."""
        if offer.lease:
            self._leased.pop(offer.lease, None)
        elif offer in self._waiting:
            self._waiting.remove(offer)

    def lease(self, count: int, seconds: float, now: float, most_bytes: int) -> list[SampleOffer]:
        """Lease out the oldest waiting samples. Only the first may exceed `most_bytes`."""
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

    def renew(self, leases: Sequence[str], now: float) -> list[str]:
        for offer in self._held(leases):
            offer.until = now + offer.seconds
        return [lease for lease in leases if lease not in self._leased]

    def release(self, leases: Sequence[str]) -> list[str]:
        """Put samples back in front, without counting a loss; return the leases that no longer exist."""
        lost = [lease for lease in leases if lease not in self._leased]
        for offer in self._held(leases):
            self._put_back(offer)
        return lost

    def settle(self, lease: str, end: Score | Exception) -> bool:
        """End a leased sample; False if the lease no longer exists. A repeat returns the same and changes nothing."""
        offer = self._leased.pop(lease, None)
        if offer is None:
            return lease in self._settled
        self._settled[lease] = None
        if len(self._settled) > _REMEMBERED:
            self._settled.popitem(last=False)
        self._end(offer, end)
        return True

    def expire(self, now: float) -> bool:
        back = False
        for offer in [offer for offer in self._leased.values() if offer.until <= now]:
            self.lost += 1
            offer.losses += 1
            if offer.losses < self._most_losses:
                self._put_back(offer)
                back = True
                continue
            del self._leased[offer.lease]
            why = f"{offer.losses} programs took this sample from the gateway and did not answer"
            self._end(offer, ProgramsLost(why, "check whether the sample makes them crash, or renew their leases"))
        return back

    def next_end(self) -> float | None:
        return min((offer.until for offer in self._leased.values()), default=None)

    def _held(self, leases: Sequence[str]) -> Iterator[SampleOffer]:
        return (self._leased[lease] for lease in leases if lease in self._leased)

    def _end(self, offer: SampleOffer, end: Score | Exception) -> None:
        if isinstance(end, Score):
            self.taken += 1
        else:
            self.failed += 1
        offer.settle(end)

    def _put_back(self, offer: SampleOffer) -> None:
        del self._leased[offer.lease]
        offer.lease = ""
        self._waiting.appendleft(offer)
