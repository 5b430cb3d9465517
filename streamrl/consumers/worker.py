"""The reward worker: leases responses, scores them, and writes score or cause of death."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

import msgspec

from streamrl import wire
from streamrl.consumers.plugins import load_rewards
from streamrl.consumers.reward import RewardSample
from streamrl.consumers.scoring import Scorer, ScoringFailed
from streamrl.errors import WireError
from streamrl.queues.leases import Lease, Leases
from streamrl.queues.ledger import ScoreOutcome
from streamrl.queues.role import Role

logger = logging.getLogger(__name__)

_RECORD_SECONDS: Final = 1.0
_DRAIN_SHARE: Final = 0.15
"""Part of the run's drain in which a worker finishes what is in hand; what is left is handed back."""


async def run_reward_worker(role: Role) -> None:
    """Score the samples of the training and the evaluation ledger until `role.stop` is set and the work in hand ended.

    A score is written once: a repeat after a lost lease or a crash changes nothing. A sample whose reward fails is a
    dead letter with its traceback, a message that cannot be decoded at once; one that kills the process is taken over
    by another worker and dead after `lease.max_deliveries`.

    Raises:
        PluginError: a reward of the run cannot be loaded.
        Unreachable: Redis was away for longer than `redis.patience`.
        DeadlineExceeded: so many sync rewards hang in their threads that the process should start afresh.
    """
    scorer = Scorer(load_rewards(role.config), role.config.reward_worker)
    worker = RewardWorker(role, scorer)
    leases = Leases(
        [role.ledgers.train, role.ledgers.evaluation],
        "rollouts",
        role.name,
        role.config.lease,
        role.config.reward_worker.concurrency,
        worker.handle,
        drain=_DRAIN_SHARE * role.config.supervisor.drain_deadline,
    )
    role.ready()
    async with asyncio.TaskGroup() as tasks:
        recorder = tasks.create_task(worker.record(leases))
        await leases.run(role.stop)
        recorder.cancel()


class RewardWorker:
    """Scores leased samples and counts.

    `scored` and `failed` count samples whose fate this process decided; what another worker was faster at is in
    neither.
    """

    def __init__(self, role: Role, scorer: Scorer) -> None:
        self.scored = 0
        self.failed = 0
        self._total = 0.0
        self._role = role
        self._scorer = scorer

    async def handle(self, lease: Lease) -> None:
        """Score one leased sample. Safe to repeat and to cancel: the lease then goes to another worker."""
        leased = await lease.ledger.leased_sample(lease)
        if leased is None:
            return
        started = time.monotonic()
        try:
            prompt = wire.decode(leased.prompt, wire.Prompt)
            sample = wire.decode(leased.payload, wire.Sample)
            score = await self._scorer.score(RewardSample.of(prompt, sample))
            data = wire.encode(msgspec.structs.replace(score, seconds=round(time.monotonic() - started, 6)))
        except WireError as error:
            await self._bury(lease, f"wire: {error}", "")
        except ScoringFailed as error:
            await self._bury(lease, error.message, error.detail)
        else:
            await self._write(lease, score.value, data)

    async def _write(self, lease: Lease, value: float, data: bytes) -> None:
        outcome = await lease.ledger.score(lease, data)
        if outcome not in {ScoreOutcome.LOST, ScoreOutcome.GONE}:
            self.scored += 1
            self._total += value

    async def _bury(self, lease: Lease, why: str, detail: str) -> None:
        if await lease.ledger.fail_score(lease, why, detail):
            self.failed += 1
            logger.warning("sample is dead", extra={"group": lease.gid, "sample": lease.sample, "why": why})

    async def record(self, leases: Leases) -> None:
        """Once a second: show the counts in the role's status and append them to its metrics. Runs until cancelled."""
        at, scored, total = time.monotonic(), 0, 0.0
        while True:
            await asyncio.sleep(_RECORD_SECONDS)
            now = time.monotonic()
            new = self.scored - scored
            counts: dict[str, int | float] = {
                "scored": self.scored,
                "failed": self.failed,
                "retried": self._scorer.retried,
                "hanging": self._scorer.threads.abandoned,
                "in_flight": leases.held,
                "per_second": round(new / (now - at), 1),
            }
            if new:
                counts["mean"] = round((self._total - total) / new, 4)
            self._role.status.update(counts)
            self._role.record(counts)
            at, scored, total = now, self.scored, self._total
