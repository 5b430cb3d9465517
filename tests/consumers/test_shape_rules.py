"""Rules of how a response looks: its tags, its length, its repetitions."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.consumers.rules.text import Format, Length, Repetition, repeated
from tests.consumers.samples import seen


def of_tokens(*tokens: int):
    return dataclasses.replace(seen(), tokens=np.array(tokens, np.int32))


@pytest.mark.parametrize(
    ("text", "value", "partial"),
    [
        ("<think>a</think>\n<answer>b</answer>\n", 1, 1),
        ("a<think>a</think><answer>b</answer>", 0, 0.5),
        ("<think>a</think> so <answer>b</answer>", 0, 0.5),
        ("<think>a</think><answer>b</answer> bye", 0, 0.5),
        ("<think>a</think><answer> </answer>", 0, 0.5),
        ("<think>a</think><answer>b", 0, 0.5),
        ("<think>a<answer>b</answer></think>", 0, 0.5),
        ("<answer>b</answer><think>a</think>", 0, 0),
        ("<think>a</think><think>a</think><answer>b</answer>", 0, 0),
        ("<think>a</think><answer>b</answer></answer>", 0, 0.5),
        ("a</think><answer>b</answer>", 0, 0),
        ("", 0, 0),
    ],
)
async def test_format(text, value, partial):
    assert (await Format().score(seen(text))).value == value
    assert (await Format(partial=True).score(seen(text))).value == partial


async def test_format_that_allows_more():
    assert (await Format(outside=True).score(seen("a<think>a</think>b<answer>b</answer>c"))).value == 1.0
    assert (await Format(empty=True).score(seen("<think></think><answer>b</answer>"))).value == 1.0
    assert (await Format(opened=True).score(seen("a</think><answer>b</answer>"))).value == 1.0
    assert (await Format(opened=True).score(seen("\n<think>a</think><answer>b</answer>"))).value == 1.0
    assert (await Format(["sql"]).score(seen("<sql>select 1</sql>"))).value == 1.0


@pytest.mark.parametrize(
    ("args", "length", "value"),
    [
        ({"most": 3}, 3, 1),
        ({"most": 3}, 4, 0),
        ({"most": 4, "slack": 4}, 6, 0.5),
        ({"most": 4, "slack": 4}, 9, 0),
        ({"least": 4, "slack": 2}, 3, 0.5),
        ({"least": 4}, 9, 1),
        ({"most": 0, "slack": 10}, 3, 0.7),
    ],
)
async def test_length(args, length, value):
    score = await Length(**args).score(of_tokens(*range(length)))
    assert (score.value, score.parts) == (pytest.approx(value), {"length": length})


async def test_units_of_length():
    sample = seen("one two  three\n")
    lengths = [(await Length(most=1, unit=unit).score(sample)).parts["length"] for unit in ("words", "characters")]
    assert lengths == [3, 15]


async def test_repetition_of_tokens_words_and_characters():
    assert (await Repetition(n=2).score(of_tokens(1, 2, 3, 4))).value == 1.0
    assert (await Repetition(n=2).score(of_tokens(1, 2, 1, 2, 1))).value == 0.5  # 12 21 12 21
    assert (await Repetition(n=2, allowed=0.5).score(of_tokens(1, 2, 1, 2, 1))).value == 1.0
    assert (await Repetition(n=1, allowed=0.5).score(of_tokens(*[1] * 8))).value == pytest.approx(0.25)
    assert (await Repetition(n=8).score(of_tokens(1, 1))).value == 1.0
    words = await Repetition(n=2, unit="words").score(seen("No no no  no"))
    assert words.parts["repeated"] == pytest.approx(2 / 3)
    assert (await Repetition(n=3, unit="characters").score(seen("abcabc"))).parts["repeated"] == 0.25


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 9))
def test_repeated_n_grams_are_those_that_a_set_counts(units, n):
    grams = [tuple(units[at : at + n]) for at in range(len(units) - n + 1)]
    share = 1 - len(set(grams)) / len(grams) if grams else 0.0
    assert repeated(np.array(units, np.int32), n) == share


@pytest.mark.parametrize(
    "build",
    [
        lambda: Format([]),
        lambda: Format("think"),
        lambda: Format(["a", "a"]),
        lambda: Format(["<a>"]),
        Length,
        lambda: Length(least=5, most=4),
        lambda: Length(most=5, unit="bytes"),
        lambda: Repetition(n=0),
        lambda: Repetition(allowed=1),
        lambda: Repetition(unit="bytes"),
    ],
)
def test_args_that_make_no_sense_are_refused(build):
    with pytest.raises(ValueError):
        build()
