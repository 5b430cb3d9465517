"""Who stands where: sizes kept, little padding, few rows, no group apart from its like without need."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_batch import sample

from streamrl.learner.batch import PASS_TOKENS, RowLimits, pack, split, work_of

GROUPS = st.lists(
    st.tuples(st.integers(1, 30), st.lists(st.integers(1, 40), min_size=1, max_size=6)), min_size=1, max_size=8
)


def batch_of(groups):
    """Groups of a prompt of so many tokens with responses of so many."""
    return [
        sample(
            group_id=number,
            prompt=np.full(prompt, number, dtype=np.int32),
            tokens=np.ones(count, dtype=np.int32),
            logprobs=np.zeros(count, dtype=np.float32),
        )
        for number, (prompt, counts) in enumerate(groups)
        for count in counts
    ]


@st.composite
def limits(draw):
    return RowLimits(
        tokens=draw(st.integers(16, 400)),
        shared=draw(st.sampled_from([40, 100])),
        packed=draw(st.booleans()),
        hidden=draw(st.sampled_from([1, 64])),
    )


@settings(max_examples=60, deadline=None)
@given(GROUPS, limits())
def test_sizes_are_kept(groups, bounds):
    batch = batch_of(groups)
    for part in pack(batch, bounds):
        rows, width = part.input_ids.shape
        assert width % bounds.padded(1) == 0
        assert rows == 1 or rows * width <= bounds.tokens
        filled = (part.visible_until < 1 << 30).sum(axis=1)
        # Padding of a micro-batch is cheaper than another pass, the rounding of each row apart.
        assert sum(width - filled) <= PASS_TOKENS + rows * (bounds.padded(1) - 1)
        assert not part.shared or max(filled) <= bounds.shared, "a row with the model's own window stands apart"


@settings(max_examples=60, deadline=None)
@given(GROUPS)
def test_packed_rows_are_well_filled(groups):
    """First fit: no two rows could be one."""
    parts = pack(batch_of(groups), RowLimits(tokens=4096, shared=80, packed=True))
    widths = sorted(
        width for part in parts for width in (part.visible_until < 1 << 30).sum(axis=1).tolist() if width <= 80
    )
    assert len(widths) < 2 or widths[0] + widths[1] > 80


def test_a_window_of_the_model_stands_apart_from_our_mask():
    """100 tokens do not fit into a window of 64, so that row must be under the model's mask, not under ours."""
    parts = pack(batch_of([(10, [91]), (40, [10, 10])]), RowLimits(tokens=4096, shared=64, hidden=64))
    assert [(part.samples.tolist(), part.shared) for part in parts] == [([0], False), ([1, 2], True)]


def test_a_model_that_takes_no_rows_has_each_response_alone_without_padding():
    parts = pack(batch_of([(10, [11, 4]), (3, [6])]), RowLimits(tokens=4096))
    assert [part.input_ids.shape for part in parts] == [(1, 20), (1, 13), (1, 8)]
    assert not any(part.shared for part in parts)


def test_work_is_that_of_tokens_and_more_for_long_sequences():
    bounds = RowLimits(tokens=4096, shared=512, hidden=64)
    assert work_of(batch_of([(33, [16] * 4)]), bounds) == 4 * bounds.work(48)
    assert bounds.work(1024) > 2 * bounds.work(512)


@pytest.mark.parametrize(("widths", "parts"), [([100, 10, 10], [[0], [1, 2]]), ([], [])])
def test_a_row_over_the_cap_gets_its_own_pass(widths, parts):
    assert split(widths, [1] * len(widths), RowLimits(tokens=32, shared=16)) == parts
