"""The smallest dropped value: by brute force and by sorting, always the same."""

import math

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from streamrl.learner.algorithms.corrections import smallest_masked

# Multiples of 1/64 add up exactly, so no verdict hangs on rounding.
# Many lie close together: they differ in their last digits alone.
NUMBERS = st.integers(0, 4000) | st.integers(320, 352)
SQUARES = st.lists(NUMBERS.map(lambda number: number / 64), max_size=40)
TAU = st.integers(0, 1000).map(lambda number: number / 64)


def brute_force(squares, tau):
    """Drop all tokens of the greatest value, until the mean of the others fits."""
    left = sorted(squares)
    cut = math.inf
    while left and sum(left) > tau * len(left):
        cut = left[-1]
        left = [value for value in left if value < cut]
    return cut


@settings(max_examples=60, deadline=None)
@given(SQUARES, TAU)
@example([1.0, 1.0, 1.0], 0.5)
@example([], 0.5)
@example([0.0, 0.0], 0.0)
def test_sorting_finds_what_brute_force_finds(squares, tau):
    values = torch.tensor(squares, dtype=torch.float32)
    found = smallest_masked(values, torch.ones(len(squares), dtype=torch.bool), tau)
    assert float(found) == brute_force(squares, tau)


def test_tokens_that_cannot_be_dropped_do_not_count():
    squares = torch.tensor([9.0, 0.5, 0.25])
    assert float(smallest_masked(squares, torch.tensor([False, True, True]), 0.3)) == 0.5
    assert float(smallest_masked(squares, torch.tensor([False, False, True]), 0.3)) == math.inf
