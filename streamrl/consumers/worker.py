"""The reward worker: leases responses, or whole groups of them, scores them, and writes the score or the failure."""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from typing import Any, Final

import msgspec
import orjson

from streamrl import wire
from streamrl.config import RunConfig
from streamrl.consumers.calls import RewardCalls, ScoringFailed
from streamrl.consumers.opening import models_of, open_scorer
from streamrl.consumers.plugins import HOLD_SHARE
from streamrl.consumers.reward import RewardContext, RewardSample
from streamrl.consumers.scoring import Scorer
from streamrl.consumers.watch import LoopWatch, MemoryWatch
from streamrl.errors import RetryLater, RewardUnavailable, WireError
from streamrl.images.store import ImageStore
from streamrl.queues.keys import REWARD_FIGURES
from streamrl.queues.leases import Lease, Leases
from streamrl.queues.ledgers import Ledgers
from streamrl.queues.records import Cause, LeasedGroup, ScoreOutcome
from streamrl.queues.role import Role
from streamrl.sandbox import Sandbox

logger = logging.getLogger(__name__)

_RECORD_SECONDS: Final = 1.0
_DRAIN_SHARE: Final = 0.15
"""Part of the run's drain in which a worker finishes the samples it holds. It hands back the rest."""
_WAITING: Final = 4
"""Samples that a worker holds for each slot of its narrowest reward, if `lease.max_hold` allows. With more, samples
would wait here while other workers are free."""
_UNSETTLED: Final = frozenset({ScoreOutcome.LOST, ScoreOutcome.GONE})


async def run_reward_worker(role: Role) -> None:
    """Score the samples of the training and the evaluation ledger until `role.stop` is set and all leases have ended.

    A score is written once: a repeat after a lost lease or a crash changes nothing. A sample whose reward fails, or
    whose message cannot be decoded, becomes a dead letter. A sample that kills the process goes to another worker, and
    is dead after `lease.max_deliveries`.

    Raises `PluginError` if a reward cannot be loaded or opened, `Unreachable` if Redis is away for longer than
    `redis.patience`, `DeadlineExceeded` if so many sync rewards hang that the process should restart.
    """
    config, ledgers = role.config, role.ledgers
    async with models_of(config, ledgers) as models:
        context = RewardContext(config, role.run_dir, models, role.name, scored=partial(has_scores, ledgers))
        async with open_scorer(config, context) as scorer:
            for ledger in (ledgers.train, ledgers.evaluation):
                await ledger.set_group_scored(scorer.group_scored)
            worker = RewardWorker(role, scorer)
            leases = Leases(
                [ledgers.train, ledgers.evaluation],
                "rollouts",
                role.name,
                config.lease,
                partial(width_of, scorer, config),
                worker.handle,
                drain=_DRAIN_SHARE * config.supervisor.drain_deadline,
            )
            role.ready()
            async with asyncio.TaskGroup() as tasks:
                beside = [
                    tasks.create_task(worker.record(leases), name="record"),
                    tasks.create_task(MemoryWatch(scorer.calls).run(), name="watch the memory"),
                ]
                with LoopWatch(scorer.calls, role.say_blocked).watching():
                    await leases.run(role.stop)
                for task in beside:
                    task.cancel()
            worker.tell_failed()


async def has_scores(ledgers: Ledgers) -> bool:
    for ledger in (ledgers.train, ledgers.evaluation):
        if (await ledger.state()).retired or await ledger.closed():
            return True
    return False


def width_of(scorer: Scorer, config: RunConfig) -> int:
    """Samples, or whole groups, that a worker holds to keep its narrowest reward busy."""
    size = config.sampling.responses if scorer.group_scored else 1
    limits = [config.reward_worker.concurrency / size]
    for calls in scorer.calls:
        if (slots := calls.slots) is not None:
            turns = max(1, min(_WAITING, int(HOLD_SHARE * config.lease.max_hold / calls.deadline)))
            limits.append(turns * slots / (1 if calls.reward.group else size))
    return max(1, int(min(limits)))


class RewardWorker:
    """Scores leased samples and groups. Counts only samples that this process decided before any other."""

    def __init__(self, role: Role, scorer: Scorer) -> None:
        self.scored = 0
        self.failed = self._told = 0
        self._newest: dict[str, Any] = {}
        self._total = 0.0
        self._role = role
        self._scorer = scorer
        self._lines: dict[str, dict[str, Any]] = {}
        self._images = ImageStore.of(role.config, role.run_dir)

    async def handle(self, lease: Lease) -> None:
        """Score what is leased. Safe to repeat and cancel.

        RetryLater: a reward was away for nearly `lease.max_hold`.
        """
        until = time.monotonic() + HOLD_SHARE * self._role.config.lease.max_hold
        try:
            if lease.is_group:
                await self._handle_group(lease, until)
            elif self._scorer.group_scored:
                await lease.ledger.make_group_scored(lease)  # admitted before a reward of the run compared
            else:
                await self._handle_sample(lease, until)
        except RewardUnavailable as error:
            raise RetryLater(error.message) from error

    async def _handle_sample(self, lease: Lease, until: float) -> None:
        leased = await lease.ledger.leased_sample(lease)
        if leased is None:
            return
        started = time.monotonic()
        try:
            prompt = wire.decode(leased.prompt, wire.Prompt)
            sample = wire.decode(leased.payload, wire.Sample)
            seen = RewardSample.of(prompt, sample, lease.group_id, leased.sample, self._images)
            score = await self._scorer.score(seen, until)
            data = _encoded(score, started)
        except WireError as error:
            await self._bury(lease, f"wire: {error}")
        except ScoringFailed as error:
            await self._bury(lease, error.message, error.detail, fail_group=error.fail_group)
        else:
            if await lease.ledger.score(lease, data) not in _UNSETTLED:
                self._count(score.value)

    async def _handle_group(self, lease: Lease, until: float) -> None:
        leased = await lease.ledger.leased_group(lease)
        if leased is None:
            return
        started = time.monotonic()
        try:
            samples, causes = _samples(lease, leased, self._images)
        except WireError as error:
            await self._bury(lease, f"wire: {error}", samples=len(leased.payloads))
            return
        if len(samples) < leased.least:  # the group is dead whatever the scores are, so call no reward
            causes = dict.fromkeys(samples, Cause(f"{len(samples)} of {leased.size} samples left to compare")) | causes
            samples = {}
        results = await self._scorer.score_group(list(samples.values()), until) if samples else []
        scores: dict[int, wire.SampleScore] = {}
        group_cause = ""
        for index, result in zip(samples, results, strict=True):
            if isinstance(result, ScoringFailed):
                causes[index] = Cause(result.message, result.detail)
                group_cause = group_cause or (result.message if result.fail_group else "")
            else:
                scores[index] = result
        encoded = {}
        for index, score in list(scores.items()):
            try:
                encoded[index] = _encoded(score, started)
            except WireError as error:
                causes[index] = Cause(f"wire: {error}")
                del scores[index]
        if await lease.ledger.score_group(lease, encoded, causes, fail_group=group_cause) in _UNSETTLED:
            return
        for score in scores.values():
            self._count(score.value)
        for index, cause in causes.items():
            self._failed(lease.group_id, index, cause.why)

    def _failed(self, group_id: int, sample: int | None, why: str, samples: int = 1) -> None:
        self.failed += samples
        self._newest = {"group": group_id, "sample": sample, "why": why}

    def tell_failed(self) -> None:
        """Log how many samples failed since the last call, with the newest cause; the dead letters hold them all."""
        if self.failed > self._told:
            logger.warning("samples failed: %d", self.failed - self._told, extra=self._newest)
            self._told = self.failed

    def _count(self, value: float) -> None:
        self.scored += 1
        self._total += value

    async def _bury(
        self, lease: Lease, why: str, detail: str = "", *, fail_group: bool = False, samples: int = 1
    ) -> None:
        if await lease.ledger.fail_score(lease, why, detail, fail_group=fail_group):
            self._failed(lease.group_id, lease.sample, why, samples)

    async def record(self, leases: Leases) -> None:
        at, scored, total = time.monotonic(), 0, 0.0
        while True:
            await asyncio.sleep(_RECORD_SECONDS)
            self.tell_failed()
            now = time.monotonic()
            new = self.scored - scored
            counts: dict[str, int | float] = {
                "scored": self.scored,
                "failed": self.failed,
                "retried": self._scorer.retried,
                "hanging": self._scorer.threads.abandoned,
                "in_flight": leases.leased,
                "per_second": round(new / (now - at), 1),
            }
            if new:
                counts["mean"] = round((self._total - total) / new, 4)
            news = self._news()
            self._role.status.update(counts)
            if Sandbox.weakness:
                self._role.status["sandbox"] = Sandbox.weakness
            shown = {name: {k: v for k, v in line.items() if k != "values"} for name, line in self._lines.items()}
            self._role.status[REWARD_FIGURES] = orjson.dumps(shown).decode()
            self._role.record({**counts, "rewards": news} if news else counts)
            at, scored, total = now, self.scored, self._total

    def _news(self) -> dict[str, dict[str, Any]]:
        news = {}
        for calls in self._scorer.calls:
            before = self._lines.get(calls.reward.name)
            line = line_of(calls)
            if before != {**(before or {}), **line}:
                news[calls.reward.name] = line
                self._lines[calls.reward.name] = {**(before or {}), **line}
        return news


def line_of(calls: RewardCalls) -> dict[str, Any]:
    line = calls.figures.line()
    trouble = []
    away = calls.away
    line["away"] = int(bool(away))
    if away:
        trouble.append(f"nobody scores: {away}")
    if calls.figures.blocked:
        trouble.append(f"held the event loop {calls.figures.blocked}x, up to {calls.figures.blocked_seconds:.1f} s")
    if calls.figures.leaks:
        trouble.append(calls.figures.leaks)
    own = calls.own_counts()
    if calls.figures.miscounts:
        trouble.append(f"cannot count: {calls.figures.miscounts}")
    line["trouble"] = "; ".join(trouble)
    if calls.circuit.opened:
        line["circuit_opened"] = calls.circuit.opened
    if own:
        line["own"] = own
    return line


def _encoded(score: wire.SampleScore, started: float) -> bytes:
    return wire.encode(msgspec.structs.replace(score, seconds=round(time.monotonic() - started, 6), detail=""))


def _samples(lease: Lease, leased: LeasedGroup, store: ImageStore) -> tuple[dict[int, RewardSample], dict[int, Cause]]:
    """The decodable samples of a group by number, and causes for the others; `WireError` for a broken prompt."""
    prompt = wire.decode(leased.prompt, wire.Prompt)
    samples, causes = {}, {}
    for index, payload in sorted(leased.payloads.items()):
        try:
            samples[index] = RewardSample.of(prompt, wire.decode(payload, wire.Sample), lease.group_id, index, store)
        except WireError as error:
            causes[index] = Cause(f"wire: {error}")
    return samples, causes
