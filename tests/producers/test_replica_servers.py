"""A replica on engines that fall behind, and on real servers that are killed, added and removed while it works."""

import asyncio
import signal
import socket
import subprocess
import sys

import pytest
import torch
from producer_kit import tiny_model, until
from replica_kit import Faulty, Learner, admit, check_sample, emitted, samples_of

from streamrl.producers.engines import make_engine
from streamrl.producers.replica import Replica, run_rollout
from streamrl.producers.tokenizer import Tokenizer
from streamrl.queues import leases
from streamrl.queues.keys import GROUP
from streamrl.wire import Prompt, Sample, decode


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


class Behind(Faulty):
    """Takes no version while the gate is closed."""

    def __init__(self, engine):
        super().__init__(engine, [])
        self.open = asyncio.Event()
        self.open.set()
        self.requests = []

    async def apply(self, version):
        await self.open.wait()
        await self._engine.apply(version)

    async def generate(self, request, listener=None):
        self.requests.append(request)
        return await super().generate(request)


@pytest.fixture
def small(run):
    return (
        run.set("engine", decode="slots", slots=4, threads=1)
        .set("sampling", group_size=4, max_new_tokens=12)
        .set("lease", seconds=0.6)
    )


async def test_weights_that_are_too_old_stop_the_prompts_until_newer_ones_are_there(small):
    async with small.open() as ledgers:
        learner = Learner(small, ledgers)
        await learner.hands.fence()
        await learner.publish(1)
        engine = make_engine(small.config, 1)
        await engine.start()
        behind = Behind(engine)
        role = small.role("rollout.0", ledgers)
        task = asyncio.create_task(Replica(role, behind, Tokenizer.load(small.config.model)).run())
        try:
            await until(lambda: role.is_ready)
            behind.open.clear()
            await learner.publish(2)  # one step behind: max_staleness is 1
            await admit(small, ledgers.train, 1, samples=4)
            await until(lambda: emitted(ledgers.train, 4))
            await learner.publish(3)
            await until(lambda: role.status.get("stale") == 1)
            await admit(small, ledgers.train, 1, samples=4)
            before = len(behind.requests)
            assert await ledgers.connection.read("XLEN", ledgers.train.keys.prompts) == 1
            behind.open.set()
            await until(lambda: emitted(ledgers.train, 8))
            assert role.status["stale"] == 0
            found = [decode(data, Sample) for data in (await samples_of(ledgers.train, 1)).values()]
            assert {number for sample in found for _, number in sample.runs} == {3}
            assert len(behind.requests) == before + 4
            assert [request.affinity for request in behind.requests] == ["g0"] * 4 + ["g1"] * 4
        finally:
            role.stop.set()
            await asyncio.gather(task, return_exceptions=True)
            await engine.close()


async def test_a_prompt_that_was_asked_for_with_old_weights_waits_for_the_new_ones(small, monkeypatch):
    """The replica asks for prompts, then a version comes out, then its prompts: the read that waits gets them."""
    monkeypatch.setattr(leases, "_BLOCK_MS", 20_000)
    small = small.set(None, max_staleness=0)
    async with small.open() as ledgers:
        learner = Learner(small, ledgers)
        await learner.hands.fence()
        await learner.publish(1)
        engine = make_engine(small.config, 1)
        await engine.start()
        behind = Behind(engine)
        role = small.role("rollout.0", ledgers)
        replica = Replica(role, behind, Tokenizer.load(small.config.model))
        task = asyncio.create_task(replica.run())
        prompts = ledgers.train.keys.prompts

        async def asking():
            clients = (await ledgers.connection.read("CLIENT", "LIST")).splitlines()
            return any(b" cmd=xreadgroup " in client and b" flags=b" in client for client in clients)

        try:
            await until(asking)
            behind.open.clear()
            await learner.publish(2)
            await until(lambda: replica._follower.newest_step == 2)
            await admit(small, ledgers.train, 1, samples=4)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await until(lambda: behind.requests)
            assert (await ledgers.connection.read("XPENDING", prompts, GROUP))[0] == 1
            behind.open.set()
            await until(lambda: emitted(ledgers.train, 4))
            found = [decode(data, Sample) for data in (await samples_of(ledgers.train, 0)).values()]
            assert {number for sample in found for _, number in sample.runs} == {2}
        finally:
            role.stop.set()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await engine.close()


async def test_a_stop_hands_prompts_back_at_once_that_wait_for_newer_weights(small):
    small.set(None, max_staleness=0).set("supervisor", drain_deadline=4000)
    async with small.open() as ledgers:
        learner = Learner(small, ledgers)
        await learner.hands.fence()
        await learner.publish(1)
        engine = make_engine(small.config, 1)
        await engine.start()
        behind = Behind(engine)
        role = small.role("rollout.0", ledgers)
        replica = Replica(role, behind, Tokenizer.load(small.config.model))
        task = asyncio.create_task(replica.run())
        try:
            await until(replica._follower.first.is_set)
            behind.open.clear()
            await learner.publish(2)
            await until(lambda: replica._follower.newest_step == 2)
            replica._leases._width = lambda: 1  # as for a read that began before the version came out
            await admit(small, ledgers.train, 1, samples=4)
            await until(lambda: replica._leases.leased)
            role.stop.set()
            await asyncio.wait_for(task, 15)
            [[_, owner, _, deaths]] = await ledgers.connection.read(
                "XPENDING", ledgers.train.keys.prompts, GROUP, "-", "+", 10
            )
            assert (owner.decode(), deaths) == (leases.UNOWNED, 0)
            assert not behind.requests
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await engine.close()


class Servers:
    """Real engine servers of the tiny model, in processes of their own."""

    def __init__(self, model_dir, log):
        self.model_dir, self.log = model_dir, log
        self.processes = {}

    def port(self):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return probe.getsockname()[1]

    def start(self, url=None):
        url = url or f"http://127.0.0.1:{self.port()}"
        settings = [
            "engine.decode=slots",
            "engine.slots=8",
            "engine.threads=1",
            "engine.device=cpu",
            "model.context=512",
        ]
        command = [
            sys.executable,
            "-m",
            "streamrl",
            "engines",
            "serve",
            str(self.model_dir),
            "--port",
            url.split(":")[2],
        ]
        command += [part for setting in settings for part in ("--set", setting)]
        command += ["--set", f"seed={len(self.processes)}"]
        self.processes[url] = subprocess.Popen(command, stdout=self.log, stderr=self.log)
        return url

    def kill(self, url):
        process = self.processes.pop(url)
        process.send_signal(signal.SIGKILL)
        process.wait(10)

    def close(self):
        for process in self.processes.values():
            process.kill()
            process.wait(10)


@pytest.fixture
def servers(tiny_dir, tmp_path):
    with (tmp_path / "servers.log").open("w") as log:
        made = Servers(tiny_dir, log)
        yield made
        made.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_servers_die_come_back_are_added_and_removed_while_a_replica_works(run, servers):
    first, second = servers.start(), servers.start()
    run.set("engine", url=[first], stream_interval=4).set("model", context=512)
    run.set("sampling", group_size=4, max_new_tokens=300).set("supervisor", backoff=0.01, max_backoff=0.2)
    async with run.open() as ledgers:
        learner = Learner(run, ledgers)
        await learner.hands.fence()
        await learner.publish(1)
        async with run.running(run_rollout, "rollout.0", ledgers) as (role, _):

            async def working():
                return (await ledgers.connection.read("XPENDING", ledgers.train.keys.prompts, GROUP))[0] > 0

            await admit(run, ledgers.train, 2, samples=4)
            await until(working, 60)
            await ledgers.servers.enlist(second, present=True)
            await until(lambda: role.status.get("servers") == 2, 60)
            await admit(run, ledgers.train, 2, samples=4)
            await until(working, 60)
            servers.kill(first)
            await until(lambda: emitted(ledgers.train, 16), 60)
            servers.start(first)
            await learner.publish(2)

            async def back():
                return (await ledgers.servers.reports())["rollout.0"][first]["version"] == 2

            await until(back, 60)
            await admit(run, ledgers.train, 1, samples=4)
            await until(working, 60)
            await ledgers.servers.enlist(second, present=False)
            await until(lambda: emitted(ledgers.train, 20), 60)

            async def alone():
                return list((await ledgers.servers.reports())["rollout.0"]) == [first]

            await until(alone)
        models = {number: tiny_model(number).eval() for number in (1, 2)}
        seen = set()
        for group_id in range(5):
            prompt = decode(await ledgers.connection.read("HGET", ledgers.train.keys.group(group_id), "prompt"), Prompt)
            for data in (await samples_of(ledgers.train, group_id)).values():
                sample = decode(data, Sample)
                assert len(sample.token_ids) == 300
                if len(sample.runs) == 1:
                    check_sample(models[sample.runs[0][1]], prompt, sample)
                seen.add(bytes(sample.tokens))
        assert len(seen) == 20
        assert not await ledgers.train.dead_letters()
