"""Figures of a comparison against numbers made by hand, and what holds for any scores."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.consumers.rescoring import compare, most_different

FINITE = st.floats(allow_nan=False, allow_infinity=False)


def test_by_hand():
    old = [0.0, 1.0, 1.0, 0.0, 1.0, 1.0]
    new = [0.1, 0.9, 0.4, 0.6, 0.7, 0.7]
    found = compare(old, new, ["a", "a", "a", "b", "b", "c"], 0.5)
    assert (found.samples, found.groups) == (6, 3)
    assert found.agreement == pytest.approx(4 / 6)  # 0.4 and 0.6 are on the wrong side
    assert found.same == 0
    # In a: 1 over 0 twice, both ordered alike; in b: 1 over 0 once, ordered alike.
    assert (found.order, found.pairs) == (1.0, 3)
    assert (found.flat_old, found.flat_new) == (1, 1)  # c has one response
    assert found.old.mean == pytest.approx(4 / 6)
    assert found.new.mean == pytest.approx(3.4 / 6)
    assert found.new.std == pytest.approx(math.sqrt(sum((x - 3.4 / 6) ** 2 for x in new) / 6))
    assert (found.new.min, found.new.max) == (0.1, 0.9)
    mean_old, mean_new = 4 / 6, 3.4 / 6
    covariance = sum((x - mean_old) * (y - mean_new) for x, y in zip(old, new, strict=True))
    spread = math.sqrt(sum((x - mean_old) ** 2 for x in old) * sum((y - mean_new) ** 2 for y in new))
    assert found.pearson == pytest.approx(covariance / spread)


def test_order_within_a_prompt_counts_ties_half_and_other_prompts_not_at_all():
    old = [0.0, 1.0, 5.0, 6.0]
    assert compare(old, [1.0, 0.0, 0.5, 0.5], [0, 0, 1, 1], 0.5).order == pytest.approx(0.25)
    found = compare([1.0, 1.0], [0.0, 1.0], [0, 0], 0.5)
    assert (found.order, found.pairs) == (None, 0)


def test_ranks_are_compared_whatever_the_scale():
    old = [1.0, 2.0, 3.0, 4.0]
    new = [math.exp(x) for x in old]
    found = compare(old, new, [0, 1, 2, 3], 0.5)
    assert found.spearman == pytest.approx(1.0)
    assert found.pearson < 0.99
    assert compare(old, [-x for x in new], [0, 1, 2, 3], 0.5).spearman == pytest.approx(-1.0)


def test_no_correlation_with_a_constant():
    found = compare([1.0, 1.0, 1.0], [0.1, 0.2, 0.3], [0, 0, 0], 0.5)
    assert (found.pearson, found.spearman, found.order) == (None, None, None)
    assert compare([1.0], [2.0], [0], 0.5).pearson is None


def test_few_values_have_a_bin_each_and_many_share():
    found = compare([0, 1, 1], [1, 1, 0.5], [0, 0, 0], 0.5).histogram
    assert [(each.low, each.old, each.new) for each in found] == [(0, 1, 0), (0.5, 0, 1), (1, 2, 2)]
    values = [float(n) for n in range(24)]
    bins = compare(values, values[::-1], [0] * 24, 0.5).histogram
    assert [each.old for each in bins] == [each.new for each in bins] == [2] * 12
    assert (bins[0].low, bins[-1].high) == (0.0, 23.0)


def test_what_differs_most_is_found_by_rank():
    old = [0.0, 0.0, 1.0, 1.0, 1.0]
    new = [-3.0, 9.0, 8.0, 7.0, -2.0]
    assert most_different(old, new, 2) == [1, 4]
    assert most_different(old, new, 99)[:2] == [1, 4]
    assert most_different(old, old, 5) == []


@given(st.lists(st.tuples(FINITE, FINITE, st.integers(0, 3)), min_size=1, max_size=40))
def test_any_finite_scores_give_finite_figures(rows):
    old, new, groups = ([row[k] for row in rows] for k in range(3))
    found = compare(old, new, groups, 0.5)
    assert 0 <= found.agreement <= 1
    assert 0 <= found.same <= 1
    assert sum(each.old for each in found.histogram) == sum(each.new for each in found.histogram) == len(rows)
    for value in (found.pearson, found.spearman):
        assert value is None or -1.000001 <= value <= 1.000001
    for moments in (found.old, found.new):
        assert math.isfinite(moments.mean)
        assert math.isfinite(moments.std)
    places = most_different(old, new, len(rows))
    assert len(set(places)) == len(places)


@given(st.lists(FINITE, min_size=1, max_size=40))
def test_equal_scores_agree(values):
    found = compare(values, values, [0] * len(values), 0.5)
    assert (found.same, found.agreement) == (1.0, 1.0)
    assert found.order in (None, 1.0)
    assert most_different(values, values, 9) == []
