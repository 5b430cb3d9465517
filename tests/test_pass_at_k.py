"""avg@k and pass@k by hand, and as the mean over all choices of k responses."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.pass_at_k import at_k, in_words


def test_by_hand():
    found = at_k([(4, 1), (4, 0), (4, 4)], 4)
    assert found == pytest.approx({"avg_at_4": 5 / 12, "pass_at_2": (0.5 + 0 + 1) / 3, "pass_at_4": 2 / 3})
    assert in_words(found) == "avg@4 0.417  pass@4 0.667"


def test_one_response_says_no_more_than_the_accuracy():
    assert at_k([(1, 1)], 1) == at_k([], 4) == at_k([(0, 0)], 4) == {}
    assert in_words({}) == ""


def test_a_prompt_with_fewer_scored_responses_than_k_says_nothing_of_it():
    found = at_k([(3, 3), (1, 0), (0, 0)], 3)
    assert found == pytest.approx({"avg_at_3": 0.5, "pass_at_2": 1.0, "pass_at_3": 1.0})
    assert at_k([(1, 1)], 3) == {"avg_at_3": 1.0}
    assert in_words({"avg_at_3": 1.0}) == "avg@3 1.000"


@given(st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=4))
def test_pass_at_k_is_the_mean_over_all_choices(prompts):
    found = at_k([(len(right), sum(right)) for right in prompts], 6)
    assert list(found) == ["avg_at_6", "pass_at_2", "pass_at_4", "pass_at_6"]
    for k in (2, 4, 6):
        chosen = [[any(some) for some in combinations(right, k)] for right in prompts]
        assert found[f"pass_at_{k}"] == pytest.approx(sum(sum(each) / len(each) for each in chosen) / len(chosen))
