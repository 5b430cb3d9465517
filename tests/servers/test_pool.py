"""Engines as rollout workers see them: which one a request goes to, and what becomes of it when its engine is lost."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass

import pytest
import toy as toy_module
from hypothesis import given
from hypothesis import strategies as st
from producer_kit import Hands, until
from toy import VOCABULARY, Toy, make_dialect, serving
from toy_kit import config, request

from streamrl.errors import DataError, DeadlyRequest, RetryLater
from streamrl.http import Call, HttpClient, Lost
from streamrl.queues import open_ledgers
from streamrl.servers import pool as pools
from streamrl.servers.pool import Affinities, ServerPool
from streamrl.weight_sync.manifest import Manifest, encode
from tests.redis_kit import free_port

PROMPT = range(1, 21)
"""Longer than a block of a prefix cache."""


# --- pure ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Candidate:
    """What the choice looks at of an engine."""

    tokens: int
    slots: int
    cache_use: float = 0.0

    @property
    def burden(self):
        return self.tokens / self.slots


def choose(candidates, *, before=None, **request):
    """The index of the choice; so is `before`."""
    kept = None if before is None else candidates[before]
    return candidates.index(pools.choose(candidates, before=kept, **request))


def test_the_least_busy_engine_for_its_size_is_taken():
    assert choose([Candidate(300, 10), Candidate(200, 10)], cost=10, shared=0, together=4) == 1
    assert choose([Candidate(300, 30), Candidate(200, 10)], cost=10, shared=0, together=4) == 0


def test_a_full_cache_comes_last():
    assert choose([Candidate(10, 10, 0.95), Candidate(500, 10, 0.5)], cost=10, shared=0, together=4) == 1
    assert choose([Candidate(10, 10, 0.95), Candidate(500, 10, 0.93)], cost=10, shared=0, together=4) == 0
    assert choose([Candidate(10, 10, 0.95), Candidate(500, 10, 0.5)], cost=10, shared=100, together=99, before=0) == 1


@pytest.mark.parametrize(("more", "chosen"), [(0, 0), (400, 0), (401, 1)])
def test_a_prefix_holds_a_request_until_its_engine_is_busier_by_a_group(more, chosen):
    candidates = [Candidate(100 + more, 10), Candidate(100, 10)]
    assert choose(candidates, cost=100, shared=32, together=4, before=0) == chosen


def test_a_prefix_shorter_than_a_block_of_the_cache_holds_nothing():
    assert choose([Candidate(101, 10), Candidate(100, 10)], cost=100, shared=15, together=4, before=0) == 1


@given(
    st.lists(st.builds(Candidate, st.integers(0, 10**6), st.integers(1, 256), st.floats(0, 1)), min_size=1, max_size=9),
    st.integers(1, 10**5),
    st.integers(0, 10**5),
    st.integers(1, 64),
    st.integers(0, 8),
)
def test_no_choice_is_worse_than_the_prefix_is_worth(candidates, cost, shared, together, before):
    before = before if before < len(candidates) else None
    at = choose(candidates, cost=cost, shared=shared, together=together, before=before)
    open_ones = [each for each in candidates if each.cache_use < 0.9] or candidates
    least = min(each.burden for each in open_ones)
    allowed = together * cost / candidates[at].slots if at == before else 0.0
    assert candidates[at].burden <= least + allowed + 1e-9 or (at == before and candidates[at].burden <= least)


def test_a_sample_begins_where_its_group_is_and_stays_there(monkeypatch):
    monkeypatch.setattr(pools, "_AFFINITIES", 4)
    known = Affinities()
    known.set("g1", "a")
    assert (known.get("g1/0"), known.get("g2"), known.get("")) == ("a", None, None)
    known.set("g1/0", "b")
    known.set("g1/1", "c")
    assert (known.get("g1/0"), known.get("g1/1"), known.get("g1/2")) == ("b", "c", "c")
    known.set("g2", "a")
    known.set("g3", "a")
    assert (known.get("g1/0"), known.get("g3")) == ("c", "a"), "the oldest is forgotten"
    known.set("", "d")
    assert known.get("") is None


# --- with toys that announce themselves ------------------------------------------------------------------------------


class Field:
    """A pool, and engines as they appear to it: `beats` are their heartbeats."""

    def __init__(self, run, ledgers):
        self.ledgers, self.pool = ledgers, ServerPool(run, ledgers, None)
        self.beats = {}
        self.hands = Hands(ledgers.train)

    async def beat(self, name, url=None, *, ttl=60.0, **fields):
        """Announce an engine, or what has changed of it."""
        if url is not None:
            self.beats[name] = {
                "url": url,
                "salt": f"life of {name}",
                "host": socket.gethostname(),
                "state": "ready",
                "adapter": "",
                **dict.fromkeys(("version", "step", "blocked"), 0),
                "slots": 8,
                "context": 64,
                "vocabulary": VOCABULARY,
                **dict.fromkeys(("started", "beat"), 1.0),
            }
        self.beats[name] |= fields
        await self.ledgers.roles.beat(name, self.beats[name], ttl)

    async def gone(self, name):
        """Let the heartbeat of an engine end."""
        await self.beat(name, ttl=0.001)

    async def publish(self, step):
        about = {
            "run": "streamrl",
            "epoch": 1,
            "transport": "shm",
            "folder": f"v-1-{step}",
            "shards": [],
            "tensors": [],
        }
        data = encode(Manifest(version=step, step=step, **about))
        await self.hands.ledger.finish_step(self.hands.nonce, 0, step, data)

    async def looked(self):
        """The pool has seen what was announced before this call."""
        await self.pool.changed()
        await self.pool.changed()

    def ask(self, name="a", *, affinity="", limit=6, prompt=PROMPT):
        return asyncio.create_task(self.pool.generate(request(name, prompt, limit, affinity=affinity)))


@pytest.fixture(autouse=True)
def often(monkeypatch):
    monkeypatch.setattr(pools, "make_dialect", lambda _: make_dialect())
    monkeypatch.setattr(pools, "_LOOK_SECONDS", 0.02)
    monkeypatch.setattr(pools, "_GONE_SECONDS", 0.1)
    monkeypatch.setattr(pools, "_COUNT_SECONDS", 0.02)


@asynccontextmanager
async def field(redis_run, *toys, **sections):
    """A pool with toys as its engines, that know the first version."""
    run = config(redis=redis_run.config.model_dump(), **sections)
    async with open_ledgers(run, redis_run.run_dir) as ledgers, AsyncExitStack() as stack:
        made = Field(run, ledgers)
        for number, toy in enumerate(toys):
            await made.beat(f"engine.{number}", await stack.enter_async_context(serving(toy)))
        await made.hands.fence()
        await made.publish(1)
        await stack.enter_async_context(made.pool.follow())
        if toys:
            await asyncio.wait_for(made.pool.first(), 30)
            await until(lambda: made.pool.load().servers == len(toys))
        yield made


async def answer(task):
    return await asyncio.wait_for(task, 30)


async def test_a_group_stays_together_and_groups_are_spread(redis_run):
    toys = [Toy(free=False), Toy(free=False)]
    async with field(redis_run, *toys, sampling={"group_size": 4}) as made:
        tasks = [
            made.ask(f"{group}.{at}", affinity=f"g{group}", prompt=[group, *PROMPT])
            for group in (1, 2)
            for at in range(4)
        ]
        for toy in toys:
            await toy.started(4)
            toy.free = True
            await toy.step()
        assert {(await answer(task)).finish for task in tasks} == {"length"}
        await answer(made.ask("b", affinity="g1/0", prompt=[1, *PROMPT]))
        there = [[body["tokens"][0] for path, body in toy.bodies if path == "/generate"] for toy in toys]
        assert sorted(there) == [[1] * 5, [2] * 4]
        load = made.pool.load()
        assert (load.running, load.tokens_sampled, load.version) == (0, 9 * 6, 0)
        assert load.busy_seconds > 0


async def test_what_a_request_says(redis_run):
    toy = Toy()
    async with field(redis_run, toy) as made:
        await made.beat("engine.0", version=3, adapter="p@3", context=24)
        await made.looked()
        assert len((await answer(made.ask(limit=500))).tokens) == 4, "what the context leaves"
        assert (await answer(made.ask(limit=500))).runs == [(0, 3)]
        bodies = [body for path, body in toy.bodies if path == "/generate"]
        assert [(body["salt"], body["adapter"]) for body in bodies] == [("life of engine.0-3", "p@3")] * 2
        assert {len(body["id"]) for body in bodies} == {32}
        assert len({body["id"] for body in bodies}) == 2, "a name is used once"
        for impossible in ([], [VOCABULARY], [1] * 24):
            with pytest.raises(DataError, match="request 'a'"):
                await answer(made.ask(prompt=impossible))


@asynccontextmanager
async def process(**environ):
    """A toy in a process of its own: that, and a client."""
    port = free_port()
    child = subprocess.Popen([sys.executable, toy_module.__file__, str(port)], env={**os.environ, **environ})  # noqa: ASYNC220
    client = HttpClient(f"http://127.0.0.1:{port}")

    async def ready():
        with suppress(Lost):
            return await client.call(Call("GET", "/ready"), 5) is not None

    try:
        await until(ready)
        yield child, client
    finally:
        await client.close()
        child.kill()
        child.wait(10)


async def test_kill_9_in_mid_response_and_all_of_it_comes_from_another(redis_run):
    other = Toy()
    other.version = 5
    async with process(TOY_STEPS="2") as (child, client), field(redis_run) as made:
        await made.beat("engine.0", client.url)
        await asyncio.wait_for(made.pool.first(), 30)
        tasks = [made.ask(name) for name in "abc"]

        async def sampled():
            return (await client.call(Call("GET", "/figures"), 5))["tokens_sampled"] == 6

        await until(sampled)
        async with serving(other) as url:
            await made.beat("engine.1", url)
            await until(lambda: made.pool.load().servers == 2)
            os.kill(child.pid, signal.SIGKILL)
            for task in tasks:
                done = await answer(task)
                assert done.tokens.tolist() == [1, 2, 3, 4, 5, 6]
                assert done.logprobs.tolist() == pytest.approx([-0.55] * 6)
                assert done.runs == [(0, 5)]
        assert made.pool.figures() == {"lost_calls": 3}
        assert made.pool.load().servers == 1, "the dead one is not asked"


async def test_an_engine_that_is_cut_off_costs_its_requests_a_try_elsewhere(redis_run, monkeypatch):
    """It says that it lives, and nothing comes from it any more: the path is cut, or the process is stopped."""
    monkeypatch.setattr(pools, "_SILENT_SECONDS", 0.1)
    monkeypatch.setattr(pools, "_CUT_SECONDS", 0.1)
    monkeypatch.setattr(pools, "_CONNECT_SECONDS", 0.2)
    async with process(TOY_STEPS="2") as (child, client), field(redis_run) as made:
        await made.beat("engine.0", client.url)
        await asyncio.wait_for(made.pool.first(), 30)
        task = made.ask()

        async def sampled():
            return (await client.call(Call("GET", "/figures"), 5))["tokens_sampled"] == 2

        await until(sampled)
        os.kill(child.pid, signal.SIGSTOP)
        await asyncio.sleep(1)
        assert made.pool.figures() == {"lost_calls": 0}, "there is no other engine"
        async with serving(Toy()) as url:
            await made.beat("engine.1", url)
            assert (await answer(task)).tokens.tolist() == [1, 2, 3, 4, 5, 6]
            assert made.pool.figures() == {"lost_calls": 1}
            os.kill(child.pid, signal.SIGCONT)
            await until(lambda: made.pool.load().servers == 2)


@pytest.fixture
def soon(monkeypatch):
    """Silence is noticed soon, but no later than a machine with much to do takes for a token."""
    for name, seconds in {"_SILENT_SECONDS": 1.0, "_CUT_SECONDS": 0.8, "_CONNECT_SECONDS": 0.05}.items():
        monkeypatch.setattr(pools, name, seconds)


@pytest.mark.parametrize("blocked", [0, 1])
async def test_an_engine_that_samples_or_is_blocked_needs_no_sign_of_life(redis_run, soon, blocked):
    toys = [Toy(free=False), Toy()]
    async with field(redis_run, *toys) as made:
        await made.beat("engine.1", state="starting")
        await until(lambda: made.pool.load().servers == 1)
        task = made.ask(limit=40)
        await toys[0].started(1)
        await made.beat("engine.0", blocked=blocked)
        await made.beat("engine.1", state="ready")
        await until(lambda: made.pool.load().servers == 2 - blocked)
        toys[0].faults["/ready"] = ["hang"] * 999
        for _ in range(25):
            await toys[0].step(1 - blocked)
            await asyncio.sleep(0.1)
        assert made.pool.figures() == {"lost_calls": 0}
        toys[0].free = True
        await toys[0].step()
        assert len((await answer(task)).tokens) == 40


async def test_an_engine_that_is_silent_behind_a_gateway_costs_its_requests_a_try_elsewhere(redis_run, soon):
    toys = [Toy(free=False), Toy()]
    async with field(redis_run, *toys) as made:
        await made.beat("engine.1", state="starting")
        await until(lambda: made.pool.load().servers == 1)
        task = made.ask()
        await toys[0].started(1)
        toys[0].faults["/ready"] = [404] * 999
        await made.beat("engine.1", state="ready")
        assert (await answer(task)).tokens.tolist() == [1, 2, 3, 4, 5, 6]
        assert made.pool.figures() == {"lost_calls": 1}


async def test_of_two_engines_that_were_cut_off_the_second_one_has_time_to_come_back_too(redis_run, soon):
    toys = [Toy(free=False), Toy(free=False)]
    async with field(redis_run, *toys) as made:
        tasks = [made.ask(name) for name in "ab"]
        for toy in toys:
            await toy.started(1)
            toy.faults["/ready"] = ["hang"] * 999
        await asyncio.sleep(2.5)
        assert (made.pool.figures(), made.pool.load().servers) == ({"lost_calls": 0}, 2), "both are as they were"
        began = asyncio.get_running_loop().time()
        toys[0].faults.clear()
        await until(lambda: made.pool.figures() == {"lost_calls": 1})
        # counted from the look before, which was up to 0.3 s earlier
        assert asyncio.get_running_loop().time() - began >= 0.8 - 0.35
        await toys[0].started(2)
        toys[0].free = True
        await toys[0].step()
        assert [(await answer(task)).finish for task in tasks] == ["length"] * 2
        assert made.pool.load().servers == 1


async def test_an_engine_whose_heartbeat_ends_is_left(redis_run, caplog):
    first, second = Toy(free=False), Toy()
    async with field(redis_run, first) as made:
        task = made.ask()
        await first.started(1)
        async with serving(second) as url:
            await made.beat("engine.1", url)
            await made.gone("engine.0")
            assert (await answer(task)).finish == "length"
            await first.idle()
            assert (second.calls["/generate"], made.pool.load().servers) == (1, 1)
    assert first.calls["/abort"] == 0, "it is called no more"
    gc.collect()
    assert "never retrieved" not in caplog.text


async def test_a_redis_that_began_anew_takes_no_engine_away(redis_run, monkeypatch):
    monkeypatch.setattr(pools, "_GONE_SECONDS", 30.0)
    toy = Toy(free=False)
    async with field(redis_run, toy) as made:
        task = made.ask()
        await toy.started(1)
        await made.gone("engine.0")
        await made.looked()
        await made.beat("engine.0")
        await made.looked()
        toy.free = True
        await toy.step()
        await answer(task)
        assert toy.calls["/generate"] == 1


async def test_a_new_life_of_an_engine_gets_what_the_one_before_had(redis_run):
    toy = Toy(free=False)
    async with field(redis_run, toy) as made:
        task = made.ask()
        await toy.started(1)
        await made.beat("engine.0", salt="the second life", started=2.0)
        await until(lambda: toy.calls["/generate"] == 2)
        toy.free = True
        await toy.step()
        assert (await answer(task)).tokens.tolist() == [1, 2, 3, 4, 5, 6]
        salts = [body["salt"] for path, body in toy.bodies if path == "/generate"]
        assert salts == ["life of engine.0-0", "the second life-0"]
        await made.beat("engine.0", salt="a process that lives on", started=0.5)
        await made.pool.changed()
        await answer(made.ask("after it"))
        assert [body["salt"] for path, body in toy.bodies if path == "/generate"][2:] == ["the second life-0"]


async def test_engines_that_are_blocked_get_nothing_and_what_they_have_waits(redis_run, monkeypatch):
    """For longer than a request waits for any engine."""
    monkeypatch.setattr(pools, "_PATIENCE", 0.25)
    toys = [Toy(free=False), Toy()]
    async with field(redis_run, *toys) as made:
        await made.beat("engine.1", blocked=1)
        await until(lambda: made.pool.load().servers == 1)
        held = made.ask("held")
        await toys[0].started(1)
        await made.beat("engine.0", blocked=1)
        await until(lambda: made.pool.load().servers == 0)
        later = made.ask("later")
        await asyncio.wait([held, later], timeout=0.6)
        assert not held.done()
        assert not later.done()
        await made.beat("engine.1", blocked=0)
        await answer(later)
        assert [toy.calls["/generate"] for toy in toys] == [1, 1]
        toys[0].free = True
        await toys[0].step()
        await answer(held)


async def test_engines_with_old_weights_keep_conversations_and_get_no_new_prompts(redis_run):
    toys = [Toy(), Toy()]
    async with field(redis_run, *toys) as made:
        await made.beat("engine.0", step=1)
        await made.beat("engine.1", step=1, blocked=1)
        await until(lambda: made.pool.load().servers == 1)
        await answer(made.ask(affinity="g1/0"))
        assert made.pool.behind() == 0
        await made.beat("engine.1", step=3, blocked=0)
        await made.publish(3)
        await until(lambda: [engine.name for engine in made.pool._fresh(made.pool._usable())] == ["engine.1"])
        assert (made.pool.behind(), made.pool.load().servers) == (0, 1)
        for at in range(3):
            await answer(made.ask(affinity=f"g{5 + at}"))
        await answer(made.ask("a2", affinity="g1/0"))
        assert [toy.calls["/generate"] for toy in toys] == [2, 3]
        await made.publish(9)
        await until(lambda: made.pool.behind() == 6)
        new, old = made.ask("new"), made.ask("old", affinity="g1/0")
        await answer(old)
        assert not new.done()
        await made.beat("engine.1", step=9)
        await answer(new)
        assert [toy.calls["/generate"] for toy in toys] == [3, 4]


async def test_a_request_that_engines_die_of_is_to_blame(redis_run):
    toys = [Toy(), Toy(), Toy()]
    async with field(redis_run, *toys) as made:
        for toy in toys:
            toy.faults["/generate"] = ["drop"] * 3
        with pytest.raises(DeadlyRequest, match="3 engines were lost under request 'a'"):
            await answer(made.ask())
        assert sum(toy.calls["/generate"] for toy in toys) == 3
        for toy in toys:
            toy.faults.clear()
        assert (await answer(made.ask("b"))).finish == "length"


async def test_a_request_that_engines_fail_at_is_to_blame(redis_run):
    toy = Toy()
    async with field(redis_run, toy) as made:
        toy.faults["/generate"] = [500] * 9
        with pytest.raises(DeadlyRequest, match="fault 500"):
            await answer(made.ask())
        assert toy.calls["/generate"] == 3


async def test_engines_that_are_lost_after_a_token_blame_nobody(redis_run):
    toy = Toy()
    async with field(redis_run, toy) as made:
        toy.faults["/generate"] = ["die"] * 5
        assert (await answer(made.ask())).finish == "length"
        assert made.pool.figures() == {"lost_calls": 5}


async def test_no_engine_for_a_while(redis_run, monkeypatch):
    monkeypatch.setattr(pools, "_PATIENCE", 0.25)
    async with field(redis_run) as made:
        with pytest.raises(RetryLater, match=r"for 0\.25 s"):
            await answer(made.ask())
        with pytest.raises(RetryLater):
            await made.pool.health()


async def test_workers_share_the_slots(redis_run):
    async with field(redis_run, Toy(), Toy()) as made:
        await made.beat("engine.0", slots=4)
        for number in range(3):
            await made.ledgers.roles.beat(f"rollout.{number}", {"state": "ready"}, 60)
        await until(lambda: made.pool.load().capacity == 4)


async def test_an_engine_on_the_loopback_of_another_host_is_not_called(redis_run):
    toy, other = Toy(), Toy()
    async with field(redis_run, toy) as made, serving(other) as url:
        await made.beat("engine.1", url, host="elsewhere")
        await made.looked()
        assert made.pool.load().servers == 1
        assert not other.calls


async def test_cancelling_frees_the_engine(redis_run):
    toy = Toy(free=False)
    async with field(redis_run, toy) as made:
        task = made.ask()
        await toy.started(1)
        assert made.pool.load().running == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await toy.idle()
        assert made.pool.load().running == 0
        await until(lambda: toy.calls["/abort"] == 1)
