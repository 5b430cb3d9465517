"""How a trainer in a process of its own takes steps when it is told to: a line in, a line with its times out.

No package but the standard library is imported: the process of trl has none of ours.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any


class Lines:
    """This process's end: whatever others print goes to standard error."""

    def __init__(self) -> None:
        self._answers: IO[str] = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def ready(self, **facts: Any) -> None:
        """Say that steps can be asked for."""
        self._answer(facts)

    def wait(self) -> bool:
        """Wait for the next order; False when there is none any more."""
        return bool(sys.stdin.readline())

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Report the seconds, and the seconds of all cores, that the block took."""
        begin, busy = time.perf_counter(), time.process_time()
        yield
        self._answer({"seconds": time.perf_counter() - begin, "cpu_seconds": time.process_time() - busy})

    def serve(self, step: Callable[[], Any]) -> None:
        """Take a step per order until there are no more."""
        while self.wait():
            with self.timed():
                step()

    def _answer(self, facts: dict[str, Any]) -> None:
        self._answers.write(json.dumps(facts) + "\n")
        self._answers.flush()
