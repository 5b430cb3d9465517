"""What is pure about a group: joining pieces of a response, and the choice of a server."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.engine import Completion, Request
from streamrl.producers.group.load_balancing import Place, choose
from streamrl.producers.group.request import PartialResponse, first_tokens, join_runs


@pytest.mark.parametrize(
    ("before", "count", "after", "joined"),
    [
        ([], 0, [(0, 3)], [(0, 3)]),
        ([(0, 3)], 4, [], [(0, 3)]),
        ([(0, 3)], 4, [(0, 3), (2, 4)], [(0, 3), (6, 4)]),
        ([(0, 3), (2, 5)], 4, [(0, 6)], [(0, 3), (2, 5), (4, 6)]),
    ],
)
def test_runs_join(before, count, after, joined):
    assert join_runs(before, count, after) == joined


def versions_of(runs, count):
    return [next(version for first, version in reversed(runs) if first <= at) for at in range(count)]


def piece_of(tokens, logprobs, runs):
    return Completion(np.asarray(tokens, np.int32), np.asarray(logprobs, np.float32), runs, "abort", 5, 0.0)


@st.composite
def pieces(draw):
    """Pieces of a response as servers leave them: how many tokens, their versions, and how many are proved."""
    version, made = 1, []
    for _ in range(draw(st.integers(1, 5))):
        count = draw(st.integers(0, 8))
        versions = []
        for _ in range(count):
            version += draw(st.integers(0, 1))
            versions.append(version)
        made.append((count, versions, draw(st.integers(0, count))))
    return made


@given(pieces(), st.integers(1, 30), st.integers(10, 40))
def test_whatever_dies_the_joined_response_is_one_a_single_server_could_have_given(parts, limit, context):
    prompt = np.arange(1, 6, dtype=np.int32)
    partial = PartialResponse(Request("r", prompt, limit), frozenset(), context)
    room = min(limit, context - 5)
    expected_versions = []
    for count, versions, proved in parts:
        if partial.finish is not None:
            break
        rest = partial.rest()
        assert rest.tokens.tolist() == [*prompt, *(100 + at for at in range(len(partial)))]
        assert rest.max_new_tokens == limit - len(partial) >= 1
        base = len(partial)
        runs = [(at, v) for at, v in enumerate(versions) if at == 0 or versions[at - 1] != v]
        piece = piece_of([100 + base + at for at in range(count)], [-float(base + at) for at in range(count)], runs)
        partial.add(first_tokens(piece, proved))
        added = len(partial) - base
        assert added == min(proved, room - base)
        expected_versions += versions[:added]
    done = partial.ended("abort", 1.0)
    assert done.tokens.tolist() == [100 + at for at in range(len(partial))]
    assert done.logprobs.tolist() == [-float(at) for at in range(len(partial))]
    assert versions_of(done.runs, len(partial)) == expected_versions
    assert all(a[0] < b[0] and a[1] < b[1] for a, b in zip(done.runs, done.runs[1:], strict=False))
    assert (partial.finish == "length") == (0 < len(partial) == room)
    assert partial.version == (expected_versions[-1] if expected_versions else -1)
    last = Completion(np.asarray([7], np.int32), np.asarray([-1.0], np.float32), [(0, 99)], "stop", 9, 0.0)
    whole = partial.joined(last, 2.0)
    assert whole.tokens.tolist() == [*done.tokens.tolist(), 7]
    assert versions_of(whole.runs, len(partial) + 1) == [*expected_versions, 99]
    assert (whole.finish, whole.seconds) == ("stop", 2.0)


@given(st.lists(st.integers(0, 5), max_size=12), st.integers(0, 12))
def test_nothing_is_kept_behind_the_token_that_ends_a_response(tokens, proved):
    partial = PartialResponse(Request("r", np.asarray([9], np.int32), 50), frozenset({3}), 100)
    partial.add(first_tokens(piece_of(tokens, [0.0] * len(tokens), [(0, 1)] if tokens else []), proved))
    sure = tokens[:proved]
    expected = sure[: sure.index(3) + 1] if 3 in sure else sure
    assert partial.ended("abort", 0.0).tokens.tolist() == expected
    assert partial.finish == ("stop" if 3 in sure else None)


def test_what_was_cached_of_a_prompt_is_said_by_the_first_piece():
    partial = PartialResponse(Request("r", np.asarray([9, 8], np.int32), 50), frozenset(), 100)
    last = replace(piece_of([5], [-1.0], [(0, 1)]), finish="stop", cached_tokens=2)
    assert partial.joined(last, 0.0).cached_tokens == 2
    partial.add(replace(piece_of([4], [-1.0], [(0, 1)]), cached_tokens=1))
    partial.add(replace(piece_of([5], [-1.0], [(0, 1)]), cached_tokens=3))
    assert partial.ended("abort", 0.0).cached_tokens == 1
    assert partial.joined(last, 0.0).cached_tokens == 1


def test_the_least_busy_server_for_its_size_is_taken():
    assert choose([Place(300, 10), Place(200, 10)], cost=10, shared=0, together=4) == 1
    assert choose([Place(300, 30), Place(200, 10)], cost=10, shared=0, together=4) == 0


def test_a_full_cache_comes_last():
    assert choose([Place(10, 10, 0.95), Place(500, 10, 0.5)], cost=10, shared=0, together=4) == 1
    assert choose([Place(10, 10, 0.95), Place(500, 10, 0.93)], cost=10, shared=0, together=4) == 0
    assert choose([Place(10, 10, 0.95), Place(500, 10, 0.5)], cost=10, shared=100, together=99, before=0) == 1


def test_a_prefix_holds_a_request_until_its_server_is_busier_by_a_group():
    for more, chosen in ((0, 0), (400, 0), (401, 1)):
        places = [Place(100 + more, 10), Place(100, 10)]
        assert choose(places, cost=100, shared=32, together=4, before=0) == chosen


def test_a_prefix_shorter_than_a_block_of_the_cache_holds_nothing():
    assert choose([Place(101, 10), Place(100, 10)], cost=100, shared=15, together=4, before=0) == 1


@given(
    st.lists(st.builds(Place, st.integers(0, 10**6), st.integers(1, 256), st.floats(0, 1)), min_size=1, max_size=9),
    st.integers(1, 10**5),
    st.integers(0, 10**5),
    st.integers(1, 64),
    st.integers(0, 8),
)
def test_no_choice_is_worse_than_the_prefix_is_worth(places, cost, shared, together, before):
    before = before if before < len(places) else None
    at = choose(places, cost=cost, shared=shared, together=together, before=before)
    open_ones = [place for place in places if place.cache_use < 0.9] or places
    least = min(place.burden for place in open_ones)
    allowed = together * cost / places[at].limit if at == before else 0.0
    assert places[at].burden <= least + allowed + 1e-9 or (at == before and places[at].burden <= least)
