"""What the learner trains next, and what it has trained: the learner's side of the ledger.

`Intake` is the only place of the learner that writes to the ledger after the start. It knows four kinds of groups:
*durable* ones are in the chain of a checkpoint, *fresh* ones were trained since, those *in the step* have gradients
that are not applied yet, *lost* ones take a place of the step and are dropped at its end. Everything else that is
closed is a candidate. `scored` is read whole each time, so that nothing depends on remembered positions; a group that
comes back after Redis lost some seconds is known by its id.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from typing import Final

from streamrl.archive.writer import Archive
from streamrl.config import RunConfig
from streamrl.learner.groups import GroupOpener, TrainGroup, Unusable
from streamrl.learner.takeover import Start
from streamrl.queues.ledger import ZERO_VARIANCE, Ledger
from streamrl.queues.records import ClosedGroup

logger = logging.getLogger(__name__)

_LOOK_AHEAD: Final = 2
_DOORBELL_SECONDS: Final = 0.5
_REST: Final = 4.0
"""Pause after a reading, in times of its length: reading takes a fifth of the loop at most, at any rate."""


class Intake:
    """Candidates, trained sets, and every fenced write of one learner.

    All methods that write raise `Fenced` when a newer learner took over. They may be repeated and cancelled at any
    point: the scripts behind them set absolute values.

    Attributes:
        durable: ids in the chain of the newest durable checkpoint.
        fresh: ids trained since.
        in_step: groups with gradients that are not applied yet.
        lost: ids with equal rewards that are not dropped yet; of a learner that dies the next one finds them closed.
        dropped: groups dropped by this learner, for whatever reason.
        zero_variance: of these, the ones with equal rewards (`learner.advantage.zero_variance`).
        held: closed groups in Redis that are trained, not retired, and whose places are free, at the last reading.
        untrained: closed groups in Redis that are neither trained nor in the step nor lost, at the last reading.
        changed: set after each reading; who waits for it clears it.
        archive: gets every group that is read, before anything is decided about it.

    Args:
        ledger: the training ledger.
        config: of the run.
        start: where this learner goes on.
        opener: decodes and checks groups.
        archive: of the run.
    """

    def __init__(self, ledger: Ledger, config: RunConfig, start: Start, opener: GroupOpener, archive: Archive) -> None:
        self.durable = set(start.trained)
        self.fresh: set[int] = set()
        self.in_step: list[TrainGroup] = []
        self.lost: set[int] = set()
        self.dropped = self.zero_variance = 0
        self.held = 0
        self.changed = asyncio.Event()
        self.archive = archive
        self.untrained = 0
        self._closed = 0
        self._ledger, self._nonce, self._config = ledger, start.nonce, config
        self._checkpoint = start.checkpoint
        self._opener = opener
        self._lengths: list[int] = []
        self._candidates: dict[int, TrainGroup] = {}
        self._oldest_live: list[int] = []
        self._taken: set[int] = set()  # fresh groups whose places nobody may have yet
        self._lock = asyncio.Lock()

    # ---- reading

    async def follow(self) -> None:
        """Keep the candidates up to date; runs until cancelled."""
        while True:
            started = time.monotonic()
            await self.refresh()
            await asyncio.sleep(_REST * (time.monotonic() - started))
            await self._ledger.wait_closed(_DOORBELL_SECONDS)

    async def refresh(self) -> None:
        """Read `scored`: retire what the chain already holds, read new groups, bury those that cannot be trained."""
        async with self._lock:
            await self._look()

    async def ended(self) -> bool:
        """Whether no group will close any more: the data is at its end and every live group is in `scored`.

        An end of fewer epochs than the configuration has now is none: the feeder has not gone on yet. Dead groups that
        wait to be admitted again are more data.
        """
        state, epochs = await self._ledger.state(), self._config.data.epochs
        if state.done != state.cursor or epochs is None or state.epochs < epochs or state.replays:
            return False
        await self.refresh()
        return state.live <= self._closed

    # ---- choosing

    def choose(self, room: int, cost: int, *, last: bool) -> list[TrainGroup]:
        """The groups of the next micro-batch, oldest first; none when it is better to wait for more.

        With `learner.order: strict` a group must be among the `room` oldest live ones that are not trained yet, so
        that a slow group is waited for. A group in whose steps a learner died is tried alone, so that another death
        tells it from its neighbours.

        Args:
            room: free places in the step.
            cost: tokens that make a micro-batch worth a pass; fewer are taken when they fill the step.
            last: nothing more will come: take what there is.
        """
        groups = self._nearest(room)
        suspects = [group for group in groups if group.crashes]
        if suspects:
            return suspects[:1]
        enough = last or len(groups) == room or sum(group.cost for group in groups) >= cost
        return groups if enough else []

    async def drop_stale(self, step: int) -> None:
        """Drop every candidate with a token that is too old to be trained at `step`."""
        limit = self._config.token_staleness_limit
        async with self._lock:
            groups = list(self._candidates.values())
            stale = [group.gid for group in groups if max(group.staleness(step), default=0) > limit]
            await self._drop(stale, "stale")

    def lose_equal(self, room: int) -> int:
        """Take out the groups with equal rewards among those that `choose` looks at; returns how many.

        They keep their places until `drop_lost`: whoever fills one while the step is open samples with the weights
        before, and a step with fewer groups than places would leave those samples one step more to age.

        Args:
            room: free places in the step.
        """
        equal = [group.gid for group in self._nearest(room) if group.zero_variance]
        self.lost.update(equal)
        for gid in equal:
            del self._candidates[gid]
        return len(equal)

    async def drop_lost(self) -> None:
        """Drop what `lose_equal` took out."""
        async with self._lock:
            lost = sorted(self.lost)
            self.zero_variance += await self._drop(lost, ZERO_VARIANCE)
            self.lost.difference_update(lost)

    def take_lengths(self) -> list[int]:
        """Lengths of all responses that were read since the last call, whatever becomes of them."""
        lengths, self._lengths = self._lengths, []
        return lengths

    # ---- the step

    async def begin(self, groups: Sequence[TrainGroup]) -> None:
        """Take groups into the step: their crash counter goes up until they are acquitted or consumed."""
        for group in groups:
            self._candidates.pop(group.gid, None)
        self.in_step.extend(groups)
        await self._ledger.begin(self._nonce, [group.gid for group in groups])

    async def acquit(self, groups: Sequence[TrainGroup], version: int) -> None:
        """Clear the crash counter of groups whose forward and backward pass killed nobody."""
        # What is held stays as it is: the last reading may be older than a retirement, or than a Redis from the past.
        await self._ledger.consume(self._nonce, None, version, None, [group.gid for group in groups])

    async def release(self, groups: Sequence[TrainGroup], version: int) -> None:
        """Take groups out of the step untrained: they are candidates again."""
        gone = {group.gid for group in groups}
        self.in_step = [group for group in self.in_step if group.gid not in gone]
        await self.consume(version, None, sorted(gone))

    async def discard(self, groups: Sequence[TrainGroup], why: str) -> None:
        """Drop groups of the step whose update could not be applied."""
        gone = [group.gid for group in groups]
        async with self._lock:
            await self._drop(gone, why)
        self.in_step = [group for group in self.in_step if group.gid not in gone]

    def applied(self) -> list[TrainGroup]:
        """The update of the step is in the weights: its groups are trained. Returns them.

        Their places are taken until `consume` names them, whatever else tells Redis what is held in between.
        """
        groups, self.in_step = self.in_step, []
        self._taken = {group.gid for group in groups}
        self.fresh |= self._taken
        return groups

    async def consume(self, version: int, manifest: bytes | None, trained: Sequence[int] = ()) -> None:
        """Free the places of `trained`, and publish `version` when given a manifest."""
        async with self._lock:
            self._taken.difference_update(trained)
            await self._look()
            await self._ledger.consume(self._nonce, self.held, version, manifest, trained)

    async def saved(self, checkpoint: str, gids: Collection[int]) -> None:
        """Fresh groups are in a durable checkpoint: retire them."""
        self.durable.update(gids)
        self.fresh.difference_update(gids)
        self._checkpoint = checkpoint
        async with self._lock:
            await self._retire(await self._ledger.closed())
            await self._look()

    # ---- inside the lock

    async def _drop(self, gids: Sequence[int], why: str) -> int:
        """Drop closed groups; returns how many were there."""
        count = 0
        if gids:
            await self.archive.settle()
        for gid in gids:
            count += await self._ledger.drop(self._nonce, gid, why)
            self._candidates.pop(gid, None)
        self._oldest_live = [gid for gid in self._oldest_live if gid not in gids]
        self.dropped += count
        return count

    async def _look(self) -> None:
        closed = await self._ledger.closed()
        self._count(closed)
        if any(gid in self.durable for gid in closed):
            await self._retire(closed)
        untrained = [gid for gid in closed if not self._known(gid)]
        self.untrained = len(untrained)
        nearest = untrained[: _LOOK_AHEAD * self._config.learner.groups_per_step]
        async with asyncio.TaskGroup() as tasks:
            new = [gid for gid in nearest if gid not in self._candidates]
            reads = [tasks.create_task(self._ledger.read_group(gid)) for gid in new]
        opened = [await self._open(read.result()) for read in reads]
        if self._config.learner.order == "strict":
            self._oldest_live = await self._ledger.oldest_live(self._config.hard_cap)
        candidates = {gid: self._candidates[gid] for gid in nearest if gid in self._candidates}
        candidates.update({group.gid: group for group in opened if group is not None})
        # What was begun while this reading waited for Redis is no candidate any more.
        self._candidates = {gid: candidates[gid] for gid in sorted(candidates) if not self._known(gid)}
        self.changed.set()

    async def _retire(self, closed: Sequence[int]) -> None:
        gids = [gid for gid in closed if gid in self.durable]
        self._count([gid for gid in closed if gid not in self.durable])
        await self._ledger.retire(self._nonce, self._checkpoint, self.held, gids)

    async def _open(self, closed: ClosedGroup | None) -> TrainGroup | None:
        if closed is None:
            return None
        self.archive.add(closed)
        if closed.crashes >= self._config.learner.max_group_crashes:
            await self._bury(closed.gid, f"learner: {closed.crashes} learners died in steps with this group")
            return None
        try:
            group = self._opener(closed)
        except Unusable as error:
            await self._bury(closed.gid, error.message)
            return None
        self._lengths += [len(sample.tokens) for sample in group.samples]
        return group

    async def _bury(self, gid: int, why: str) -> None:
        logger.warning("group is dead", extra={"group": gid, "why": why})
        await self.archive.settle()
        await self._ledger.fail_group(self._nonce, gid, why)

    def _count(self, closed: Sequence[int]) -> None:
        self._closed = len(closed)
        self.held = sum(gid in self.durable or (gid in self.fresh and gid not in self._taken) for gid in closed)

    def _nearest(self, room: int) -> list[TrainGroup]:
        """The oldest candidates; in strict order those among the oldest live groups that are not trained yet."""
        groups = list(self._candidates.values())[:room]
        if self._config.learner.order != "strict":
            return groups
        first = [gid for gid in self._oldest_live if not self._known(gid)][:room]
        return [group for group in groups if group.gid in first]

    def _known(self, gid: int) -> bool:
        if gid in self.durable or gid in self.fresh or gid in self.lost:
            return True
        return any(group.gid == gid for group in self.in_step)
