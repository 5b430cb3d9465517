"""What the learner trains next, and what it has trained: the learner's side of the ledger.

Only `TrainBuffer` writes to the ledger after the start of the learner. `scored` is read whole each time, so that
nothing depends on remembered positions; a group that comes back after Redis lost some seconds is known by its id.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

import orjson

from streamrl.archive.writer import Archive
from streamrl.config import RunConfig
from streamrl.learner.groups import GroupOpener, TrainGroup, Unusable
from streamrl.learner.takeover import Start
from streamrl.queues.ledger import ZERO_VARIANCE, Ledger
from streamrl.queues.records import ClosedGroup
from streamrl.wire import prompt_key

logger = logging.getLogger(__name__)

_LOOK_AHEAD: Final = 2
_DOORBELL_SECONDS: Final = 0.5
_REST: Final = 4.0  # pause after a reading, in times of its length: reading takes at most a fifth of the loop


class Stage(Enum):
    CANDIDATE = 0
    EQUAL_REWARDS = 1  # takes a slot of the step until its end, then it is dropped; a crash leaves it closed
    IN_STEP = 2  # has gradients that are not applied yet
    APPLIED = 3  # is in the weights, and its slot is not free yet
    TRAINED = 4  # is in the weights and its slot is free; no durable checkpoint holds it


@dataclass(slots=True)
class GroupState:
    """A group that no durable checkpoint holds, as this learner knows it."""

    stage: Stage
    group: TrainGroup | None  # None once it is in the weights
    computed: bool = False  # its passes went well, and its crash counter has not been cleared for that yet


class TrainBuffer:
    """Closed groups from their reading to a durable checkpoint, and every fenced write of one learner.

    All methods that write raise `Fenced` when a newer learner took over. They may be repeated and cancelled at any
    point: the scripts behind them set absolute values.
    """

    def __init__(self, ledger: Ledger, config: RunConfig, start: Start, opener: GroupOpener, archive: Archive) -> None:
        self.durable = set(start.trained)  # ids in the newest durable checkpoint
        self.dropped = self.zero_variance = 0  # groups dropped by this learner, and those of them with equal rewards
        # Closed groups in Redis, at the last reading: in the weights and without a slot; to be trained yet.
        self.unretired = self.untrained = 0
        self.changed = asyncio.Event()  # set after each reading; the task that waits for it clears it
        self.archive = archive  # gets every group that is read, before anything is decided about it
        self._groups: dict[int, GroupState] = {}
        self._closed = 0
        self._ledger, self._nonce, self._config = ledger, start.nonce, config
        self._checkpoint, self._branch = start.checkpoint, start.branch
        self._opener = opener
        self._seen: list[TrainGroup] = []
        self.newest: ClosedGroup | None = None  # the last one that was read, for loggers
        self._oldest_live: list[int] = []
        self._lock = asyncio.Lock()

    @property
    def in_step(self) -> list[TrainGroup]:
        return self._at(Stage.IN_STEP)

    @property
    def fresh(self) -> set[int]:
        return {group_id for group_id, state in self._groups.items() if state.stage in {Stage.APPLIED, Stage.TRAINED}}

    @property
    def room(self) -> int:
        taken = sum(state.stage in {Stage.IN_STEP, Stage.EQUAL_REWARDS} for state in self._groups.values())
        return self._config.learner.groups_per_step - taken

    # ---- reading

    async def follow(self) -> None:
        """Keep the candidates up to date; runs until cancelled."""
        while True:
            started = time.monotonic()
            await self.refresh()
            await asyncio.sleep(_REST * (time.monotonic() - started))
            await self._ledger.wait_closed(_DOORBELL_SECONDS)

    async def refresh(self) -> None:
        """Read `scored`: retire what the chain already holds, read new groups, fail those that cannot be trained."""
        async with self._lock:
            await self._read()

    async def ended(self) -> bool:
        """Whether no group will close any more, under the epochs that are configured now."""
        state, epochs = await self._ledger.state(), self._config.data.epochs
        if state.done != state.cursor or epochs is None or state.epochs < epochs or state.replays:
            return False
        await self.refresh()
        return state.live <= self._closed

    # ---- choosing

    def choose(self, room: int, cost: int, *, last: bool) -> list[TrainGroup]:
        """The groups of the next micro-batch, oldest first; none when it is better to wait for more.

        `cost` are the tokens that make a micro-batch worth a pass; fewer fill the step, or are the last ones.
        """
        groups = self._nearest(room)
        # A group in whose steps a learner died is tried alone: another death tells it from its neighbours.
        suspects = [group for group in groups if group.crashes]
        if suspects:
            return suspects[:1]
        enough = last or len(groups) == room or sum(group.cost for group in groups) >= cost
        return groups if enough else []

    async def drop_stale(self, step: int) -> None:
        limit = self._config.token_staleness_limit
        async with self._lock:
            candidates = self._at(Stage.CANDIDATE)
            stale = [group.group_id for group in candidates if max(group.staleness(step), default=0) > limit]
            await self._drop(sorted(stale), "stale")

    def set_equal_aside(self, room: int) -> int:
        """Take out the groups with equal rewards among those that `choose(room)` looks at; returns how many.

        They keep their slots until `drop_equal`: a group admitted meanwhile would be sampled with the old weights.
        """
        equal = [group.group_id for group in self._nearest(room) if group.zero_variance]
        for group_id in equal:
            self._groups[group_id].stage = Stage.EQUAL_REWARDS
        return len(equal)

    async def drop_equal(self) -> None:
        async with self._lock:
            equal = sorted(group.group_id for group in self._at(Stage.EQUAL_REWARDS))
            self.zero_variance += await self._drop(equal, ZERO_VARIANCE)

    def take_seen(self) -> list[TrainGroup]:
        """All groups that were read since the last call, trained or not."""
        seen, self._seen = self._seen, []
        return seen

    # ---- the step

    async def start_step(self, groups: Sequence[TrainGroup]) -> None:
        """Take groups into the step: their crash counter goes up until it is cleared."""
        for group in groups:
            self._groups.pop(group.group_id, None)  # in_step has the order in which they were begun
            self._groups[group.group_id] = GroupState(Stage.IN_STEP, group)
        await self._ledger.start_step(self._nonce, [group.group_id for group in groups])

    def computed(self, groups: Sequence[TrainGroup]) -> None:
        for group in groups:
            self._groups[group.group_id].computed = True

    async def clear_crash_counts(self) -> None:
        """For the groups of the step that were `computed` since the last call."""
        done = [state for state in self._groups.values() if state.stage is Stage.IN_STEP and state.computed]
        for state in done:
            state.computed = False
        if done:
            await self._clear_crash_counts([state.group.group_id for state in done if state.group is not None])

    async def release(self, groups: Sequence[TrainGroup]) -> None:
        """Take groups out of the step untrained: they are read again, and are candidates then."""
        group_ids = sorted(group.group_id for group in groups)
        await self._clear_crash_counts(group_ids)
        for group_id in group_ids:
            self._groups.pop(group_id, None)
        await self.refresh()

    async def discard(self, groups: Sequence[TrainGroup], why: str) -> None:
        async with self._lock:
            await self._drop([group.group_id for group in groups], why)

    def applied(self) -> list[TrainGroup]:
        """Mark the groups of the step as trained; their slots stay taken until `free_places` names them."""
        groups = self.in_step
        for group in groups:
            self._groups[group.group_id] = GroupState(Stage.APPLIED, None)
        return groups

    async def free_places(self, group_ids: Sequence[int]) -> None:
        """Free the slots of trained groups in the budget, and clear their crash counters."""
        async with self._lock:
            for group_id in group_ids:
                if group_id in self._groups:
                    self._groups[group_id].stage = Stage.TRAINED
            await self._read()
            await self._ledger.finish_step(self._nonce, self.unretired, 0, None, group_ids)

    async def announce(self, version: int, manifest: bytes) -> None:
        """Show engines a version of the weights."""
        async with self._lock:
            await self._read()
            await self._ledger.finish_step(self._nonce, self.unretired, version, manifest)

    async def saved(self, checkpoint: str, group_ids: Collection[int]) -> None:
        self.durable.update(group_ids)
        for group_id in group_ids:
            self._groups.pop(group_id, None)
        self._checkpoint = checkpoint
        async with self._lock:
            await self._retire(await self._ledger.closed())
            await self._read()

    async def _clear_crash_counts(self, group_ids: Sequence[int]) -> None:
        # Do not write `unretired`: the last reading may be older than a retirement, or than a restored Redis.
        await self._ledger.finish_step(self._nonce, None, 0, None, group_ids)

    # ---- inside the lock

    async def _drop(self, group_ids: Sequence[int], why: str) -> int:
        count = 0
        if group_ids:
            await self.archive.sync()
        for group_id in group_ids:
            count += await self._ledger.drop(self._nonce, group_id, why)
            self._groups.pop(group_id, None)
        self._oldest_live = [group_id for group_id in self._oldest_live if group_id not in group_ids]
        self.dropped += count
        return count

    async def _read(self) -> None:
        closed = await self._ledger.closed()
        self._count(closed)
        if any(group_id in self.durable for group_id in closed):
            await self._retire(closed)
        untrained = [group_id for group_id in closed if not self._taken(group_id)]
        self.untrained = len(untrained)
        nearest = dict.fromkeys(untrained[: _LOOK_AHEAD * self._config.learner.groups_per_step])
        async with asyncio.TaskGroup() as tasks:
            new = [group_id for group_id in nearest if group_id not in self._groups]
            reads = [tasks.create_task(self._ledger.read_group(group_id)) for group_id in new]
        opened = [await self._open(read.result()) for read in reads]
        if self._config.learner.order == "strict":
            self._oldest_live = await self._ledger.oldest_live(self._config.hard_cap)
        for group in self._at(Stage.CANDIDATE):
            if group.group_id not in nearest:
                del self._groups[group.group_id]
        for found in opened:
            if found is not None and not self._taken(found.group_id):
                self._groups[found.group_id] = GroupState(Stage.CANDIDATE, found)
        self.changed.set()

    async def _retire(self, closed: Sequence[int]) -> None:
        group_ids = [group_id for group_id in closed if group_id in self.durable]
        self._count([group_id for group_id in closed if group_id not in self.durable])
        await self._ledger.retire(self._nonce, self._checkpoint, self.unretired, group_ids)

    async def _open(self, closed: ClosedGroup | None) -> TrainGroup | None:
        if closed is None:
            return None
        self.archive.add(closed)
        if closed.crashes >= self._config.learner.max_group_crashes:
            await self._bury(closed.group_id, f"learner: {closed.crashes} learners died in steps with this group")
            return None
        try:
            if self._opener.images is None:
                group = self._opener(closed, self._branch.step)
            else:  # they may have to be read
                group = await asyncio.to_thread(self._opener, closed, self._branch.step)
        except Unusable as error:
            await self._bury(closed.group_id, error.message)
            return None
        except OSError as error:  # the store of images is away; the next reading tries again
            logger.warning("images of a group cannot be read", extra={"group": closed.group_id, "why": str(error)})
            return None
        self.newest = closed
        self._seen.append(group)
        if self._config.data.curriculum is not None:
            await self._ledger.note_outcome(group.group_id, orjson.dumps([prompt_key(closed.prompt), group.rewards]))
        return group

    async def _bury(self, group_id: int, why: str) -> None:
        logger.warning("group is dead", extra={"group": group_id, "why": why})
        await self.archive.sync()
        await self._ledger.fail_group(self._nonce, group_id, why)

    def _count(self, closed: Sequence[int]) -> None:
        trained = {group_id for group_id, state in self._groups.items() if state.stage is Stage.TRAINED}
        self._closed = len(closed)
        self.unretired = sum(group_id in self.durable or group_id in trained for group_id in closed)

    # ---- looking

    def _at(self, stage: Stage) -> list[TrainGroup]:
        return [state.group for state in self._groups.values() if state.stage is stage and state.group is not None]

    def _nearest(self, room: int) -> list[TrainGroup]:
        """The oldest candidates; in strict order those among the oldest live groups that are not trained yet."""
        groups = sorted(self._at(Stage.CANDIDATE), key=lambda group: group.group_id)[:room]
        if self._config.learner.order != "strict":
            return groups
        first = set([group_id for group_id in self._oldest_live if not self._taken(group_id)][:room])
        return [group for group in groups if group.group_id in first]

    def _taken(self, group_id: int) -> bool:
        state = self._groups.get(group_id)
        return group_id in self.durable or (state is not None and state.stage is not Stage.CANDIDATE)
