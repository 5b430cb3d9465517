"""A following rank's share of each version, written behind its training."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from streamrl.config import WeightsConfig
from streamrl.errors import DeadlineExceeded
from streamrl.learner.snapshot import Snapshot
from streamrl.weight_sync.manifest import Pair
from streamrl.weight_sync.rank_writer import RankWriter

logger = logging.getLogger(__name__)


class Parts:
    """Writes this rank's files of one version after the other, in a thread of its own.

    Nobody waits for it but rank 0's thread that puts the version together, and that one has a deadline.

    Args:
        config: how versions are written.
        run_dir: of the run.
        rank: of the learner, above 0.
    """

    def __init__(self, config: WeightsConfig, run_dir: Path, rank: int) -> None:
        self._writer = RankWriter(config, run_dir, rank)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="publish")
        self._running: Future[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether the version before is still being written."""
        return self._running is not None and not self._running.done()

    def start(self, pair: Pair, base: Pair | None, snapshot: Snapshot) -> None:
        """Begin to write this rank's files of a version; `busy` must be False."""
        self._running = self._executor.submit(self._write, pair, base, snapshot)

    async def refuse(self, pair: Pair) -> None:
        """Tell rank 0 that this rank still writes the version before, and leave this one out."""
        error = DeadlineExceeded("still writes the version before", "raise weights.deadline, or look at the disk")
        logger.warning("version left out", extra={"version": pair[1], "error": error.message})
        await asyncio.to_thread(self._writer.refuse, pair, error)

    def close(self) -> None:
        """End the thread; a write that hangs is left to itself."""
        self._writer.stop()
        self._executor.shutdown(wait=not self.busy, cancel_futures=True)

    def _write(self, pair: Pair, base: Pair | None, snapshot: Snapshot) -> None:
        try:
            self._writer.deliver(pair, base, snapshot.tensors, snapshot.shapes)
        except Exception as error:
            # The reader of the last exception: rank 0 leaves the version out, and this rank goes on training.
            logger.exception("part of a version not written", extra={"version": pair[1]})
            self._writer.refuse(pair, error)
