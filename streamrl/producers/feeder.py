"""The feeder: admits prompts while the staleness budget has room, and runs the held-out rounds.

```
queue -> dead groups that people want admitted again (`streamrl dead replay`) come before anything new
FULL  -> wait for a new version (a step has made room) or a short pause, then ask again
MOVED -> go on where Redis says
drops -> groups are dropped and none is trained: admit nothing, and say why (`DropGuard`)
end   -> finish() where the cursor stands, then watch: when Redis goes back, the lost groups are admitted again
dead  -> too many dead letters, or all fail with the same error: end with an error, because a person has to look at them
```
"""

from __future__ import annotations

import asyncio
import logging
from itertools import islice
from typing import Final

from streamrl.config import RunConfig
from streamrl.errors import Refused, unwrapped
from streamrl.images.store import ImageStore
from streamrl.producers.admission import BURST, AdmissionTerms, Admitter, DropGuard, SameFailureGuard, VersionWatcher
from streamrl.producers.curriculum import PassedOver, open_curriculum
from streamrl.producers.dataset import Faults, PromptLimits, load_prompts
from streamrl.producers.evaluation import Evaluation
from streamrl.producers.order import TrainingPrompts, fingerprint_of
from streamrl.producers.tokenizer import Tokenizer, vocabulary_of
from streamrl.queues import Role
from streamrl.queues.records import AdmitOutcome, ReplayOutcome
from streamrl.wire import Prompt, decode

logger = logging.getLogger(__name__)
FIRST_PAUSE: Final = 0.005
LONGEST_PAUSE: Final = 0.05
IDLE_PAUSE: Final = 0.5
_COUNT_SECONDS: Final = 1.0
_ADMITTED_AGAIN: Final = frozenset({ReplayOutcome.REPLAYED, ReplayOutcome.LIVE})


async def run_feeder(role: Role) -> None:
    """`Refused`: as the table says, or other data. `DataError`: bad prompts. `Fenced`: a newer feeder took over."""
    config = role.config
    tokenizer = await asyncio.to_thread(Tokenizer.load, config.model)
    vocabulary = await asyncio.to_thread(vocabulary_of, config.model)
    limits = PromptLimits.of(config, vocabulary)
    store = ImageStore.of(config, role.run_dir)
    data = await asyncio.to_thread(TrainingPrompts, config, tokenizer, limits, store)
    versions = VersionWatcher(role.ledgers.weights)
    training = Training(role, data, versions)
    await training.check()
    await versions.read()
    evaluation = None
    if config.evaluation.every and config.data.held_out:
        sources, paths = config.data.whole(config.data.held_out), config.plugin_paths
        held_out = await asyncio.to_thread(
            load_prompts, sources, tokenizer, limits, paths, evaluation=True, store=store
        )
        evaluation = Evaluation(role, held_out, versions)
        await evaluation.start()
    role.ready()
    with unwrapped():
        async with asyncio.TaskGroup() as group:
            group.create_task(versions.run(role.stop))
            group.create_task(training.run())
            group.create_task(training.check_records())
            if evaluation is not None:
                group.create_task(evaluation.run())


class Training:
    def __init__(self, role: Role, data: TrainingPrompts, versions: VersionWatcher) -> None:
        config = role.config
        self._role, self._ledger, self._data, self._versions = role, role.ledgers.train, data, versions
        terms = AdmissionTerms(
            fingerprint=train_fingerprint(config, data),
            samples=config.sampling.responses,
            min_group=config.sampling.min_responses,
            budget=config.budget,
            hard_cap=config.hard_cap,
            max_dead=config.max_dead,
        )
        curriculum = open_curriculum(config)
        self._prompts = data if curriculum is None else PassedOver(curriculum, role.run_dir, data)
        self._admitter = Admitter(self._ledger, terms, self._prompts.prompt)
        self._drops = DropGuard(config.budget, config.learner.groups_per_step)
        self._count_at = 0.0
        self._same_failure = SameFailureGuard(self._ledger)

    async def check(self) -> None:
        await self._admitter.locate()
        await self._same_failure.begin()
        self._show("starting")

    async def check_records(self) -> None:
        """`DataError`: all faults of records that would be read later, named within the first minutes of a run."""
        faults = Faults()
        for reader, rows in self._data.pieces():
            if self._role.stop.is_set():
                return
            await asyncio.to_thread(reader.check, rows, faults)
        faults.check()

    async def _check_live(self) -> None:
        """`Refused`: code gives other prompts than those which it gave for the groups that are live."""
        live = await self._ledger.live() if self._data.of_code else []
        for group_id, prompt in (await self._ledger.prompts(live)).items():
            again = await asyncio.to_thread(self._prompts.prompt, group_id)
            if decode(prompt, Prompt).tokens != decode(again, Prompt).tokens:
                what = f"data.train is not deterministic: it gives another prompt for group {group_id} than before"
                raise Refused(what, "make it give the same records in the same order each time (a seed, sorted files)")

    async def run(self) -> None:
        await self._check_live()
        burst = min(BURST, self._role.config.budget)
        pause, limit = FIRST_PAUSE, burst
        while not self._role.stop.is_set():
            version = self._versions.version
            await self._same_failure.check()
            await self._check_drops()
            stopped = self._drops.allowed == 0
            outcome = None if stopped else await self._replay()
            try:
                end = await self._end(self._admitter.cursor + limit)
            except OSError as error:
                await self._wait_for_disk(error)
                continue
            if outcome is None and end is not None and self._admitter.cursor >= end:
                await self._finish()
                continue
            if stopped:
                self._show("stopped")
                await self._versions.wait(version, IDLE_PAUSE)
                continue
            if outcome is None:
                outcome = await self._admit(version, self._most(limit), end)
            if outcome is AdmitOutcome.FULL:
                self._show("full")
                changed = await self._versions.wait(version, pause)
                # Only a step makes room for many groups; between steps one prompt is enough to ask for room.
                pause, limit = (FIRST_PAUSE, burst) if changed else (min(2 * pause, LONGEST_PAUSE), 1)
            else:
                self._show("admitting")
                pause, limit = FIRST_PAUSE, burst

    async def _end(self, before: int) -> int | None:
        """The group id at which the data ends; a curriculum learns what groups scored and decides on the next ones."""
        if isinstance(self._prompts, PassedOver):
            scores = await self._ledger.outcomes()
            await asyncio.to_thread(self._prompts.learn, scores)
            await self._ledger.forget_outcomes(scores)
            self._role.status["skipped"] = self._prompts.next - len(self._prompts.places)
        return await asyncio.to_thread(self._prompts.end, before)

    async def _wait_for_disk(self, error: OSError) -> None:  # or for the store of images
        logger.warning("prompts cannot be made; tried again", extra={"why": str(error)})
        await self._versions.wait(self._versions.version, IDLE_PAUSE)

    async def _admit(self, version: int, limit: int, end: int | None) -> AdmitOutcome:
        before = self._admitter.cursor
        wanted = range(before, before + limit if end is None else min(before + limit, end))
        try:  # in a thread, so that the loop goes on meanwhile
            await asyncio.to_thread(list, map(self._prompts.prompt, wanted))
        except OSError as error:
            await self._wait_for_disk(error)
            return AdmitOutcome.FULL
        outcome = await self._admitter.admit(version, limit=limit, end=end)
        self._drops.admitted(self._admitter.cursor - before)
        return outcome

    def _most(self, wanted: int) -> int:
        return wanted if self._drops.allowed is None else min(wanted, self._drops.allowed)

    async def _replay(self) -> AdmitOutcome | None:
        queue = await self._ledger.queued_replays()
        if not queue:
            self._role.status.pop("replays", None)
            return None
        self._role.status["replays"] = len(queue)
        config = self._role.config
        for group_id, letters in islice(queue.items(), self._most(BURST)):
            bounds = {"budget": config.budget, "hard_cap": config.hard_cap}
            outcome = await self._ledger.replay_queued(group_id, letters, **bounds)
            if outcome is ReplayOutcome.FULL:
                return AdmitOutcome.FULL
            if outcome in _ADMITTED_AGAIN:
                self._drops.admitted(1)
        return AdmitOutcome.ADMITTED

    async def _check_drops(self) -> None:
        now = asyncio.get_running_loop().time()
        if now < self._count_at:
            return
        self._count_at = now + _COUNT_SECONDS
        drops, state = self._drops, await self._ledger.state()
        went_on = drops.allowed is None
        drops.look(now, state.dropped_for, state.unretired + state.retired)
        if drops.allowed is not None:
            trouble = (
                f"admission stopped: {drops.dropped} groups in a row were dropped ({drops.why}) and none was trained;"
                f" the {self._role.config.learner.groups_per_step} groups of one step are tried in"
                f" {max(0.0, drops.retry_at - now):.0f} s"
            )
            if went_on:
                logger.error("admission stopped", extra={"why": trouble})
            self._role.status["trouble"] = trouble
        elif not went_on:
            self._role.status.pop("trouble", None)
            logger.info("admission goes on: groups are trained again")

    async def _finish(self) -> None:
        """Store that the data ends at the cursor, which is above the end when the run was given fewer epochs."""
        if done := await self._ledger.finish(self._admitter.cursor, self._role.config.data.epochs or 1):
            self._show("end of data")
        await self._versions.wait(self._versions.version, IDLE_PAUSE if done else LONGEST_PAUSE)
        await self._admitter.locate()

    def _show(self, state: str) -> None:
        cursor = self._admitter.cursor
        self._role.status.update(admitted=cursor, admission=state)
        if (epoch := self._prompts.epoch(cursor)) is not None:
            self._role.status["epoch"] = epoch
        if self._data.dropped:
            self._role.status["too_long"] = self._data.dropped


def train_fingerprint(config: RunConfig, data: TrainingPrompts) -> str:
    """Without the number of epochs: no prompt depends on it, so a run may be given another epoch."""
    return fingerprint_of(data, seed=config.seed, shuffle=config.data.shuffle, group_size=config.sampling.responses)
