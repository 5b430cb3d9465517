"""Reward models on real servers that streamrl starts: scores are those of a plain forward pass, whoever is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
import torch

from streamrl import wire
from streamrl.config import RunConfig
from streamrl.consumers.models.servers import RewardServers
from streamrl.errors import ExitCode
from streamrl.queues import Ledger, open_ledgers
from streamrl.runfile import LoadedConfig, save
from streamrl.runtime.instance import RoleState
from streamrl.runtime.plan import plan
from tests.consumers.samples import prompt, response
from tests.engines.critic_kit import CONTEXT, Judge, make_critic
from tests.queues.ledger_kit import admit, faults, lease, until_async
from tests.runtime.test_supervisor import Run

START = 900.0
"""Seconds in which a server starts, however busy the machine is."""
pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(3 * START)]

GROUPS, SAMPLES = 40, 4
FLAGS = {
    "vllm": {"dtype": "float32", "max-model-len": CONTEXT, "kv-cache-memory-bytes": 64 << 20},
    "sglang": {"dtype": "float32", "context-length": CONTEXT, "max-total-tokens": 1 << 14},
}
CLOSE = 1e-4


def make_run(folder: Path, kind: str, servers: int) -> RunConfig:
    """A run whose only reward is the model in `folder/critic`."""
    critic = {"kind": kind, "model": str(make_critic(folder / "critic")), "servers": servers, "start_deadline": START}
    config = RunConfig.model_validate(
        {
            "name": "rewarded",
            "rewards": [{"use": "reward_model", "name": "critic", "args": {"model": "critic"}}],
            "reward_models": {"critic": critic | {"flags": FLAGS[kind], "variables": {"OMP_NUM_THREADS": "1"}}},
            "reward_worker": {"concurrency": 8, "deadline": 60.0},
            "redis": {"maxmemory": 256 << 20},
            "lease": {"seconds": 10.0},
        }
    )
    (folder / "run").mkdir()
    save(LoadedConfig(config=config, origins={}), folder / "run" / "run.json")
    return config


def question(group_id: int) -> str:
    return f"What is {group_id} + {group_id}?"


def answer(group_id: int, sample: int) -> str:
    return f"It is {2 * group_id + sample}" + "." * sample


async def put(ledger: Ledger, group_id: int) -> None:
    """Admit a group whose responses wait for their scores."""
    await admit(ledger, group_id, samples=SAMPLES, prompt=wire.encode(prompt(text=question(group_id))))
    (held,) = await lease(ledger, "prompts")
    for sample in range(SAMPLES):
        assert await ledger.emit(held, sample, wire.encode(response(answer(group_id, sample))))


async def scores(ledger: Ledger, group_id: int) -> dict[int, float]:
    group = await ledger.read_group(group_id)
    assert group is not None
    assert not group.causes
    return {number: wire.decode(score, wire.SampleScore).value for number, (_, score) in group.samples.items()}


def server_of(role: int) -> psutil.Process:
    """The server process below a role and its keeper."""
    (keeper,) = psutil.Process(role).children()
    return max(keeper.children(), key=lambda process: process.create_time())


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_two_servers_one_killed_in_mid_run_and_every_score_is_that_of_a_forward_pass(tmp_path: Path, kind: str):
    torch.set_num_threads(1)
    config, run_dir = make_run(tmp_path, kind, servers=2), tmp_path / "run"
    names = ["reward_model.critic.0", "reward_model.critic.1"]
    units = [unit for unit in plan(config, run_dir) if unit.kind in {"redis", "reward_model", "reward"}]
    async with Run(run_dir, *units) as run:
        await run.until(lambda: run.now("reward.0") is RoleState.READY, START)
        async with open_ledgers(config, run_dir) as ledgers:
            train = ledgers.train

            async def closed(count: int) -> bool:
                return len(await train.closed()) >= count

            before = {server.name: server.url for server in await RewardServers(ledgers).present("critic")}
            assert sorted(before) == names
            for group_id in range(GROUPS // 4):
                await put(train, group_id)
            await until_async(lambda: closed(GROUPS // 4), 120)
            role = run.pid(names[0])
            server = server_of(role)
            os.kill(server.pid, signal.SIGSTOP)  # what it is asked from now on, it dies with
            for group_id in range(GROUPS // 4, GROUPS):
                await put(train, group_id)
            await until_async(lambda: closed(GROUPS // 2), 120)
            assert not await closed(GROUPS), "samples wait for the one that is to die"
            os.kill(server.pid, signal.SIGKILL)
            await until_async(lambda: closed(GROUPS), 240)
            judge = Judge(tmp_path / "critic")
            found = {group_id: await scores(train, group_id) for group_id in range(GROUPS)}
            wanted = {
                group_id: {k: judge.score(question(group_id), answer(group_id, k)) for k in range(SAMPLES)}
                for group_id in found
            }
            for group_id, group in found.items():
                assert group == pytest.approx(wanted[group_id], abs=CLOSE)
                assert 0.0 not in group.values()
            spread = [score for group in wanted.values() for score in group.values()]
            assert max(spread) - min(spread) > 100 * CLOSE, "the model tells responses apart"
            assert await train.dead_letters() == []
            assert not await faults(train)
            await run.until(lambda: run.pid(names[0]) != role and run.now(names[0]) is RoleState.READY, START)
            after = {server.name: server.url for server in await RewardServers(ledgers).present("critic")}
            assert sorted(after) == names
            assert after[names[1]] == before[names[1]]
        os.kill(os.getpid(), signal.SIGINT)
        outcome = await run.outcome(120)
    assert outcome.exit_code == ExitCode.OK
    assert outcome.restarts == {"redis": 0, names[0]: 1, names[1]: 0, "reward.0": 0}
    assert not psutil.pid_exists(server.pid)
