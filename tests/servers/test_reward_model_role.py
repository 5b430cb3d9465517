"""The role of a reward model's server, around a process that plays it: its place in the list, sleep, death, end."""

from __future__ import annotations

import asyncio
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
from tests.queues.ledger_kit import until
from tests.servers.played_model_server import make_environment

PATIENT = 60.0


@pytest.fixture
def make(redis_run, tmp_path):
    """Makes the configuration of a run with one reward model whose server is played."""

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


async def listed(role):
    return await RewardServers(role.ledgers).present("critic")


async def is_sleeping(url):
    async with aiohttp.ClientSession() as session, session.get(f"{url}/is_sleeping") as answer:
        return (await answer.json())["is_sleeping"]


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


COLOCATED = {"placement": "colocated"}


@asynccontextmanager
async def sharing(config, run_dir):
    """The role, when it is ready, and a learner with the same devices."""
    async with running(config, run_dir) as (role, task):
        await ready(role, task)
        yield role, task, LearnerDevices(role.ledgers.device_lock, "L", deadline=PATIENT)


async def test_on_shared_devices_it_leaves_for_the_learner_and_comes_back(make, redis_run):
    async with sharing(make(sleep=True, rollout=COLOCATED), redis_run.run_dir) as (role, task, learner):
        for _ in range(2):
            (server,) = await listed(role)
            await learner.take()
            assert await is_sleeping(server.url), "the learner never meets it on the devices"
            assert [one.awake for one in await listed(role)] == [False], "nobody asks a server that sleeps"
            await learner.give()
            await until(lambda: role.status["server"] == "ready", PATIENT)
            assert not await is_sleeping(server.url)
        role.stop.set()
        await asyncio.wait_for(task, PATIENT)
        assert await role.ledgers.device_lock.take("L") == 0, "it has left for good"
    said = log(redis_run.run_dir)
    assert "--enable-sleep-mode" in said
    assert "slept {'level': '1', 'mode': 'wait'}" in said, "what it computes is done before"


@pytest.mark.parametrize(
    ("played", "why"), [("no-sleep", "does not become asleep"), ("no-wake", "does not become awake")]
)
async def test_a_server_that_does_not_move_is_started_anew_by_the_end_of_its_role(make, redis_run, played, why):
    config = make(sleep=True, variables={"PLAYED": played}, rollout=COLOCATED)
    async with sharing(config, redis_run.run_dir) as (role, task, learner):
        await learner.take()
        await learner.give()
        with pytest.raises(Unreachable, match=why):
            await asyncio.wait_for(task, PATIENT)
        assert await listed(role) == []


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
        (make(cpu=True, sleep=True, rollout=COLOCATED), r"reward_models\.critic\.sleep: .* on a CPU", "leave out"),
    ]:
        with pytest.raises(ConfigError, match=what) as caught:
            model_server("critic", config.reward_models["critic"])
        assert hint in caught.value.hint
