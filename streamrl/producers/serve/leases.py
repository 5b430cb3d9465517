"""Who holds a pause of a served engine, and until when; pure, with the clock as an argument."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Lease:
    seconds: float
    end: float


class PauseLeases:
    """Pauses by owner. An engine stands still for as long as anybody holds one."""

    def __init__(self) -> None:
        self._leases: dict[str, _Lease] = {}

    def __bool__(self) -> bool:
        return bool(self._leases)

    def take(self, owner: str, seconds: float, now: float) -> None:
        """Hold a pause, or hold it anew, until `seconds` after the last word of its owner."""
        self._leases[owner] = _Lease(seconds, now + seconds)

    def renew(self, owner: str, now: float) -> None:
        """A word of an owner; of one without a pause it means nothing."""
        lease = self._leases.get(owner)
        if lease is not None:
            lease.end = now + lease.seconds

    def give_back(self, owner: str) -> None:
        """The owner's pause is over; a repeat does nothing."""
        self._leases.pop(owner, None)

    def expire(self, now: float) -> list[str]:
        """Forget the pauses that have run out, and return their owners."""
        late = [owner for owner, lease in self._leases.items() if lease.end <= now]
        for owner in late:
            del self._leases[owner]
        return late

    def next_end(self) -> float | None:
        """When the next one runs out, if nobody says a word; None without any."""
        return min((lease.end for lease in self._leases.values()), default=None)
