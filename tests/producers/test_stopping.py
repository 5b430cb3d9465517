"""Texts that end a response: which token completes one, and what stands before it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.engine import Completion
from streamrl.producers.stopping import StopTexts

PIECES = ["a", "b", ";", ";;", "ab;", "\n", "é"]
BYTES = len(PIECES)  # from here on a token is one byte of é
RUNS = [(0, 4), (2, 5)]
ALL = [*(piece.encode() for piece in PIECES), *(bytes([byte]) for byte in "é".encode())]


def decode(tokens: Sequence[int]) -> str:
    return b"".join(ALL[token] for token in tokens).decode(errors="replace")


def done(tokens: Sequence[int], finish: str = "length") -> Completion:
    values = np.asarray(tokens, np.int32)
    runs = [run for run in RUNS if run[0] < len(tokens)]
    return Completion(values, -values.astype(np.float32), runs, finish, 0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tokens", "stops", "after", "count", "text"),
    [
        ([0, 1, 2, 2, 1], [";;"], 0, 4, "ab"),
        ([0, 3, 1], [";"], 0, 2, "a"),  # `;;` is one token: the text ends before it, the tokens behind
        ([4, 0, 1], ["b;a"], 0, 2, "a"),
        ([0, 1], [";"], 0, 2, "ab"),
        ([2, 0, 2, 1], [";"], 1, 3, ";a"),  # the first one came too early
        ([0, 2, 2, 2], [";;"], 2, 3, "a"),  # begun early, complete behind
        ([0, BYTES, BYTES + 1, 1], ["é"], 0, 3, "a"),
        ([6, 1], ["é"], 0, 1, ""),
        ([0, 1, 5], ["b\n", "a"], 0, 1, ""),
    ],
)
def test_a_response_ends_with_the_token_that_completes_a_text(tokens, stops, after, count, text):
    ends = StopTexts(stops, decode, after)
    found = ends.cut(done(tokens))
    said = ends.before(decode(tokens[:count]), tokens[:count])
    ended = text != decode(tokens)
    assert (found.tokens.tolist(), said) == (tokens[:count], text)
    assert (found.finish, len(found.logprobs)) == ("stop" if ended else "length", count)
    assert found.runs == [run for run in RUNS if run[0] < count]
    for upto in range(1, count + 1):  # an engine that asks after each token ends it there, too
        assert StopTexts(stops, decode, after).ends(tokens[:upto]) == (ended and upto == count)


def test_without_texts_nothing_ends():
    found = StopTexts((), decode).cut(done([0, 1, 2]))
    assert (found.tokens.tolist(), found.finish) == ([0, 1, 2], "length")
    assert StopTexts((), decode).before("ab;", [0, 1, 2]) == "ab;"
    assert not StopTexts((), decode).ends([0])


def test_a_part_of_a_response_is_cut_where_its_last_token_completes_a_text():
    ends = StopTexts([";"], decode)
    assert ends.before("b", [0, 1, 3]) == "b"  # the part has no text of the last token
    assert ends.before("ab;;", [0, 1, 3]) == "ab"
    assert ends.before("a;b", [0, 2, 1]) == "a;b"  # it ended by another token


tokens_of = st.lists(st.integers(0, len(ALL) - 1), min_size=1, max_size=14)
texts_of = st.lists(st.text("ab;\né", min_size=1, max_size=4), min_size=1, max_size=3)


@given(tokens_of, texts_of, st.integers(0, 4))
def test_both_ways_find_the_same_end(tokens, stops, after):
    """Token by token, through a window, as an engine does, and at once."""
    ends = StopTexts(stops, decode, after)
    found = ends.cut(done(tokens))
    by_step = next((count for count in range(1, len(tokens) + 1) if ends.ends(tokens[:count])), None)
    assert (by_step or len(tokens)) == len(found.tokens)
    assert (found.finish == "stop") == (by_step is not None)
    text = decode(found.tokens.tolist())
    said = ends.before(text, found.tokens.tolist())
    assert text.startswith(said)
    assert (said != text) == (by_step is not None)
    assert said == text or any(text[len(said) :].startswith(stop) for stop in stops)
