"""An engine that leaves its devices in the middle of responses and comes back: nothing sampled is lost."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from engine_kit import engine_config, held, named, random_model, request, versions

from streamrl.errors import Unreachable
from streamrl.producers.engines.hf import HfEngine

PROMPT = [5, 6, 7, 8]


@pytest.fixture
async def shared(model_dir):
    engine = HfEngine(engine_config(model_dir("qwen2", stops=False)), seed=7)
    await engine.start()
    yield engine
    await engine.close()


@torch.no_grad()
def by_version(models, prompt, done):
    """Each token by a plain pass of its version's model: after every return the prefix was computed anew."""
    found = []
    for place, version in enumerate(versions(done)):
        ids = torch.tensor([[*prompt, *done.tokens[:place].tolist()]])
        logits = models[version](input_ids=ids).logits[0, -1]
        found.append(torch.log_softmax(logits.float(), -1)[int(done.tokens[place])].item())
    return np.asarray(found)


async def sampled(engine: HfEngine, tokens: int) -> None:
    async with asyncio.timeout(30):
        while engine.load().tokens_sampled < tokens:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_responses_go_on_after_every_turn_with_the_weights_then_in_force(shared):
    models = {version: random_model("qwen2", version) for version in range(4)}
    tasks = [asyncio.create_task(shared.generate(request(str(k), PROMPT, 150))) for k in range(8)]
    for version in (1, 2, 3):
        await sampled(shared, shared.load().tokens_sampled + 100)
        await shared.sleep()
        await shared.sleep()
        before = shared.load().tokens_sampled
        await shared.apply(held((1, version), named(models[version])))
        assert shared.load().tokens_sampled == before
        await shared.wake()
        await shared.wake()
    for done in await asyncio.gather(*tasks):
        assert len(done.tokens) == 150
        assert done.finish == "length"
        seen = versions(done)
        assert seen == sorted(seen)
        np.testing.assert_allclose(done.logprobs, by_version(models, PROMPT, done), atol=1e-4)


async def test_requests_that_come_while_it_is_away_wait(shared):
    await shared.sleep()
    task = asyncio.create_task(shared.generate(request("a", PROMPT, 5)))
    await asyncio.sleep(0)
    assert not task.done()
    await shared.wake()
    assert len((await task).tokens) == 5


async def test_a_close_while_away_keeps_what_was_sampled(shared):
    task = asyncio.create_task(shared.generate(request("a", PROMPT, 190)))
    await sampled(shared, 5)
    await shared.sleep()
    await shared.close()
    done = await task
    assert done.finish == "abort"
    assert 5 <= len(done.tokens) < 190
    assert len(done.logprobs) == len(done.tokens)


async def test_a_close_ends_what_is_sampled(shared):
    task = asyncio.create_task(shared.generate(request("a", PROMPT, 190)))
    await sampled(shared, 5)
    await shared.close()
    assert ((await task).finish, len((await task).tokens) >= 5) == ("abort", True)


async def test_a_close_while_away_ends_what_waits(shared):
    await shared.sleep()
    task = asyncio.create_task(shared.generate(request("a", PROMPT, 5)))
    await asyncio.sleep(0)
    await shared.close()
    assert (await task).finish == "abort"
    with pytest.raises(Unreachable):
        await shared.generate(request("b", PROMPT, 5))


async def test_a_turn_that_is_over_before_a_request_began_is_waited_out(shared):
    await shared.sleep()
    task = asyncio.create_task(shared.generate(request("a", PROMPT, 5)))
    await asyncio.sleep(0)
    await shared.wake()
    await shared.sleep()  # the request has not had its turn in between
    assert not task.done()
    await shared.wake()
    assert ((await task).finish, len((await task).tokens)) == ("length", 5)
