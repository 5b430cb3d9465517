"""EGPO: its three modes by hand, and what it must never do."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.config.learner import LearnerConfig
from streamrl.learner.algorithms.advantages import Estimator, GroupData
from streamrl.learner.algorithms.egpo import confidence_weights, mean_uncertainty


def advantages(rewards, surprisals, *, entropy=None, tokens=None, **args):
    """First token's advantage of each response; `surprisals` are negative log-probabilities per response."""
    data = GroupData(
        np.asarray(rewards, dtype=np.float64),
        np.asarray([len(tokens) for tokens in surprisals]),
        [-np.asarray(values) for values in surprisals],
        entropy=entropy,
        tokens=tokens,
    )
    config = LearnerConfig.model_validate({"advantage": {"use": "egpo", "args": args}})
    return [tokens[0] for tokens in Estimator.of(config)(data)]


# GRPO of 0, 0, 1, 1: -+ .5 / std, std = sqrt(1 / 3)
GRPO = 0.5 / (np.sqrt(1 / 3) + 1e-6)


def test_ratio_mode_weighs_the_confident_more_right_or_wrong():
    # H = 1, 3, 2, 2 with mean 2: weights 2, 2/3, 1, 1
    found = advantages([0, 0, 1, 1], [[0.5, 1.5], [3.0], [2.0, 2.0], [1, 2, 3]])
    assert found == pytest.approx([-2 * GRPO, -GRPO * 2 / 3, GRPO, GRPO], rel=1e-5)


def test_ratio_mode_is_clipped():
    found = advantages([0, 1], [[0.0], [10.0]], lambda_min=0.6, lambda_max=1.5)
    plain = advantages([0, 1], [[1.0], [1.0]])
    assert found == pytest.approx([plain[0] * 1.5, plain[1] * 0.6], rel=1e-5)


def test_the_group_mean_is_over_all_of_the_group():
    # One response more, whose advantage plays no part, moves the weights of the others.
    few = confidence_weights(np.asarray([1.0, 1.0]), lambda_min=0.1, lambda_max=10)
    many = confidence_weights(np.asarray([1.0, 1.0, 4.0]), lambda_min=0.1, lambda_max=10)
    assert few == pytest.approx([1, 1], rel=1e-5)
    assert many == pytest.approx([2, 2, 0.5], rel=1e-5)


def test_equal_confidence_is_plain_grpo():
    assert advantages([0, 0, 1, 1], [[1.0]] * 4) == pytest.approx([-GRPO, -GRPO, GRPO, GRPO], rel=1e-5)
    assert advantages([0, 0, 1, 1], [[0.0]] * 4) == pytest.approx([-GRPO, -GRPO, GRPO, GRPO], rel=1e-12)


def test_parts_are_before_and_behind_the_boundary():
    values, tokens = [[1.0, 3.0, 5.0], [7.0, 9.0]], [np.asarray([4, 99, 5]), np.asarray([4, 5])]
    assert mean_uncertainty(values).tolist() == [3, 8]
    assert mean_uncertainty(values, part="thinking", boundary=99, tokens=tokens).tolist() == [2, 8]
    answer = mean_uncertainty(values, part="answer", boundary=99, tokens=tokens)
    assert answer[0] == 5
    assert np.isnan(answer[1])
    assert confidence_weights(answer, lambda_min=0.5, lambda_max=2)[1] == 1
    found = advantages([0, 1], values, tokens=tokens, part="answer", boundary=99)
    assert found == pytest.approx(advantages([0, 1], [[1.0]] * 2), rel=1e-5)


def test_bonus_mode_adds_entropy_within_a_share_of_the_advantage():
    # |A| / 2 = .433: an entropy of .1 is added whole, one of 5 is cut.
    surprisals = [[1.0]] * 4
    found = advantages([0, 0, 1, 1], surprisals, mode="bonus", entropy=[[0.1], [5.0], [0.1], [5.0]])
    expected = [-GRPO + 0.4 * 0.1, -GRPO + 0.4 * GRPO / 2, GRPO + 0.4 * 0.1, GRPO + 0.4 * GRPO / 2]
    assert found == pytest.approx(expected, rel=1e-12)
    with pytest.raises(ValueError, match="needs entropy"):
        advantages([0, 1], surprisals[:2], mode="bonus")


def test_asymmetric_mode_leaves_successes_alone():
    # H = 1, 3, 1, 3, mean 2: weights 2, 2/3; only the confident failure is weighed.
    found = advantages([0, 0, 1, 1], [[1.0], [3.0], [1.0], [3.0]], mode="asymmetric")
    assert found == pytest.approx([-2 * GRPO, -GRPO, GRPO, GRPO], rel=1e-5)


def test_asymmetric_mode_tells_failures_apart():
    found = advantages([0, 0], [[1.0], [3.0]], mode="asymmetric", degenerate=0.3)
    # weights 2 and 2/3, mean 4/3
    assert found == pytest.approx([-0.2, 0.2], rel=1e-5)
    assert advantages([1, 1], [[1.0], [3.0]], mode="asymmetric") == [0, 0]
    assert advantages([0, 0], [[1.0], [3.0]], mode="asymmetric", degenerate=0.0) == [0, 0]
    assert advantages([0], [[1.0]], mode="asymmetric") == [0]
    assert advantages([-1, -1], [[1.0], [3.0]], mode="asymmetric", wrong=-2.0) == [0, 0]


responses = st.lists(
    st.tuples(st.integers(-3, 3), st.lists(st.floats(0, 1000), min_size=1, max_size=4)), min_size=1, max_size=6
)


@given(responses, st.sampled_from(["ratio", "bonus", "asymmetric"]))
def test_no_sign_ever_flips_and_all_is_bounded(drawn, mode):
    rewards, surprisals = zip(*drawn, strict=True)
    found = np.asarray(advantages(rewards, surprisals, entropy=list(surprisals), mode=mode, degenerate=0.0))
    plain = np.asarray(advantages(rewards, [[1.0]] * len(rewards), mode="ratio"))
    assert np.all(np.isfinite(found))
    assert np.all(np.sign(found) == np.sign(plain))
    assert np.all(np.abs(found) <= 2 * np.abs(plain) * 1.001)
