"""A replica on engines that fall behind, and on real servers that are killed, added and removed while it works."""

import asyncio
import signal
import socket
import subprocess
import sys

import pytest
from producer_kit import tiny_model, until
from replica_kit import Faulty, Learner, admit, check_sample, emitted, replica_on, samples_of

from streamrl.producers.replica import run_rollout
from streamrl.queues import leases
from streamrl.queues.keys import GROUP
from streamrl.wire import Prompt, Sample, decode


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


async def test_weights_that_are_too_old_stop_the_prompts_until_newer_ones_are_there(small):
    async with small.open() as ledgers:
        learner = await Learner.of(small, ledgers)
        async with replica_on(small, ledgers, Behind) as (behind, role, _, _):
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


async def test_a_prompt_that_was_asked_for_with_old_weights_waits_for_the_new_ones(small, monkeypatch):
    """The replica asks for prompts, then a version comes out, then its prompts: the read that waits gets them."""
    monkeypatch.setattr(leases, "_BLOCK_MS", 20_000)
    small = small.set(None, max_staleness=0)
    async with small.open() as ledgers:
        learner = await Learner.of(small, ledgers)
        prompts = ledgers.train.keys.prompts

        async def asking():
            clients = (await ledgers.connection.read("CLIENT", "LIST")).splitlines()
            return any(b" cmd=xreadgroup " in client and b" flags=b" in client for client in clients)

        async with replica_on(small, ledgers, Behind) as (behind, _, replica, task):
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
            task.cancel()  # it waits for prompts


async def test_a_stop_hands_prompts_back_at_once_that_wait_for_newer_weights(small):
    small.set(None, max_staleness=0).set("supervisor", drain_deadline=4000)
    async with small.open() as ledgers:
        learner = await Learner.of(small, ledgers)
        async with replica_on(small, ledgers, Behind) as (behind, role, replica, task):
            await until(replica._follower.first.is_set)
            behind.open.clear()
            await learner.publish(2)
            await until(lambda: replica._follower.newest_step == 2)
            replica._work._leases._width = lambda: 1  # as for a read that began before the version came out
            await admit(small, ledgers.train, 1, samples=4)
            await until(lambda: replica._work._leases.leased)
            role.stop.set()
            await asyncio.wait_for(task, 15)
            [[_, owner, _, deaths]] = await ledgers.connection.read(
                "XPENDING", ledgers.train.keys.prompts, GROUP, "-", "+", 10
            )
            assert (owner.decode(), deaths) == (leases.UNOWNED, 0)
            assert not behind.requests


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
        settings = ["slots=8", "threads=1", "device=cpu"]
        command = [sys.executable, "-m", "streamrl", "engines", "serve", str(self.model_dir)]
        command += ["--no-api-key", "--port", url.split(":")[2], "--set", "model.context=512"]
        command += [part for setting in settings for part in ("--set", f"engine.{setting}")]
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
        learner = await Learner.of(run, ledgers)
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
