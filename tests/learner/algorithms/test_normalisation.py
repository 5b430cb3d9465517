"""Advantages over a whole step: by hand, and the same whatever the number of ranks."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.learner.algorithms.advantages import normalise


def alone(values):
    return values


def on_ranks(shares, kind):
    """Each rank in a thread of its own; sums go through a barrier, as an all-reduce does."""
    barrier, sent, results = threading.Barrier(len(shares), timeout=20), [None] * len(shares), [None] * len(shares)

    def rank(number):
        def all_sum(values):
            sent[number] = values
            barrier.wait()
            total = sum(sent)
            barrier.wait()
            return total

        results[number] = normalise(shares[number], kind, all_sum)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(len(shares))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    return results


def test_whiten_is_over_tokens():
    # 0, 0, 3: mean 1, unbiased variance (1 + 1 + 4) / 2 = 3
    short, long = normalise([np.asarray([3.0]), np.zeros(2)], "whiten", alone)
    std = np.sqrt(3) + 1e-6
    assert short == pytest.approx([2 / std], rel=1e-12)
    assert long == pytest.approx([-1 / std] * 2, rel=1e-12)


def test_std_is_over_responses_and_keeps_zero():
    # Responses 3, 0, 0, however long: mean 1, variance 3
    arrays = [np.full(5, 3.0), np.zeros(1), np.zeros(2)]
    found = normalise(arrays, "std", alone)
    assert found[0] == pytest.approx([3 / (np.sqrt(3) + 1e-6)] * 5, rel=1e-12)
    assert found[1].tolist() == [0]


def test_centre_is_over_responses_however_long():
    found = normalise([np.full(5, 3.0), np.zeros(1), np.asarray([1.0, -1.0])], "centre", alone)
    assert [array.tolist() for array in found] == [[2.0] * 5, [-1.0], [0.0, -2.0]]
    assert not any(array.any() for array in normalise([np.full(3, 0.1 + 0.2), np.full(2, 0.3)], "centre", alone))


def test_nonzero_makes_up_for_responses_without_an_advantage():
    found = normalise([np.ones(2), np.zeros(3), -np.ones(1), np.zeros(1), np.zeros(0)], "nonzero", alone)
    assert [array.tolist() for array in found] == [[2, 2], [0, 0, 0], [-2], [0], []]


def test_none_changes_nothing():
    arrays = [np.asarray([1.0, 7.0])]
    assert normalise(arrays, "none", alone)[0] is arrays[0]


@pytest.mark.parametrize("kind", ["whiten", "std", "centre", "nonzero"])
@pytest.mark.parametrize("arrays", [[], [np.zeros(0)], [np.zeros(3)], [np.zeros(1), np.zeros(1)]])
def test_nothing_to_go_by_gives_zero(kind, arrays):
    assert all(not array.any() for array in normalise(arrays, kind, alone))


@pytest.mark.parametrize("kind", ["whiten", "std"])
@pytest.mark.parametrize("value", [1.0, 0.1, 1e10])
def test_equal_advantages_are_no_contrast(kind, value):
    assert all(not array.any() for array in normalise([np.full(3, value), np.full(4, value)], kind, alone))
    assert not normalise([np.full(1, value)], kind, alone)[0].any()


def test_what_cannot_be_normalised_is_refused():
    with pytest.raises(ValueError, match="too large"):
        normalise([np.asarray([1e200, -1e200])], "whiten", alone)


steps = st.lists(st.lists(st.floats(-100, 100, allow_subnormal=False), max_size=4), min_size=1, max_size=8)


@given(steps, st.integers(2, 3), st.sampled_from(["whiten", "std", "centre", "nonzero"]))
def test_any_number_of_ranks_is_one_rank(responses, ranks, kind):
    arrays = [np.asarray(tokens, dtype=np.float64) for tokens in responses]
    whole = normalise(arrays, kind, alone)
    shares = on_ranks([arrays[rank::ranks] for rank in range(ranks)], kind)
    for rank in range(ranks):
        for found, expected in zip(shares[rank], whole[rank::ranks], strict=True):
            assert found == pytest.approx(expected, rel=1e-6, abs=1e-6)
