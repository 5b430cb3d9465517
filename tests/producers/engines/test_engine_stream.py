"""The engine in this process: listeners, pauses, levels and tags of sleep."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import numpy as np
import pytest
from engine_kit import LONG, gated, held, named, plain, prompt, random_model, replay, request, versions

from streamrl.errors import Refused
from streamrl.producers.engines.slots import JobProgress


class Ear:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.calls = 0

    def __call__(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        assert len(tokens) == len(logprobs) > 0
        self.tokens += tokens
        self.logprobs += logprobs
        self.calls += 1

    def equals(self, done) -> bool:
        return self.tokens == done.tokens.tolist() and np.array_equal(np.float32(self.logprobs), done.logprobs)


# --- listeners ---


async def test_a_listener_hears_every_token_once_and_before_the_result(start):
    engine = await start(slots=4)
    ears = [Ear() for _ in range(12)]
    async with gated(engine) as gate:
        tasks = [
            asyncio.create_task(engine.generate(request(str(k), prompt(3 + k % 3, k), 5 + k), ear if k % 2 else None))
            for k, ear in enumerate(ears)
        ]
        await gate.passed(5)
        assert not tasks[1].done()
        assert 3 <= len(ears[1].tokens) <= 5
    for k, (ear, task) in enumerate(zip(ears, tasks, strict=True)):
        done = await task
        assert len(done.tokens) == 5 + k
        if k % 2:
            assert ear.equals(done)
            assert ear.calls >= len(done.tokens) - 1
        else:
            assert not ear.calls


async def test_who_does_not_listen_costs_nothing(start):
    engine = await start()
    told: list[JobProgress] = []
    engine._hear = told.append
    await asyncio.gather(*(engine.generate(request(str(k), prompt(3), 20)) for k in range(5)))
    assert not told


async def test_a_listener_hears_what_an_aborted_request_has(start):
    engine = await start()
    ear, deaf = Ear(), Ear()
    async with gated(engine) as gate:
        task = asyncio.create_task(engine.generate(request("a", prompt(3), LONG), ear))
        cancelled = asyncio.create_task(engine.generate(request("b", prompt(3), LONG), deaf))
        await gate.passed(4)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        heard = len(deaf.tokens)
        await gate.passed(2)
        await gate.during(engine.abort("a"))
        done = await task
    assert done.finish == "abort"
    assert ear.equals(done)
    assert len(deaf.tokens) == heard


async def test_a_listener_that_fails_ends_its_own_request_only(start):
    engine = await start(slots=2)

    def fail(*_: object) -> None:
        raise RuntimeError("a bug of the caller")

    good, bad, later = await asyncio.gather(
        engine.generate(request("good", prompt(3), 30)),
        engine.generate(request("bad", prompt(3), LONG), fail),
        engine.generate(request("later", prompt(3), 3)),
        return_exceptions=True,
    )
    assert isinstance(bad, RuntimeError)
    assert len(good.tokens) == 30
    assert len(later.tokens) == 3
    assert len((await engine.generate(request("bad", prompt(3), 3))).tokens) == 3


# --- pause ---


async def test_a_pause_keeps_keys_and_values(start):
    engine = await start()
    models = {version: random_model("qwen2", version) for version in (0, 1)}
    async with gated(engine) as gate:
        task = asyncio.create_task(engine.generate(request("a", prompt(9), 40)))
        await gate.passed(5)
        await gate.during(engine.pause())
        await engine.apply(held((1, 1), named(models[1])))
        await gate.running(engine.resume())
    done = await task
    np.testing.assert_allclose(done.logprobs, replay(models, prompt(9), done), atol=1e-5)
    assert set(versions(done)) == {0, 1}


async def test_an_abort_while_paused_returns_what_there_is_and_new_requests_wait(start):
    engine = await start()
    async with gated(engine) as gate:
        task = asyncio.create_task(engine.generate(request("a", prompt(3), LONG)))
        await gate.passed(4)
        await gate.during(engine.pause())
        assert not task.done()
        assert await engine.abort("a") == 1
        done = await task
        assert (done.finish, len(done.tokens) >= 3) == ("abort", True)
        after = asyncio.create_task(engine.generate(request("b", prompt(3), 4)))
        await asyncio.sleep(0)
        assert await engine.abort("nobody") == 0
        assert not after.done()
        await engine.resume()
    assert len((await after).tokens) == 4


async def test_many_requests_through_random_pauses_and_swaps(start):
    """Versions only grow, nothing is lost, and every token is that of its version on keys and values as they grew."""
    engine = await start(slots=6)
    source = random.Random(5)
    models = {version: random_model("qwen2", version) for version in range(6)}
    asked = [request(str(k), prompt(source.choice([1, 4, 33, 66]), k % 7), 60 + k) for k in range(10)]
    ears = [Ear() for _ in asked]
    async with gated(engine) as gate:
        tasks = [asyncio.create_task(engine.generate(one, ear)) for one, ear in zip(asked, ears, strict=True)]
        for version in range(1, 6):
            await gate.passed(source.randint(1, 6))
            await gate.during(engine.pause())
            await engine.apply(held((1, version), named(models[version])))
            await gate.running(engine.resume())
    for one, ear, task in zip(asked, ears, tasks, strict=True):
        done = await task
        assert len(done.tokens) == one.max_new_tokens
        assert ear.equals(done)
        seen = versions(done)
        assert seen == sorted(seen)
        assert seen[-1] == 5
        np.testing.assert_allclose(done.logprobs, replay(models, one.tokens.tolist(), done), atol=1e-5)


# --- sleep ---


async def test_level_0_stops_decoding_and_keeps_all(start):
    engine = await start()
    async with gated(engine) as gate:
        task = asyncio.create_task(engine.generate(request("a", prompt(3), 30)))
        await gate.passed(4)
        await gate.during(engine.sleep(0))
        entered = gate.entered
        with pytest.raises(Refused, match="being decoded"):
            await engine.sleep(1)
        await engine.wake(["weights"])
        assert await engine.abort("nobody") == 0
        assert gate.entered == entered
        await engine.wake(["kv_cache"])
    np.testing.assert_allclose((await task).logprobs, plain(random_model("qwen2", 0), prompt(3), await task), atol=1e-5)


async def test_waking_in_parts(start):
    engine = await start()
    await engine.generate(request("before", prompt(40), 4))
    await engine.sleep(1)
    await engine.sleep(1)
    task = asyncio.create_task(engine.generate(request("a", prompt(40), 6)))
    await engine.wake(["kv_cache"])
    assert await engine.abort("nobody") == 0
    assert not task.done()
    await engine.apply(held((1, 1), named(random_model("qwen2", 1))))
    await engine.wake(["weights"])
    done = await task
    assert done.runs == [(0, 1)]
    np.testing.assert_allclose(done.logprobs, plain(random_model("qwen2", 1), prompt(40), done), atol=1e-5)


# --- load, an update without its caller ---


async def test_figures_of_a_loaded_engine(start):
    engine = await start(slots=2)
    idle = engine.load()
    assert (idle.capacity, idle.servers) == (2, 1)
    assert idle.cache_use < 0.01
    async with gated(engine) as gate:
        tasks = [asyncio.create_task(engine.generate(request(str(k), prompt(60, k), 30))) for k in range(3)]
        await gate.passed(4)
        load = engine.load()
        assert (load.running, load.waiting) == (2, 1)
        assert 0.1 < load.cache_use <= 1
    await asyncio.gather(*tasks)
    assert engine.load().cache_use < 0.01


async def test_an_update_goes_on_without_its_caller(start):
    engine = await start()
    version = held((1, 1), named(random_model("qwen2", 1)))
    async with gated(engine) as gate:
        running = asyncio.create_task(engine.generate(request("a", prompt(3), 20)))
        await gate.passed(3)
        task = asyncio.create_task(engine.apply(version))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert versions(await running)[-1] == 1
