"""Samples that cannot be trained, and those that give nothing: an error with the group's id, or no step at all."""

import logging
from dataclasses import replace

import numpy as np
import pytest
from test_actor import plain, reference_logprobs
from tiny_policy import make_batch, run_config, train_sample

from streamrl import wire
from streamrl.config import RunConfig
from streamrl.learner.algorithms.recipe import Recipe
from streamrl.learner.groups import GroupOpener, Unusable
from streamrl.learner.policy import Actor
from streamrl.queues.records import ClosedGroup


def closed(*samples, size=None):
    payloads = {
        number: (wire.encode(sample), wire.encode(wire.SampleScore(value=number))) for number, sample in samples
    }
    prompt = wire.encode(wire.Prompt(tokens=wire.pack_int32([1, 2])))
    return ClosedGroup(
        group_id=9,
        size=size or len(samples),
        attempt=0,
        version=1,
        crashes=0,
        causes={},
        prompt=prompt,
        samples=payloads,
    )


def response(tokens, logprobs):
    runs = [(0, 1)] if tokens else []
    return wire.Sample(tokens=wire.pack_int32(tokens), logprobs=wire.pack_float32(logprobs), runs=runs, finish="length")


def opened(group, check=lambda _: None):
    recipe = Recipe.of(RunConfig.model_validate({"model": {"path": "none"}}))
    return GroupOpener(recipe, check)(group, {1: 0}.__getitem__)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_log_probability_that_is_not_finite_is_a_dead_letter_of_its_group(bad):
    good, spoiled = response([4, 5], [-1, -2]), response([4, 5], [-1, bad])
    with pytest.raises(Unusable, match=r"group 9 .*log-probability.*not finite"):
        opened(closed((0, good), (1, spoiled)))


def test_a_sample_longer_than_the_model_is_a_dead_letter_of_its_group(one_rank, model_of):
    actor = Actor(run_config(model_of("Qwen2")), one_rank)
    long = response([3] * 130, [-1.0] * 130)
    with pytest.raises(Unusable, match=r"group 9 .*131 tokens, the model takes 128"):
        opened(closed((0, long), (1, response([3], [-1]))), actor.check_samples)


def test_a_sample_longer_than_a_micro_batch_is_trained_alone_and_said_so(one_rank, model_of, caplog):
    with caplog.at_level(logging.WARNING, "streamrl"):
        actor = Actor(run_config(model_of("Qwen2"), tokens_per_microbatch=32), one_rank)
    (record,) = (record for record in caplog.records if "pass of their own" in record.getMessage())
    assert (record.longest, record.tokens_per_microbatch) == (128, 32)
    tokens = np.arange(100, dtype=np.int32) % 61
    long = train_sample(0, np.asarray([1], dtype=np.int32), tokens, np.zeros(100, dtype=np.float32), 1.0)
    batch = [long, *make_batch(0, groups=1)]
    expected = [logprobs for _, logprobs in reference_logprobs(plain(model_of("Qwen2")), batch)]
    for ours, theirs in zip(actor.compute_log_prob(batch).logprobs, expected, strict=True):
        np.testing.assert_allclose(ours, theirs.detach().numpy(), atol=2e-5)


def test_responses_without_a_token_are_no_step_and_change_nothing_else(one_rank, model_of):
    """Neither a gradient nor a place in the count; a group of nothing else is a step of zeros, not of NaN."""
    group = opened(closed((0, response([], [])), (1, response([], []))))
    assert (group.tokens, group.cost) == (0, 0)
    (empty,) = make_batch(0, groups=1, size=1)
    nothing = np.zeros(0)
    empty = replace(
        empty,
        tokens=nothing.astype(np.int32),
        logprobs=nothing.astype(np.float32),
        steps=nothing.astype(np.int64),
        advantages=nothing.astype(np.float32),
    )
    actor, other = (Actor(run_config(model_of("Qwen2")), one_rank) for _ in range(2))
    before = actor.shard_state()
    micro, stats = actor.update_policy([empty, empty])
    assert (micro.passes, stats.grad_norm, stats.loss, stats.skipped) == (0, 0.0, 0.0, False)
    assert all(np.array_equal(before[name], rows) for name, rows in actor.shard_state().items() if "weight/" in name)
    batch = make_batch(1)
    actor.load_shard_state(before)
    with_empty, without = (one.update_policy(rows)[1] for one, rows in ((actor, [*batch, empty]), (other, batch)))
    assert with_empty.grad_norm == without.grad_norm
    assert with_empty.trained.tokens == without.trained.tokens
