"""The feeder: admits prompts while the staleness budget has room, and runs the held-out rounds.

```
queue -> dead groups that people want admitted again (`streamrl dead replay`) come before anything new
FULL  -> wait for a new version (a step has made room) or a short pause, then ask again
MOVED -> go on where Redis says
waste -> more groups are dropped than trained: admit nothing, and say why (`Waste`)
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
from streamrl.producers.admission import BURST, AdmissionTerms, Admitter, SameFailureGuard, VersionBell, Waste, wasted
from streamrl.producers.dataset import PromptLimits, PromptSet, fingerprint_of, load_prompts
from streamrl.producers.evaluation import Evaluation
from streamrl.producers.tokenizer import Tokenizer, check_tokenizer, vocabulary_of
from streamrl.queues import Role
from streamrl.queues.records import AdmitOutcome, ReplayOutcome
from streamrl.queues.replies import read_number

logger = logging.getLogger(__name__)
_FIRST_PAUSE: Final = 0.005
_LONGEST_PAUSE: Final = 0.05
_IDLE_PAUSE: Final = 0.5
_WASTE_SECONDS: Final = 1.0
"""How often the counts of dropped and trained groups are looked at."""
_ADMITTED_AGAIN: Final = frozenset({ReplayOutcome.REPLAYED, ReplayOutcome.LIVE})


async def run_feeder(role: Role) -> None:
    """Run the feeder until `role.stop` is set or a newer feeder takes over.

    A restart, also after kill -9, continues at the cursor in Redis. Groups in flight need no feeder.

    Raises:
        ConfigError: the tokenizer cannot be loaded, or is another model's.
        DataError: a prompt file is missing or has a line that cannot be used.
        Refused: the run holds groups of other data, another seed or another group size; or `max_dead` dead letters; or
            all responses fail with the same error.
        Fenced: a newer feeder took over the held-out ledger.
    """
    config = role.config
    tokenizer = await asyncio.to_thread(Tokenizer.load, config.model)
    await asyncio.to_thread(check_tokenizer, tokenizer, config.model)
    vocabulary = await asyncio.to_thread(vocabulary_of, config.model)
    limits = PromptLimits.of(config, vocabulary)
    data = await asyncio.to_thread(load_prompts, config.data.train, tokenizer, limits)
    bell = VersionBell(role.ledgers.weights)
    training = Training(role, data, bell)
    await training.check()
    await bell.look()
    evaluation = None
    if config.evaluation.every and config.data.held_out is not None:
        held_out = await asyncio.to_thread(load_prompts, config.data.held_out, tokenizer, limits, evaluation=True)
        evaluation = Evaluation(role, held_out, bell)
        await evaluation.start()
    role.ready()
    with unwrapped():
        async with asyncio.TaskGroup() as group:
            group.create_task(bell.run(role.stop))
            group.create_task(training.run())
            if evaluation is not None:
                group.create_task(evaluation.run())


class Training:
    def __init__(self, role: Role, data: PromptSet, bell: VersionBell) -> None:
        config = role.config
        self._role = role
        self._ledger = role.ledgers.train
        self._data = data
        self._bell = bell
        self._fingerprint = train_fingerprint(config, data)
        self._end = None if config.data.epochs is None else config.data.epochs * len(data)
        terms = AdmissionTerms(
            fingerprint=self._fingerprint,
            samples=config.sampling.responses,
            min_group=config.sampling.min_responses,
            budget=config.budget,
            hard_cap=config.hard_cap,
            max_dead=config.max_dead,
        )
        self._admitter = Admitter(self._ledger, terms, self._prompt)
        self._waste = Waste(config.budget, config.learner.groups_per_step)
        self._look_at = 0.0
        self._same_failure = SameFailureGuard(self._ledger)

    async def check(self) -> None:
        state = await self._ledger.state()
        if state.fingerprint not in (None, self._fingerprint):
            raise Refused(
                f"this run was started with other prompts than {self._data.path}, another seed or another group size",
                "restore them, or start a new run (--fresh, or another name)",
            )
        self._admitter.cursor = state.cursor
        await self._same_failure.begin()
        self._show("starting")

    async def run(self) -> None:
        pause, limit = _FIRST_PAUSE, BURST
        while not self._role.stop.is_set():
            version = self._bell.version
            await self._same_failure.check()
            await self._look_for_waste()
            stopped = self._waste.allowed == 0
            outcome = None if stopped else await self._replay()
            if outcome is None and self._end is not None and self._admitter.cursor >= self._end:
                await self._finish(self._end // len(self._data))
                continue
            if stopped:
                self._show("stopped")
                await self._bell.wait(version, _IDLE_PAUSE)
                continue
            if outcome is None:
                outcome = await self._admit(version, limit)
            if outcome is AdmitOutcome.FULL:
                self._show("full")
                rung = await self._bell.wait(version, pause)
                # Only a step makes room for many groups; between steps one prompt is enough to ask for room.
                pause, limit = (_FIRST_PAUSE, BURST) if rung else (min(2 * pause, _LONGEST_PAUSE), 1)
            else:
                self._show("admitting")
                pause, limit = _FIRST_PAUSE, BURST

    async def _admit(self, version: int, limit: int) -> AdmitOutcome:
        before = self._admitter.cursor
        outcome = await self._admitter.admit(version, limit=self._waste.most(limit), end=self._end)
        self._waste.admitted(self._admitter.cursor - before)
        return outcome

    async def _replay(self) -> AdmitOutcome | None:
        """Admit dead groups that people have queued again; None when there are none."""
        queue = await self._ledger.queued_replays()
        if not queue:
            self._role.status.pop("replays", None)
            return None
        self._role.status["replays"] = len(queue)
        config = self._role.config
        for group_id, letters in islice(queue.items(), self._waste.most(BURST)):
            outcome = await self._ledger.replay_queued(
                group_id, letters, budget=config.budget, hard_cap=config.hard_cap
            )
            if outcome is ReplayOutcome.FULL:
                return AdmitOutcome.FULL
            if outcome in _ADMITTED_AGAIN:
                self._waste.admitted(1)
        return AdmitOutcome.ADMITTED

    async def _look_for_waste(self) -> None:
        now = asyncio.get_running_loop().time()
        if now < self._look_at:
            return
        self._look_at = now + _WASTE_SECONDS
        waste, state = self._waste, await self._ledger.state()
        was_stopped = waste.stopped
        waste.look(now, wasted(state.dropped_for), state.unretired + state.retired)
        if waste.stopped:
            trouble = self._trouble(now, state.dropped_for, await self._behind(state.version))
            if not was_stopped:
                logger.error("admission stopped", extra={"why": trouble})
            self._role.status["trouble"] = trouble
        elif was_stopped:
            self._role.status.pop("trouble", None)
            logger.info("admission goes on: groups are trained again")

    def _trouble(self, now: float, dropped_for: dict[str, int], behind: list[str]) -> str:
        dropped, trained, seconds = self._waste.found
        most = max(dropped_for, key=lambda why: dropped_for[why], default="")
        step = self._role.config.learner.groups_per_step
        again = f"the {step} groups of one step are tried in {max(0.0, self._waste.retry_at - now):.0f} s"
        return "; ".join(
            [
                f"admission stopped: {dropped} groups dropped ({most}), {trained} trained in {seconds:.0f} s",
                *behind,
                again,
            ]
        )

    async def _behind(self, version: int) -> list[str]:
        """Replicas without the newest version, which explains stale groups; unreadable status fields are skipped."""
        replicas = await self._role.ledgers.roles.read("rollout.")
        held = [(name, read_number(fields.get("version", "0"))) for name, fields in replicas.items()]
        return [f"{name} has version {has:.0f} of {version}" for name, has in held if has is not None and has < version]

    def _prompt(self, group_id: int) -> bytes:
        config = self._role.config
        return self._data.prompts[self._data.index(group_id, config.seed, shuffle=config.data.shuffle)]

    async def _finish(self, epochs: int) -> None:
        """Store that the data ends at the cursor, which is above the end when the run was given fewer epochs."""
        pause = _LONGEST_PAUSE
        if await self._ledger.finish(self._admitter.cursor, epochs):
            self._show("end of data")
            pause = _IDLE_PAUSE
        await self._bell.wait(self._bell.version, pause)
        await self._admitter.locate()

    def _show(self, state: str) -> None:
        cursor = self._admitter.cursor
        self._role.status.update(admitted=cursor, epoch=cursor // len(self._data), admission=state)
        if self._data.dropped:
            self._role.status["too_long"] = self._data.dropped


def train_fingerprint(config: RunConfig, data: PromptSet) -> str:
    """Return the fingerprint of a run's training data.

    It leaves out the number of epochs: no prompt depends on it, so a run may be given another epoch.
    """
    return fingerprint_of(data, seed=config.seed, shuffle=config.data.shuffle, group_size=config.sampling.responses)
