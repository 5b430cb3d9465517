"""Redis comes back from the past while groups are scored whole: after each script, from before each earlier one."""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from streamrl.config import RunConfig
from streamrl.queues import Lease, Ledger, open_ledgers
from streamrl.queues.records import Cause, ScoreOutcome
from tests.queues.conftest import both_versions
from tests.queues.ledger_kit import admit, faults, lease, take
from tests.redis_kit import RedisRun

SAMPLES = 3
Step = Callable[[], Awaitable[object]]


class Past:
    """A Redis whose files are kept at some moments, to come back from them."""

    def __init__(self, run: RedisRun, folder: Path) -> None:
        self.run, self.folder = run, folder
        self.kept = 0

    def keep(self) -> None:
        """Keep what the server has now; it is stopped for that, so that all of it is on disk."""
        self.run.stop()
        shutil.copytree(self.run.run_dir / "redis", self.folder / str(self.kept))
        self.kept += 1
        self.run.start()

    def go_back(self, moment: int) -> None:
        """Kill the server, and start it with what was kept."""
        self.run.kill()
        # Not removed: a child of the server that rewrites its file may outlive it for a moment.
        (self.run.run_dir / "redis").rename(self.folder / f"after-{moment}")
        shutil.copytree(self.folder / str(moment), self.run.run_dir / "redis")
        self.run.start()


class Worker:
    """A replica and a reward worker in one; it remembers every lease that it ever had."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.prompts: list[Lease] = []
        self.groups: list[Lease] = []
        self.taken = 0

    async def lease_prompt(self) -> None:
        self.prompts += await lease(self.ledger, "prompts")

    async def emit(self, k: int) -> None:
        await self.ledger.emit(self.prompts[-1], k, b"%d" % k)

    async def lease_group(self) -> None:
        self.groups += await lease(self.ledger, "rollouts")

    async def settle(self) -> None:
        await self.ledger.score_group(self.groups[-1], {0: b"s", 1: b"s"}, {2: Cause("no")})

    async def act_as_zombie(self) -> None:
        """Say everything again with every lease that was ever held: of what Redis has forgotten, nothing counts."""
        for prompt in self.prompts:
            await self.ledger.emit(prompt, 0, b"0")
            await self.ledger.open_work(prompt)
        for group in self.groups:
            if await self.ledger.leased_group(group) is None:
                everyone = dict.fromkeys(range(SAMPLES), b"zombie")
                assert await self.ledger.score_group(group, everyone, {}) in (ScoreOutcome.LOST, ScoreOutcome.GONE)
        assert await faults(self.ledger) == []

    async def finish(self) -> None:
        """What the roles do then: take over what is pending, and go on to the end."""
        if not (await self.ledger.state()).cursor:
            await admit(self.ledger, 0, samples=SAMPLES)
        for prompt in await self._pending("prompts"):
            work = await self.ledger.open_work(prompt)
            for k in work.missing if work is not None else ():
                await self.ledger.emit(prompt, k, b"%d" % k)
        while found := await self._pending("rollouts"):
            for one in found:
                if not one.is_group:
                    await self.ledger.make_group_scored(one)
                elif await self.ledger.leased_group(one) is not None:
                    await self.ledger.score_group(one, dict.fromkeys(range(SAMPLES), b"s"), {})

    async def _pending(self, stage: str) -> list[Lease]:
        """Everything in a stream, whoever has it."""
        found = await lease(self.ledger, stage, "second", 100)
        for old in self.prompts + self.groups:
            if (stage == "prompts") == (old in self.prompts):
                self.taken += 1
                one = await take(self.ledger, stage, old, f"taker-{self.taken}")
                found += [one] if one is not None else []
        return found


@pytest.mark.slow
@both_versions
async def test_redis_comes_back_from_before_every_script_of_a_whole_group(
    run: RedisRun, config: RunConfig, tmp_path: Path
):
    """Whatever is forgotten, the group is closed in the end, with each sample once, and nobody's old word counts."""
    past = Past(run, tmp_path / "past")
    async with open_ledgers(config, run.run_dir) as opened:
        train = opened.train
        worker = Worker(train)
        steps: list[Step] = [
            lambda: train.set_group_scored(True),
            lambda: admit(train, 0, samples=SAMPLES),
            worker.lease_prompt,
            *(lambda k=k: worker.emit(k) for k in range(SAMPLES)),
            worker.lease_group,
            worker.settle,
        ]
        for step in steps:
            past.keep()
            await step()
        assert await train.closed() == [0]
        for moment in range(past.kept):
            past.go_back(moment)
            await worker.act_as_zombie()
            await worker.finish()
            assert await faults(train) == []
            assert await train.closed() == [0], f"back from before step {moment}"
            group = await train.read_group(0)
            assert group.samples == {k: (b"%d" % k, b"s") for k in range(SAMPLES)}
