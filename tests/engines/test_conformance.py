"""What every engine must do, asked of real ones: tokens, log-probabilities, versions, sleep, aborts."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from streamrl.errors import DataError
from streamrl.producers.engines.drawing import truncated
from streamrl.producers.stopping import StopTexts
from streamrl.producers.tokenizer import Tokenizer
from tests.engines import tiny
from tests.engines.conformance_kit import BF16, INTERVAL, SOON, Bench, prompt

pytestmark = [
    pytest.mark.engines,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="session"),
]

HF = pytest.mark.parametrize("running", ["hf"], indirect=True)
SERVERS = pytest.mark.parametrize("running", ["vllm", "sglang"], indirect=True)


@pytest.mark.parametrize("length", [1, 24, 200])
async def test_log_probabilities_equal_a_plain_forward_pass(bench: Bench, length: int):
    tokens = prompt(length, length)
    done = await bench.generate(tokens, 64)
    assert bench.judge(tokens, done) == [(0, 64, bench.number)]
    assert done.finish == "length"
    assert done.tokens.dtype == np.int32


async def test_log_probabilities_are_those_of_the_temperature(bench: Bench):
    tokens = prompt(1)
    done = await bench.generate(tokens, 64, temperature=0.7)
    with torch.no_grad():
        logits = bench.models[bench.number](input_ids=torch.tensor([[*tokens, *done.tokens.tolist()]])).logits
    scaled = torch.log_softmax(logits[0, len(tokens) - 1 : -1].float() / 0.7, -1)
    wanted = scaled.gather(1, torch.from_numpy(done.tokens.astype(np.int64))[:, None])[:, 0]
    assert float((wanted - torch.from_numpy(done.logprobs)).abs().max()) < BF16 / 0.7


async def test_temperature_0_is_greedy_beside_requests_that_draw(bench: Bench):
    tokens = prompt(7)
    greedy, drawn = await asyncio.gather(bench.generate(tokens, 32, temperature=0.0), bench.generate(tokens, 32))
    with torch.no_grad():
        logits = bench.models[bench.number](input_ids=torch.tensor([[*tokens, *greedy.tokens.tolist()]])).logits
    logits = logits[0, len(tokens) - 1 : -1].float()
    chosen = logits.gather(1, torch.from_numpy(greedy.tokens.astype(np.int64))[:, None])[:, 0]
    assert float((logits.max(-1).values - chosen).max()) < BF16  # the engine's kernels may see another one a hair ahead
    assert np.isfinite(greedy.logprobs).all()
    bench.judge(tokens, drawn)


@pytest.mark.parametrize("cut", [{"top_k": 5}, {"top_k": 320, "top_p": 0.4}, {"top_k": 320, "min_p": 0.8}])
async def test_log_probabilities_are_those_of_the_cut_distribution(bench: Bench, cut: dict[str, Any]):
    """SGLang tells them with a `top_k` alone; here that may be the whole vocabulary.

    Of these weights `min_p` 0.8 leaves about three tokens, with room between them; at 0.6 those at the border are so
    dense that rounding moves it by more of them than the judge allows, once in some hundred responses.
    """
    tokens = prompt(11)
    done = await asyncio.gather(
        *(bench.generate(tokens, 24, temperature=1.5, affinity="group", **cut) for _ in range(4)),
        bench.generate(tokens, 24),
    )
    bench.judge(tokens, done.pop())
    for one in done:
        with torch.no_grad():
            logits = bench.models[bench.number](input_ids=torch.tensor([[*tokens, *one.tokens.tolist()]])).logits
        whole = torch.log_softmax(logits[0, len(tokens) - 1 : -1].float() / 1.5, -1)
        ids = torch.from_numpy(one.tokens.astype(np.int64))[:, None]
        requests = [bench.request(tokens, 1, temperature=1.5, **cut)] * len(ids)
        left = torch.isfinite(truncated(whole, requests))
        assert float(left.gather(1, ids).float().mean()) > 0.9  # a token at the very border may be kept there, not here
        kept = left.sum(-1)
        # In bfloat16 tokens at the border are equal, or change places: the server may keep a few more or less.
        masses = whole.sort(-1, descending=True).values.logcumsumexp(-1)
        chosen = whole.gather(1, ids)[:, 0]
        told = torch.from_numpy(one.logprobs)
        more = torch.arange(-8, 9)
        at = (kept[:, None] - 1 + more).clamp(0, masses.shape[1] - 1)
        errors = (chosen[:, None] - masses.gather(1, at) - told[:, None]).abs()
        errors[more.abs() > (kept[:, None] // 10).clamp(min=3)] = torch.inf
        assert float(errors[:, 7:10].amin(1).median()) < BF16, "most are cut at the same place, or a token beside it"
        assert float(errors.amin(1).max()) < 2 * BF16
        assert float((chosen - told).abs().min()) > 2 * BF16  # those of the whole distribution are others


async def test_a_text_ends_a_response_and_stays_in_its_tokens(bench: Bench):
    tokenizer = Tokenizer.load(bench.config.model)
    # Servers decode the prompt, too: bytes at its end that are no character would come with the response.
    tokens, stops = tokenizer.plain_ids("What comes now? "), (*"iunrt", "yz")  # in no special token
    least = [0] * 6 if bench.kind == "sglang" else range(6)  # it is told of no text where there is a least length
    done = await asyncio.gather(*(bench.generate(tokens, 2000, stop=stops, min_tokens=at) for at in least))
    for at, one in zip(least, done, strict=True):
        ends, said = StopTexts(stops, tokenizer.decode, at), tokenizer.decode(one.tokens)
        assert (one.finish, len(ends.cut(one).tokens)) == ("stop", len(one.tokens))
        assert said[len(ends.before(said, one.tokens.tolist())) :] in stops
        assert len(one.tokens) > at
        bench.judge(tokens, one)


@SERVERS
async def test_a_schema_leaves_few_tokens_and_log_probabilities_are_those_of_them(bench: Bench):
    tokenizer = Tokenizer.load(bench.config.model)
    tokens, allowed = tokenizer.plain_ids("True? "), ("true", "false")
    texts = [tokenizer.decode([at]) for at in range(tiny.VOCABULARY)]
    for done in await asyncio.gather(
        *(bench.generate(tokens, 32, json_schema='{"type": "boolean"}') for _ in range(4))
    ):
        own = done.tokens.tolist()
        assert (tokenizer.decode(own) in allowed, own[-1], done.finish) == (True, tiny.EOS, "stop")
        with torch.no_grad():
            logits = bench.models[bench.number](input_ids=torch.tensor([[*tokens, *own]])).logits
        said = ""
        for at, token in enumerate(own[:-1]):
            fit = [i for i, text in enumerate(texts) if text and any(word.startswith(said + text) for word in allowed)]
            left = torch.log_softmax(logits[0, len(tokens) - 1 + at, fit].float(), -1)
            assert abs(float(left[fit.index(token)]) - float(done.logprobs[at])) < BF16
            said += texts[token]
        assert done.logprobs[-1] == pytest.approx(0, abs=1e-4)


async def test_no_end_before_the_least_length(bench: Bench):
    done = await bench.generate([*prompt(2), tiny.STOP], 64, min_tokens=7)
    assert len(done.tokens) == 64 or (len(done.tokens) > 7 and done.finish == "stop")
    assert tiny.EOS not in done.tokens[:7]
    ids = torch.tensor([[*prompt(2), tiny.STOP, *done.tokens.tolist()]])
    with torch.no_grad():
        logits = bench.models[bench.number](input_ids=ids).logits[0, 24:-1].float()
    logits[:7, tiny.EOS] = -torch.inf  # as good as certain, and impossible
    expected = torch.log_softmax(logits, -1).gather(1, ids[0, 25:, None])[:, 0]
    assert float((expected - torch.from_numpy(done.logprobs)).abs().max()) < 2 * BF16


@pytest.mark.parametrize("running", ["hf", "vllm"], indirect=True)
async def test_a_seed_gives_the_same_response_again(bench: Bench):
    """SGLang draws for all responses by one seed."""
    tokens = prompt(13)
    first, other, again = await asyncio.gather(*(bench.generate(tokens, 8, seed=seed) for seed in (3, 4, 3)))
    assert first.tokens.tolist() == again.tokens.tolist() != other.tokens.tolist()
    bench.judge(tokens, first)


async def test_the_end_of_sequence_is_a_token_of_the_response(bench: Bench):
    done = await bench.generate([*prompt(2), tiny.STOP], 64)
    assert (done.finish, done.tokens.tolist(), done.runs) == ("stop", [tiny.EOS], [(0, bench.number)])
    assert abs(done.logprobs[0]) < BF16


async def test_the_context_ends_a_response_and_refuses_a_prompt(bench: Bench):
    tokens = prompt(3, tiny.CONTEXT - 10)
    done = await bench.generate(tokens, 64)
    assert done.finish == "length"
    # SGLang keeps two tokens of its context to itself.
    assert len(done.tokens) in ({8, 9, 10} if bench.kind == "sglang" else {10})
    for wrong in ([], prompt(3, tiny.CONTEXT), prompt(3, tiny.CONTEXT + 50), [tiny.VOCABULARY + 4]):
        with pytest.raises(DataError):
            await bench.generate(wrong, 8)
    bench.judge(prompt(4), await bench.generate(prompt(4), 8))


async def test_samples_of_one_prompt_differ_and_are_all_right(bench: Bench):
    tokens = prompt(5)
    done = await asyncio.gather(*(bench.generate(tokens, 32, affinity="group") for _ in range(8)))
    assert len({tuple(one.tokens.tolist()) for one in done}) == 8
    for one in done:
        bench.judge(tokens, one)


async def test_one_request_shows_two_versions_without_an_abort(bench: Bench):
    before, tokens = bench.number, prompt(7)
    await bench.prepare(1)
    begun = bench.begin(tokens)
    first = await begun[1].at_least(2 * INTERVAL)
    after = await bench.apply()
    done = await bench.end(begun, 8 * INTERVAL)
    (_, change, old), (_, _, new) = bench.judge(tokens, done)
    assert (old, new) == (before, after)
    assert first <= change, "what was heard before the update was sampled before it"


async def test_a_request_goes_on_through_several_versions(bench: Bench):
    numbers, tokens = [bench.number], prompt(8)
    await bench.prepare(3)
    begun = bench.begin(tokens)
    await begun[1].at_least(1)
    for _ in range(3):
        await bench.more(2 * INTERVAL)
        numbers.append(await bench.apply())
    done = await bench.end(begun, 4 * INTERVAL)
    assert [number for _, _, number in bench.judge(tokens, done)] == numbers


async def test_a_cached_prompt_is_computed_anew_by_new_weights(bench: Bench):
    tokens = prompt(9, 200)
    for _ in range(2):
        bench.judge(tokens, await bench.generate(tokens, 16))
    number = await bench.apply()
    done = await bench.generate(tokens, 16)
    assert bench.judge(tokens, done) == [(0, 16, number)]


@SERVERS
async def test_a_later_turn_says_how_much_the_server_still_had_of_earlier_ones(bench: Bench):
    first, tokens = bench.number, prompt(17, 600)

    async def turn(cache_version: int | None) -> int:
        done = await bench.generate(tokens, 40, cache_version=cache_version)
        tokens.extend([*done.tokens.tolist(), *prompt(18, 30)])
        return done.cached_tokens

    assert await turn(first) == 0
    # All of the last turn but its last token, in whole blocks: 128 tokens in vLLM on a CPU, one in SGLang.
    block = 128 if bench.kind == "vllm" else 1
    assert await turn(first) == 639 // block * block
    await bench.apply()
    assert await turn(first) == 709 // block * block, "new weights go on with it"
    assert await turn(None) == 0, "and leave it when that is wanted"


@HF
async def test_an_abort_of_all_leaves_nothing_in_flight(bench: Bench):
    begun = [bench.begin(prompt(20 + index)) for index in range(8)]
    for _, heard in begun:
        await heard.at_least(1)
    async with asyncio.timeout(SOON):
        await bench.engine.abort()
        done = await asyncio.gather(*(task for task, _ in begun))
    assert {one.finish for one in done} == {"abort"}
    for index, one in enumerate(done):
        bench.judge(prompt(20 + index), one)
    assert bench.engine.load().running == bench.engine.load().waiting == 0


async def test_a_cancelled_request_gives_its_place_back(bench: Bench):
    begun = [bench.begin(prompt(30 + index), 400) for index in range(4)]
    for _, heard in begun:
        await heard.at_least(1)
    for task, _ in begun[:3]:
        task.cancel()
    async with asyncio.timeout(60):
        kept = await begun[3][0]
    assert len(kept.tokens) == 400
    bench.judge(prompt(33), kept)
    if bench.kind == "hf":
        assert bench.engine.load().running == 0
    else:
        await bench.server.idle()


async def test_sixty_four_requests_while_twenty_versions_are_applied(bench: Bench):
    first = bench.number
    await bench.prepare(20)
    # No two have their first token in common: a server may queue some of them, and keep it for them meanwhile.
    prompts = [[tiny.FIRST_PLAIN + index, *prompt(100 + index)] for index in range(64)]
    begun = [bench.begin(tokens, 300) for tokens in prompts]
    await begun[0][1].at_least(1)
    for _ in range(20):
        await bench.apply()
    done = await asyncio.gather(*(task for task, _ in begun))
    for tokens, one in zip(prompts, done, strict=True):
        assert (one.finish, len(one.tokens)) == ("length", 300)
        bench.judge(tokens, one)
    seen = {number for one in done for _, number in one.runs}
    assert len(seen) >= 3
    assert seen <= set(range(first, first + 21))
    assert any(len(one.runs) > 1 for one in done)


@HF
async def test_the_load_tells_what_runs(bench: Bench):
    before = bench.engine.load()
    begun = [bench.begin(prompt(60 + index)) for index in range(4)]
    for _, heard in begun:
        await heard.at_least(1)
    assert bench.engine.load().running + bench.engine.load().waiting == 4
    await bench.engine.abort()
    tokens = sum([len((await task).tokens) for task, _ in begun])
    after = bench.engine.load()
    assert after.running == after.waiting == 0
    assert after.tokens_sampled >= before.tokens_sampled + tokens
    assert after.busy_seconds > before.busy_seconds
    assert (after.version, after.servers) == (bench.number, 1)


@HF
async def test_waking_undoes_sleep(bench: Bench):
    begun = bench.begin(prompt(70))
    await begun[1].at_least(1)
    await bench.engine.sleep(1)
    try:
        assert not begun[0].done()
        sampled = bench.sampled
        late, _ = bench.begin(prompt(71), 16)
        number = await bench.apply()
        assert bench.sampled == sampled
    finally:
        await bench.engine.wake()
    assert bench.judge(prompt(71), await late) == [(0, 16, number)]
    bench.judge_apart(prompt(70), await bench.end(begun))


@SERVERS
async def test_requests_wait_while_a_server_has_left_its_devices(bench: Bench):
    control, tokens, before = bench.server.control, prompt(72), bench.number
    await bench.prepare(1)
    begun = bench.begin(tokens)
    await begun[1].at_least(2 * INTERVAL)
    await control.sleep()
    assert control.blocked
    first = len(begun[1].tokens)
    late, heard = bench.begin(prompt(73), 16)
    applying = asyncio.create_task(bench.apply())
    # An answer to a second call says that the server had time for a step, if it made any.
    assert (await bench.server.metrics()).cache_use == (await bench.server.metrics()).cache_use
    assert not applying.done()
    assert not heard.tokens
    held = len(begun[1].tokens)
    assert held <= first + 2 * INTERVAL
    await control.wake()
    after = await applying
    assert not control.blocked
    beside = await late
    done = await bench.end(begun, 4 * INTERVAL)
    assert bench.judge(prompt(73), beside) == [(0, 16, after)]
    (_, change, old), (_, _, new) = bench.judge(tokens, done)
    assert (old, new) == (before, after)
    assert held <= change <= held + 2 * INTERVAL, "it comes back with the version that waited"


@SERVERS
async def test_a_server_tells_what_runs(bench: Bench):
    begun = [bench.begin(prompt(60 + index)) for index in range(4)]
    for _, heard in begun:
        await heard.at_least(1)
    figures = await bench.server.metrics()
    assert figures.running + figures.waiting == 4
    assert 0 < figures.cache_use < 1
    for one in begun:
        await bench.end(one)
    await bench.server.idle()
