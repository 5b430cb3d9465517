"""When and how rank 0 makes a checkpoint, while training goes on.

```
between two steps: every rank copies its state to the host      (SAVE)
in the background: every rank writes and fsyncs its copy
                   all have written                              (POLL_SAVE, asked again and again)
                   meta data -> retire -> remove old ones
```
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Final

import msgspec

from streamrl.config import RunConfig
from streamrl.errors import DeadlineExceeded, Fenced, StreamrlError
from streamrl.learner.checkpoint import InvalidCheckpoint, Meta
from streamrl.learner.checkpoint_files import WriteProgress
from streamrl.learner.lineage import join
from streamrl.learner.rank_group import Command, RankGroup
from streamrl.learner.takeover import Start
from streamrl.learner.train_buffer import TrainBuffer

logger = logging.getLogger(__name__)
_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 30.0


class Saver:
    """The checkpoints of one learner, one at a time.

    A checkpoint that fails (full disk) leaves the run as it was: nothing is retired, training goes on until the hard
    cap of live groups stops admission, and it is tried again after a pause that doubles.
    """

    def __init__(
        self, config: RunConfig, start: Start, buffer: TrainBuffer, ranks: RankGroup, tasks: asyncio.TaskGroup
    ) -> None:
        self._config, self._start, self._buffer = config, start, buffer
        self._ranks, self._trained, self._tasks = ranks, ranks.worker, tasks
        self._checkpoints = ranks.worker.checkpoints
        self.newest = start.meta  # the newest checkpoint that this learner wrote or loaded
        self._begun = start.step
        self._running: asyncio.Task[None] | None = None
        self._pause, self._retry_at = 0.0, 0.0

    @property
    def due(self) -> bool:
        due = self._config.checkpoint_due(self._trained.step - self._begun, self._buffer.unretired)
        return due and time.monotonic() >= self._retry_at

    async def begin(self, version: int) -> None:
        """Begin a checkpoint of the present weights, between two steps; its groups are retired when it is durable.

        If it is cancelled or killed half way, it leaves shards, which the next learner removes, or a finished
        checkpoint, whose groups the next learner retires. Fenced: a newer learner has left its mark.
        """
        await self.settle()  # so at most the groups of two intervals are unretired
        if not self._buffer.fresh:
            return
        meta, group_ids, started = self._describe(version), self._buffer.fresh, time.monotonic()
        try:
            await self._check_alone()
            await asyncio.to_thread(self._checkpoints.begin, meta.position)
        except OSError as error:
            self._failed(meta, error)
            return
        await self._ranks.order(Command.SAVE, *meta.position)
        self._begun = self._trained.step
        completing = self._complete(meta, group_ids, started)
        self._running = self._tasks.create_task(completing, name=f"checkpoint {meta.name}")
        if not self._config.checkpoint.background:
            await self.settle()

    async def settle(self) -> None:
        """Wait until no checkpoint is being written; at most `checkpoint.deadline`."""
        if self._running is not None:
            await asyncio.wait([self._running])

    async def save(self, version: int) -> bool:
        """Make a checkpoint of the present weights now, unless there is one; False when it failed."""
        await self.begin(version)
        await self.settle()
        return not self._buffer.fresh

    def _describe(self, version: int) -> Meta:
        before = self.newest.trained if self.newest else []
        meta = self._start.next_checkpoint(
            step=self._trained.step,
            version=version,
            trained=join([*before, *((group_id, group_id) for group_id in self._buffer.fresh)]),
            count=self._trained.count,
            oldest=self._trained.step - self._config.token_staleness_limit,
            model=self._config.model.path,
        )
        return self._trained.state.describe(meta)

    async def _check_alone(self) -> None:
        newer = await asyncio.to_thread(self._checkpoints.greatest_epoch)
        if newer > self._start.epoch:
            raise Fenced(f"checkpoint: the learner of epoch {newer} has taken over from this one ({self._start.epoch})")

    async def _complete(self, meta: Meta, group_ids: set[int], started: float) -> None:
        deadline = self._config.checkpoint.deadline
        try:
            async with asyncio.timeout(deadline):
                saved = await self._write(meta)
        except InvalidCheckpoint as error:
            await self._withdraw(meta, error)
            return
        except StreamrlError:  # some are OSErrors
            raise
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"ckpt-{meta.name} was not written within checkpoint.deadline ({deadline:g} s)", "look at the disk"
            ) from error
        except OSError as error:
            await self._withdraw(meta, error)
            return
        await self._buffer.saved(meta.name, group_ids)
        self._pause, self.newest = 0.0, saved
        keep, keep_every = self._config.checkpoint.keep, self._config.checkpoint.keep_every
        try:
            await asyncio.to_thread(self._checkpoints.remove_older, saved, keep, keep_every)
        except OSError as error:  # they take room and do no harm
            logger.warning("old checkpoints stay", extra={"error": str(error)})
        seconds = round(time.monotonic() - started, 3)
        logger.info("checkpoint", extra={"checkpoint": meta.name, "groups": meta.count, "seconds": seconds})

    async def _write(self, meta: Meta) -> Meta:
        await self._buffer.archive.sync()
        if await self._ranks.saved() is not WriteProgress.WRITTEN:
            raise OSError("a rank could not write its shard")
        whole = msgspec.structs.replace(meta, shards=self._trained.state.shards)
        await asyncio.to_thread(self._checkpoints.finish, whole)
        await self._check_alone()
        return whole

    async def _withdraw(self, meta: Meta, error: Exception) -> None:
        """Remove what a failed checkpoint left, so that it takes no room and its name is free again."""
        with contextlib.suppress(OSError):
            await asyncio.to_thread(self._checkpoints.remove, meta.position)
        self._failed(meta, error)

    def _failed(self, meta: Meta, error: Exception) -> None:
        self._begun = self.newest.step if self.newest else 0
        self._pause = min(_LONGEST_PAUSE, max(_FIRST_PAUSE, 2 * self._pause))
        self._retry_at = time.monotonic() + self._pause
        logger.error(
            "checkpoint failed, nothing was retired",
            extra={"checkpoint": meta.name, "error": str(error), "retry_seconds": self._pause},
        )
