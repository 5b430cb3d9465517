"""The engine in this process: levels of sleep, figures, updates."""

from __future__ import annotations

import asyncio
import random

import numpy as np
from engine_kit import gated, held, named, plain, prompt, random_model, replay, request, versions


async def test_level_0_keeps_keys_and_values(start):
    engine = await start()
    models = {version: random_model("qwen2", version) for version in (0, 1)}
    async with gated(engine) as gate:
        task = asyncio.create_task(engine.generate(request("a", prompt(9), 40)))
        await gate.passed(5)
        await gate.during(engine.sleep(0))
        await engine.apply(held((1, 1), named(models[1])))
        await gate.running(engine.wake())
    done = await task
    np.testing.assert_allclose(done.logprobs, replay(models, prompt(9), done), atol=1e-5)
    assert set(versions(done)) == {0, 1}


async def test_many_requests_through_random_sleeps_and_swaps(start):
    """Versions only grow, nothing is lost, and every token is that of its version on keys and values as they grew."""
    engine = await start(slots=6)
    source = random.Random(5)
    models = {version: random_model("qwen2", version) for version in range(6)}
    asked = [request(str(k), prompt(source.choice([1, 4, 33, 66]), k % 7), 60 + k) for k in range(10)]
    async with gated(engine) as gate:
        tasks = [asyncio.create_task(engine.generate(one)) for one in asked]
        for version in range(1, 6):
            await gate.passed(source.randint(1, 6))
            await gate.during(engine.sleep(0))
            await engine.apply(held((1, version), named(models[version])))
            await gate.running(engine.wake())
    for one, task in zip(asked, tasks, strict=True):
        done = await task
        assert len(done.tokens) == one.max_new_tokens
        seen = versions(done)
        assert seen == sorted(seen)
        assert seen[-1] == 5
        np.testing.assert_allclose(done.logprobs, replay(models, one.tokens.tolist(), done), atol=1e-5)


async def test_level_0_stops_decoding_and_keeps_all(start):
    engine = await start()
    async with gated(engine) as gate:
        task = asyncio.create_task(engine.generate(request("a", prompt(3), 30)))
        await gate.passed(4)
        await gate.during(engine.sleep(0))
        entered = gate.entered
        await engine.sleep(0)
        assert gate.entered == entered
        await engine.wake()
    np.testing.assert_allclose((await task).logprobs, plain(random_model("qwen2", 0), prompt(3), await task), atol=1e-5)


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
