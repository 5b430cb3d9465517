"""Groups that are scored whole under fire: workers are killed, Redis comes back seconds in the past, a group is poison.

Real Redis and real reward workers; replica, feeder and learner are played by the test, which remembers what it trained,
as the learner's log does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal

import pytest

from streamrl import wire
from streamrl.config import LeaseConfig, RunConfig
from streamrl.errors import Fenced
from streamrl.queues import Lease, Leases, Ledgers, open_ledgers
from streamrl.queues.records import AdmitOutcome
from tests.consumers.samples import prompt, response
from tests.consumers.worker_kit import Workers
from tests.queues.ledger_kit import admit, faults, until_async
from tests.redis_kit import RedisRun

GROUPS, SAMPLES, BUDGET, POISON = 60, 4, 8, 21
SEED = int(os.environ.get("CHAOS_SEED", "1"))


def text_of(group_id: int, k: int) -> str:
    """Responses of different lengths, the longest first in every third group."""
    return "poison" if (group_id, k) == (POISON, 2) else "x" * (1 + (k if group_id % 3 else SAMPLES - k))


class Others:
    """Feeder, replica and learner of the run; `trained` is what a learner has on its disk."""

    def __init__(self, ledgers: Ledgers, config: RunConfig) -> None:
        self.ledgers, self.train, self.config = ledgers, ledgers.train, config
        self.trained: set[int] = set()
        self.took: list[int] = []
        self._lives = 0

    async def feed(self) -> None:
        while True:
            cursor = (await self.train.state()).cursor
            if cursor >= GROUPS:
                await asyncio.sleep(0.05)
                continue
            bounds = {"samples": SAMPLES, "min_group": 2, "budget": BUDGET, "hard_cap": BUDGET}
            found = await admit(self.train, cursor, prompt=wire.encode(prompt()), **bounds)
            if found.outcome is AdmitOutcome.FULL:
                await asyncio.sleep(0.01)

    async def generate(self, stop: asyncio.Event) -> None:
        async def handle(found: Lease) -> None:
            work = await self.train.open_work(found)
            for k in work.missing if work is not None else ():
                await self.train.emit(found, k, wire.encode(response(text_of(found.group_id, k))))

        await Leases([self.train], "prompts", "rollout.0", self.config.lease, 4, handle).run(stop)

    async def learn(self) -> None:
        while True:
            self._lives += 1
            nonce = f"life {self._lives}"
            await self.train.fence(nonce, 0)
            with contextlib.suppress(Fenced):  # Redis came back from before this fence
                while True:
                    await self._step(nonce)

    async def _step(self, nonce: str) -> None:
        for group_id in await self.train.closed():
            group = await self.train.read_group(group_id)
            if group is not None and group_id not in self.trained:
                found = {k: wire.decode(score, wire.SampleScore).value for k, (_, score) in group.samples.items()}
                assert found == {k: float(k) for k in range(SAMPLES)}, f"group {group_id} has other scores: {found}"
                self.trained.add(group_id)
                self.took.append(group_id)
            await self.train.retire(nonce, f"{self._lives}-1", 0, [group_id])
        await self.train.wait_closed(0.1)

    async def over(self) -> bool:
        """Every group was admitted, and none is live."""
        state = await self.train.state()
        return state.cursor >= GROUPS and state.live == 0


def cut(redis: RedisRun, choice: random.Random) -> int:
    """Kill Redis, take some of what it wrote last from its file, and start it; the number of bytes that are gone."""
    redis.kill()
    files = [*redis.run_dir.glob("redis/**/*.incr.aof"), *redis.run_dir.glob("redis/appendonly.aof")]
    part = max(files, key=lambda path: path.stat().st_mtime)
    size = part.stat().st_size
    gone = choice.randint(1, min(20_000, size // 2))
    os.truncate(part, size - gone)
    redis.start()
    return gone


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_nothing_is_lost_or_compared_with_others(redis_run, make_config, capsys):
    choice = random.Random(SEED)
    config = make_config("group_rewards_for_tests:KillsItsProcess")
    config = config.model_copy(update={"lease": LeaseConfig(seconds=0.6, max_deliveries=6)})
    log: list[str] = []
    async with open_ledgers(config, redis_run.run_dir) as ledgers:
        others, stop = Others(ledgers, config), asyncio.Event()
        with Workers(config, redis_run.run_dir) as workers:
            async with asyncio.TaskGroup() as tasks:
                played = [tasks.create_task(each) for each in (others.feed(), others.generate(stop), others.learn())]
                workers.start(0)
                workers.start(1)
                blows = ["kill"] * 5 + ["cut"] * 4
                choice.shuffle(blows)
                for place, blow in enumerate(blows):
                    goal = (place + 1) * (GROUPS - 10) // len(blows)

                    async def moved(goal: int = goal) -> bool:
                        workers.keep()
                        return len(others.trained) >= goal or await others.over()

                    await until_async(moved, 60)
                    if blow == "kill":
                        workers.processes[choice.randint(0, 1)].send_signal(signal.SIGKILL)
                        log.append(f"{len(others.trained)} trained: a worker killed")
                    else:
                        gone = await asyncio.to_thread(cut, redis_run, choice)
                        log.append(f"{len(others.trained)} trained: {gone} bytes cut")

                async def ended() -> bool:
                    workers.keep()
                    return await others.over()

                await until_async(ended, 90)
                stop.set()
                for task in played:
                    task.cancel()
        letters = await ledgers.train.dead_letters()
        assert await faults(ledgers.train) == []
    with capsys.disabled():
        print(f"\nseed {SEED}, {workers.deaths} deaths of workers; " + "; ".join(log))
    dead = {letter.group_id for letter in letters if letter.sample is None}
    assert dead == {POISON}
    assert others.trained == set(range(GROUPS)) - {POISON}
    assert len(others.took) == len(others.trained)
