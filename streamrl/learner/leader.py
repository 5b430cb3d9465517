"""The learner's role: rank 0 leads, the other ranks follow.

```
take over -> load -> publish -> { micro-batches as groups complete -> update -> finish_step -> publish }
                                  every k steps: checkpoint, with the ids -> retire
```
The event loop (ledger, files) and torch (one thread of its own) run side by side: while a micro-batch is computed, the
next groups are read; while a version is written, the next step is trained.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import orjson

from streamrl.archive.writer import Archive
from streamrl.errors import CannotCreate, ConfigError, Fenced, Forgotten, StreamrlError, Unreachable, leaves, unwrap
from streamrl.images.store import ImageStore
from streamrl.learner.checkpoint import Checkpoints, Position
from streamrl.learner.checkpoint_files import WriteProgress
from streamrl.learner.ending import Ending, Finished, Reason, is_over, write_finished
from streamrl.learner.export import export_model
from streamrl.learner.groups import GroupOpener, TrainGroup
from streamrl.learner.metrics import StepLoggers, StepMeter
from streamrl.learner.publishing import Publishing
from streamrl.learner.rank_group import Command, RankGroup, RankWorker, TorchThread, follow
from streamrl.learner.ranks import Ranks
from streamrl.learner.saving import Saver
from streamrl.learner.step import StepStats, make_models
from streamrl.learner.takeover import Start, take_over
from streamrl.learner.train_buffer import TrainBuffer
from streamrl.learner.weight_copy import PolicySnapshot
from streamrl.queues.device_lock import LearnerDevices
from streamrl.queues.keys import SOURCE_FIGURES
from streamrl.queues.role import Role
from streamrl.waits import first_of
from streamrl.weight_sync.publisher import Publisher
from streamrl.weight_sync.transports import open_server

logger = logging.getLogger(__name__)
_STARVED_SECONDS: Final = 0.25
_MAX_DIVERGED: Final = 8  # steps in a row in which a model had no finite gradient, after which the learner gives up
_MAX_UNREAD: Final = 5
"""Micro-batches in a row without a reference, after which the learner gives up; about 4 s with the pauses."""
_UNREAD_SECONDS: Final = 0.125  # half of the first pause after one; the pause doubles
_REPEAT_SECONDS: Final = 2.0  # pause between checks of a waiting learner that engines can get the newest version


async def run_learner(role: Role) -> None:
    """Train until the run is over or `role.stop` is set; then everything trained is in a checkpoint and retired.

    It may be cancelled or killed at any point: the next learner goes on from the last checkpoint and the ledger.
    """
    torch = TorchThread()
    try:
        ranks = await torch.run(Ranks.from_environment, role.config)
        # Rank 0 decides for all: another rank might find another answer a moment later.
        over = ranks.rank == 0 and await is_over(role.config, role.run_dir, role.ledgers.train)
        if await torch.run(ranks.broadcast_ints, [int(over)]) == [1]:
            role.ready()
        else:
            await _train(role, ranks, torch)
        await torch.run(ranks.close)
    finally:
        torch.close()


async def _train(role: Role, ranks: Ranks, torch: TorchThread) -> None:
    async with _on_devices(role, ranks.rank) as devices:
        await torch.run(ranks.broadcast_ints)  # the others wait until rank 0 has the devices
        checkpoints = await asyncio.to_thread(Checkpoints.of, role.config, role.run_dir)
        if checkpoints.store is None and not await torch.run(ranks.share, checkpoints.folder):
            raise ConfigError(
                f"the ranks of the learner do not share {checkpoints.folder}",
                "set checkpoint.store to a directory or URL that all hosts of the learner reach",
            )
        models = await torch.run(make_models, role.config, ranks)
        worker = await torch.run(RankWorker, role.config, ranks, models, checkpoints)
        if ranks.rank == 0:
            await _lead(role, RankGroup(worker, torch, devices))
            return
        role.ready()
        await follow(worker, torch)


@asynccontextmanager
async def _on_devices(role: Role, rank: int) -> AsyncIterator[LearnerDevices | None]:
    """Take devices shared with engines (`rollout.placement: colocated`); a lost lock cancels the block."""
    if role.config.rollout.placement != "colocated" or rank:
        yield None
        return
    devices = LearnerDevices(role.ledgers.device_lock, uuid.uuid4().hex, deadline=role.config.turn_deadline)
    async with asyncio.TaskGroup() as tasks:
        renewing = tasks.create_task(devices.run(), name="device lock")
        await devices.take()
        yield devices
        renewing.cancel()


async def _lead(role: Role, ranks: RankGroup) -> None:
    start: Start | None = None
    try:
        try:
            start = await _begin(role, ranks)
            await Leader(role, ranks, start).run()
        except BaseExceptionGroup as group:
            # A fenced learner stops, whatever other error came at the same time.
            fenced = (error for error in leaves(group) if isinstance(error, Fenced))
            raise next(fenced, unwrap(group)) from group
    except Fenced as error:
        await ranks.order(Command.STOP)
        if start is not None and (await role.ledgers.train.state()).epoch < start.epoch:
            raise Forgotten(f"Redis forgot epoch {start.epoch} of the learner", "start the learner again") from error
        raise


async def _begin(role: Role, ranks: RankGroup) -> Start:
    """Take over; the other ranks do not time out while a large checkpoint is read."""
    async with asyncio.TaskGroup() as tasks:
        talking = tasks.create_task(ranks.keep_alive(role.config.learner.collective_deadline), name="keep alive")
        checkpoints, model = ranks.worker.checkpoints, role.config.model.path
        try:
            start = await take_over(role.ledgers.train, checkpoints, role.run_dir, kind="model", model=model)
        except StreamrlError:
            raise
        except OSError as error:
            raise Unreachable(f"the checkpoints cannot be used: {error}", "bring their disk or store back") from error
        talking.cancel()
    return start


class Leader:
    def __init__(self, role: Role, ranks: RankGroup, start: Start) -> None:
        self._role, self._config = role, role.config
        self._ranks, self._worker = ranks, ranks.worker
        self._ending = Ending(role.config, role.ledgers.roles)
        self._meter = StepMeter(self._config.checkpoint.every)
        self._repeat_at = 0.0
        self._version = start.version
        self._diverged, self._unread, self._skipped_updates = 0, 0, 0
        self._published_step = -1
        self._starved_since: float | None = None
        self._start = start

    async def run(self) -> None:
        start, run_dir = self._start, self._role.run_dir
        if start.meta is not None:
            await self._load(start.meta.position)
        vision = self._worker.actor.vision
        images = None if vision is None else ImageStore.of(self._config, run_dir)
        fingerprint = "" if vision is None else vision.fingerprint
        opener = GroupOpener(self._worker.recipe, self._worker.check_samples, images, fingerprint)
        archive = Archive(self._config, run_dir)
        self._buffer = TrainBuffer(self._role.ledgers.train, self._config, start, opener, archive)
        loggers = self._loggers = StepLoggers(self._config, run_dir)
        publisher = await asyncio.to_thread(Publisher, self._config.weights, self._config.name, run_dir)
        try:
            async with (
                open_server(self._config, run_dir, publisher.root, self._worker.ranks.device) as weight_server,
                asyncio.TaskGroup() as tasks,
            ):
                self._saver = Saver(self._config, start, self._buffer, self._ranks, tasks)
                deadline, epoch = self._config.weights.deadline, start.epoch
                self._publishing = Publishing(
                    publisher, weight_server, run_dir, self._buffer, epoch=epoch, deadline=deadline, tasks=tasks
                )
                try:
                    await self._train_and_leave(tasks)
                finally:
                    self._publishing.close()
        finally:
            await archive.close()
            await asyncio.to_thread(loggers.close)

    async def _load(self, position: Position) -> None:
        await self._ranks.order(Command.FETCH_CHECKPOINT, *position)
        if await self._ranks.saved() is not WriteProgress.WRITTEN:
            raise Unreachable("a rank could not fetch a checkpoint from checkpoint.store", "its log says why")
        await self._ranks.order(Command.LOAD, *position)

    async def _train_and_leave(self, tasks: asyncio.TaskGroup) -> None:
        talking = tasks.create_task(self._ranks.keep_alive(self._config.learner.collective_deadline), name="keep alive")
        await self._publish()
        await self._publishing.settle()
        self._role.ready()
        following = tasks.create_task(self._buffer.follow(), name="train buffer")
        archiving = tasks.create_task(self._buffer.archive.run(), name="archive")
        reason = await self._train()
        if self._buffer.in_step:
            await self._abandon()
        if self._worker.step != self._published_step:
            await self._publish()  # the last steps may be unpublished when `publish_every` is above 1
        if not await self._saver.save(self._version):
            raise CannotCreate("the last checkpoint could not be written", "make room and start the learner again")
        await self._publishing.settle()
        following.cancel()
        archiving.cancel()
        if reason is not None:
            await self._finish(reason)
        talking.cancel()
        await self._ranks.release()
        await self._ranks.order(Command.STOP)

    async def _train(self) -> Reason | None:
        """Train until the run is over (returns why) or the role is to stop (returns None)."""
        while not self._role.stop.is_set():
            in_step = self._buffer.in_step
            if not in_step and (reason := await self._ending.reason(self._worker.step)):
                return reason
            if self._buffer.room <= 0:
                await self._update()
                continue
            groups = await self._choose(last=False)
            if not groups and self._buffer.room > 0 and await self._buffer.ended():
                groups = await self._choose(last=True)
                if not groups and in_step:
                    await self._update()
                    continue
                if not groups and not self._buffer.untrained:
                    await self._buffer.drop_equal()
                    return "data"
            if groups:
                await self._micro_batch(groups)
            elif self._buffer.room > 0:
                await self._starve()
        return None

    async def _choose(self, *, last: bool) -> list[TrainGroup]:
        self._buffer.changed.clear()
        await self._buffer.drop_stale(self._worker.step)
        zero_variance = self._worker.recipe.zero_variance
        if zero_variance == "drop":
            self._buffer.set_equal_aside(self._buffer.room)
        elif zero_variance == "resample":
            self._buffer.set_equal_aside(sys.maxsize)
            await self._buffer.drop_equal()
        cost = self._config.learner.tokens_per_microbatch * self._worker.ranks.world
        if self._ranks.alternates:
            cost = sys.maxsize  # engines stand still from the first micro-batch on: begin with all of the step
        room = self._buffer.room
        return self._buffer.choose(room, cost, last=last) if room > 0 else []

    async def _starve(self) -> None:
        """Wait for groups; meanwhile save when due, and see to it that engines can get the weights."""
        now = time.monotonic()
        self._starved_since = self._starved_since or now
        if self._worker.step != self._published_step and now - self._starved_since >= _REPEAT_SECONDS:
            # Engines may wait for it: what they sample with older weights may be too old to be trained.
            await self._publish()
        if self._saver.due:
            await self._save_between_steps()
        await self._ranks.release()
        if time.monotonic() >= self._repeat_at:
            self._repeat_at = time.monotonic() + _REPEAT_SECONDS
            if not await self._publishing.repeat():
                logger.warning("engines cannot get the weights: published again", extra={"version": self._version})
                await self._publish()
            elif await self._nobody_has_it():
                logger.warning("no engine took the weights: published whole again", extra={"version": self._version})
                self._publishing.force_full_next()
                await self._publish()
        await first_of(self._role.stop.wait(), self._buffer.changed.wait(), seconds=_STARVED_SECONDS)

    async def _save_between_steps(self) -> None:
        # An open step is abandoned when the hard cap keeps out the groups that it lacks.
        if self._buffer.in_step and (await self._role.ledgers.train.state()).live >= self._config.hard_cap:
            await self._abandon()
        if not self._buffer.in_step:
            await self._saver.begin(self._version)

    async def _nobody_has_it(self) -> bool:
        """Whether engines are there and none took the newest version in time: its files may be damaged.

        Engines that stay behind take no prompts, so there would be no further version.
        """
        if self._publishing.age < self._config.weights.deadline:
            return False
        roles = await self._role.ledgers.roles.read()
        followers = (fields for name, fields in roles.items() if name.startswith(("engine.", "rollout.")))
        held = [int(fields["version"]) for fields in followers if "version" in fields]  # others still start
        return bool(held) and max(held) < self._publishing.version

    async def _micro_batch(self, groups: Sequence[TrainGroup]) -> None:
        self._meter.begin()
        self._starved_since = None
        await self._buffer.start_step(groups)
        async with asyncio.TaskGroup() as tasks:
            work = tasks.create_task(self._ranks.train(groups))
            tasks.create_task(self._buffer.clear_crash_counts())  # of the micro-batch before
        if work.result():
            self._buffer.computed(groups)
            self._unread = 0
        else:
            await self._give_back(groups)

    async def _give_back(self, groups: Sequence[TrainGroup]) -> None:
        await self._buffer.release(groups)
        self._unread += 1
        logger.warning("micro-batch skipped: a rank lacks reference log-probabilities", extra={"groups": len(groups)})
        if self._unread >= _MAX_UNREAD:
            raise Unreachable(
                f"a rank lacked reference log-probabilities {self._unread} times in a row",
                "the log of that rank says why",
            )
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._role.stop.wait(), _UNREAD_SECONDS * 2**self._unread)

    async def _update(self) -> None:
        done = await self._apply() if self._buffer.in_step else None
        await self._buffer.drop_equal()
        if done is None:
            return
        groups, stats = done
        step = self._worker.step
        line = self._meter.line(groups, stats, step, self._ranks.torch.take_busy(), self._buffer.take_seen())
        counts = {
            "skipped_updates": self._skipped_updates,
            "dropped": self._buffer.dropped,
            "dropped_zero_variance": self._buffer.zero_variance,
            **self._buffer.archive.counts,
            **({"memory_reserved": self._worker.reserved} if self._ranks.alternates else {}),
        }
        self._show(step, {**line, **counts, **self._publishing.record})
        if self._saver.due:
            await self._saver.begin(self._version)

    async def _apply(self) -> tuple[list[TrainGroup], StepStats] | None:
        """Apply the step; None when nothing of it was applied."""
        in_step = self._buffer.in_step
        tokens, responses = sum(group.tokens for group in in_step), sum(group.responses for group in in_step)
        stats: StepStats = await self._ranks.order(Command.APPLY, max(1, tokens), responses)
        self._skipped_updates += stats.skipped_updates
        step = self._worker.step
        if stats.skipped:
            await self._buffer.discard(in_step, "the gradient was not finite")
        self._diverged = self._diverged + 1 if stats.diverged else 0
        if self._diverged >= _MAX_DIVERGED:
            raise ConfigError(
                f"the gradients of {self._diverged} steps in a row were not finite: the training has diverged at step"
                f" {step} or before",
                "lower learner.lr or learner.critic.lr, and start afresh or from a checkpoint before it (checkpoints/)",
            )
        if stats.skipped:
            return None
        groups = self._buffer.applied()
        await self._make_room([group.group_id for group in groups])
        return groups, stats

    async def _make_room(self, group_ids: Sequence[int]) -> None:
        due = self._worker.step - self._published_step >= self._config.learner.publish_every
        if due and not self._config.max_staleness:
            # No engine may begin the next step with the previous weights, so publish before its slots are freed.
            await self._publish()
            await self._publishing.settle()
            await self._buffer.free_places(group_ids)
            return
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._buffer.free_places(group_ids))
            if due:
                tasks.create_task(self._publish())

    async def _publish(self) -> None:
        """Publish the present weights in the background, after the version before."""
        await self._publishing.settle()
        self._version += 1
        self._published_step = self._worker.step
        self._start.branch.note(self._version, self._published_step)
        snapshot: PolicySnapshot = await self._ranks.order(Command.PUBLISH)
        await self._publishing.start(self._version, self._worker.step, snapshot)

    async def _abandon(self) -> None:
        """Forget a partial step: its groups stay closed in Redis, for this learner or the next one."""
        await self._ranks.order(Command.DISCARD)
        await self._buffer.release(self._buffer.in_step)

    async def _finish(self, reason: Reason) -> None:
        if self._saver.newest is None:
            logger.warning("no model exported: nothing was trained", extra={"model": self._config.model.path})
        else:
            try:
                await asyncio.to_thread(export_model, self._config, self._role.run_dir, self._saver.newest)
            except ConfigError as error:  # the run is over all the same, and its last checkpoint is whole
                extra = {"why": error.message, "hint": "`streamrl export` writes it later"}
                logger.warning("no model exported", extra=extra)
        write_finished(
            self._role.run_dir,
            Finished(
                reason=reason,
                step=self._worker.step,
                version=self._version,
                epoch=self._start.epoch,
                accuracy=self._ending.accuracy,
                epochs=self._config.data.epochs,
            ),
        )
        logger.info("the run is over", extra={"reason": reason, "step": self._worker.step})

    def _show(self, step: int, line: dict[str, Any]) -> None:
        head = {"step": step, "epoch": self._start.epoch, "version": self._version}
        shown = {"loss": line["loss"], "reward": line["reward_mean"], **self._meter.shown()}
        self._role.status.update({**head, **shown})
        if line["sources"]:
            self._role.status[SOURCE_FIGURES] = orjson.dumps(line["sources"]).decode()
        self._role.record({**head, **line})
        self._loggers.log(step, line, self._buffer.newest)
