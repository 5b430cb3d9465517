"""A reward worker on a real Redis, in this process and as processes that are killed; its samples and their scores."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any, Self

from streamrl import wire
from streamrl.config import RedisConfig, RunConfig
from streamrl.consumers.worker import run_reward_worker
from streamrl.queues import Ledger, Ledgers, Role
from streamrl.queues.records import DeadLetter
from streamrl.runfile import LoadedConfig, save
from tests.consumers.samples import prompt, response
from tests.queues.ledger_kit import admit, lease, until_async


def config_of(
    redis: RedisConfig, *rewards: str | dict[str, Any], lease_seconds: float = 15.0, **worker: Any
) -> RunConfig:
    """A run with these rewards; `worker` are keys of `reward_worker`, except for two sections of the run."""
    rewards = rewards or ("exact_match",)
    sections = {name: worker.pop(name) for name in ("scoring", "reward_models") if name in worker}
    return RunConfig.model_validate(
        {
            "name": "t",
            "redis": redis.model_dump(),
            "rewards": [
                {"use": reward} if isinstance(reward, str) else reward for reward in rewards or ("exact_match",)
            ],
            "sampling": {"group_size": 4, "min_group": 2},
            "reward_worker": {"deadline": 30.0, "attempts": 2, "backoff": 0.01, "concurrency": 16, **worker},
            "lease": {"seconds": lease_seconds, "max_deliveries": 3},
            "plugin_paths": [str(Path(__file__).parent)],
            **sections,
        }
    )


async def put(ledger: Ledger, cursor: int, texts: Sequence[str | bytes], least: int = 1, **fields: Any) -> None:
    """Admit a group and emit one response for each text (bytes go as they are)."""
    await admit(ledger, cursor, samples=len(texts), min_group=least, prompt=wire.encode(prompt(**fields)))
    (held,) = await lease(ledger, "prompts")
    for number, text in enumerate(texts):
        payload = text if isinstance(text, bytes) else wire.encode(response(text))
        assert await ledger.emit(held, number, payload)


async def put_whole(ledger: Ledger, cursor: int, texts: Sequence[str | bytes], least: int = 2, **fields: Any) -> None:
    """The same for a group that is scored whole."""
    await ledger.set_group_scored(True)
    await put(ledger, cursor, texts, least, **fields)


@contextlib.asynccontextmanager
async def worker(config: RunConfig, run_dir: Path, ledgers: Ledgers) -> AsyncIterator[Role]:
    """A worker in this process, which drains at the end of the block; its failure is that of the block."""
    role = Role("reward.0", config, run_dir, ledgers)
    task = asyncio.create_task(run_reward_worker(role))
    try:
        yield role
        role.stop.set()
        await asyncio.wait_for(task, 60)
    finally:
        task.cancel()
        await asyncio.wait([task])
        role.close()
        if not task.cancelled():
            task.result()


async def until_closed(ledger: Ledger, group_ids: Iterable[int], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not set(group_ids) <= set(await ledger.closed()):
            await ledger.wait_closed(0.2)


async def until_dead(ledger: Ledger, *group_ids: int) -> dict[tuple[int, int | None], DeadLetter]:
    """Wait until these groups are dead; all dead letters by group and sample, the group's own under None."""
    found: dict[tuple[int, int | None], DeadLetter] = {}

    async def are_dead() -> bool:
        found.update({(letter.group_id, letter.sample): letter for letter in await ledger.dead_letters()})
        return all((group_id, None) in found for group_id in group_ids)

    await until_async(are_dead, 60)
    return found


async def scores(ledger: Ledger, group_id: int) -> tuple[dict[int, wire.SampleScore], dict[int, str]]:
    """Scores and causes of death of the samples of a group."""
    group = await ledger.read_group(group_id)
    assert group is not None
    return {number: wire.decode(score, wire.SampleScore) for number, (_, score) in group.samples.items()}, group.causes


async def values(ledger: Ledger, group_id: int) -> dict[int, float]:
    """Values of the scores of a group of which no sample has died."""
    found, causes = await scores(ledger, group_id)
    assert not causes
    return {number: score.value for number, score in found.items()}


class Workers:
    """Reward workers as processes, started again when they die, as the supervisor would."""

    def __init__(self, config: RunConfig, run_dir: Path) -> None:
        save(LoadedConfig(config=config, origins={}), run_dir / "run.json")
        self.run_dir = run_dir
        self.deaths = 0
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, index: int = 0) -> None:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("STREAMRL_")}
        command = [sys.executable, "-P", "-m", "streamrl.runtime", "reward", str(index), str(self.run_dir)]
        self.processes[index] = subprocess.Popen(command, env=environ)

    def kill(self, index: int = 0) -> None:
        self.processes[index].kill()
        self.processes[index].wait()

    def end(self, index: int = 0) -> int:
        """The exit code after SIGTERM."""
        self.processes[index].terminate()
        return self.processes[index].wait(60)

    def keep(self) -> None:
        for index, process in self.processes.items():
            if process.poll() is not None:
                self.deaths += 1
                self.start(index)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for index in self.processes:
            self.kill(index)
