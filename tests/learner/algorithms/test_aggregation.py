"""Weights and normalisers by hand, and that no cutting of a step into pieces changes its mean."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.learner.algorithms.recipe import normaliser, token_weights

MODES = ("token_mean", "sequence_mean", "prompt_mean", "constant_length")


def mean(losses, aggregate, limit=8, groups=None):
    """All responses are to one prompt unless `groups` says how many are to each."""
    counts = [len(part) for part in losses]
    weights = token_weights(counts, aggregate, limit, means_of(counts, groups or [len(counts)])).astype(np.float64)
    return (weights * np.concatenate(losses)).sum() / normaliser(aggregate, tokens=sum(counts), responses=len(counts))


def means_of(counts, groups):
    """The mean length of the responses to the same prompt, for each response."""
    parts = np.split(np.asarray(counts, dtype=np.float64), np.cumsum(groups)[:-1])
    return np.concatenate([np.full(len(part), part.mean()) for part in parts if len(part)] or [[]])


def test_the_mean_over_prompts_of_the_mean_over_their_tokens():
    # (4 + 1 + 2 + 3) / 4 and (10 + 20 + 30 + 40) / 4
    losses = [np.asarray(part, dtype=np.float64) for part in ([4], [1, 2, 3], [10, 20], [30, 40])]
    assert mean(losses, "prompt_mean", groups=[2, 2]) == pytest.approx((2.5 + 25) / 2)


def test_by_hand():
    losses = [np.asarray([1.0, 2.0, 3.0, 4.0]), np.asarray([10.0])]
    assert mean(losses, "token_mean") == pytest.approx(20 / 5)
    assert mean(losses, "sequence_mean") == pytest.approx((2.5 + 10) / 2)
    assert mean(losses, "constant_length") == pytest.approx((10 / 8 + 10 / 8) / 2)


def test_a_long_response_weighs_by_its_length_only_in_the_token_mean_and_the_constant_length():
    weights = {mode: token_weights([1, 4], mode, 8, [2.5, 2.5]) for mode in MODES}
    assert weights["token_mean"].tolist() == [1] * 5
    assert weights["sequence_mean"].tolist() == [1, 0.25, 0.25, 0.25, 0.25]
    assert weights["prompt_mean"].tolist() == pytest.approx([0.4] * 5)
    assert weights["constant_length"].tolist() == [0.125] * 5
    assert all(array.dtype == np.float32 for array in weights.values())


@pytest.mark.parametrize("aggregate", MODES)
def test_responses_without_a_gradient_still_count(aggregate):
    losses = [np.asarray([1.0, 2.0]), np.asarray([0.0, 0.0])]
    skipped = token_weights([2], aggregate, 8, [2.0]) @ losses[0] / normaliser(aggregate, tokens=4, responses=2)
    assert skipped == pytest.approx(mean(losses, aggregate))


@pytest.mark.parametrize("aggregate", MODES)
def test_nothing_at_all(aggregate):
    assert token_weights([], aggregate, 8).shape == (0,)
    assert token_weights([0], aggregate, 8, [1.0]).shape == (0,)
    assert normaliser(aggregate, tokens=0, responses=0) == 1


@pytest.mark.parametrize("aggregate", MODES)
@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    owners=st.lists(st.integers(0, 3), min_size=12, max_size=12),
)
def test_pieces_on_any_rank_add_up_to_the_whole(aggregate, lengths, owners):
    rng = np.random.default_rng(len(lengths))
    losses = [rng.standard_normal(length) for length in lengths]
    divisor = normaliser(aggregate, tokens=sum(lengths), responses=len(lengths))
    total, means = 0.0, means_of(lengths, [len(lengths)])
    for rank in range(4):
        mine = [loss for loss, owner in zip(losses, owners, strict=False) if owner == rank]
        weights = token_weights([len(loss) for loss in mine], aggregate, 8, means[: len(mine)])
        total += sum((weights * np.concatenate(mine)).tolist()) if mine else 0.0
    assert total / divisor == pytest.approx(mean(losses, aggregate), abs=1e-5)
