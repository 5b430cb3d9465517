"""One engine of a run: what it announces and when, what ends it, and how it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from contextlib import asynccontextmanager, suppress

import psutil
import pytest
from producer_kit import until
from replica_kit import Learner
from toy import Toy, make_dialect, serving

from streamrl.errors import ConfigError, Unreachable
from streamrl.http import Call, HttpClient, Lost
from streamrl.queues.device_lock import LearnerDevices
from streamrl.queues.role import open_role
from streamrl.servers import role as roles
from streamrl.servers import server as servers
from streamrl.servers.dialect import ServerMetrics
from streamrl.servers.engine import run_engine
from streamrl.servers.role import Liveness
from streamrl.weight_sync.files import TOKEN_VARIABLE, make_token, staging_root

IDLE, BUSY, MORE = ServerMetrics(), ServerMetrics(running=1), ServerMetrics(running=1, tokens_sampled=9)


@pytest.mark.parametrize(
    ("seconds", "figures", "held", "dead"),
    [
        ([1] * 100, [IDLE], False, ""),
        ([1] * 100, [BUSY, MORE], False, ""),
        ([1] * 100, [BUSY], True, ""),
        ([1] * 9, [BUSY], False, ""),
        ([1] * 12, [BUSY], False, "no token and no other sign of progress"),
        ([1] * 12, [ServerMetrics(waiting=1)], False, "no token"),
        ([1] * 9, [None], False, ""),
        ([1] * 10, [None], False, "no answer to anything for 10 s"),
        ([1] * 100, [None], True, ""),
        ([1] * 100, [None, IDLE], False, ""),
        ([1] * 100, [None, BUSY], False, ""),  # it answers, so it does not hang for good
        ([100, 100], [None], False, ""),  # this process was stopped itself
    ],
)
def test_what_counts_as_dead(seconds, figures, held, dead):
    liveness, now, said = Liveness(10, 0.0), 0.0, []
    for at, passed in enumerate(seconds):
        now += passed
        said.append(liveness.look(now, figures[at % len(figures)], held=held))
    assert not any(said[:-1]) or dead
    assert said[-1].startswith(dead) if dead else not any(said)


# --- with a toy as a process -----------------------------------------------------------------------------------------


@pytest.fixture
def dialect(run, monkeypatch):
    """Its toys sample one token of each request by themselves."""
    dialect = make_dialect()
    dialect.environ = {"TOY_FREE": "0", "TOY_STEPS": "1"}
    monkeypatch.setattr(servers, "make_dialect", lambda _: dialect)
    monkeypatch.setattr(roles, "POLL_SECONDS", 0.05)
    make_token(run.run_dir)
    run.set("engine", kind="vllm", slots=6, start_deadline=60)
    run.set("supervisor", term_grace=2, drain_deadline=200)
    return dialect


class Engine:
    """An engine at work; `toy` speaks to its server."""

    def __init__(self, role, task):
        self.role, self.task = role, task

    async def announced(self, **wanted):
        """The heartbeat, as soon as it says so."""

        async def says():
            if self.task.done():
                self.task.result()
            fields = (await self.role.ledgers.roles.read("engine.")).get("engine.0", {})
            return fields if "url" in fields and fields.items() >= wanted.items() else None

        return await until(says, 60)

    @asynccontextmanager
    async def toy(self, url=None):
        client = HttpClient(url or (await self.announced())["url"])

        async def call(method, path, body=None):
            return await client.call(Call(method, path, body, repeatable=True), 10)

        try:
            yield call
        finally:
            await client.close()


@asynccontextmanager
async def engine_on(run):
    async with open_role("engine.0", run.config, run.run_dir) as role:
        task = asyncio.create_task(run_engine(role))
        try:
            yield Engine(role, task)
        finally:
            role.stop.set()
            await asyncio.wait([task], timeout=60)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_with_the_lane_its_server_brings_the_files(run, dialect):
    """The role has none of them, as the version names nobody who serves them; the server knows the token."""
    run.set("weights", transport="collective")
    async with engine_on(run) as engine:
        learner = await Learner.of(run, engine.role.ledgers, None)
        await learner.publish(1)
        await engine.announced(version="1")
        children = psutil.Process().children(recursive=True)
        alive = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
        named = [child.environ().get(TOKEN_VARIABLE) for child in alive]
        assert str(run.run_dir / "weights.token") in named
        landing = staging_root(run.run_dir, "engine.0")  # which the role empties and takes away
        assert str(landing) in [child.environ().get("STREAMRL_LANDING") for child in alive]
        assert landing.is_dir()
    assert not landing.exists()


async def test_it_is_announced_with_its_first_version_and_with_each_other_one(run, dialect):
    async with engine_on(run) as engine:
        learner = await Learner.of(run, engine.role.ledgers, None)
        await until(lambda: dialect.ports, 60)
        async with engine.toy(url := f"http://127.0.0.1:{dialect.ports[-1]}") as toy:

            async def tried():
                with suppress(Lost):
                    return "/generate" in [path for path, _ in (await toy("GET", "/log"))["bodies"]]

            await until(tried, 60)
        assert not engine.role.is_ready
        assert "url" not in (await engine.role.ledgers.roles.read())["engine.0"]
        await learner.publish(1)
        fields = await engine.announced(state="ready")
        expected = {
            "version": "1",
            "step": "1",
            "adapter": "",
            "blocked": "0",
            "slots": "6",
            "context": "64",
            "vocabulary": "128",
            "running": "0",
            "host": socket.gethostname(),
        }
        assert fields.items() >= expected.items()
        assert fields["url"] == url
        assert len(fields["salt"]) == 32
        await learner.publish(4)
        later = await engine.announced(version="4", step="4")
        assert later["salt"] == fields["salt"]
        async with engine.toy() as toy:
            told = [(path, body.get("version")) for path, body in (await toy("GET", "/log"))["bodies"]]
        assert [version for path, version in told if path == "/update"] == [1, 4]
        assert engine.role.status["pause_seconds"] > 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_the_death_of_its_server_and_a_hang_end_the_role(run, dialect, monkeypatch, number):
    monkeypatch.setattr(servers, "ANSWER_SECONDS", 0.3)
    run.set("lease", seconds=0.6, max_hold=3)
    async with engine_on(run) as engine:
        await Learner.of(run, engine.role.ledgers)
        async with engine.toy() as toy:
            pid = (await toy("GET", "/log"))["pid"]
        os.kill(pid, number)
        says = "killed by SIGKILL" if number == signal.SIGKILL else "the server hangs: no answer"
        with pytest.raises(Unreachable, match=says):
            await asyncio.wait_for(asyncio.shield(engine.task), 60)
    await until(lambda: not psutil.pid_exists(pid))


async def test_a_server_that_samples_nothing_ends_the_role(run, dialect):
    run.set("lease", seconds=0.6, max_hold=3)
    async with engine_on(run) as engine:
        await Learner.of(run, engine.role.ledgers)
        async with engine.toy() as toy:
            asking = asyncio.create_task(toy("POST", "/generate", {"id": "a", "max": 3}))
            with pytest.raises(Unreachable, match="no token and no other sign of progress"):
                await asyncio.wait_for(asyncio.shield(engine.task), 60)
            asking.cancel()


async def test_a_server_that_does_not_tell_its_figures_lives(run, dialect):
    """It runs already."""
    toy = Toy()
    async with serving(toy) as url:
        run.set("engine", url=[url]).set("lease", seconds=0.6, max_hold=1)
        async with engine_on(run) as engine:
            await Learner.of(run, engine.role.ledgers)
            await engine.announced(url=url)
            toy.faults["/figures"] = [404, "junk", 500] * 10
            await until(lambda: not toy.faults["/figures"] or engine.task.done())
            assert not engine.task.done()


async def test_a_stop_while_the_server_starts(run, dialect):
    dialect.argv = [sys.executable, "-c", "import time; time.sleep(1000)"]
    async with engine_on(run) as engine:
        await until(lambda: dialect.ports)
        engine.role.stop.set()
        await asyncio.wait_for(asyncio.shield(engine.task), 20)


async def test_a_stop_lets_the_requests_that_it_has_end(run, dialect):
    async with engine_on(run) as engine:
        await Learner.of(run, engine.role.ledgers)
        async with engine.toy() as toy:
            asking = asyncio.create_task(toy("POST", "/generate", {"id": "a", "max": 3}))
            await engine.announced(running="1")
            engine.role.stop.set()
            await engine.announced(state="draining")
            assert not engine.task.done()
            await toy("POST", "/step", {"count": 2})
            assert '"finish": "length"' in await asking
            await asyncio.wait_for(engine.task, 30)


async def test_a_server_whose_weights_stay_samples_for_records_alone(run, dialect):
    dialect.fixed = True
    async with engine_on(run) as engine:
        with pytest.raises(ConfigError, match="stay as they are: it cannot sample for training") as caught:
            await asyncio.wait_for(asyncio.shield(engine.task), 60)
        assert "recording.mode" in caught.value.hint


async def test_it_leaves_its_devices_to_the_learner_and_comes_back_with_its_version(run, dialect):
    run.set("rollout", placement="colocated")
    async with engine_on(run) as engine:
        ledgers = engine.role.ledgers
        learner = await Learner.of(run, ledgers)
        await engine.announced(version="1", blocked="0")
        switch = LearnerDevices(ledgers.device_lock, "learner", deadline=30)  # on a CPU it moves nothing
        await switch.take()
        await engine.announced(blocked="1")
        await learner.publish(2)
        await switch.give()
        await engine.announced(version="2", blocked="0")
        async with engine.toy() as toy:
            told = [path for path, _ in (await toy("GET", "/log"))["bodies"]]
        assert told[-6:] == ["/sleep", "/prefetch", "/update", "/finish", "/wake", "/resume"] or told[-6:] == [
            "/resume", "/prefetch", "/pause", "/update", "/finish", "/resume",
        ], "the version may come a moment after the devices"  # fmt: skip
