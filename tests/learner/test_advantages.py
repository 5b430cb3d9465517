"""Group advantages against numbers worked out by hand, and on the inputs that went wrong for others."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.learner.advantages import group_advantages


def test_hand_computed_with_unbiased_standard_deviation():
    # mean 0.25, deviations -.25 -.25 -.25 .75, sum of squares .75, unbiased variance .25, std .5
    advantages = group_advantages([0, 0, 0, 1])
    assert advantages == pytest.approx([-0.5, -0.5, -0.5, 1.5], rel=1e-5)
    assert advantages[3] == pytest.approx(0.75 / (0.5 + 1e-6), rel=1e-12)


def test_without_scaling_it_is_the_distance_from_the_mean():
    assert group_advantages([1, 2, 6], scale_by_std=False) == pytest.approx([-2, -1, 3])


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -3.7, 1e300])
def test_equal_rewards_give_exactly_zero(reward):
    assert group_advantages([reward] * 7).tolist() == [0.0] * 7


@pytest.mark.parametrize("rewards", [[], [1.0]])
def test_a_group_of_one_is_not_its_own_baseline(rewards):
    assert group_advantages(rewards).tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_is_refused(reward):
    with pytest.raises(ValueError, match="not finite"):
        group_advantages([0.0, reward])


def test_rewards_too_far_apart_are_refused_without_scaling():
    with pytest.raises(ValueError, match="too far apart"):
        group_advantages([1.7e308, -1.7e308, -1.7e308], scale_by_std=False)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=2, max_size=12))
def test_scaled_advantages_are_finite_centred_and_bounded(rewards):
    advantages = group_advantages(rewards)
    assert np.all(np.isfinite(advantages))
    assert abs(advantages.sum()) < 1e-6 * len(rewards)
    # The largest possible distance from the mean in units of the unbiased deviation.
    assert np.abs(advantages).max() <= (len(rewards) - 1) / math.sqrt(len(rewards)) + 1e-9


@given(st.lists(st.integers(-5, 5), min_size=2, max_size=8), st.floats(0.1, 100), st.floats(-50, 50))
def test_scale_and_shift_of_rewards_do_not_matter(rewards, scale, shift):
    moved = group_advantages([scale * reward + shift for reward in rewards])
    if len(set(rewards)) > 1:
        assert moved == pytest.approx(group_advantages(rewards), abs=1e-4)
