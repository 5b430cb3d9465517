"""The loss of the critic by hand, its gradient, and its statistics."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.learner.algorithms.losses import ValueSums, clipped_value_loss

FINITE = st.floats(-1e6, 1e6, width=32)


def wide(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def test_the_plain_error_inside_of_the_region():
    values = wide(0.3, -0.2).requires_grad_()
    loss = clipped_value_loss(values, wide(0.0, 0.0), wide(1.0, -1.0), clip=0.5)
    assert loss.per_token.tolist() == pytest.approx([0.7**2 / 2, 0.8**2 / 2])
    loss.per_token.sum().backward()
    assert values.grad.tolist() == pytest.approx([-0.7, 0.8])


def test_outside_of_the_region_only_what_went_away_from_its_return_is_pulled_back():
    # 0.9 has gone more than 0.5 from 0 towards 1: the clipped value 0.5 has the larger error, a constant.
    # -0.9 has gone away from 1: its own error is the larger one.
    values = wide(0.9, -0.9).requires_grad_()
    loss = clipped_value_loss(values, wide(0.0, 0.0), wide(1.0, 1.0), clip=0.5)
    assert loss.per_token.tolist() == pytest.approx([0.5**2 / 2, 1.9**2 / 2])
    loss.per_token.sum().backward()
    assert values.grad.tolist() == pytest.approx([0.0, -1.9])
    assert ValueSums.from_tensor(loss.sums).clipped == 1


def test_without_a_region_it_is_the_squared_error():
    values = wide(9.0).requires_grad_()
    loss = clipped_value_loss(values, wide(0.0), wide(10.0), clip=0)
    assert loss.per_token.tolist() == [0.5]
    loss.per_token.sum().backward()
    assert values.grad.tolist() == [-1.0]
    assert ValueSums.from_tensor(loss.sums).clipped == 0


@settings(deadline=None)
@given(st.lists(st.tuples(FINITE, FINITE, FINITE), min_size=1, max_size=20), st.sampled_from([0.0, 0.2, 3.0]))
def test_it_is_finite_and_never_below_the_plain_error(tokens, clip):
    values, old, returns = (torch.tensor(column, dtype=torch.float32) for column in zip(*tokens, strict=True))
    values.requires_grad_()
    loss = clipped_value_loss(values, old, returns, clip=clip)
    loss.per_token.sum().backward()
    assert torch.isfinite(loss.per_token).all()
    assert torch.isfinite(values.grad).all()
    assert torch.isfinite(loss.sums).all()
    assert (loss.per_token >= (values - returns).square() / 2).all()


@settings(deadline=None)
@given(st.lists(st.tuples(*[st.floats(-3, 3)] * 3), min_size=1, max_size=8))
def test_the_gradient_is_that_of_the_loss(tokens):
    values, old, returns = (wide(*column) for column in zip(*tokens, strict=True))
    step = 1e-6
    # The loss has a corner where a value touches the border of its region or where both errors are equal.
    bounded = values.clamp(old - 0.5, old + 0.5)
    errors = ((values - returns).abs() - (bounded - returns).abs()).abs()
    corner = ((values - old).abs() - 0.5).abs() < 1e-3
    smooth = ~corner & ((errors > 1e-3) | (bounded == values))
    values.requires_grad_()
    clipped_value_loss(values, old, returns, clip=0.5).per_token.sum().backward()
    plain = values.detach()
    above, below = (clipped_value_loss(plain + way, old, returns, clip=0.5).per_token for way in (step, -step))
    numeric = (above - below) / (2 * step)
    torch.testing.assert_close(values.grad[smooth], numeric[smooth], rtol=1e-4, atol=1e-6)


def test_statistics():
    old, returns = wide(1.0, 2.0, 4.0), wide(1.0, 3.0, 5.0)
    sums = ValueSums.from_tensor(clipped_value_loss(old, old, returns, clip=0.5).sums)
    assert sums.tokens == 3
    assert sums.mean("values") == pytest.approx(7 / 3)
    assert sums.mean("returns") == pytest.approx(3)
    assert sums.loss == pytest.approx((0 + 1 + 1) / 2)
    error = np.array([0, 1, 1])
    assert sums.explained_variance == pytest.approx(1 - error.var() / np.array([1, 3, 5]).var())


def test_returns_that_do_not_vary_explain_nothing():
    sums = ValueSums.from_tensor(clipped_value_loss(wide(0.0), wide(0.0), wide(7.0), clip=0).sums)
    assert sums.explained_variance == 0
    assert ValueSums().explained_variance == 0
    assert ValueSums().mean("loss") == 0
