"""From a closed group to what is trained: its numbers, its greedy response, and what cannot be trained."""

from __future__ import annotations

import logging

import msgspec
import numpy as np
import pytest
from test_actor import plain, reference_logprobs
from tiny_policy import make_batch, passes_of, run_config, train_sample

from streamrl import wire
from streamrl.config import RunConfig
from streamrl.errors import ConfigError
from streamrl.learner.algorithms.advantages import traits
from streamrl.learner.algorithms.recipe import Recipe
from streamrl.learner.groups import GroupOpener, TrainGroup, Unusable
from streamrl.learner.lineage import Branch
from streamrl.learner.policy import Actor
from streamrl.queues.records import ClosedGroup

REMAX = {"sampling": {"greedy_baseline": True}, "learner": {"advantage": {"use": "remax"}}}


def response(*tokens, logprobs=None, runs=((0, 3),), greedy=False) -> wire.Sample:
    return wire.Sample(
        tokens=wire.pack_int32(tokens),
        logprobs=wire.pack_float32([-1.0] * len(tokens) if logprobs is None else logprobs),
        runs=list(runs) if tokens else [],
        finish="stop",
        greedy=greedy,
    )


def opened(*scored, prompt=(1, 2), check=lambda _: None, step_of=None, parts=None, **config) -> TrainGroup:
    """The group of these responses with their rewards; version 3 was made at step 1."""
    samples = {
        2 * place: (wire.encode(sample), wire.encode(wire.SampleScore(value=value, parts=parts or {})))
        for place, (sample, value) in enumerate(scored)
    }
    closed = ClosedGroup(
        group_id=9,
        size=2 * len(scored),
        attempt=0,
        version=3,
        crashes=0,
        causes={1: "engine"},
        prompt=wire.encode(wire.Prompt(tokens=wire.pack_int32(prompt))),
        samples=samples,
    )
    recipe = Recipe.of(RunConfig.model_validate({"model": {"path": "none"}, **config}))
    return GroupOpener(recipe, check)(closed, step_of or {3: 1}.__getitem__)


def test_a_group_is_opened_with_its_numbers():
    branch = Branch({3: 10, 5: 20})
    rows = response(4, 5, 6, logprobs=[-1, -2, -3], runs=[(0, 3), (1, 5)]), response(7, runs=[(0, 5)])
    group = opened(*zip(rows, (1.0, 0.0), strict=True), step_of=branch.step, learner={"advantage": {"use": "dr_grpo"}})
    assert (group.tokens, group.prompt_tokens, group.mixed_version) == (4, 4, 1)
    assert [sample.steps.tolist() for sample in group.samples] == [[10, 20, 20], [20]]
    assert group.staleness(22) == {12: 1, 2: 3}
    assert group.staleness(15) == {5: 1, 0: 3}
    assert [sample.advantages.tolist() for sample in group.samples] == [[0.5] * 3, [-0.5]]
    assert group.cost == 4 + 2  # prompt and response, without the last token, of each
    # 0.1 + 0.2 is not 0.3 to a computer.
    flat = opened(*zip(rows, (0.1 + 0.2, 0.3), strict=True), step_of=branch.step)
    assert flat.zero_gradient
    assert flat.zero_variance
    assert flat.cost == 0


def test_a_truncated_response_is_masked_where_it_is_asked():
    whole, cut = response(4, 5), msgspec.structs.replace(response(6, 7, 8), finish="length")
    for learner, last in (({}, [-0.5] * 3), ({"loss": {"truncated": "mask"}}, [0.0] * 3)):
        group = opened((whole, 1.0), (cut, 0.0), learner={"advantage": {"use": "dr_grpo"}, **learner})
        assert [one.advantages.tolist() for one in group.samples] == [[0.5, 0.5], last]
        assert [one.truncated for one in group.samples] == [False, True]
        assert (group.tokens, group.rewards) == (5, (1.0, 0.0))


@pytest.mark.parametrize(
    ("finish", "stop", "truncated"),
    [
        ("stop", None, False),
        ("length", None, True),
        ("stop", "completed", False),
        ("stop", "max_turns", True),
        ("stop", "rollout_timeout", True),
        ("stop", "agent_failed", False),
    ],
)
def test_what_ended_by_a_limit_is_truncated(finish, stop, truncated):
    assert msgspec.structs.replace(response(4), finish=finish, stop=stop).truncated == truncated


def test_samples_know_the_parts_of_their_score_and_the_length_of_their_group():
    group = opened((response(4, 5, 6), 1.0), (response(7), 0.0), (response(), 0.0), parts={"right": 1.0})
    assert [one.group_mean for one in group.samples] == [2.0] * 3
    assert [one.parts for one in group.samples] == [{"right": 1.0}] * 3
    assert opened((response(), 0.0)).samples[0].group_mean == 1.0


def test_the_greedy_response_is_the_baseline_and_no_sample():
    group = opened((response(4, 5), 1.0), (response(6), 0.0), (response(7, 8, 9, greedy=True), 0.25), **REMAX)
    assert [one.tokens.tolist() for one in group.samples] == [[4, 5], [6]]
    assert [one.advantages.tolist() for one in group.samples] == [[0.75, 0.75], [-0.25]]
    assert (group.tokens, group.responses, group.rewards) == (3, 2, (1.0, 0.0))
    first = opened((response(7, greedy=True), 1.0), (response(4), 0.5), **REMAX)
    assert [one.advantages.tolist() for one in first.samples] == [[-0.5]], "wherever it stands in the group"


def test_other_estimators_leave_it_out_as_well():
    own = {"sampling": REMAX["sampling"], "learner": {"advantage": {"use": f"{__name__}:centred"}}}
    group = opened((response(4), 1.0), (response(5), 0.0), (response(6, greedy=True), 7.0), **own)
    assert [one.advantages.tolist() for one in group.samples] == [[0.5], [-0.5]]


def centred(group):
    return group.constant(group.rewards - group.rewards.mean())


@traits(needs=["baseline"])
def own_baseline(group):
    return group.constant(group.rewards - group.baseline_reward)


@traits(needs=["values"])
def own_values(group):
    return [values * 0 for values in group.values]


@pytest.mark.parametrize(("name", "message"), [("own_baseline", "greedy_baseline"), ("own_values", "critic.kind")])
def test_an_estimator_of_the_user_that_needs_more_than_there_is_is_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        Recipe.of(RunConfig.model_validate({"learner": {"advantage": {"use": f"{__name__}:{name}"}}}))


@pytest.mark.parametrize(
    ("samples", "config", "message"),
    [
        ([response(4), response(5)], REMAX, "needs baseline"),  # the greedy one has died
        ([response(4, greedy=True)], REMAX, "no response"),
        ([response(4), response(5)], {"prompt": ()}, "prompt"),
        *(
            ([response(4, 5), response(4, 5, logprobs=[-1, bad])], {}, "log-probability.*not finite")
            for bad in (np.nan, np.inf, -np.inf)
        ),
    ],
)
def test_what_cannot_be_trained_is_a_dead_letter_of_its_group(samples, config, message):
    with pytest.raises(Unusable, match=f"group 9 .*{message}"):
        opened(*((sample, float(place)) for place, sample in enumerate(samples)), **config)


def test_a_sample_longer_than_the_model_is_one_too(one_rank, model_of):
    actor = Actor(run_config(model_of("Qwen2")), one_rank)
    with pytest.raises(Unusable, match=r"group 9 .*131 tokens, the model takes 128"):
        opened((response(*[3] * 130), 0.0), (response(3), 1.0), check=actor.check_samples)


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
    group = opened((response(), 0.0), (response(), 1.0))
    assert (group.tokens, group.cost) == (0, 0)
    empty = group.samples[0]
    actor, other = (Actor(run_config(model_of("Qwen2")), one_rank) for _ in range(2))
    before = actor.shard_state()
    passes = passes_of(actor)
    stats = actor.update_policy([empty, empty])
    assert (passes, stats.grad_norm, stats.loss, stats.skipped) == ([], 0.0, 0.0, False)
    assert all(np.array_equal(before[name], rows) for name, rows in actor.shard_state().items() if "weight/" in name)
    batch = make_batch(1)
    actor.load_shard_state(before)
    with_empty, without = (one.update_policy(rows) for one, rows in ((actor, [*batch, empty]), (other, batch)))
    assert with_empty.grad_norm == without.grad_norm
    assert with_empty.trained.tokens == without.trained.tokens
