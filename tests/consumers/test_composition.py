"""From the values of rewards to one score."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.config import RunConfig, ScoringConfig
from streamrl.config.rewards import Normalisation, OverlongConfig
from streamrl.consumers import Score
from streamrl.consumers.composition import Composition, normalised, overlong_penalty
from tests.consumers.calls_kit import loaded


def reward(name, **spec):
    async def call(sample):
        raise AssertionError("not called here")

    return loaded(call, name=name, **spec)


def compose(values, rewards, *, tokens=10, longest=100, **scoring):
    composition = Composition(rewards, ScoringConfig(**scoring), longest)
    return composition.score({name: Score(value) for name, value in values.items()}, tokens)


def test_a_weighted_sum_keeps_every_part():
    score = compose({"a": 1.0, "b": 4.0}, [reward("a", weight=2), reward("b", weight=-0.25)])
    assert (score.value, score.parts) == (1.0, {"a": 1.0, "b": 4.0})


def test_a_product_has_weights_as_exponents_and_a_min_none_but_0():
    rewards = [reward("a", weight=2), reward("b", weight=0.5), reward("shown", weight=0)]
    score = compose({"a": 3.0, "b": 4.0, "shown": 7.0}, rewards, combine="product")
    assert score.value == 18.0
    assert score.parts["shown"] == 7.0
    assert compose({"a": -2.0}, [reward("a", weight=3)], combine="product").value == -8.0
    assert compose({"a": 1.0, "b": 2.0, "shown": -9.0}, rewards, combine="min").value == 1.0


@pytest.mark.parametrize(("value", "weight"), [(-1.0, 0.5), (0.0, -1.0), (1e300, 2.0)])
def test_a_product_that_is_no_number_is_an_error(value, weight):
    with pytest.raises((ValueError, OverflowError)):
        compose({"a": value}, [reward("a", weight=weight)], combine="product")


def test_a_sum_that_overflows_is_an_error():
    with pytest.raises(ValueError, match="weighted sum"):
        compose({"a": 1e308, "b": 1e308}, [reward("a"), reward("b")], clip=(0, 1))


def test_a_value_is_normalised_then_clipped_and_the_raw_one_is_kept():
    spec = reward("a", normalise={"mean": 10, "std": 2}, clip=(-1, 1))
    score = compose({"a": 20.0}, [spec])
    assert (score.value, score.parts) == (1.0, {"a": 1.0, "a/raw": 20.0})


@pytest.mark.parametrize(
    ("squash", "value"), [("none", 2.0), ("tanh", math.tanh(2)), ("sigmoid", 1 / (1 + math.exp(-2)))]
)
def test_squashing(squash, value):
    assert normalised(5.0, Normalisation(mean=1, std=2, squash=squash)) == pytest.approx(value, rel=1e-12)


@given(st.floats(-1e300, 1e300), st.sampled_from(["tanh", "sigmoid"]))
def test_what_is_squashed_has_bounds_whatever_it_was(value, squash):
    assert -1 <= normalised(value, Normalisation(squash=squash)) <= 1


def test_the_score_is_clipped_before_the_penalty_of_long_responses():
    score = compose({"a": 9.0}, [reward("a")], tokens=100, clip=(0, 1), overlong={"buffer": 10})
    assert (score.value, score.parts["overlong"]) == (0.0, -1.0)


@pytest.mark.parametrize(
    ("tokens", "penalty"),
    [(0, 0.0), (90, 0.0), (91, -0.2), (95, -1.0), (100, -2.0), (130, -2.0)],
)
def test_the_penalty_of_dapo(tokens, penalty):
    found = overlong_penalty(tokens, 100, OverlongConfig(buffer=10, penalty=2.0))
    assert found == pytest.approx(penalty, abs=1e-12)


def test_a_gate_that_does_not_let_through_gives_the_gated_score_and_the_penalty():
    rewards = [reward("format", gate=1), reward("right")]
    scoring = {"gated": -0.5, "overlong": {"buffer": 10}}
    score = compose({"format": 0.0}, rewards, tokens=95, **scoring)
    assert score.value == -1.0
    assert score.parts == {"format": 0.0, "format/passed": 0.0, "overlong": -0.5}
    score = compose({"format": 1.0, "right": 0.25}, [reward("format", gate=1, weight=5), reward("right")])
    assert score.value == 0.25, "an open gate is in no sum"
    assert score.parts == {"format": 1.0, "format/passed": 1.0, "right": 0.25}


def test_a_gate_compares_what_normalise_and_clip_made():
    spec = reward("judge", gate=0.5, normalise={"mean": 3, "squash": "sigmoid"})
    composition = Composition([spec], ScoringConfig())
    assert composition.passes(spec, Score(3.0))
    assert not composition.passes(spec, Score(2.9))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": [{"use": "format", "gate": 1}]}, "nothing to make a score of"),
        ({"rewards": [{"use": "exact_match", "weight": 0}]}, "nothing to make a score of"),
        ({"rewards": [{"use": "exact_match", "name": "overlong"}]}, "another `name:`"),
        ({"scoring": {"overlong": {"buffer": 257}}}, "above sampling.max_new_tokens 256"),
        ({"scoring": {"clip": [1, 0]}}, "lowest, highest"),
        ({"scoring": {"clip": [0, float("nan")]}}, "lowest, highest"),
        ({"scoring": {"gated": float("nan")}}, "finite"),
        ({"rewards": [{"use": "exact_match", "weight": float("inf")}]}, "finite"),
        ({"reward_worker": {"on_failure": "retry", "retry_for": "20m"}}, "not below lease.max_hold 900 s"),
    ],
)
def test_what_makes_no_score_is_refused_at_the_start(changes, message):
    with pytest.raises(ValueError, match=message):
        RunConfig.model_validate(changes)


def test_the_page_says_from_which_score_on_a_held_out_response_is_right():
    page = (Path(__file__).parents[2] / "docs" / "guides" / "combine-rewards.md").read_text("utf-8")
    assert f"`evaluation.threshold` ({RunConfig().evaluation.threshold})" in page
