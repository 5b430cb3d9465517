"""The thread that drives a `SlotBatch`: who gets a free slot, and who may touch the model meanwhile."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from streamrl.errors import DeadlineExceeded, Refused, Unreachable
from streamrl.producers.engines.decoder import Counts, Deliver, Job, Outcome, Tell
from streamrl.producers.engines.slots import SlotBatch

logger = logging.getLogger(__name__)


class SlotDecoder:
    """Decode loop over static slots (`decoder.Decoder`).

    Free slots are filled when an eighth of all is free or nothing runs: prompts are computed in batches, and a slot
    waits a step or two at most. Jobs start in the order of their arrival.

    Args:
        batch: the sequences; this loop's alone from `start` on, except inside `exclusive`.
        deliver: gets the jobs that ended.
        tell: gets what jobs with a listener have sampled.
        patience: seconds one step may take before `exclusive` gives up.
    """

    def __init__(self, batch: SlotBatch, deliver: Deliver, tell: Tell, patience: float) -> None:
        self._batch = batch
        self._deliver = deliver
        self._tell = tell
        self._patience = patience
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._discarded: set[int] = set()
        self._holds = 0
        self._parked = True
        self._stopping = False
        self._failure: BaseException | None = None
        self._busy = 0.0
        self._steps = 0
        # a daemon: a step that hangs must not keep a process alive that wants to end
        self._thread = threading.Thread(target=self._run, name="engine-decode", daemon=True)

    def start(self) -> None:
        """Begin to decode."""
        self._thread.start()

    def stop(self) -> None:
        """End the loop; repeatable."""
        self.abandon()
        if self._thread.is_alive():
            self._thread.join(self._patience)

    def abandon(self) -> None:
        """End the loop without waiting for its step."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue jobs."""
        with self._changed:
            self._waiting.extend(jobs)
            self._changed.notify_all()

    def discard(self, ticket: int) -> None:
        """Drop a job at the next step."""
        with self._changed:
            self._discarded.add(ticket)
            self._changed.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the loop between two steps."""
        with self._changed:
            self._holds += 1
            self._changed.notify_all()
        try:
            with self._changed:
                in_time = self._changed.wait_for(lambda: self._parked or self._failure is not None, self._patience)
            if self._failure is not None:
                raise Unreachable(f"the decode loop died: {self._failure!r}") from self._failure
            if not in_time:
                raise DeadlineExceeded(f"a decode step takes longer than {self._patience:g} s")
            yield
        finally:
            with self._changed:
                self._holds -= 1
                self._changed.notify_all()

    def take(self, tickets: Collection[int] | None) -> list[Outcome]:
        """End jobs as they are."""
        with self._changed:
            ending = [job for job in self._waiting if tickets is None or job.ticket in tickets]
            self._waiting = deque(job for job in self._waiting if tickets is not None and job.ticket not in tickets)
        return [Outcome(job.ticket, [], [], [], "abort") for job in ending] + self._batch.take(tickets)

    def swapped(self, version: int) -> None:
        """The weights have changed."""
        self._batch.swapped(version)

    def recompute(self) -> None:
        """Compute keys and values anew."""
        self._batch.recompute()

    def release(self) -> None:
        """Free keys and values."""
        if self._batch.active:
            raise Refused(
                f"{self._batch.active} requests are being decoded: their keys and values would be lost",
                "abort them or wait for their end, then sleep",
            )
        self._batch.release()

    def restore(self) -> None:
        """Nothing to do: the next prompt allocates."""

    def counts(self) -> Counts:
        """How busy the loop is; a slot is never taken away from a request."""
        batch = self._batch
        return Counts(batch.active, len(self._waiting), batch.tokens_sampled, self._busy, batch.cache_use, 0)

    def progress(self) -> tuple[bool, int]:
        """(whether a step runs, steps so far)."""
        return not self._parked, self._steps

    def failure(self) -> BaseException | None:
        """What killed the loop."""
        return self._failure

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:
            logger.exception("decode loop died")
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _turn(self) -> bool:
        """Wait for work, then refill and step; False to end."""
        with self._changed:
            self._parked = True
            self._changed.notify_all()
            self._changed.wait_for(self._has_work)
            if self._stopping:
                return False
            self._parked = False
            self._drop_discarded()
            jobs = self._next_jobs()
        start = time.perf_counter()
        ended = self._batch.admit(jobs) if jobs else []
        if self._batch.active:
            ended += self._batch.step()
        self._busy += time.perf_counter() - start
        self._steps += 1
        if news := self._batch.news():
            self._tell(news)
        if ended:
            self._deliver(ended)
        return True

    def _has_work(self) -> bool:
        return self._stopping or (not self._holds and bool(self._waiting or self._discarded or self._batch.active))

    def _drop_discarded(self) -> None:
        if self._discarded:
            self._waiting = deque(job for job in self._waiting if job.ticket not in self._discarded)
            self._batch.take(self._discarded)
            self._discarded = set()

    def _next_jobs(self) -> list[Job]:
        """Take jobs off the queue when filling slots is worth a forward pass."""
        active = self._batch.active
        free = self._batch.slots - active
        if not self._waiting or not (8 * free >= self._batch.slots or active == 0):
            return []
        return [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
