"""Cut distributions against hand-computed numbers, properties and what the engine really samples."""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np
import pytest
import torch
from engine_kit import EOS, VOCABULARY, prompt, random_model
from hypothesis import given
from hypothesis import strategies as st

from streamrl.engine import Request
from streamrl.errors import DataError
from streamrl.producers.engines.drawing import sample, truncated
from streamrl.producers.engines.hf import HfEngine
from streamrl.producers.engines.slots import Job, SlotBatch
from tests.engines import tiny
from tests.engines.conformance_kit import run_config

HALVES = [0.5, 0.25, 0.125, 0.125]


def asked(**more) -> Request:
    return Request("r", np.asarray([3], np.int32), 8, **more)


def left(probabilities: list[float], **more) -> list[float]:
    [row] = truncated(torch.tensor([probabilities]).log(), [asked(**more)]).exp().tolist()
    return row


@pytest.mark.parametrize(
    ("probabilities", "cut", "expected"),
    [
        (HALVES, {"top_k": 1}, [1, 0, 0, 0]),
        (HALVES, {"top_k": 2}, [2 / 3, 1 / 3, 0, 0]),
        (HALVES, {"top_k": 3}, [4 / 7, 2 / 7, 1 / 7, 0]),
        (HALVES, {"top_k": 9}, HALVES),
        (HALVES, {"top_p": 0.4}, [1, 0, 0, 0]),
        (HALVES, {"top_p": 0.49}, [1, 0, 0, 0]),
        (HALVES, {"top_p": 0.51}, [2 / 3, 1 / 3, 0, 0]),
        (HALVES, {"top_p": 0.8}, [4 / 7, 2 / 7, 1 / 7, 0]),
        (HALVES, {"top_p": 0.9}, HALVES),
        (HALVES, {"min_p": 0.49}, [2 / 3, 1 / 3, 0, 0]),
        (HALVES, {"min_p": 0.24}, HALVES),
        (HALVES, {"min_p": 1.0}, [1, 0, 0, 0]),
        (HALVES, {"top_k": 3, "top_p": 0.8}, [2 / 3, 1 / 3, 0, 0]),  # of 7/8: 4/7 is too little, 6/7 enough
        (HALVES, {"min_p": 0.49, "top_p": 0.6}, [1, 0, 0, 0]),  # of 3/4: 2/3 is enough
        ([0.125, 0.5, 0.125, 0.25], {"top_k": 3}, [1 / 7, 4 / 7, 0, 2 / 7]),
        ([0.25] * 4, {"top_k": 2}, [0.5, 0.5, 0, 0]),
        ([0.25] * 4, {"top_p": 0.49}, [0.5, 0.5, 0, 0]),
        ([0.25] * 4, {"min_p": 1.0}, [0.25] * 4),
        ([0.5, 0.5, 0.0, 0.0], {"top_k": 3}, [0.5, 0.5, 0, 0]),
    ],
)
def test_what_is_left_by_hand(probabilities, cut, expected):
    assert left(probabilities, **cut) == pytest.approx(expected, abs=1e-6)


weights = st.lists(st.integers(0, 4), min_size=1, max_size=12).filter(any)


@given(weights, st.integers(0, 13), st.floats(0.01, 1.0), st.floats(0.0, 1.0))
def test_what_is_left_sums_to_1_and_is_the_most_probable_part(parts, top_k, top_p, min_p):
    """Small whole numbers as weights: most are tied."""
    whole = torch.tensor([parts], dtype=torch.float32) / sum(parts)
    [found] = truncated(whole.log(), [asked(top_k=top_k, top_p=top_p, min_p=min_p)]).exp().double().tolist()
    kept = [token for token, share in enumerate(found) if share > 0]
    order = sorted(range(len(parts)), key=lambda token: (-parts[token], token))
    assert sorted(order[: len(kept)]) == kept
    assert sum(found) == pytest.approx(1.0, abs=1e-6)
    mass = sum(parts[token] for token in kept)
    assert found == pytest.approx(
        [parts[token] / mass if token in kept else 0.0 for token in range(len(parts))], abs=1e-6
    )
    assert 1 <= len(kept) <= (top_k or len(parts))
    # by the definitions, on whole numbers; a float32 may put a sum on either side of its very border
    able = [token for token in order[: top_k or len(parts)] if parts[token] >= min_p * max(parts) - 1e-5]
    share = sum(parts[token] for token in able)
    if all(abs(parts[token] - min_p * max(parts)) > 1e-4 for token in order):
        before = [sum(parts[token] for token in able[:at]) for at in range(len(able))]
        if all(abs(each - top_p * share) > 1e-4 for each in before):
            expected = [t for t, each in zip(able, before, strict=True) if parts[t] and (each < top_p * share)]
            assert kept == sorted(expected)


def test_rows_that_are_cut_stand_beside_those_that_are_not():
    logits = torch.tensor(HALVES).log().repeat(4, 1).repeat(2_000, 1)
    cut = {row: asked(top_k=2) for row in range(0, 8_000, 4)} | {row: asked(min_p=1.0) for row in range(1, 8_000, 4)}
    temperature = torch.tensor([1.0, 1.0, 1.0, 2.0]).repeat(2_000)
    tokens, logprobs = sample(logits, temperature, torch.Generator().manual_seed(5), cut=cut)
    for at, expected in enumerate([[2 / 3, 1 / 3, 0, 0], [1, 0, 0, 0], HALVES, torch.tensor(HALVES).sqrt().tolist()]):
        whole = torch.tensor(expected) / sum(expected)
        found = torch.bincount(tokens[at::4], minlength=4) / 2_000
        assert 0.5 * float((found - whole).abs().sum()) < 0.03
        assert torch.allclose(logprobs[at::4].exp(), whole[tokens[at::4]], atol=1e-6)


def test_the_largest_uniform_number_draws_a_token_that_was_kept(monkeypatch):
    whole = torch.tensor([[0.9, 0.1, 0.0, 0.0]]).log()
    monkeypatch.setattr(torch, "rand", lambda *_a, **_k: torch.ones(1, 1, dtype=torch.float64))
    for cut in ({}, {0: asked(top_k=1)}):
        tokens, logprobs = sample(whole, None, torch.Generator(), cut=cut)
        assert np.isfinite(logprobs.tolist()).all()
        assert tokens.tolist() == [0 if cut else 1]


def answers(jobs: list[Job], stop: frozenset[int] = frozenset({EOS}), seed: int = 1) -> dict[int, list[int]]:
    generator = torch.Generator().manual_seed(seed)
    batch = SlotBatch(random_model("qwen2", 0), slots=3, context=64, stop_tokens=stop, generator=generator)
    found, waiting = {}, list(jobs)
    while waiting or batch.active:
        free = batch.slots - batch.active
        ended = batch.admit(waiting[:free]) if waiting and free else []
        waiting = waiting[free:] if free else waiting
        ended += batch.step() if batch.active else []
        found |= {outcome.ticket: outcome.tokens for outcome in ended}
    return found


def job(ticket: int, limit: int = 12, **more) -> Job:
    return Job(ticket, (3, 4, 5), limit, 1.0, request=asked(**more) if more else None)


def test_a_seed_gives_the_same_tokens_whoever_is_beside():
    seeded = [job(at, seed=7 + at % 2) for at in range(4)]
    first = answers([job(9), *seeded])
    second = answers([*reversed(seeded), job(10), job(11)], seed=2)
    for at in range(4):
        assert first[at] == second[at]
    assert first[0] == first[2] != first[1] == first[3]


def test_no_end_before_the_least_length():
    """Half of the vocabulary ends a response."""
    stops = frozenset(range(VOCABULARY // 2))
    short = answers([job(at) for at in range(30)], stops)
    assert min(map(len, short.values())) == 1
    long = answers([job(at, min_tokens=5) for at in range(30)], stops)
    assert all(not stops & set(tokens[:5]) for tokens in long.values())
    assert set(map(len, long.values())) > {6}


@pytest.mark.parametrize(
    ("cut", "most"),
    [({"top_k": 3}, 3), ({"top_p": 0.3}, VOCABULARY), ({"min_p": 0.5, "top_p": 0.9, "top_k": 4}, 4)],
)
async def test_the_engine_samples_from_what_is_left_and_says_its_log_probabilities(start, cut, most):
    engine = await start()
    tokens = prompt(5)
    requests = [Request(f"r{at}", np.asarray(tokens, np.int32), 1, 0.8, **cut) for at in range(800)]
    done = await asyncio.gather(*map(engine.generate, requests))
    with torch.no_grad():
        logits = random_model("qwen2", 0)(input_ids=torch.tensor([tokens])).logits[0, -1]
    [expected] = truncated(torch.log_softmax(logits.float() / 0.8, -1)[None], [asked(**cut)]).exp()
    assert 1 < int((expected > 0).sum()) <= most
    counts = Counter(int(one.tokens[0]) for one in done)
    found = torch.tensor([counts[token] / 800 for token in range(VOCABULARY)])
    assert 0.5 * float((found - expected).abs().sum()) < 0.08
    assert all(float(expected[one.tokens[0]].log()) == pytest.approx(float(one.logprobs[0]), abs=2e-5) for one in done)


async def test_what_no_distribution_can_be_cut_to_is_refused_and_the_engine_goes_on(start):
    engine = await start()
    for wrong in ({"top_p": 0.0}, {"top_p": 1.5}, {"top_k": -1}, {"min_p": -0.1}):
        with pytest.raises(DataError, match=next(iter(wrong))):
            await engine.generate(asked(**wrong))
    assert (await engine.generate(asked())).finish == "length"


async def test_texts_end_a_response_where_they_are_complete(tmp_path):
    """One token a byte: `bc` is two of them."""
    engine = HfEngine(run_config("hf", tmp_path, dtype="float32", slots=8), seed=3)
    await engine.start()
    try:
        text, stops = tiny.FIRST_PLAIN, (*"aeiou!", "bc")
        requests = [
            Request(f"r{at}", np.asarray([text, text + 1], np.int32), 2000, stop=stops, min_tokens=at % 3)
            for at in range(8)
        ]
        done = await asyncio.gather(*map(engine.generate, requests))
        tokenizer = engine._tokenizer
        assert tokenizer is not None
        for at, one in enumerate(done):
            said = [tokenizer.decode(one.tokens[:count]) for count in range(len(one.tokens) + 1)]
            assert one.finish == "stop"
            early, last = said[-2][len(said[at % 3]) :], said[-1][len(said[at % 3]) :]
            assert any(stop in last for stop in stops)
            assert not any(stop in early for stop in stops)
    finally:
        await engine.close()
