"""Generalized advantage estimation: by hand, by its definition token by token, over masks and segments."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.learner.algorithms.gae import generalized_advantages


def by_definition(rewards, values, gamma, lam):
    """`A_t = sum over l of (gamma lam)^l delta_{t+l}` for one sequence without gaps."""
    following = [*values, 0.0][1:]
    deltas = [r + gamma * n - v for r, v, n in zip(rewards, values, following, strict=True)]
    return [sum((gamma * lam) ** late * delta for late, delta in enumerate(deltas[at:])) for at in range(len(deltas))]


def test_by_hand():
    # deltas: 0 + .9 x 2 - 1 = .8; 0 + .9 x 3 - 2 = .7; 1 - 3 = -2; gamma lam = .45
    advantages = generalized_advantages([0, 0, 1], [1, 2, 3], gamma=0.9, lam=0.5)
    assert advantages == pytest.approx([0.8 + 0.45 * (0.7 - 0.45 * 2), 0.7 - 0.45 * 2, -2], rel=1e-12)


def test_lambda_one_is_the_return_minus_the_value_and_lambda_zero_one_step():
    rewards, values = [0.0, 2.0, 1.0], [0.5, 1.0, -1.0]
    assert generalized_advantages(rewards, values, gamma=1, lam=1) == pytest.approx([3 - 0.5, 3 - 1, 1 + 1])
    assert generalized_advantages(rewards, values, gamma=1, lam=0) == pytest.approx([1 - 0.5, 2 - 1 - 1, 1 + 1])


def test_a_perfect_critic_leaves_nothing():
    assert generalized_advantages([0, 0, 3], [3, 3, 3], gamma=1, lam=0.9).tolist() == [0, 0, 0]


def test_tokens_that_were_not_sampled_are_no_steps():
    mask = [1, 0, 0, 1, 1, 0]
    values = [1.0, 99, 99, 2, 3, 99]
    masked = generalized_advantages([0, 0, 0, 0, 1, 0], values, gamma=0.9, lam=0.5, mask=mask)
    plain = generalized_advantages([0, 0, 1], [1, 2, 3], gamma=0.9, lam=0.5)
    assert masked[[0, 3, 4]] == pytest.approx(plain, rel=1e-15)
    assert masked[[1, 2, 5]].tolist() == [0, 0, 0]


def test_a_reward_on_an_observation_belongs_to_the_token_before_it():
    mask = [1, 0, 1, 0]
    late = generalized_advantages([0, 0.5, 0, 1], [0, 0, 0, 0], gamma=1, lam=1, mask=mask)
    assert late.tolist() == [1.5, 0, 1, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rewards": [1, 0], "mask": [0, 1]}, "before the first sampled"),
        ({"rewards": [0, 0, 1], "mask": [1, 1, 0], "segments": [0, 0, 1]}, "before the first sampled"),
        ({"rewards": [1.0], "mask": [0]}, "without a sampled token"),
        ({"rewards": [0, 0], "segments": [1, 0]}, "order"),
        ({"rewards": [0, 0], "mask": [1]}, "shapes"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        generalized_advantages(values=np.zeros(len(arguments["rewards"])), gamma=1, lam=1, **arguments)


def test_nothing_gives_nothing():
    assert generalized_advantages([], [], gamma=1, lam=1).tolist() == []
    assert generalized_advantages([0, 0], [5, 5], gamma=1, lam=1, mask=[0, 0]).tolist() == [0, 0]


number = st.floats(-10, 10, allow_subnormal=False)
sequence = st.lists(st.tuples(number, number, st.booleans()), max_size=8)


@given(st.lists(sequence, max_size=5), st.floats(0, 1), st.floats(0, 1))
def test_segments_side_by_side_are_the_definition_one_by_one(sequences, gamma, lam):
    flat = [token for tokens in sequences for token in tokens]
    rewards = [reward if sampled else 0.0 for reward, _, sampled in flat]
    found = generalized_advantages(
        rewards,
        [value for _, value, _ in flat],
        gamma=gamma,
        lam=lam,
        mask=[sampled for _, _, sampled in flat],
        segments=[at for at, tokens in enumerate(sequences) for _ in tokens],
    )
    expected = []
    for tokens in sequences:
        kept = [(reward, value) for reward, value, sampled in tokens if sampled]
        left = iter(by_definition([reward for reward, _ in kept], [value for _, value in kept], gamma, lam))
        expected += [next(left) if sampled else 0.0 for _, _, sampled in tokens]
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)
