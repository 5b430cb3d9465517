"""Reward models on real servers that streamrl starts: scores are those of a plain forward pass, whoever is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
import torch

from streamrl import wire
from streamrl.consumers.models.servers import RewardServers
from streamrl.queues import Ledger
from streamrl.runtime.instance import RoleState
from tests.engines.critic_kit import SAMPLES, START, Judge, answer, make_critic, put, question, scoring, write_run
from tests.queues.ledger_kit import faults, until_async

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(3 * START)]

GROUPS = 40
CLOSE = 1e-4


async def scores(ledger: Ledger, group_id: int) -> dict[int, float]:
    group = await ledger.read_group(group_id)
    assert group is not None
    assert not group.causes
    return {number: wire.decode(score, wire.SampleScore).value for number, (_, score) in group.samples.items()}


def server_of(role: int) -> psutil.Process:
    """The server process below a role and its keeper."""
    (keeper,) = psutil.Process(role).children()
    return max(keeper.children(), key=lambda process: process.create_time())


async def test_two_servers_one_killed_in_mid_run_and_every_score_is_that_of_a_forward_pass(tmp_path: Path):
    """Of SGLang; `test_judge_live` has one of vLLM."""
    torch.set_num_threads(1)
    make_critic(tmp_path / "critic")
    config = write_run(tmp_path, {"use": "reward_model", "name": "critic"}, {"kind": "sglang", "servers": 2})
    names = ["reward_model.critic.0", "reward_model.critic.1"]
    async with scoring(config, tmp_path / "run") as (run, ledgers):
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
    outcome = await run.outcome()
    assert outcome.restarts == {"redis": 0, names[0]: 1, names[1]: 0, "reward.0": 0}
    assert not psutil.pid_exists(server.pid)
