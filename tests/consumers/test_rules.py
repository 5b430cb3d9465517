import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.consumers.rules.text import ExactMatch, NumberMatch, last_number
from tests.consumers.samples import seen


async def test_exact_match_strips_white_space_and_compares_the_rest():
    rule = ExactMatch()
    assert (await rule.score(seen("  4\n", "4"))).value == 1.0
    assert (await rule.score(seen("4.0", "4"))).value == 0.0
    assert (await rule.score(seen("4", 4))).value == 1.0


async def test_exact_match_can_insist_on_an_end_by_itself():
    sample = seen("4", "4", finish="length")
    assert (await ExactMatch().score(sample)).value == 1.0
    assert (await ExactMatch(require_stop=True).score(sample)).value == 0.0
    assert (await ExactMatch(require_stop=True).score(seen("4", "4"))).value == 1.0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so it is 12.", 12),
        ("1,234.50 in all", 1234.5),
        ("first 3, then 4", 4),
        ("x = -3", -3),
        ("10-4", 4),
        ("6e2", 600),
        ("1, 2,3", 3),
        (".5", 0.5),
        ("1e999 or 7, or 1e999", 7),
        ("none", None),
        ("", None),
    ],
)
def test_the_last_number_of_a_text(text, number):
    assert last_number(text) == number


@given(st.integers(-(10**12), 10**12), st.text(alphabet="abc xyz.,\n", max_size=30))
def test_a_number_is_found_in_whatever_way_it_is_written(number, words):
    assert last_number(f"{words} {number} {words}") == number
    assert last_number(f"{words} {number:,} {words}") == number


@given(st.text(max_size=300))
def test_any_text_has_a_finite_last_number_or_none(text):
    number = last_number(text)
    assert number is None or math.isfinite(number)


async def test_number_match_compares_numbers_not_texts():
    rule = NumberMatch()
    assert (await rule.score(seen("the answer is 1,000.0", "1000"))).value == 1.0
    assert (await rule.score(seen("#### 42", "work\n#### 42"))).value == 1.0
    assert (await rule.score(seen("42 or 43", "42"))).value == 0.0
    assert (await rule.score(seen("no idea", "42"))).value == 0.0
    assert (await rule.score(seen("2.02", 2, "stop"))).value == 0.0
    assert (await NumberMatch(tolerance=0.02).score(seen("2.02", 2))).value == 1.0
    assert (await NumberMatch(require_stop=True).score(seen("2", 2, "length"))).value == 0.0


async def test_a_prompt_without_an_answer_is_an_error_and_no_zero():
    with pytest.raises(ValueError, match="line 7"):
        await ExactMatch().score(seen("4", None))
    with pytest.raises(ValueError, match="has no number"):
        await NumberMatch().score(seen("4", "four"))
