"""The smallest dropped value: by brute force, by sorting, and digit by digit over ranks, always the same."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from streamrl.learner.algorithms.corrections import smallest_masked, step_limit

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


@settings(max_examples=60, deadline=None)
@given(SQUARES, TAU, st.integers(1, 3))
@example([1.0, 1.0, 1.0], 0.5, 2)
@example([1.0, 5.0, 5.5], 3.0, 2)
@example([1.0, 5.0, 5.015625], 3.0, 1)
def test_ranks_find_it_from_sums(squares, tau, world):
    shares = [np.asarray(squares[rank::world], dtype=np.float32) for rank in range(world)]
    assert over_ranks(shares, tau) == [brute_force(squares, tau)] * world


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1e6, width=32), min_size=1, max_size=60), st.floats(1e-6, 1e6))
def test_what_stays_fits_and_one_more_would_not(squares, tau):
    values = np.asarray(squares, dtype=np.float32)
    cut = step_limit(values, tau, lambda sums: sums)
    kept = values[values < cut].astype(np.float64)
    assert kept.sum() <= tau * len(kept) * (1 + 1e-9)
    if cut < math.inf:
        more = values[values <= cut].astype(np.float64)
        assert more.sum() > tau * len(more) * (1 - 1e-9)


def test_tokens_that_cannot_be_dropped_do_not_count():
    squares = torch.tensor([9.0, 0.5, 0.25])
    assert float(smallest_masked(squares, torch.tensor([False, True, True]), 0.3)) == 0.5
    assert float(smallest_masked(squares, torch.tensor([False, False, True]), 0.3)) == math.inf


@pytest.mark.parametrize("extreme", [float(np.finfo(np.float32).tiny), 1e-45, 3e38])
def test_every_bit_of_a_float_counts(extreme):
    values = np.asarray([0.0, extreme], dtype=np.float32)
    assert step_limit(values, 0.0, lambda sums: sums) == float(values[1])


def over_ranks(shares, tau):
    """All ranks at once: a sum is known when every rank has given its part, and they ask equally often."""
    world = len(shares)
    parts, barrier = [None] * world, threading.Barrier(world, timeout=20)

    def search(rank):
        def all_sum(part):
            parts[rank] = part
            barrier.wait()
            total = np.sum(parts, axis=0)
            barrier.wait()
            return total

        return step_limit(shares[rank], tau, all_sum)

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(search, range(world)))
