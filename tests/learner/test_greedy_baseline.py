"""The greedy response of a group: its reward is the baseline of ReMax, and nothing else of it is used."""

from __future__ import annotations

import pytest

from streamrl import wire
from streamrl.config import RunConfig
from streamrl.errors import ConfigError
from streamrl.learner.algorithms.advantages import traits
from streamrl.learner.algorithms.recipe import Recipe
from streamrl.learner.groups import GroupOpener, TrainGroup, Unusable
from streamrl.queues.records import ClosedGroup

GREEDY = {"sampling": {"greedy_baseline": True}, "learner": {"advantage": {"use": "remax"}}}


def sample(*tokens: int, greedy: bool = False) -> bytes:
    count = len(tokens)
    return wire.encode(
        wire.Sample(
            tokens=wire.pack_int32(tokens),
            logprobs=wire.pack_float32([-1.0] * count),
            runs=[(0, 3)],
            finish="stop",
            greedy=greedy,
        )
    )


def closed(*scored: tuple[bytes, float]) -> ClosedGroup:
    samples = {at: (payload, wire.encode(wire.SampleScore(value=value))) for at, (payload, value) in enumerate(scored)}
    return ClosedGroup(
        group_id=9,
        size=len(scored),
        attempt=0,
        version=3,
        crashes=0,
        causes={},
        prompt=wire.encode(wire.Prompt(tokens=wire.pack_int32([1, 2]))),
        samples=samples,
    )


def opened(*responses, values=GREEDY) -> TrainGroup:
    opener = GroupOpener(Recipe.of(RunConfig.model_validate(values)), lambda _: None)
    return opener(closed(*responses), {3: 1}.__getitem__)


def test_it_is_the_baseline_and_no_sample():
    group = opened((sample(4, 5), 1.0), (sample(6), 0.0), (sample(7, 8, 9, greedy=True), 0.25))
    assert [one.tokens.tolist() for one in group.samples] == [[4, 5], [6]]
    assert [one.advantages.tolist() for one in group.samples] == [[0.75, 0.75], [-0.25]]
    assert (group.tokens, group.responses, group.rewards) == (3, 2, (1.0, 0.0))


def test_where_it_stands_in_the_group_does_not_matter():
    group = opened((sample(7, greedy=True), 1.0), (sample(4), 0.5))
    assert [one.advantages.tolist() for one in group.samples] == [[-0.5]]


def test_a_group_whose_greedy_response_died_cannot_be_trained():
    with pytest.raises(Unusable, match="needs baseline"):
        opened((sample(4), 1.0), (sample(5), 0.0))


def test_a_group_of_the_greedy_response_alone_cannot_be_trained():
    with pytest.raises(Unusable, match="no response"):
        opened((sample(4, greedy=True), 1.0))


def test_other_estimators_leave_it_out_as_well():
    own = {"sampling": GREEDY["sampling"], "learner": {"advantage": {"use": f"{__name__}:centred"}}}
    group = opened((sample(4), 1.0), (sample(5), 0.0), (sample(6, greedy=True), 7.0), values=own)
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
