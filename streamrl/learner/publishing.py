"""Publishing versions of the weights while the next step is already trained."""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from streamrl.errors import CannotCreate, DeadlineExceeded
from streamrl.learner.lineage import use_version
from streamrl.learner.train_buffer import TrainBuffer
from streamrl.learner.weight_copy import PolicySnapshot
from streamrl.weight_sync.manifest import Manifest
from streamrl.weight_sync.publisher import Publisher
from streamrl.weight_sync.transports import WeightServer

logger = logging.getLogger(__name__)
_MAX_FAILURES: Final = 3
_HANGS: Final = 2
"""Times `weights.deadline` after which a write hangs: the publisher looks at its deadline between shards only."""


class Publishing:
    """Publishes one version after the other, in a thread of its own; engines are told when all is there.

    A version that cannot be written is logged and left out. When the versions of three steps in a row failed, or all
    within `deadline` seconds, the learner gives up: without new weights in the engines, each step makes training worse.
    """

    def __init__(
        self,
        publisher: Publisher,
        weight_server: WeightServer,
        run_dir: Path,
        buffer: TrainBuffer,
        *,
        epoch: int,
        deadline: float,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self.version = 0  # newest one that engines can see
        self.record: dict[str, object] = {"publish_seconds": 0.0}
        self._publisher, self._weight_server = publisher, weight_server
        self._run_dir, self._buffer, self._epoch = run_dir, buffer, epoch
        self._deadline, self._tasks = deadline, tasks
        self._running: asyncio.Task[None] | None = None
        self._failed_steps: set[int] = set()
        self._failing_since = 0.0
        self._manifest = b""
        self._hung = False
        self._shown_at = time.monotonic()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="publish")

    async def settle(self) -> None:
        """Return when no version is being written; bounded by `weights.deadline` and the patience with Redis."""
        if self._running is not None:
            await asyncio.wait([self._running])

    async def start(self, version: int, step: int, snapshot: PolicySnapshot) -> None:
        await self.settle()
        publish = self._publish(version, step, snapshot)
        self._running = self._tasks.create_task(publish, name=f"publish {version}")

    @property
    def age(self) -> float:
        return time.monotonic() - self._shown_at

    def force_full_next(self) -> None:
        """Have the next version written whole: what it would build on may be damaged."""
        self._publisher.force_full_next()

    async def repeat(self) -> bool:
        """Show the newest version again: Redis may be back with an older state, and without it engines sample nothing.

        False when the present weights have to be published again, because the files are gone.
        """
        await self.settle()
        if self._failed_steps or not self._publisher.holds_newest():
            return False
        await self._buffer.announce(self.version, self._manifest)
        return True

    def close(self) -> None:
        """End the thread. The versions stay: engines and the evaluation at the end still need them."""
        self._executor.shutdown(wait=not self._hung)

    async def _publish(self, version: int, step: int, snapshot: PolicySnapshot) -> None:
        started = time.monotonic()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_HANGS * self._deadline):
                data, manifest = await loop.run_in_executor(self._executor, self._write, version, step, snapshot)
        except (CannotCreate, DeadlineExceeded) as error:
            now = time.monotonic()
            late = bool(self._failed_steps) and now - self._failing_since > self._deadline
            if not self._failed_steps:
                self._failing_since = now  # not the start: a slow write has used up the deadline already
            self._failed_steps.add(step)
            if late or len(self._failed_steps) >= _MAX_FAILURES:
                raise
            logger.warning("version not published", extra={"version": version, "error": str(error)})
            return
        except TimeoutError as error:
            # The thread is stuck in a write that never returns, and every later version would wait behind it.
            self._hung = True
            raise DeadlineExceeded(
                f"version {version} is being written and does not end", "look at the disk"
            ) from error
        self._failed_steps.clear()
        self.version, self._manifest = version, data
        self._weight_server.announce(manifest)
        await self._buffer.announce(version, data)
        self._shown_at = time.monotonic()
        self.record = {
            "published": version,
            "publish_seconds": time.monotonic() - started,
            "snapshot_seconds": snapshot.seconds,
            "publish_step": step,
            "publish_bytes": manifest.total_bytes,
            "publish_kind": manifest.kind,
            "publish_density": self._publisher.density,
        }

    def _write(self, version: int, step: int, snapshot: PolicySnapshot) -> tuple[bytes, Manifest]:
        try:
            use_version(self._run_dir, version)
        except OSError as error:
            # The pair (epoch, number) stays unique without the note, so a full disk need not stop the engines.
            logger.warning("version not noted", extra={"version": version, "error": str(error)})
        data = self._publisher.publish(
            epoch=self._epoch,
            version=version,
            step=step,
            tensors=snapshot.tensors,
            sources=self._weight_server.sources(),
            lane=self._weight_server.lane,
            adapter=snapshot.adapter,
        )
        try:
            self._weight_server.store(self._publisher.manifest)
        except CannotCreate:
            self._publisher.force_full_next()  # no version may build on one that the store does not have
            raise
        return data, self._publisher.manifest
