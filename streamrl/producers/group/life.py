"""Whether a server lives, judged by what it does, not by what it answers; pure, with the clock as an argument."""

from __future__ import annotations

from typing import Final

_LONGEST_GAP: Final = 1.0
"""Seconds between two looks that count at most: a process that was stopped (SIGSTOP) has not waited all that time."""


class Life:
    """Signs of life of one server, and for how long there have been none.

    Args:
        patience: longest time without a sign, in seconds.
        now: any clock's.

    Attributes:
        busy_seconds: time in which requests were being decoded.
    """

    def __init__(self, patience: float, now: float) -> None:
        self._patience = patience
        self._looked_at = now
        self._still = 0.0
        self._silent = 0.0
        self.busy_seconds = 0.0

    def progress(self) -> None:
        """It has sampled tokens, or its own figures have changed."""
        self._still = self._silent = 0.0

    def answered(self) -> None:
        """It has answered something; that alone does not prove that it decodes."""
        self._silent = 0.0

    def look(self, now: float, *, busy: bool, held: bool) -> str:
        """Return why it counts as dead now; empty when it does not.

        Args:
            now: of the clock.
            busy: it has requests to decode.
            held: it was told to stand still, so that neither decoding nor answers are expected.
        """
        passed, self._looked_at = min(now - self._looked_at, _LONGEST_GAP), now
        if held:
            self._still = self._silent = 0.0
            return ""
        self._silent += passed
        if busy:
            self.busy_seconds += passed
            self._still += passed
        else:
            self._still = 0.0
        if self._still >= self._patience:
            return f"no token and no other sign of progress for {self._still:.0f} s"
        if self._silent >= self._patience:
            return f"no answer to anything for {self._silent:.0f} s"
        return ""
