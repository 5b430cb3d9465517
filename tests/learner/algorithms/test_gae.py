"""Generalized advantage estimation: by hand, by its definition token by token, sequence by sequence."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.learner.algorithms.advantages import generalized_advantages


def by_definition(rewards, values, gamma, lam):
    """`A_t = sum over l of (gamma lam)^l delta_{t+l}` for one sequence without gaps."""
    following = [*values, 0.0][1:]
    deltas = [r + gamma * n - v for r, v, n in zip(rewards, values, following, strict=True)]
    return [sum((gamma * lam) ** late * delta for late, delta in enumerate(deltas[at:])) for at in range(len(deltas))]


def test_by_hand():
    # deltas: 0 + .9 x 2 - 1 = .8; 0 + .9 x 3 - 2 = .7; 1 - 3 = -2; gamma lam = .45
    advantages = generalized_advantages([0, 0, 1], [1, 2, 3], gamma=0.9, lam=0.5, lengths=[3])
    assert advantages == pytest.approx([0.8 + 0.45 * (0.7 - 0.45 * 2), 0.7 - 0.45 * 2, -2], rel=1e-12)


def test_lambda_one_is_the_return_minus_the_value_and_lambda_zero_one_step():
    rewards, values = [0.0, 2.0, 1.0], [0.5, 1.0, -1.0]
    assert generalized_advantages(rewards, values, gamma=1, lam=1, lengths=[3]) == pytest.approx(
        [3 - 0.5, 3 - 1, 1 + 1]
    )
    assert generalized_advantages(rewards, values, gamma=1, lam=0, lengths=[3]) == pytest.approx(
        [1 - 0.5, 2 - 1 - 1, 1 + 1]
    )


def test_a_perfect_critic_leaves_nothing():
    assert generalized_advantages([0, 0, 3], [3, 3, 3], gamma=1, lam=0.9, lengths=[3]).tolist() == [0, 0, 0]


def test_nothing_gives_nothing():
    assert generalized_advantages([], [], gamma=1, lam=1, lengths=[]).tolist() == []
    assert generalized_advantages([], [], gamma=1, lam=1, lengths=[0, 0]).tolist() == []


number = st.floats(-10, 10, allow_subnormal=False)
sequence = st.lists(st.tuples(number, number), max_size=8)


@given(st.lists(sequence, max_size=5), st.floats(0, 1), st.floats(0, 1))
def test_sequences_side_by_side_are_the_definition_one_by_one(sequences, gamma, lam):
    flat = [token for tokens in sequences for token in tokens]
    found = generalized_advantages(
        [reward for reward, _ in flat],
        [value for _, value in flat],
        gamma=gamma,
        lam=lam,
        lengths=[len(tokens) for tokens in sequences],
    )
    expected = []
    for tokens in sequences:
        expected += by_definition([reward for reward, _ in tokens], [value for _, value in tokens], gamma, lam)
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)
