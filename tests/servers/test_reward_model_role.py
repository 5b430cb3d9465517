"""The role of a reward model's server, around a process that plays it: its place in the list, sleep, death, end."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
from contextlib import asynccontextmanager, suppress

import aiohttp
import psutil
import pytest

from streamrl.config import RunConfig
from streamrl.errors import ConfigError, Unreachable
from streamrl.queues.device_lock import LearnerDevices
from streamrl.queues.reward_servers import RewardServers
from streamrl.queues.role import open_role
from streamrl.servers import reward_models as module
from streamrl.servers.reward_models import model_server, run_reward_model
from tests.queues.ledger_kit import admit, lease, until, until_async
from tests.servers.played_model_server import make_environment

PATIENT = 60.0


@pytest.fixture
def make(redis_run, tmp_path, monkeypatch):
    """Makes the configuration of a run with one reward model whose server is played, and which looks often."""
    monkeypatch.setattr(module, "_LINGER", 0.2)
    monkeypatch.setattr(module, "_COUNT_SECONDS", 0.05)

    def configure(cpu=False, rollout=None, **model):
        folder = tmp_path / ("cpu" if cpu else "env")
        if not folder.exists():
            make_environment(folder, cpu=cpu)
        critic = {"model": "critic-model", "environment": str(folder), "start_deadline": 60.0, **model}
        return RunConfig.model_validate(
            {
                "name": "t",
                "redis": redis_run.config.model_dump(),
                "reward_models": {"critic": critic, "judge": {"model": "j", "url": ["http://a:1"]}},
                "supervisor": {"term_grace": 5.0},
                "rollout": rollout or {},
            }
        )

    return configure


@asynccontextmanager
async def running(config, run_dir, name="reward_model.critic.0"):
    """The role in a task of its own; its end is its orderly stop, unless it ended before."""
    async with open_role(name, config, run_dir) as role:
        task = asyncio.create_task(run_reward_model(role))
        try:
            yield role, task
        finally:
            role.stop.set()
            with suppress(Exception):
                await asyncio.wait_for(task, PATIENT)


async def ready(role, task):
    await until(lambda: role.is_ready or task.done(), PATIENT)
    if task.done():
        task.result()


async def looked(role, times):
    """Wait until the role has counted its work so many times more."""
    looks, waiting = 0, RewardServers.waiting

    async def counted(servers, *sizes):
        nonlocal looks
        looks += 1
        return await waiting(servers, *sizes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RewardServers, "waiting", counted)
        await until(lambda: looks > times, PATIENT)


async def listed(role):
    return await RewardServers(role.ledgers).present("critic")


async def is_sleeping(url):
    async with aiohttp.ClientSession() as session, session.get(f"{url}/is_sleeping") as answer:
        return (await answer.json())["is_sleeping"]


async def put(ledger, cursor, samples):
    """Samples that wait for their scores, as leases of a worker."""
    await admit(ledger, cursor, samples=samples)
    (prompt,) = await lease(ledger, "prompts")
    for sample in range(samples):
        await ledger.emit(prompt, sample, b"payload")
    return await lease(ledger, "rollouts", count=samples)


def log(run_dir, name="reward_model.critic.0.server0"):
    return (run_dir / "logs" / f"{name}.log").read_text()


def played():
    """Pids of the servers in the play."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended meanwhile
            if any("played_model_server" in word for word in process.cmdline()):
                found.append(process.pid)
    return found


def pid_of_server():
    (found,) = played()
    return found


async def test_a_server_is_listed_while_its_role_lives_and_gone_afterwards(make, redis_run):
    config = make(flags={"max_model_len": 512}, variables={"SEEN": "1"})
    async with running(config, redis_run.run_dir, "reward_model.critic.3") as (role, task):
        await ready(role, task)
        (server,) = await listed(role)
        assert (server.name, server.awake) == ("reward_model.critic.3", True)
        assert not await is_sleeping(server.url)
        pid = pid_of_server()
        assert psutil.Process(pid).environ()["SEEN"] == "1"
        role.stop.set()
        await asyncio.wait_for(task, PATIENT)
        assert await listed(role) == []
        assert not psutil.pid_exists(pid)
    said = log(redis_run.run_dir, "reward_model.critic.3.server0")
    assert "--model critic-model --host 127.0.0.1" in said
    assert "--max-model-len 512" in said
    assert "--runner pooling" in said
    assert "--seed 3" in said
    assert "--enable-sleep-mode" not in said


async def test_it_sleeps_without_work_and_wakes_for_enough_of_it(make, redis_run):
    config = make(sleep=True, wake_at=3, wake_after=3600.0)
    async with running(config, redis_run.run_dir) as (role, task):
        await ready(role, task)
        train, held_out = role.ledgers.train, role.ledgers.evaluation
        (server,) = await listed(role)

        async def asleep():
            return await is_sleeping(server.url)

        async def awake():
            return [one.awake for one in await listed(role)] == [True] and not await asleep()

        for turn in range(2):
            await until_async(asleep, PATIENT)
            assert [one.awake for one in await listed(role)] == [False], "nobody asks a server that sleeps"
            few = await put(held_out, turn, 2)
            await looked(role, 3)
            assert await asleep(), "two are not enough"
            rest = await put(train, turn, 1)
            await until_async(awake, PATIENT)
            assert role.status["wakes"] == turn + 1
            for sample in (*few, *rest):
                assert await sample.ledger.score(sample, b"score")
        await until_async(asleep, PATIENT)
    rows = (redis_run.run_dir / "metrics" / "reward_model.critic.0.jsonl").read_text()
    assert rows.count('"asleep"') == 3
    assert rows.count('"awake"') == 2
    assert "--enable-sleep-mode" in log(redis_run.run_dir)


async def test_the_last_few_samples_wake_it_as_well(make, redis_run):
    config = make(sleep=True, wake_at=1000, wake_after=0.5)
    async with running(config, redis_run.run_dir) as (role, task):
        await ready(role, task)
        (server,) = await listed(role)
        await until_async(lambda: is_sleeping(server.url), PATIENT)
        await put(role.ledgers.train, 0, 1)
        await until(lambda: role.status["wakes"] == 1 and role.status["server"] == "ready", PATIENT)


async def test_what_is_awake_when_the_role_ends_is_put_to_sleep_first(make, redis_run):
    config = make(sleep=True, wake_at=1, wake_after=1.0)
    async with running(config, redis_run.run_dir) as (role, task):
        await put(role.ledgers.train, 0, 1)
        await ready(role, task)
        (server,) = await listed(role)
        assert server.awake
    said = log(redis_run.run_dir)
    assert "woke" not in said
    assert said.index("slept") < said.index("ended")
    assert "slept {'level': '1', 'mode': 'wait'}" in said, "what it computes is done before"


async def test_a_server_that_refuses_to_sleep_stays_awake_and_says_so_once(make, redis_run, caplog):
    caplog.set_level(logging.WARNING)
    config = make(sleep=True, variables={"PLAYED": "no-sleep"})
    async with running(config, redis_run.run_dir) as (role, task):
        await ready(role, task)

        def said():
            return [record for record in caplog.records if "cannot sleep" in record.message]

        await until(said, PATIENT)
        await until(lambda: role.status["server"] == "ready", PATIENT)
        for sample in await put(role.ledgers.train, 0, 2):
            await sample.ledger.score(sample, b"score")
        await looked(role, 2 + math.ceil(module._LINGER / module._COUNT_SECONDS))  # it would sleep again
        assert len(said()) == 1
        assert [server.awake for server in await listed(role)] == [True]
        assert not task.done()


async def test_a_server_that_does_not_wake_is_started_anew_by_the_end_of_its_role(make, redis_run):
    config = make(sleep=True, wake_at=1, variables={"PLAYED": "no-wake"})
    async with running(config, redis_run.run_dir) as (role, task):
        await ready(role, task)
        (server,) = await listed(role)
        await until_async(lambda: is_sleeping(server.url), PATIENT)
        await put(role.ledgers.train, 0, 1)
        with pytest.raises(Unreachable, match="does not wake"):
            await asyncio.wait_for(task, PATIENT)
        assert await listed(role) == []


async def test_on_shared_devices_it_leaves_for_the_learner_and_comes_back(make, redis_run):
    config = make(sleep=True, wake_at=1, rollout={"placement": "colocated"})
    async with running(config, redis_run.run_dir) as (role, task):
        await put(role.ledgers.train, 0, 1)  # there is work all the time
        await ready(role, task)
        learner = LearnerDevices(role.ledgers.device_lock, "L", deadline=PATIENT)
        for turn in range(2):
            (server,) = await listed(role)
            await learner.take()
            assert await is_sleeping(server.url), "the learner never meets it on the devices"
            assert [one.awake for one in await listed(role)] == [False]
            await learner.give()
            await until(lambda turn=turn: role.status["wakes"] == turn + 1, PATIENT)
        role.stop.set()
        await asyncio.wait_for(task, PATIENT)
        assert await role.ledgers.device_lock.take("L") == 0, "it has left for good"


async def test_without_work_it_stays_off_shared_devices(make, redis_run):
    config = make(sleep=True, wake_at=1, rollout={"placement": "colocated"})
    async with running(config, redis_run.run_dir) as (role, task):
        await ready(role, task)
        (server,) = await listed(role)
        await until_async(lambda: is_sleeping(server.url), PATIENT)

        async def left():
            return await role.ledgers.device_lock.take("L") == 0

        await until_async(left, PATIENT)


async def test_the_death_of_the_server_is_the_end_of_its_role(make, redis_run):
    async with running(make(), redis_run.run_dir) as (role, task):
        await ready(role, task)
        os.kill(pid_of_server(), signal.SIGKILL)
        with pytest.raises(Unreachable, match="killed by SIGKILL"):
            await asyncio.wait_for(task, PATIENT)
        assert await listed(role) == []


async def test_a_server_that_hangs_counts_as_dead(make, redis_run, monkeypatch):
    for name, seconds in (("ANSWER_SECONDS", 0.2), ("_PATIENCE", 1.0)):
        monkeypatch.setattr(module, name, seconds)
    async with running(make(), redis_run.run_dir) as (role, task):
        await ready(role, task)
        pid = pid_of_server()
        (server,) = await listed(role)
        async with aiohttp.ClientSession() as session, session.post(f"{server.url}/hang"):
            pass
        with pytest.raises(Unreachable, match="the server hangs: no answer"):
            await asyncio.wait_for(task, PATIENT)
        assert not psutil.pid_exists(pid)


async def test_a_stop_during_the_start_ends_it(make, redis_run):
    async with running(make(variables={"PLAYED": "slow"}), redis_run.run_dir) as (role, task):
        await until(played, PATIENT)
        assert await listed(role) == []
        role.stop.set()
        await asyncio.wait_for(task, PATIENT)
        assert not role.is_ready
        await until(lambda: not played(), PATIENT)  # a start that is cut off very early dies with its keeper


async def test_what_no_restart_mends_says_which_key_to_mend(make, redis_run, tmp_path):
    async with open_role("reward_model.critik.0", make(), redis_run.run_dir) as role:
        with pytest.raises(ConfigError, match="no reward model critik") as caught:
            await run_reward_model(role)
        assert "critic" in caught.value.hint
    async with running(make(variables={"PLAYED": "usage"}), redis_run.run_dir) as (_, task):
        with pytest.raises(ConfigError, match="unrecognized arguments: --nonsense") as caught:
            await asyncio.wait_for(task, PATIENT)
        assert "reward_models.critic.flags" in caught.value.hint
    for config, what, hint in [
        (make(flags={"host": "0.0.0.0"}), r"reward_models\.critic\.flags\.host", "reward_models.critic.url"),
        (make(environment=str(tmp_path)), r"reward_models\.critic\.environment", "streamrl engines install vllm"),
        (make(cpu=True, sleep=True), r"reward_models\.critic\.sleep: .* on a CPU", "leave out"),
    ]:
        with pytest.raises(ConfigError, match=what) as caught:
            model_server("critic", config.reward_models["critic"])
        assert hint in caught.value.hint
