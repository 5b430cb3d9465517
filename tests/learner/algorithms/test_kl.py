"""KL estimators against whole distributions, penalties, and the controllers of the coefficient."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_kit import make_tokens

from streamrl.config.learner import KlConfig
from streamrl.learner.algorithms.kl import UNBIASED_CAP, KlController, kl_estimate, kl_term, penalties

ALL = ("k1", "k2", "k3", "abs", "k1+", "k3+")
POLICY, REFERENCE, BEHAVIOUR = ([0.5, 0.3, 0.2], [0.2, 0.2, 0.6], [0.4, 0.4, 0.2])


def wide(*values):
    return torch.tensor(values, dtype=torch.float64)


def tokens_of(logprobs, reference, behaviour):
    return make_tokens(logprobs, behaviour, behaviour, dtype=None, reference=reference)


def test_by_hand():
    # d = log policy - log reference = log 2
    logprobs, reference, log2 = wide(math.log(0.4)), wide(math.log(0.2)), math.log(2)
    values = {name: float(kl_estimate(name, logprobs, reference)) for name in ALL}
    assert [values["k1"], values["k1+"]] == pytest.approx([log2, log2])
    assert values["abs"] == pytest.approx(log2)
    assert values["k2"] == pytest.approx(log2**2 / 2)
    assert [values["k3"], values["k3+"]] == pytest.approx([0.5 - 1 + log2] * 2)
    # The other way round k1 is negative and k3 is another number.
    assert float(kl_estimate("k1", reference, logprobs)) == pytest.approx(-log2)
    assert float(kl_estimate("k3", reference, logprobs)) == pytest.approx(2 - 1 - log2)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_the_expectation_under_the_policy_is_the_kl_of_policy_to_reference(name):
    policy, reference = wide(*POLICY), wide(*REFERENCE)
    exact = float((policy * (policy / reference).log()).sum())
    assert float((policy * kl_estimate(name, policy.log(), reference.log())).sum()) == pytest.approx(exact)


def test_off_policy_the_unbiased_form_has_that_expectation_and_the_plain_one_has_not():
    policy, reference, behaviour = wide(*POLICY), wide(*REFERENCE), wide(*BEHAVIOUR)
    exact = float((policy * (policy / reference).log()).sum())
    tokens = tokens_of(policy.log(), reference.log(), behaviour.log())
    for name in ("k1", "k3", "k1+", "k3+"):
        plain = float((behaviour * kl_term(tokens, KlConfig(estimator=name))).sum())
        unbiased = float((behaviour * kl_term(tokens, KlConfig(estimator=name, unbiased=True))).sum())
        assert unbiased == pytest.approx(exact)
        assert plain != pytest.approx(exact, rel=0.01)


def expected_gradient(config, sampling):
    """Gradient to the logits of the expectation that the term estimates, under what samples the tokens."""
    logits = wide(*POLICY).log().requires_grad_()
    logprobs = torch.log_softmax(logits, dim=0)
    tokens = tokens_of(logprobs, wide(*REFERENCE).log(), wide(*sampling).log())
    # Tokens are sampled, not differentiated: only the term depends on the logits.
    (wide(*sampling) * kl_term(tokens, config)).sum().backward()
    return logits.grad


def kl_gradient():
    logits = wide(*POLICY).log().requires_grad_()
    logprobs = torch.log_softmax(logits, dim=0)
    (logprobs.exp() * (logprobs - wide(*REFERENCE).log())).sum().backward()
    return logits.grad


@pytest.mark.parametrize("name", ["k2", "k1+", "k3+"])
def test_on_policy_the_gradient_of_k2_and_straight_through_is_that_of_the_kl(name):
    torch.testing.assert_close(expected_gradient(KlConfig(estimator=name), POLICY), kl_gradient())


def test_on_policy_k1_has_no_gradient_and_k3_another_one():
    assert expected_gradient(KlConfig(estimator="k1"), POLICY).abs().max() < 1e-12
    assert (expected_gradient(KlConfig(estimator="k3"), POLICY) - kl_gradient()).abs().max() > 0.05


@pytest.mark.parametrize("name", ["k1", "k3", "k1+", "k3+"])
def test_off_policy_the_gradient_of_the_unbiased_form_is_that_of_the_kl(name):
    torch.testing.assert_close(expected_gradient(KlConfig(estimator=name, unbiased=True), BEHAVIOUR), kl_gradient())


def test_the_weight_of_the_unbiased_form_is_bounded():
    tokens = tokens_of(wide(-1.0), wide(-2.0), wide(-100.0))
    assert float(kl_term(tokens, KlConfig(estimator="k1", unbiased=True))) == pytest.approx(UNBIASED_CAP * 1.0)


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("name", ALL)
@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(*[st.floats(-1000, 0, width=32)] * 3), min_size=1, max_size=8))
def test_finite_in_value_and_gradient(name, unbiased, rows):
    logprobs, reference, behaviour = (torch.tensor(column) for column in zip(*rows, strict=True))
    logprobs.requires_grad_()
    term = kl_term(tokens_of(logprobs, reference, behaviour), KlConfig(estimator=name, unbiased=unbiased))
    (gradient,) = torch.autograd.grad(term.sum(), logprobs)
    assert torch.isfinite(term).all()
    assert torch.isfinite(gradient).all()
    if name not in {"k1", "k1+"}:
        assert (term >= -1e-9).all()


@pytest.mark.parametrize("name", ALL)
def test_no_distance_costs_nothing(name):
    assert kl_estimate(name, wide(-3.0), wide(-3.0)).tolist() == [0.0]


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "abs"])
def test_the_gradient_is_the_slope(name):
    logprobs = wide(-2.5, -1.0, -0.3).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: kl_estimate(name, x, wide(-2.0, -2.0, -2.0)), logprobs)


def test_penalties_are_in_double_precision_and_keep_the_shape_of_responses():
    mine = [np.asarray([-1.0, -2.0], dtype=np.float32), np.asarray([-0.5], dtype=np.float32)]
    theirs = [np.asarray([-1.5, -1.0], dtype=np.float32), np.asarray([-0.5], dtype=np.float32)]
    found = penalties(mine, theirs, "k1", 0.1)
    assert [part.tolist() for part in found] == [pytest.approx([0.05, -0.1]), [0.0]]
    assert found[0].dtype == np.float64


def test_fixed_stays():
    control = KlController(KlConfig(coefficient=0.01))
    control.update(100.0, 1000)
    assert control.coefficient == 0.01
    control.load_state({"kl_coefficient": 5.0})
    assert control.coefficient == 0.01


def test_adaptive_by_hand():
    control = KlController(KlConfig(coefficient=0.1, controller="adaptive", target=0.2, horizon=1000))
    control.update(0.21, 100)  # error 0.05
    assert control.coefficient == pytest.approx(0.1 * 1.005)
    control.update(100.0, 100)  # error cut to 0.2
    assert control.coefficient == pytest.approx(0.1 * 1.005 * 1.02)
    control.update(0.0, 100)  # error cut to -0.2
    assert control.coefficient == pytest.approx(0.1 * 1.005 * 1.02 * 0.98)


def test_adaptive_survives_a_step_larger_than_its_horizon_and_a_kl_that_is_none():
    control = KlController(KlConfig(coefficient=0.1, controller="adaptive", horizon=10))
    for _ in range(50):
        control.update(0.0, 10_000)
    assert control.coefficient == pytest.approx(0.1 * 0.8**50)
    before = control.coefficient
    control.update(math.nan, 10)
    control.update(math.inf, 10)
    assert control.coefficient == before


def test_the_state_goes_through_a_checkpoint():
    config = KlConfig(coefficient=0.1, controller="adaptive", horizon=10)
    control, again = KlController(config), KlController(config)
    control.update(1.0, 7)
    again.load_state(control.state())
    assert again.coefficient == control.coefficient != 0.1
    again.load_state({})
    assert again.coefficient == control.coefficient


def test_adaptive_reaches_its_target():
    """A policy whose KL falls as the coefficient rises settles where the KL is the target."""
    control = KlController(KlConfig(coefficient=0.001, controller="adaptive", target=0.1, horizon=100))
    for _ in range(400):
        control.update(0.01 / control.coefficient, 50)
    assert 0.01 / control.coefficient == pytest.approx(0.1, rel=1e-3)
