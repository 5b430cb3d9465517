"""What holds for every policy loss: finite for any input, REINFORCE on-policy, additive over responses, any order."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from loss_kit import differentiate, random_tokens, tokens_of

from streamrl.learner.algorithms.losses import LOSSES
from streamrl.learner.algorithms.tokens import LOG_RATIO_BOUND

ALL = LOSSES.names
OPTIONS = {
    "ppo": {"dual_clip": None},
    "gspo": {"dual_clip": None},
    "gmpo": {"dual_clip": None},
    "dppo": {"regulariser": 1e-3},
}
FAR = st.floats(-1000, 0, width=32)
WILD = st.floats(allow_nan=False, allow_infinity=False, width=32)


def loss_of(name):
    return LOSSES.resolve(name, OPTIONS.get(name, {}))


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(FAR, FAR, FAR, st.floats(-1e6, 1e6, width=32)), min_size=1, max_size=8), st.integers(1, 3))
def test_finite_log_probs_give_a_finite_loss_and_gradient(name, rows, size):
    check_finite(name, rows, size)


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(FAR, WILD, WILD, st.floats(-10, 10, width=32)), min_size=1, max_size=8), st.integers(1, 3))
def test_even_absurd_log_probs_from_elsewhere_do(name, rows, size):
    check_finite(name, rows, size)


def check_finite(name, rows, size):
    logprobs, old, behaviour, advantages = zip(*rows, strict=True)
    counts = [size] * (len(rows) // size) + ([len(rows) % size] if len(rows) % size else [])
    tokens = tokens_of(logprobs, old, advantages, behaviour=behaviour, counts=counts, dtype=torch.float32)
    result, gradient = differentiate(loss_of(name), tokens)
    assert result.per_token.shape == gradient.shape == result.clipped.shape == (len(rows),)
    assert result.clipped.dtype == torch.bool
    assert torch.isfinite(result.per_token).all()
    assert torch.isfinite(gradient).all()
    bound = torch.e**LOG_RATIO_BOUND * tokens.advantages.abs() + LOG_RATIO_BOUND
    assert (gradient.abs() <= bound * 1.001).all()


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(FAR, FAR, FAR, st.floats(-100, 100, width=32)), min_size=1, max_size=8), st.integers(1, 3))
@example([(0.0, 0.0, 0.0, 1.0), (0.0, -6.0, 0.0, -1.0)], 2)  # a response with advantages of both signs
def test_without_options_no_gradient_is_above_twenty_advantages(name, rows, size):
    """The greatest bound of a default is `dppo`'s cap of 20; kimi pulls back with up to tau x 20, kl_cov with 1."""
    logprobs, old, behaviour, advantages = zip(*rows, strict=True)
    counts = [size] * (len(rows) // size) + ([len(rows) % size] if len(rows) % size else [])
    tokens = tokens_of(logprobs, old, advantages, behaviour=behaviour, counts=counts)
    _, gradient = differentiate(LOSSES.resolve(name, {}), tokens)
    pull = {"kimi": 0.1 * LOG_RATIO_BOUND, "kl_cov": 1.0}.get(name, 0.0)
    assert (gradient.abs() <= 20 * tokens.advantages.abs() + pull + 1e-9).all()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("alike", [True, False])
def test_on_policy_the_gradient_is_that_of_reinforce(name, alike):
    tokens = random_tokens(4, spread=0.0, alike=alike)
    result, gradient = differentiate(loss_of(name), tokens)
    torch.testing.assert_close(gradient, -tokens.advantages, rtol=1e-12, atol=1e-12)
    assert not result.clipped.any()


@pytest.mark.parametrize("name", ["ppo", "gspo", "gmpo", "dppo"])
def test_on_policy_it_is_exactly_ppo(name):
    tokens = random_tokens(5, spread=0.0)
    assert torch.equal(differentiate(LOSSES.resolve(name, {}), tokens)[0].per_token, -tokens.advantages)


@pytest.mark.parametrize("name", ALL)
def test_zero_advantage_gives_no_gradient_and_is_not_clipped(name):
    tokens = tokens_of([-1.0, -9.0], [-3.0, -3.0], [0.0, 0.0], counts=[2])
    result, gradient = differentiate(LOSSES.resolve(name, {"tau": 0} if name == "kimi" else {}), tokens)
    assert not gradient.any()
    assert not result.clipped.any()


@pytest.mark.parametrize("name", [name for name in ALL if name != "kl_cov"])
def test_responses_do_not_see_each_other(name):
    whole = random_tokens(6, 12, spread=0.6)
    result, gradient = differentiate(loss_of(name), whole)
    values, slopes = [], []
    columns = torch.stack([whole.logprobs, whole.old, whole.advantages, whole.behaviour])
    for part in columns.split(whole.counts.tolist(), dim=1):
        one = tokens_of(part[0], part[1], part[2], behaviour=part[3], counts=[part.shape[1]])
        alone, slope = differentiate(loss_of(name), one)
        values.append(alone.per_token)
        slopes.append(slope)
    torch.testing.assert_close(result.per_token, torch.cat(values), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, torch.cat(slopes), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ALL)
def test_a_response_without_tokens_changes_nothing(name):
    with_empty = tokens_of([-1.0, -2.0], [-1.1, -2.2], [1.0, -1.0], counts=[1, 0, 1])
    without = tokens_of([-1.0, -2.0], [-1.1, -2.2], [1.0, -1.0])
    for left, right in zip(
        differentiate(loss_of(name), with_empty), differentiate(loss_of(name), without), strict=True
    ):
        if isinstance(left, torch.Tensor):
            assert torch.equal(left, right)


@pytest.mark.parametrize("name", ALL)
def test_single_precision_agrees_with_double(name):
    wide = random_tokens(7)
    narrow = tokens_of(
        wide.logprobs, wide.old, wide.advantages, behaviour=wide.behaviour, counts=wide.counts, dtype=torch.float32
    )
    (result, gradient), (expected, slope) = (differentiate(loss_of(name), tokens) for tokens in (narrow, wide))
    same = result.clipped == expected.clipped
    assert same.float().mean() > 0.98
    torch.testing.assert_close(result.per_token.double(), expected.per_token, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradient[same].double(), slope[same], rtol=1e-4, atol=1e-5)
