"""When the servers of a reward model should be awake: pure, with the clock as an argument."""

from __future__ import annotations


class Demand:
    """Whether there is work for a server that sleeps while there is none. It begins awake.

    ```
    awake  --nothing waits, for as long as `linger`-------------------> asleep
    asleep --`wake_at` samples wait, or fewer for `wake_after`--------> awake
    ```
    Fewer than `wake_at` samples would wait for ever where the rest of the run waits for them, so time wakes as well.

    Args:
        wake_at: samples without a score that wake it.
        wake_after: seconds for which fewer of them let it sleep on.
        linger: seconds without any work after which it sleeps: to sleep and wake costs more than a moment's idling.

    Attributes:
        awake: whether it should be awake now.
    """

    def __init__(self, wake_at: int, wake_after: float, linger: float) -> None:
        self.awake = True
        self._wake_at, self._wake_after, self._linger = wake_at, wake_after, linger
        self._since: float | None = None

    def see(self, waiting: int, now: float) -> bool:
        """Note how much work waits now, and return whether the server should be awake.

        Args:
            waiting: samples without a score.
            now: any clock's, in seconds; one that goes back starts the time anew.
        """
        wanted = waiting > 0
        if wanted == self.awake:
            self._since = None
            return self.awake
        if self._since is None or now < self._since:
            self._since = now
        patience = self._wake_after if wanted else self._linger
        if waiting >= self._wake_at or now - self._since >= patience:
            self.awake, self._since = wanted, None
        return self.awake
