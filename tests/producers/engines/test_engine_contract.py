"""What every engine promises (`streamrl.engine.Generator`), of the one in this process."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from engine_kit import (
    EOS,
    KINDS,
    VOCABULARY,
    gated,
    held,
    named,
    plain,
    prompt,
    random_model,
    replay,
    request,
    versions,
)

from streamrl.errors import DataError

# --- log-probabilities and versions ---


@KINDS
async def test_log_probabilities_equal_a_plain_forward_pass(start, kind):
    engine = await start(kind)
    model = random_model(kind, 0)
    asked = [
        (request(f"{length}.{k}.{heat}", prompt(length), 1 + (5 * length + k) % 20, heat), heat)
        for length in (1, 2, 7, 16, 33, 40)
        for k in range(3)
        for heat in (1.0, 0.6)
    ]
    done = await asyncio.gather(*(engine.generate(one) for one, _ in asked))
    for (one, heat), completion in zip(asked, done, strict=True):
        assert len(completion.tokens) == len(completion.logprobs) == one.max_new_tokens
        assert completion.tokens.dtype == np.int32
        assert completion.logprobs.dtype == np.float32
        assert completion.finish == "length"
        assert completion.runs == [(0, 0)]
        np.testing.assert_allclose(completion.logprobs, plain(model, one.tokens.tolist(), completion, heat), atol=1e-5)


@KINDS
async def test_swaps_in_mid_request_are_exact(start, kind):
    """Three versions in one response; the oracle replays it with transformers' own cache, old keys and values kept."""
    engine = await start(kind)
    models = {version: random_model(kind, version) for version in (0, 3, 5)}
    prompts = [prompt(3, 1), prompt(3, 1), prompt(20, 2), prompt(35, 3)]
    async with gated(engine) as gate:
        early = [asyncio.create_task(engine.generate(request(str(k), p, 40))) for k, p in enumerate(prompts)]
        await gate.passed(6)
        await gate.during(engine.apply(held((1, 3), named(models[3]))))
        late = asyncio.create_task(engine.generate(request("late", prompts[0], 20)))
        await gate.passed(7)
        await gate.during(engine.apply(held((1, 5), named(models[5]))))
    for p, task in zip([*prompts, prompts[0]], [*early, late], strict=True):
        completion = await task
        seen = versions(completion)
        assert seen == sorted(seen)
        assert set(seen) == ({3, 5} if task is late else {0, 3, 5})
        np.testing.assert_allclose(completion.logprobs, replay(models, p, completion), atol=1e-5)
        # the oracle tells neighbouring boundaries apart
        first, version = completion.runs[1]
        completion.runs[1] = (first + 1, version)
        assert np.abs(completion.logprobs - replay(models, p, completion)).max() > 1e-3
    assert engine.load().version == 5


async def test_nothing_of_old_weights_is_served_after_a_swap(start):
    """Prompts of several cache blocks, asked for before, during and after a swap: later ones equal a plain pass."""
    engine = await start(slots=4)
    new = random_model("qwen2", 9)
    shared = prompt(100, 4)
    await asyncio.gather(*(engine.generate(request(f"before {k}", shared, 4)) for k in range(3)))
    async with gated(engine) as gate:
        alive = asyncio.create_task(engine.generate(request("alive", shared, 80)))
        await gate.passed(4)
        await gate.during(engine.apply(held((1, 1), named(new))))
        followers = [asyncio.create_task(engine.generate(request(f"after {k}", shared, 6))) for k in range(5)]
        await gate.passed(3)
    old = await alive
    assert set(versions(old)) == {0, 1}
    # what the old request generated is a prefix too, and its blocks mix both versions
    grown = [*shared, *old.tokens.tolist()]
    last = await engine.generate(request("grown", grown, 6))
    for tokens, completion in [(shared, await one) for one in followers] + [(grown, last)]:
        assert completion.runs == [(0, 1)]
        np.testing.assert_allclose(completion.logprobs, plain(new, tokens, completion), atol=1e-5)


async def test_a_swap_before_the_first_token_leaves_one_run(start):
    engine = await start()
    await engine.sleep(0)
    task = asyncio.create_task(engine.generate(request("a", prompt(4), 5)))
    await asyncio.sleep(0)
    await engine.apply(held((1, 1), named(random_model("qwen2", 1))))
    await engine.apply(held((1, 2), named(random_model("qwen2", 2))))
    await engine.wake()
    completion = await task
    assert completion.runs == [(0, 2)]
    np.testing.assert_allclose(completion.logprobs, plain(random_model("qwen2", 2), prompt(4), completion), atol=1e-5)


# --- sampling ---


@pytest.mark.parametrize("heat", [1.0, 0.5])
async def test_first_tokens_follow_the_distribution(start, heat):
    engine = await start(slots=64)
    model, text, count = random_model("qwen2", 0), prompt(6, 5), 3000
    done = await asyncio.gather(*(engine.generate(request(str(k), text, 1, heat)) for k in range(count)))
    with torch.no_grad():
        expected = torch.softmax(model(input_ids=torch.tensor([text])).logits[0, -1] / heat, -1).double().numpy()
    found = np.bincount([int(one.tokens[0]) for one in done], minlength=VOCABULARY)
    likely = expected * count >= 5
    assert likely.sum() >= 5
    chi = ((found - expected * count)[likely] ** 2 / (expected * count)[likely]).sum()
    # 1 in a million for a chi-square of 23 degrees of freedom is 74
    assert chi < 74
    assert found[~likely].sum() <= 5 + 6 * np.sqrt(expected[~likely].sum() * count)


async def test_equal_requests_get_different_responses(start):
    engine = await start()
    done = await asyncio.gather(*(engine.generate(request(str(k), prompt(5), 20)) for k in range(8)))
    assert len({one.tokens.tobytes() for one in done}) == 8


# --- ends ---


async def test_responses_end_at_the_first_end_of_sequence_or_at_their_limit(start):
    engine = await start(stops=True)
    asked = [request(str(k), prompt(1 + k % 9, k), 1 + k % 25) for k in range(120)]
    done = await asyncio.gather(*(engine.generate(one) for one in asked))
    assert {one.finish for one in done} == {"stop", "length"}
    for one, completion in zip(asked, done, strict=True):
        assert EOS not in completion.tokens[:-1]
        if completion.finish == "stop":
            assert completion.tokens[-1] == EOS
        else:
            assert completion.tokens[-1] != EOS
            assert len(completion.tokens) == one.max_new_tokens
    load = engine.load()
    assert (load.running, load.waiting) == (0, 0)
    assert load.tokens_sampled == sum(len(one.tokens) for one in done)
    assert load.busy_seconds > 0


async def test_more_requests_than_slots(start):
    engine = await start(slots=3)
    model = random_model("qwen2", 0)
    asked = [request(str(k), prompt(1 + k % 5, k), 1 + k % 7) for k in range(40)]
    for one, completion in zip(asked, await asyncio.gather(*map(engine.generate, asked)), strict=True):
        assert len(completion.tokens) == one.max_new_tokens
        np.testing.assert_allclose(completion.logprobs, plain(model, one.tokens.tolist(), completion), atol=1e-5)


async def test_the_context_is_filled_to_the_last_token_and_not_beyond(start):
    engine = await start(context=50)
    model = random_model("qwen2", 0)
    for length in (1, 42, 49):
        completion = await engine.generate(request("a", prompt(length), 1000))
        assert len(completion.tokens) == 50 - length
        assert completion.finish == "length"
        np.testing.assert_allclose(completion.logprobs, plain(model, prompt(length), completion), atol=1e-5)


async def test_requests_that_can_never_be_served(start):
    engine = await start(context=50)
    for bad in (
        request("empty", []),
        request("too long", prompt(50)),
        request("negative", [3, -1]),
        request("outside", [3, VOCABULARY]),
        request("limit", [3], limit=0),
        request("cold", [3], temperature=-0.5),
        request("nan", [3], temperature=float("nan")),
        request("hot", [3], temperature=float("inf")),
    ):
        with pytest.raises(DataError, match=bad.id):
            await engine.generate(bad)
    assert len((await engine.generate(request("good", [3], 4))).tokens) == 4


async def test_temperature_0_takes_the_most_probable_token_beside_others_that_draw(start):
    engine = await start()
    jobs = [("greedy", 0.0), ("drawn", 1.0), ("cool", 0.5), ("greedy too", 0.0)]
    done = await asyncio.gather(*(engine.generate(request(name, prompt(5), 20, heat)) for name, heat in jobs))
    model = random_model("qwen2", 0)
    tokens = done[0].tokens.tolist()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt(5), *tokens]])).logits[0, 4:-1]
    assert tokens == logits.argmax(-1).tolist()
    assert done[3].tokens.tolist() == tokens
    np.testing.assert_allclose(done[1].logprobs, plain(model, prompt(5), done[1]), atol=1e-5)
    np.testing.assert_allclose(done[2].logprobs, plain(model, prompt(5), done[2], 0.5), atol=1e-5)
    assert np.isfinite(done[0].logprobs).all()
