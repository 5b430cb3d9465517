"""The policy loss against hand-computed numbers, a plain float64 reference, and inputs meant to break it."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.learner.losses import LOG_RATIO_BOUND, TOKEN_SUMS, TokenSums, decoupled_ppo

LOW, HIGH, CAP = 0.2, 0.28, 2.0


def loss_of(logprobs, prox, behaviour, advantages):
    tensors = [torch.as_tensor(values, dtype=torch.float64) for values in (logprobs, prox, behaviour, advantages)]
    tensors[0] = tensors[0].clone().requires_grad_()
    result = decoupled_ppo(*tensors, clip_low=LOW, clip_high=HIGH, importance_cap=CAP)
    (gradient,) = torch.autograd.grad(result.per_token.sum(), tensors[0])
    return result.per_token.detach(), gradient, TokenSums.from_tensor(result.sums)


def reference(logprobs, prox, behaviour, advantages):
    """The formula of the paper, term by term."""
    rho = torch.minimum(torch.exp(prox - behaviour), torch.tensor(CAP, dtype=torch.float64))
    u = torch.exp(logprobs - prox)
    return -rho * torch.minimum(u * advantages, u.clamp(1 - LOW, 1 + HIGH) * advantages)


def test_hand_computed():
    ln = math.log
    logprobs = [ln(0.5), ln(0.5), ln(0.5), ln(0.1)]
    prox = [ln(0.5), ln(0.25), ln(0.25), ln(0.4)]
    behaviour = [ln(0.4), ln(0.25), ln(0.05), ln(0.8)]
    advantages = [1.0, 2.0, -3.0, -1.0]
    loss, gradient, sums = loss_of(logprobs, prox, behaviour, advantages)
    #       rho              u     min(u A, clip A)
    # 0     .5/.4 = 1.25     1     1                -> -1.25, gradient -1.25
    # 1     1                2     1.28 * 2 clipped -> -2.56, none
    # 2     5 -> capped at 2 2     2 * -3           -> 12,    gradient 12
    # 3     .5               .25   .8 * -1 clipped  -> .4,    none
    assert loss.tolist() == pytest.approx([-1.25, -2.56, 12.0, 0.4])
    assert gradient.tolist() == pytest.approx([-1.25, 0, 12, 0])
    w = [1.25, 1.0, 5.0, 0.5]
    assert sums.tokens == 4
    assert sums.loss == pytest.approx(8.59)
    assert sums.weight == pytest.approx(sum(w))
    assert sums.ess == pytest.approx(sum(w) ** 2 / (4 * sum(x * x for x in w)))
    assert sums.mean("squared_log_ratio") == pytest.approx(sum(ln(x) ** 2 for x in w) / 4)
    assert sums.clipped == 2
    assert sums.capped == 1
    assert sums.mean("kl_k1") == pytest.approx(-sum(ln(x) for x in w) / 4)
    assert sums.mean("kl_k3") == pytest.approx(sum(x - 1 - ln(x) for x in w) / 4)


def test_equals_the_plain_formula_in_value_and_gradient():
    generator = torch.Generator().manual_seed(0)
    logprobs, prox, behaviour, advantages = torch.randn(4, 5000, generator=generator, dtype=torch.float64)
    logprobs = (prox + 0.3 * logprobs).requires_grad_()
    behaviour = prox + 0.5 * behaviour
    ours = decoupled_ppo(logprobs, prox, behaviour, advantages, clip_low=LOW, clip_high=HIGH, importance_cap=CAP)
    theirs = reference(logprobs, prox, behaviour, advantages)
    torch.testing.assert_close(ours.per_token, theirs, rtol=1e-12, atol=1e-12)
    (gradient,) = torch.autograd.grad(ours.per_token.sum(), logprobs)
    (expected,) = torch.autograd.grad(theirs.sum(), logprobs)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)
    narrow = decoupled_ppo(logprobs.float(), prox.float(), behaviour.float(), advantages.float(), clip_low=LOW)
    torch.testing.assert_close(narrow.per_token.double(), theirs, rtol=1e-5, atol=1e-5)


def test_gradient_is_the_slope():
    prox, behaviour, advantages = torch.randn(3, 60, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    # Away from the corners of the clip, where there is no slope.
    logprobs = prox + torch.tensor([-0.5, -0.1, 0.0, 0.1, 0.5, 3.0], dtype=torch.float64).repeat(10)
    assert torch.autograd.gradcheck(
        lambda x: decoupled_ppo(x, prox, behaviour, advantages).per_token, logprobs.requires_grad_(), atol=1e-7
    )


def test_on_policy_it_is_exactly_ppo():
    generator = torch.Generator().manual_seed(2)
    old, advantages = torch.randn(2, 1000, generator=generator)
    new = (old + 0.3 * torch.randn(1000, generator=generator)).requires_grad_()
    result = decoupled_ppo(new, old, old, advantages)
    u = torch.exp(new - old)
    ppo = -torch.minimum(u * advantages, u.clamp(0.8, 1.28) * advantages)
    torch.testing.assert_close(result.per_token, ppo, rtol=1e-6, atol=1e-6)
    sums = TokenSums.from_tensor(result.sums)
    assert (sums.ess, sums.capped, sums.kl_k1, sums.kl_k3) == (1.0, 0, 0, 0)


def test_with_the_present_policy_as_proximal_the_gradient_is_truncated_importance_sampling():
    logprobs = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    behaviour = torch.tensor([-1.0, -3.0, -1.5])
    advantages = torch.tensor([1.0, 1.0, -2.0])
    result = decoupled_ppo(logprobs, logprobs.detach(), behaviour, advantages)
    result.per_token.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([-1.0, -2.0, 2 * math.exp(0.5)])


def test_proximal_and_behaviour_get_no_gradient():
    prox = torch.tensor([-1.0], requires_grad=True)
    logprobs = torch.tensor([-0.9], requires_grad=True)
    loss = decoupled_ppo(logprobs, prox, torch.tensor([-2.0]), torch.tensor([1.0])).per_token.sum()
    assert torch.autograd.grad(loss, prox, allow_unused=True) == (None,)


@pytest.mark.parametrize(
    ("log_u", "advantage", "moves"),
    [(1.0, 1.0, False), (1.0, -1.0, True), (-1.0, 1.0, True), (-1.0, -1.0, False), (0.0, 1.0, True), (0.0, -1.0, True)],
)
def test_clip_stops_only_what_runs_away(log_u, advantage, moves):
    _, gradient, sums = loss_of([log_u - 2], [-2.0], [-2.0], [advantage])
    assert (gradient.item() != 0) == moves
    assert sums.clipped == (not moves)
    if moves:
        assert math.copysign(1, gradient.item()) == -math.copysign(1, advantage)


def test_direction_of_the_importance_weight():
    """Tokens that the sampler drew too rarely count more, up to the cap; those drawn too often count less."""
    loss, _, sums = loss_of([-1, -1], [-1, -1], [-5, -3], [1, 1])
    assert loss.tolist() == [-CAP, -CAP]
    assert sums.capped == 2
    loss, _, sums = loss_of([-5], [-5], [-1], [1])
    assert loss.item() == pytest.approx(-math.exp(-4))
    assert sums.capped == 0


FINITE = st.floats(-1000, 0, width=32)
WILD = st.floats(allow_nan=False, allow_infinity=False, width=32)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(FINITE, FINITE, FINITE, st.floats(-1e6, 1e6, width=32)), min_size=1, max_size=8))
def test_finite_log_probs_give_finite_loss_gradient_and_statistics(rows):
    check_finite(rows)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(WILD, WILD, WILD, st.floats(-10, 10, width=32)), min_size=1, max_size=8))
def test_even_absurd_log_probs_do(rows):
    check_finite(rows)


def check_finite(rows):
    logprobs, prox, behaviour, advantages = (torch.tensor(column) for column in zip(*rows, strict=True))
    logprobs.requires_grad_()
    result = decoupled_ppo(logprobs, prox, behaviour, advantages)
    (gradient,) = torch.autograd.grad(result.per_token.sum(), logprobs)
    assert torch.isfinite(result.per_token).all()
    assert torch.isfinite(gradient).all()
    assert torch.isfinite(result.sums).all()
    sums = TokenSums.from_tensor(result.sums)
    assert 0 < sums.ess <= 1 + 1e-9
    assert sums.kl_k3 >= -1e-9
    bound = CAP * math.exp(LOG_RATIO_BOUND) * advantages.abs()
    assert (result.per_token.abs() <= bound * 1.001).all()


def test_sums_add_up_over_pieces():
    columns = torch.randn(4, 40, generator=torch.Generator().manual_seed(3))
    whole = decoupled_ppo(*columns).sums
    pieces = sum(decoupled_ppo(*columns[:, start : start + 8]).sums for start in range(0, 40, 8))
    torch.testing.assert_close(whole, pieces)
    assert len(TOKEN_SUMS) == len(whole)


def test_no_tokens_give_neutral_statistics():
    assert (TokenSums().ess, TokenSums().mean("loss")) == (1.0, 0.0)


def test_a_lower_clip_of_one_leaves_the_ratio_free():
    result = decoupled_ppo(*(torch.tensor([x]) for x in (-900.0, -1.0, -1.0, -1.0)), clip_low=1.0)
    assert result.per_token.item() == 0
