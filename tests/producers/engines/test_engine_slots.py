"""The static-slot batch by itself, without threads: random schedules against an oracle, and its parts."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from engine_kit import EOS, KINDS, VOCABULARY, named, random_model, replay
from hypothesis import given
from hypothesis import strategies as st

from streamrl import wire
from streamrl.engine import Completion
from streamrl.errors import WeightsError
from streamrl.producers.engines import slots
from streamrl.producers.engines.drawing import sample
from streamrl.producers.engines.slots import Job, SlotBatch, SlotCache, round_up
from streamrl.producers.engines.weights import copy_weights


def batch_of(model, count=5, context=200, stop=frozenset({EOS})):
    return SlotBatch(model, slots=count, context=context, stop_tokens=stop, generator=torch.Generator().manual_seed(1))


def completion(outcome: Job) -> Completion:
    return Completion(
        np.asarray(outcome.tokens, np.int32),
        np.asarray(outcome.logprobs, np.float32),
        outcome.runs,
        outcome.finish,
        0,
    )


@given(st.integers(0, 9), st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3))), st.integers(0, 5))
def test_runs_say_which_version_sampled_which_token(version, steps, tail):
    job, truth = Job(0, (3,), 99, 1.0), []
    for tokens, newer in [*steps, (tail, 0)]:
        job.swap(version)
        truth += [version] * tokens
        job.tokens = truth
        version += newer
    runs = job.runs
    blank = bytes(4 * len(truth))
    # the wire refuses runs that are out of order or do not cover the tokens
    sample = wire.Sample(tokens=blank, logprobs=blank, runs=runs, finish="stop")
    assert sample.token_versions.tolist() == truth


@KINDS
@pytest.mark.parametrize("seed", range(4))
def test_random_schedules_are_exact(kind, seed, monkeypatch):
    """Admissions, ends, aborts, swaps, gaps, moves and growth in random order: every token as the oracle says."""
    monkeypatch.setattr(slots, "PREFILL_TOKENS", 40)
    source = random.Random(seed)
    model = random_model(kind, 0)
    weights = {version: random_model(kind, version) for version in (0, 1, 2)}
    batch = batch_of(model)
    moves = []
    move = batch._cache.move
    monkeypatch.setattr(batch._cache, "move", lambda *args: (moves.append(args), move(*args)))
    jobs: dict[int, Job] = {}
    ended: list[Job] = []
    texts = [tuple(source.randrange(3, VOCABULARY) for _ in range(length)) for length in (1, 2, 9, 30, 70)]
    while len(jobs) < 60 or batch.active:
        free = batch.slots - batch.active
        if len(jobs) < 60 and ((free and source.random() < 0.3) or not batch.active):
            new = [
                Job(
                    len(jobs) + k,
                    source.choice(texts),
                    source.choice([1, 2, 5, 40]),
                    source.choice([1.0, 1.0, 0.7]),
                )
                for k in range(source.randint(1, free))
            ]
            jobs |= {job.ticket: job for job in new}
            ended += batch.admit(new)
        if batch.active:
            ended += batch.step()
        assert 0 <= batch.cache_use <= 1
        if source.random() < 0.02 and batch.version < 2:
            targets = model.state_dict(keep_vars=True)
            new = named(weights[batch.version + 1]).items()
            copy_weights([(targets[name], values) for name, values in new])
            batch.swapped(batch.version + 1)
        if source.random() < 0.03:
            ended += batch.take({source.randrange(len(jobs))})
    assert moves
    assert batch._cache.get_max_length() > 64
    assert sorted(outcome.ticket for outcome in ended) == sorted(jobs)
    assert batch.tokens_sampled == sum(len(outcome.tokens) for outcome in ended)
    assert batch.cache_use == 0
    for outcome in ended:
        job = jobs[outcome.ticket]
        assert outcome.finish in {"stop", "length", "abort"}
        assert (outcome.tokens[-1] == EOS) == (outcome.finish == "stop")
        expected = replay(weights, job.prompt, completion(outcome), job.temperature)
        np.testing.assert_allclose(outcome.logprobs, expected, atol=2e-5)


def test_equal_prompts_are_computed_once():
    model = random_model("qwen2", 0)
    rows = []
    model.register_forward_pre_hook(
        lambda _module, _args, kwargs: rows.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    batch = batch_of(model, count=8)
    batch.admit([Job(k, (3, 4, 5) if k % 2 else (6, 7, 8, 9), 5, 1.0) for k in range(8)])
    assert rows == [(2, 4)]


def test_a_step_runs_over_the_sequences_that_are_left():
    """Gaps are closed as soon as an eighth of the range is free, so the tail of a batch is cheap."""
    model = random_model("qwen2", 0)
    rows = []
    model.register_forward_pre_hook(
        lambda _module, _args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    batch = batch_of(model, count=16, stop=frozenset())
    batch.admit([Job(k, (3,), 2 + k, 1.0) for k in range(16)])
    while batch.active:
        batch.step()
    # one ends with each step; one gap in nine or more is let be
    assert rows[1:] == [16, 16, 14, 14, 12, 12, 10, 10, 8, 7, 6, 5, 4, 3, 2, 1]


def test_one_token_limits_never_take_a_step():
    batch = batch_of(random_model("qwen2", 0))
    ended = batch.admit([Job(k, (3, 4), 1, 1.0) for k in range(5)])
    assert [len(outcome.tokens) for outcome in ended] == [1] * 5
    assert batch.active == 0
    assert len(batch.admit([Job(9, (3,), 1, 1.0)])) == 1


def test_weights_that_give_nan_end_the_batch():
    model = random_model("qwen2", 0)
    batch = batch_of(model)
    batch.admit([Job(0, (3,), 9, 1.0)])
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(float("nan"))
    with pytest.raises(WeightsError, match="not finite"):
        batch.step()


def test_the_cache_grows_by_doubling_and_keeps_what_it_has():
    cache = SlotCache(layers=1, slots=2, context=150)
    cache.reserve(5)
    cache.prefill(torch.tensor([0, 0]), torch.tensor([0, 1]))
    first = torch.randn(1, 3, 5, 4)
    cache.update(first, -first, 0)
    lengths = []
    for length in (64, 65, 128, 129, 150):
        cache.reserve(length)
        lengths.append(cache.get_max_length())
    assert lengths == [64, 128, 128, 160, 160]
    cache.decode(torch.tensor([5, 149]), 160)
    keys, values = cache.update(torch.ones(2, 3, 1, 4), torch.ones(2, 3, 1, 4), 0)
    for slot, position in ((0, 5), (1, 149)):
        assert torch.equal(keys[slot, :, :5], first[0])
        assert torch.equal(values[slot, :, :5], -first[0])
        assert torch.equal(keys[slot, :, position], torch.ones(3, 4))
    assert int(keys.count_nonzero()) == 2 * 3 * 6 * 4
    cache.free()
    cache.reserve(5)
    assert cache.get_max_length() == 64


def test_round_up():
    assert [round_up(length) for length in (1, 15, 16, 17, 32)] == [16, 16, 16, 32, 32]


@pytest.mark.parametrize("heat", [None, 0.25, 4.0])
def test_sampling_follows_the_distribution(heat):
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0, -float("inf")], [3.0, 3.0, 3.0, -9.0, 3.0]]).repeat_interleave(
        20_000, 0
    )
    temperature = None if heat is None else torch.full((40_000,), heat)
    tokens, logprobs = sample(logits, temperature, torch.Generator().manual_seed(3))
    expected = torch.softmax(logits / (heat or 1.0), -1)
    assert torch.allclose(logprobs.exp(), expected.gather(1, tokens[:, None])[:, 0], atol=1e-6)
    for row in (0, 1):
        part = slice(20_000 * row, 20_000 * (row + 1))
        found = torch.bincount(tokens[part], minlength=5).double() / 20_000
        assert 0.5 * (found - expected[part][0]).abs().sum() < 0.012
    assert not bool((tokens[:20_000] == 4).any())


def test_a_row_at_temperature_0_takes_the_most_probable_token():
    logits = torch.tensor([[0.0, 1.0, -1.0], [0.0, 1.0, -1.0]]).repeat(500, 1)
    tokens, logprobs = sample(logits, torch.tensor([0.0, 2.0]).repeat(500), torch.Generator().manual_seed(3))
    assert tokens[::2].tolist() == [1] * 500
    assert len(set(tokens[1::2].tolist())) == 3
    expected = torch.log_softmax(logits, -1)[::2, 1]
    assert torch.allclose(logprobs[::2], expected)
    drawn = torch.log_softmax(logits / 2, -1)[1::2].gather(1, tokens[1::2, None])[:, 0]
    assert torch.allclose(logprobs[1::2], drawn)


def test_the_edges_of_the_uniform_number_draw_possible_tokens(monkeypatch):
    logits = torch.tensor([[-float("inf"), 0.0, 0.0, -float("inf")]])
    for edge, token in ((0.0, 1), (1 - 2**-53, 2)):
        monkeypatch.setattr(torch, "rand", lambda *_a, edge=edge, **_k: torch.tensor([[edge]], dtype=torch.float64))
        tokens, logprobs = sample(logits, None, torch.Generator())
        assert tokens.tolist() == [token]
        assert logprobs[0].item() == pytest.approx(np.log(0.5))
