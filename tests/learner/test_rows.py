"""Who stands where: every response once, sizes kept, little padding, few rows."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.learner.batch import (
    PASS_TOKENS,
    WIDTH_STEP,
    Extent,
    Limits,
    padded_width,
    plan,
    row_width,
    split,
    work_of_prompt,
)

PROMPTS = st.lists(
    st.tuples(st.integers(1, 30), st.lists(st.integers(1, 40), min_size=1, max_size=6)), min_size=1, max_size=8
)


@st.composite
def limits(draw):
    shared = draw(st.sampled_from([0, 40, 100]))
    packed = draw(st.sampled_from([0, shared // 2, shared]))
    return Limits(
        tokens=draw(st.integers(16, 400)),
        shared=shared,
        packed=packed,
        share_prompts=draw(st.booleans()),
        hidden=draw(st.sampled_from([1, 64])),
    )


def problem(prompts):
    extents, members = [], []
    for prompt, responses in prompts:
        members.append(list(range(len(extents), len(extents) + len(responses))))
        extents += [Extent(prompt, sampled) for sampled in responses]
    return extents, members


@settings(max_examples=60, deadline=None)
@given(PROMPTS, limits())
def test_sizes_are_kept(prompts, bounds):
    extents, members = problem(prompts)
    for part in plan(extents, members, bounds):
        widths = [row_width(extents, row) for row in part]
        width = padded_width(max(widths))
        assert len(part) == 1 or len(part) * width <= bounds.tokens
        # Padding of a micro-batch is cheaper than another pass, the rounding of each row apart.
        assert sum(width - own for own in widths) <= PASS_TOKENS + len(part) * (WIDTH_STEP - 1)
        several = [row for row in part if len(row) > 1 or len(row[0]) > 1]
        assert all(row_width(extents, row) <= bounds.shared for row in several)
        assert all(row_width(extents, row) <= bounds.packed for row in several if len(row) > 1)
        assert not several or max(widths) <= bounds.shared, "a row with the model's own window stands apart"
        if not bounds.share_prompts:
            assert all(len(block) == 1 for row in part for block in row)


@settings(max_examples=60, deadline=None)
@given(PROMPTS)
def test_packed_rows_are_well_filled(prompts):
    """First fit: no two rows could be one."""
    extents, members = problem(prompts)
    rows = [row for part in plan(extents, members, Limits(tokens=4096, shared=80, packed=80)) for row in part]
    widths = sorted(row_width(extents, row) for row in rows if row_width(extents, row) <= 80)
    assert len(widths) < 2 or widths[0] + widths[1] > 80


def test_packing_by_hand():
    # Widths 50, 30, 20, 20 into rows of 50 with sharing off: [50], [30, 20], [20].
    extents = [Extent(10, 11), Extent(10, 41), Extent(10, 21), Extent(10, 11)]
    bounds = Limits(tokens=1000, shared=50, packed=50, share_prompts=False)
    ((*rows,),) = plan(extents, [[0, 1, 2, 3]], bounds)
    assert sorted(rows) == [[[1]], [[2], [0]], [[3]]]


def test_a_window_of_the_model_stands_apart_from_our_mask():
    """100 tokens do not fit into a window of 64, so that row must be under the model's mask, not under ours."""
    extents = [Extent(10, 91), *[Extent(40, 10)] * 2]
    parts = plan(extents, [[0], [1, 2]], Limits(tokens=4096, shared=64, hidden=64))
    assert parts == [[[[0]]], [[[1, 2]]]]


def test_work_counts_a_shared_prompt_once():
    extents = [Extent(33, 16)] * 4
    bounds = Limits(tokens=4096, shared=512, hidden=64)
    assert work_of_prompt(extents, bounds) == bounds.work(33 + 4 * 15)
    assert work_of_prompt(extents, Limits(tokens=4096, hidden=64)) == 4 * bounds.work(33 + 15)
    assert work_of_prompt([Extent(33, 0)], bounds) == 0


def test_long_rows_cost_more_than_their_tokens():
    bounds = Limits(tokens=4096, hidden=64)
    assert bounds.work(1024) > 2 * bounds.work(512)


@pytest.mark.parametrize(("widths", "parts"), [([100, 10, 10], [[0], [1, 2]]), ([], [])])
def test_a_row_over_the_cap_gets_its_own_pass(widths, parts):
    assert split(widths, 32) == parts
