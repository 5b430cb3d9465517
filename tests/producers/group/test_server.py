"""The engine over a server: conversations, deaths and what is left of them."""

from __future__ import annotations

import asyncio
import pickle
from contextlib import asynccontextmanager

import numpy as np
import pytest
from toy import VOCABULARY, Toy, make_dialect, serving, until

from streamrl import http
from streamrl.config import RunConfig
from streamrl.engine import Request
from streamrl.errors import ConfigError, DataError, StreamrlError, Unreachable, WireError
from streamrl.producers.group import server
from streamrl.producers.group.server import ServerDied, ServerEngine
from streamrl.weight_sync.tensors import Version


def config(**sections):
    base = {
        "model": {"path": "/nowhere", "context": 64},
        "sampling": {"max_new_tokens": 8},
        "engine": {"kind": "vllm", "slots": 8},
        "weights": {"deadline": 20},
    }
    return RunConfig.model_validate(
        {name: {**base.get(name, {}), **sections.get(name, {})} for name in base | sections}
    )


def request(name, prompt=(1, 2, 3), limit=6, **more):
    return Request(name, np.asarray(prompt, dtype=np.int32), limit, **more)


def version(number, epoch=1):
    return Version((epoch, number), number, {})


@asynccontextmanager
async def engine_on(toy, *, settings=None, dialect=None):
    async with serving(toy) as url:
        engine = ServerEngine(dialect or make_dialect(), settings or config(), url=url)
        try:
            await engine.start()
            yield engine
        finally:
            await engine.close()


async def test_tokens_logprobs_runs_and_the_listener():
    toy = Toy()
    async with engine_on(toy) as engine:
        await engine.apply(version(3))
        heard = []
        done = await engine.generate(
            request("a"), lambda tokens, logprobs: heard.extend(zip(tokens, logprobs, strict=True))
        )
        assert done.tokens.tolist() == [1, 2, 3, 4, 5, 6]
        assert done.tokens.dtype == np.int32
        assert done.logprobs.dtype == np.float32
        np.testing.assert_allclose(done.logprobs, -0.53)
        assert done.runs == [(0, 3)]
        assert (done.finish, done.prompt_tokens) == ("length", 3)
        assert [token for token, _ in heard] == done.tokens.tolist()
        load = engine.load()
        assert (load.running, load.waiting, load.tokens_sampled, load.version, load.capacity) == (0, 0, 6, 3, 8)
        assert (await engine.generate(request("a"))).finish == "length"  # a name may be used again
        salts = [body["salt"] for path, body in toy.bodies if path == "/generate"]
        assert salts == [0, 3, 3]  # the first was tried out at connect
        assert len({body["id"] for path, body in toy.bodies if path == "/generate"}) == 3
        assert {len(body["id"]) for path, body in toy.bodies if path == "/generate"} == {32}


async def test_a_response_is_cut_to_what_the_context_leaves():
    async with engine_on(Toy()) as engine:
        assert len((await engine.generate(request("a", range(20), limit=500))).tokens) == 44


@pytest.mark.parametrize("bad", [request("a", [VOCABULARY]), request("a", [1] * 64)])
async def test_a_request_that_can_never_be_served(bad):
    async with engine_on(Toy()) as engine:
        with pytest.raises(DataError, match="request 'a'"):
            await engine.generate(bad)
        assert (await engine.generate(request("a"))).finish == "length"


async def test_one_name_is_in_flight_once():
    toy = Toy(free=False)
    async with engine_on_stepped(toy) as engine:
        first = asyncio.create_task(engine.generate(request("a")))
        await toy.started(1)
        with pytest.raises(ValueError, match="in flight"):
            await engine.generate(request("a"))
        await toy.step(6)
        assert (await first).finish == "length"


@asynccontextmanager
async def engine_on_stepped(toy, **more):
    """The toy is free while the engine connects."""
    toy.free = True
    async with engine_on(toy, **more) as engine:
        toy.free = False
        yield engine


async def heard(engine, count):
    await until(lambda: engine._tokens >= count)


async def test_abort_returns_what_there_is_and_takes_no_longer_than_a_second():
    toy = Toy()
    async with engine_on_stepped(toy) as engine:
        tasks = [asyncio.create_task(engine.generate(request(name))) for name in "abc"]
        await toy.started(3)
        await toy.step(2)
        await heard(engine, 6)
        assert await engine.abort("nobody") == 0
        assert await engine.abort("b") == 1
        assert (await tasks[1]).finish == "abort"
        assert (await tasks[1]).tokens.tolist() == [1, 2]
        assert (await tasks[1]).runs == [(0, 0)]
        toy.faults["/abort"] = ["hang", "hang"]
        begun = asyncio.get_running_loop().time()
        assert await engine.abort() == 2
        assert asyncio.get_running_loop().time() - begun < 1
        for task in (tasks[0], tasks[2]):
            assert ((await task).finish, (await task).tokens.tolist()) == ("abort", [1, 2])
        assert await engine.abort() == 0
        await toy.idle()  # hung up, although it never heard of an abort


async def test_an_abort_without_versions_keeps_the_tokens_whose_version_is_sure():
    """What is heard after an update may have been sampled before it, and only the server knows."""
    toy = Toy()
    async with engine_on_stepped(toy) as engine:
        await engine.apply(version(1))
        early, late = (asyncio.create_task(engine.generate(request(name))) for name in "ab")
        await toy.started(2)
        await toy.step(2)
        await until(lambda: engine.load().tokens_sampled == 4)
        unheard = asyncio.create_task(engine.generate(request("c")))
        await toy.started(3)
        await engine.apply(version(2))
        await toy.step(1)
        await until(lambda: engine.load().tokens_sampled == 7)
        toy.faults["/abort"] = [500] * 2
        assert await engine.abort("a") == await engine.abort("c") == 1
        done, empty = await early, await unheard
        assert (done.finish, done.tokens.tolist(), done.runs) == ("abort", [1, 2], [(0, 1)])
        np.testing.assert_allclose(done.logprobs, -0.51)
        assert (empty.finish, empty.tokens.tolist(), empty.runs) == ("abort", [], [])
        assert await engine.abort("b") == 1  # this time the server says it
        assert ((await late).tokens.tolist(), (await late).runs) == ([1, 2, 3], [(0, 1), (2, 2)])


async def test_what_waits_for_a_place_is_aborted_without_a_word_to_the_server():
    toy = Toy()
    async with engine_on_stepped(toy, settings=config(engine={"slots": 1})) as engine:
        first = asyncio.create_task(engine.generate(request("a")))
        await toy.started(1)
        second = asyncio.create_task(engine.generate(request("b")))
        await asyncio.sleep(0)
        assert (engine.load().running, engine.load().waiting) == (1, 1)
        assert await engine.abort("b") == 1
        assert (await second).tokens.size == 0
        assert (await second).runs == []
        assert toy.calls["/abort"] == 0
        await toy.step(6)
        assert (await first).finish == "length"


async def test_cancelling_frees_the_place_at_the_server():
    toy = Toy()
    async with engine_on_stepped(toy) as engine:
        task = asyncio.create_task(engine.generate(request("a")))
        await toy.started(1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        await toy.idle()
        assert engine.load().running == 0


@pytest.mark.parametrize("fault", ["nan", "uneven", "outside"])
async def test_an_answer_that_cannot_be_true_fails_its_request_alone(fault):
    toy = Toy()
    async with engine_on_stepped(toy) as engine:
        other = asyncio.create_task(engine.generate(request("other")))
        await toy.started(1)
        toy.faults["/generate"] = [fault]
        toy.free = True
        with pytest.raises(WireError):
            await engine.generate(request("a"))
        assert (await other).finish == "length"
        await engine.health()


async def test_a_request_that_the_server_refuses_and_one_that_it_fails_at():
    toy = Toy()
    async with engine_on(toy) as engine:
        toy.faults["/generate"] = [400, 500, 503, 503]
        with pytest.raises(DataError, match="fault 400"):
            await engine.generate(request("a"))
        with pytest.raises(StreamrlError, match="fault 500") as caught:
            await engine.generate(request("a"))
        assert not isinstance(caught.value, DataError | WireError | Unreachable)
        assert (await engine.generate(request("a"))).finish == "length"


async def test_a_listener_that_raises_fails_its_request_alone():
    async with engine_on(Toy()) as engine:

        def listen(*_):
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await engine.generate(request("a"), listen)
        assert (await engine.generate(request("a"))).finish == "length"


@pytest.mark.parametrize("fault", ["die", "short"])
async def test_a_response_that_breaks_off_at_a_living_server_ends_as_aborted_with_what_was_heard(fault):
    toy = Toy()
    async with engine_on(toy) as engine:
        toy.faults["/generate"] = [fault]
        done = await engine.generate(request("a"))
        assert (done.finish, done.tokens.tolist(), done.runs) == ("abort", [1], [(0, 0)])
        assert sum(path == "/generate" for path, _ in toy.bodies) == 2  # never sent twice
        await engine.health()


async def test_a_server_that_does_not_close_its_streams_costs_no_place(monkeypatch):
    monkeypatch.setattr(server, "_TAIL_SECONDS", 0.05)
    toy = Toy()
    async with engine_on(toy, settings=config(engine={"slots": 1})) as engine:
        toy.faults["/generate"] = ["late"]
        assert (await engine.generate(request("a"))).finish == "length"
        assert (await engine.generate(request("b"))).finish == "length"


async def test_what_was_cached_may_be_told_after_the_last_token(monkeypatch):
    monkeypatch.setattr(server, "_TAIL_SECONDS", 0.05)
    toy = Toy()
    async with engine_on(toy) as engine:
        toy.cached, toy.faults["/generate"] = 2, ["late"]
        untold = await engine.generate(request("a"))
        assert (untold.finish, untold.cached_tokens) == ("length", 0), "the response does without it"
        told = await engine.generate(request("b"))
        assert (told.tokens.tolist(), told.cached_tokens) == (untold.tokens.tolist(), 2)
        toy.cached = 99
        assert (await engine.generate(request("c"))).cached_tokens == 3, "no more than the prompt"


async def test_the_death_of_the_server_leaves_each_request_what_it_had_heard():
    toy = Toy()
    runner = serving(toy)
    url = await runner.__aenter__()
    engine = ServerEngine(make_dialect(), config(), url=url)
    await engine.start()
    toy.free = False
    await engine.apply(version(1))
    tasks = {name: asyncio.create_task(engine.generate(request(name))) for name in "ab"}
    await toy.started(2)
    await toy.step(2)
    await heard(engine, 4)
    await engine.apply(version(2))
    await toy.step(1)
    await heard(engine, 6)
    await runner.__aexit__(None, None, None)
    for task in tasks.values():
        with pytest.raises(ServerDied) as caught:
            await task
        died = caught.value
        assert died.tokens == [1, 2, 3]
        assert died.logprobs == [-0.51, -0.51, -0.52]
        assert died.runs == [(0, 1), (2, 2)]
        assert died.proved == 2
        copy = pickle.loads(pickle.dumps(died))
        assert (copy.tokens, copy.runs, copy.proved, copy.message) == (died.tokens, died.runs, 2, died.message)
    with pytest.raises(ServerDied, match=url):
        await engine.generate(request("c"))
    for call in (engine.health(), engine.apply(version(3)), engine.pause(), engine.abort(), engine.sleep()):
        with pytest.raises(Unreachable):
            await call
    assert engine.load().servers == 0
    await engine.close()
    await engine.close()


@pytest.mark.parametrize("fault", ["silent", "hang"])
async def test_a_server_that_gives_no_sign_of_life_is_dead(fault):
    """The clock is the one of `Life`; nothing waits for the deadline itself."""
    toy = Toy()
    async with engine_on(toy, settings=config(weights={"deadline": 0.6})) as engine:
        toy.faults["/generate"] = [fault]
        with pytest.raises(ServerDied, match="no token and no other sign of progress") as caught:
            await engine.generate(request("a"))
        assert caught.value.tokens == ([1] if fault == "silent" else [])


async def test_figures_that_change_are_a_sign_of_life(monkeypatch):
    monkeypatch.setattr(server, "_POLL_SECONDS", 0.05)
    toy = Toy()
    async with engine_on_stepped(toy, settings=config(weights={"deadline": 0.6})) as engine:
        task = asyncio.create_task(engine.generate(request("a")))
        await toy.started(1)
        for tokens in range(16):
            toy.figures["tokens_sampled"] = tokens
            await asyncio.wait([task], timeout=0.05)
            assert not task.done()
        with pytest.raises(ServerDied):
            await task


async def test_an_idle_server_that_answers_nothing_is_dead(monkeypatch):
    monkeypatch.setattr(server, "_POLL_SECONDS", 0.02)
    monkeypatch.setattr(server, "_POLL_DEADLINE", 0.1)
    toy = Toy()
    async with engine_on(toy, settings=config(weights={"deadline": 0.6})) as engine:
        toy.faults["/figures"] = ["hang"] * 100
        await until(lambda: engine.dead)
        with pytest.raises(ServerDied, match="no answer to anything"):
            await engine.health()


async def test_figures_of_the_server_are_in_the_load(monkeypatch):
    monkeypatch.setattr(server, "_POLL_SECONDS", 0.02)
    toy = Toy()
    toy.figures = {"running": 1, "waiting": 1, "cache_use": 0.5, "preemptions": 7}
    async with engine_on_stepped(toy) as engine:
        tasks = [asyncio.create_task(engine.generate(request(name))) for name in "ab"]
        await toy.started(2)
        await until(lambda: engine.load().cache_use)
        load = engine.load()
        assert (load.running, load.waiting, load.preemptions, load.servers) == (1, 1, 7, 1)
        await engine.pause()
        await until(lambda: engine.load().waiting == 0)  # what waits for it to go on is no queue
        await engine.resume()
        await until(lambda: engine.load().waiting == 1)
        assert engine.load().reading > load.reading
        await engine.abort()
        await asyncio.gather(*tasks)


async def test_a_server_without_figures_serves_all_the_same(monkeypatch, caplog):
    monkeypatch.setattr(server, "_POLL_SECONDS", 0.01)
    toy = Toy()
    async with engine_on(toy, settings=config(weights={"deadline": 0.5})) as engine:
        toy.faults["/figures"] = [404, "junk", 500] * 40
        await until(lambda: toy.calls["/figures"] >= 90)
        await engine.health()
        assert sum("does not tell its figures" in record.message for record in caplog.records) == 1


async def test_close_ends_what_is_in_flight():
    toy = Toy()
    async with engine_on_stepped(toy) as engine:
        task = asyncio.create_task(engine.generate(request("a")))
        await toy.started(1)
        await toy.step(1)
        await heard(engine, 1)
        await engine.close()
        assert ((await task).finish, (await task).tokens.tolist()) == ("abort", [1])
        await toy.idle()
        with pytest.raises(Unreachable, match="closed"):
            await engine.generate(request("b"))


async def test_an_engine_that_never_started_serves_nothing_and_closes():
    engine = ServerEngine(make_dialect(), config(), url="http://127.0.0.1:9")
    with pytest.raises(Unreachable, match="not been started"):
        await engine.generate(request("a"))
    assert engine.load().servers == 0
    await engine.close()


def test_a_url_or_a_server():
    with pytest.raises(ValueError, match="either"):
        ServerEngine(make_dialect(), config())


async def test_a_key_that_is_wanted_and_given(tmp_path):
    toy = Toy()
    toy.key = "s3cret"
    with pytest.raises(ConfigError, match="wants a key"):
        async with engine_on(toy):
            pass
    key = tmp_path / "key"
    key.write_text("s3cret\n")
    async with engine_on(toy, settings=config(engine={"api_key_file": str(key)})) as engine:
        assert (await engine.generate(request("a"))).finish == "length"
    with pytest.raises(ConfigError, match="cannot be read"):
        async with engine_on(toy, settings=config(engine={"api_key_file": str(tmp_path / "none")})):
            pass


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(http, "_FIRST_PAUSE", 0.01)
