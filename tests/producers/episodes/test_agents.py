"""Role `agent`: episodes in processes of their own, which call the replicas over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial

import numpy as np
import pytest

from streamrl.engine import Completion, Request
from streamrl.errors import DataError, RetryLater, Unreachable
from streamrl.listening import listen
from streamrl.producers.group.replicas import STEP, URL, Replicas
from streamrl.producers.serve.app import GenerationApp
from streamrl.producers.tokenizer import Tokenizer
from streamrl.queues.keys import BEAT_TTL
from streamrl.runtime.audit import audit
from streamrl.weight_sync.files import make_token
from streamrl.wire import encode
from tests.producers.producer_kit import kill
from tests.producers.replica_kit import Learner
from tests.queues.ledger_kit import admit, until, until_async

from .episode_kit import ADD, order_of, save_talker
from .killed_replica import TURNS
from .test_killed import all_emitted, more_noted, noted, publish, read, sampled_turns

SAMPLES, GROUPS = 2, 4
KEY = "a-key-of-this-test"
WHERE = "tests.producers.episodes.killed_replica"
AGENT = "streamrl.producers.agents:run_agent"


@contextlib.contextmanager
def spawned(run, coroutine, *names):
    """Processes by name; killed at the end."""
    living = {name: run.spawn(coroutine, name) for name in names}
    try:
        yield living
    finally:
        for process in living.values():
            kill(process)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_episodes_survive_the_death_of_an_agent_and_of_the_replica(run, tmp_path):
    folder = save_talker(tmp_path / "talker", calls=(ADD,))
    run.set("model", path=str(folder), context=1024).set("engine", decode="slots", slots=4, threads=1)
    run.set("sampling", group_size=SAMPLES, max_new_tokens=16)
    run.set("episode", run=f"{WHERE}:Honest", max_turns=TURNS, processes=2)
    run.set("lease", seconds=1.0, max_deliveries=5)
    make_token(run.run_dir)
    prompt = order_of(Tokenizer.load(run.config.model)).prompt
    async with run.open() as ledgers:
        for group_id in range(GROUPS):
            await admit(ledgers.train, group_id, prompt=encode(prompt), samples=SAMPLES)
        await publish(run, ledgers, folder)
        with (
            spawned(run, f"{WHERE}:serve", "rollout.0") as replicas,
            spawned(run, AGENT, "agent.0") as agents,
        ):
            await until(partial(more_noted, run, replicas["rollout.0"], 1), 90)
            agents["agent.1"] = run.spawn(AGENT, "agent.1")
            await until(partial(more_noted, run, agents["agent.0"], 10), 90)
            kill(agents["agent.0"])
            before = len(noted(run))
            await until(partial(more_noted, run, agents["agent.1"], before + 4), 90)
            assert not await all_emitted(ledgers.train), "nobody died in mid-episode"
            kill(replicas["rollout.0"])
            replicas["rollout.0"] = run.spawn(f"{WHERE}:serve", "rollout.0")
            await until_async(lambda: all_emitted(ledgers.train), 120)
            assert agents["agent.1"].poll() is None, "the agent died with its replica"
        assert await ledgers.train.dead_letters() == []
        found = await audit(run.config, run.run_dir, ledgers)
        assert (found.lost, found.twice, found.faults, found.live) == (0, 0, [], GROUPS)
        flat = [sample for group_id in range(GROUPS) for sample in await read(ledgers.train, group_id)]
    left = noted(run)
    assert len(flat) == GROUPS * SAMPLES
    for sample in flat:
        for turn in sampled_turns(prompt, sample):
            left.remove(turn)  # each completion of an engine is in one place at most
    assert sum(sample.replayed for sample in flat) > 0
    assert sum(sample.restarts for sample in flat) == 0
    assert {sample.engine for sample in flat} <= {"agent.0", "agent.1"}


class Played:
    """A replica without an engine: it answers as told, and a test writes its heartbeat."""

    def __init__(self, ledgers, name):
        self.name, self.url = name, ""
        self.calls, self.break_off, self.hold = [], 0, asyncio.Event()
        self.hold.set()
        self._ledgers = ledgers

    async def generate(self, request, _):
        self.calls.append(request)
        await self.hold.wait()
        if self.break_off:
            self.break_off -= 1
            raise Unreachable("the engine died")
        return Completion(np.asarray([5, 6], np.int32), np.zeros(2, np.float32), [(0, 7)], "stop", 3, 0.1, 2)

    @contextlib.asynccontextmanager
    async def serve(self, key=KEY, **fields):
        async with listen(
            GenerationApp(self.generate, key).app(), "127.0.0.1", 0, what="a test", hint="", cancels=True
        ) as url:
            self.url = url
            await self.say(**fields)
            yield self

    async def say(self, **fields):
        shown = {URL: self.url, "state": "ready", "capacity": 4, "version": 7, STEP: 7, **fields}
        await self._ledgers.roles.beat(self.name, shown, fields.pop("ttl", BEAT_TTL))


@contextlib.asynccontextmanager
async def replicas_of(run, ledgers, patience=10.0):
    replicas = Replicas(run.config, ledgers, KEY)
    replicas._patience = patience
    async with replicas.follow():
        yield replicas


def request(number=0, affinity="a"):
    return Request(f"r{number}", np.arange(20, dtype=np.int32), 4, 1.0, affinity=affinity, cache_version=7)


async def test_a_call_carries_all_and_stays_where_its_conversation_is(run):
    async with run.open() as ledgers, Played(ledgers, "rollout.0").serve() as one, replicas_of(run, ledgers) as known:
        done = await known.generate(request())
        assert (done.tokens.tolist(), done.runs, done.finish, done.cached_tokens) == ([5, 6], [(0, 7)], "stop", 2)
        (call,) = one.calls
        assert (call.affinity, call.cache_version, call.max_new_tokens) == ("a", 7, 4)
        async with Played(ledgers, "rollout.1").serve() as two:
            await until(lambda: known.load().servers == 2)
            for number in range(4):
                await known.generate(request(number))
            assert (len(one.calls), len(two.calls)) == (5, 0)
            await one.say(state="draining")
            await until(lambda: known.load().servers == 1)
            await known.generate(request())
            assert len(two.calls) == 1


async def test_new_work_goes_only_to_replicas_whose_weights_are_new_enough(run):
    async with run.open() as ledgers:
        await Learner.of(run, ledgers, version=9)
        async with (
            Played(ledgers, "rollout.0").serve(**{STEP: 7}) as old,
            Played(ledgers, "rollout.1").serve(**{STEP: 7}) as new,
            replicas_of(run, ledgers) as known,
        ):
            await until(lambda: known.load().servers == 2 and known.behind() == 2)
            assert known.load().capacity == 0, "both are stale"
            await new.say(**{STEP: 8})
            await until(lambda: known.behind() == 1)
            assert known.load().capacity == 4
            for number in range(4):
                await known.generate(request(number, affinity=f"a{number}"))
            assert (len(old.calls), len(new.calls)) == (0, 4)


async def test_a_call_that_was_lost_is_made_again_but_not_for_ever(run):
    async with run.open() as ledgers, Played(ledgers, "rollout.0").serve() as one, replicas_of(run, ledgers) as known:
        one.break_off = 2
        assert (await known.generate(request())).finish == "stop"
        assert known.figures() == {"lost_calls": 2}
        one.break_off = 3
        with pytest.raises(DataError, match="3 replicas were lost while they answered request 'r0'"):
            await known.generate(request())


async def test_without_a_replica_work_is_given_back(run):
    async with run.open() as ledgers, replicas_of(run, ledgers, patience=0.3) as known:
        with pytest.raises(RetryLater, match=r"no replica answered for 0\.3 s"):
            await known.generate(request())
        async with Played(ledgers, "rollout.0").serve(key="another-key"):
            await until(lambda: "rollout.0" in known._known)
            with pytest.raises(RetryLater):
                await known.generate(request())


async def test_a_call_goes_on_elsewhere_when_the_process_of_its_replica_is_gone(run):
    async with run.open() as ledgers, Played(ledgers, "rollout.0").serve() as one, replicas_of(run, ledgers) as known:
        one.hold.clear()
        asking = asyncio.create_task(known.generate(request()))
        await until(lambda: one.calls)
        async with Played(ledgers, "rollout.0").serve():  # started again: another address
            assert (await asyncio.wait_for(asking, 20)).finish == "stop"
