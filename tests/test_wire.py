"""The wire: round trips, limits, and every kind of bytes that are no message."""

from __future__ import annotations

import math
from pathlib import Path

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl import wire
from streamrl.errors import WireError
from streamrl.wire import Prompt, Sample, SampleScore, ToolUse, Turn

SAMPLE = Sample(
    tokens=wire.pack_int32([5, 6, 2]),
    logprobs=wire.pack_float32([-0.5, -1.0, -0.25]),
    runs=[(0, 7), (2, 9)],
    finish="stop",
    text="ab",
)


def test_sample_round_trip_keeps_every_token_with_its_version():
    read = wire.decode(wire.encode(SAMPLE), Sample)
    assert read == SAMPLE
    assert read.token_ids.tolist() == [5, 6, 2]
    assert read.token_logprobs.tolist() == [-0.5, -1.0, -0.25]
    assert read.token_versions.tolist() == [7, 7, 9]


def test_only_a_greedy_sample_says_that_it_is_one():
    assert wire.decode(wire.encode(msgspec.structs.replace(SAMPLE, greedy=True)), Sample).greedy
    assert b"greedy" not in wire.encode(SAMPLE)


@st.composite
def samples(draw: st.DrawFn) -> tuple[list[int], list[float], list[tuple[int, int]]]:
    count = draw(st.integers(1, 40))
    tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=count, max_size=count))
    logprobs = draw(st.lists(st.floats(-(2.0**100), 0, width=32), min_size=count, max_size=count))
    starts = sorted(draw(st.sets(st.integers(1, count - 1), max_size=5)) | {0}) if count > 1 else [0]
    versions = sorted(draw(st.lists(st.integers(0, 2**40), min_size=len(starts), max_size=len(starts))))
    return tokens, logprobs, list(zip(starts, versions, strict=True))


@given(samples())
def test_any_sample_survives_the_wire_exactly(drawn):
    tokens, logprobs, runs = drawn
    sample = Sample(tokens=wire.pack_int32(tokens), logprobs=wire.pack_float32(logprobs), runs=runs, finish="length")
    read = wire.decode(wire.encode(sample), Sample)
    assert read.token_ids.tolist() == tokens
    assert np.array_equal(read.token_logprobs, np.asarray(logprobs, dtype=np.float32))
    for index, version in enumerate(read.token_versions):
        assert version == max((run for run in runs if run[0] <= index), key=lambda run: run[0])[1]


def test_prompt_and_score_round_trip():
    prompt = Prompt(tokens=wire.pack_int32([1, 2]), text="é", answer={"x": [1, None]}, metadata={"k": 1.5}, line=3)
    assert wire.decode(wire.encode(prompt), Prompt) == prompt
    named = msgspec.structs.replace(prompt, source="gsm8k")
    assert wire.decode(wire.encode(named), Prompt) == named
    assert b"source" not in wire.encode(prompt), "bytes of prompts without one stay as they were"
    score = SampleScore(value=0.5, parts={"exact": 1.0, "length": -0.5})
    assert wire.decode(wire.encode(score), SampleScore) == score


def test_only_a_prompt_of_a_named_source_says_which():
    prompt = Prompt(tokens=wire.pack_int32([1, 2]))
    named = wire.encode(msgspec.structs.replace(prompt, source="gsm8k"))
    assert wire.decode(named, Prompt).source == "gsm8k"
    assert b"source" not in wire.encode(prompt)


def test_every_truncation_is_refused():
    data = wire.encode(SAMPLE)
    for cut in range(len(data)):
        with pytest.raises(WireError):
            wire.decode(data[:cut], Sample)


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_but_wire_error(data):
    for kind in (Prompt, Sample, SampleScore):
        try:
            wire.decode(data, kind)
        except WireError:
            continue


def test_foreign_type_and_unknown_schema_are_named():
    with pytest.raises(WireError, match="not a sample"):
        wire.decode(wire.encode(SampleScore(value=1.0)), Sample)
    newer = msgspec.msgpack.encode({"type": "sample", "v": 4, "chunks": []})
    with pytest.raises(WireError, match="schema version 4"):
        wire.decode(newer, Sample)
    with pytest.raises(WireError, match="schema version 9"):
        wire.decode(wire.encode(SampleScore(v=9, value=1.0)), SampleScore)


def test_unknown_fields_of_the_same_schema_are_ignored():
    fields = msgspec.msgpack.decode(wire.encode(SAMPLE)) | {"later": [1, 2]}
    assert wire.decode(msgspec.msgpack.encode(fields), Sample) == SAMPLE


@pytest.mark.parametrize(
    "change",
    [
        {"logprobs": wire.pack_float32([-1.0])},
        {"tokens": b"abc", "logprobs": b"abc"},
        {"runs": []},
        {"runs": [(1, 7)]},
        {"runs": [(0, 7), (3, 8)]},
        {"runs": [(0, 9), (1, 8)]},
        {"runs": [(0, 7), (0, 8)]},
        {"runs": [(0, -1)]},
        {"finish": "eos"},
        {"logprobs": wire.pack_float32([-1.0, math.nan, -1.0])},
        {"logprobs": wire.pack_float32([-1.0, -math.inf, -1.0])},
    ],
)
def test_samples_against_the_rules_are_refused(change):
    fields = msgspec.msgpack.decode(wire.encode(SAMPLE)) | change
    with pytest.raises(WireError):
        wire.decode(msgspec.msgpack.encode(fields), Sample)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_score_is_finite(value):
    with pytest.raises(ValueError, match="finite"):
        SampleScore(value=value)
    with pytest.raises(WireError):
        wire.decode(msgspec.msgpack.encode({"type": "score", "v": 1, "value": value}), SampleScore)


def test_size_limit_is_checked_before_decoding(monkeypatch):
    data = wire.encode(SAMPLE)
    monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", len(data) - 1)
    with pytest.raises(WireError, match="limit"):
        wire.decode(data, Sample)
    with pytest.raises(WireError, match="limit"):
        wire.encode(SAMPLE)


def test_deeply_nested_garbage_is_refused():
    with pytest.raises(WireError):
        wire.decode(b"\x91" * 100_000, Prompt)


def test_frames_stop_at_a_cut_tail_and_foreign_bytes_are_named():
    path, frames = Path("groups.msgpack"), [msgpack.packb({"gid": group_id}) for group_id in range(50)]
    data = b"".join(frames) + frames[0][:-1]
    for chunks in ([data], [data[:7], data[7:]]):
        assert [frame["gid"] for frame in wire.unpack_frames(chunks, path, 1 << 20)] == list(range(50))
    with pytest.raises(WireError, match=r"groups\.msgpack"):
        list(wire.unpack_frames([frames[1] + b"\xc1\xc1"], path, 1 << 20))
    with pytest.raises(WireError, match="no map"):
        list(wire.unpack_frames([b"\x01"], path, 1 << 20))


EPISODE = Sample(
    v=2,
    tokens=wire.pack_int32([5, 6, 7, 8, 9]),
    logprobs=wire.pack_float32([-0.5] * 5),
    runs=[(0, 3), (3, 5), (4, 4)],
    finish="stop",
    turns=[
        Turn(sampled=2, finish="stop"),
        Turn(parent=0, role="tool", observed=wire.pack_int32([1, 2, 3]), tools=[ToolUse(name="look_up", seconds=0.2)]),
        Turn(parent=1, sampled=2, finish="stop", reward=0.5),
        Turn(parent=1, sampled=1, finish="length"),
        Turn(parent=wire.NOTHING, role="user", observed=wire.pack_int32([4])),
    ],
    stop="completed",
    score=SampleScore(value=0.5, parts={"tests": 0.25}),
)


def test_an_episode_comes_back_and_a_single_turn_is_what_it_was_in_schema_1():
    assert wire.decode(wire.encode(EPISODE), Sample) == EPISODE
    fields = msgspec.msgpack.decode(wire.encode(SAMPLE))
    assert "v" not in fields
    assert "turns" not in fields


@pytest.mark.parametrize(
    ("turns", "why"),
    [
        ([Turn(sampled=4)], "4 sampled tokens, its arrays 5"),
        ([Turn(sampled=5, parent=0)], "turn 0 of a sample comes after turn 0"),
        ([Turn(sampled=5, parent=wire.NOTHING)], "sampled after nothing"),
        ([Turn(sampled=4), Turn(parent=0, sampled=1)], "out of order"),
    ],
)
def test_turns_that_form_no_tree_are_refused(turns: list[Turn], why: str):
    with pytest.raises(ValueError, match=why):
        msgspec.structs.replace(EPISODE, turns=turns, runs=[(0, 5), (3, 4)] if len(turns) == 2 else EPISODE.runs)


@pytest.mark.parametrize(
    "change",
    [
        {"v": 1},
        {"turns": [{"parent": -3, "sampled": 5}]},
        {"turns": [{"sampled": 5, "observed": b"1234"}]},
        {"turns": [{}]},
        {"turns": [{"sampled": 5}, {"parent": 0, "observed": b"123"}]},
        {"turns": [{"sampled": 5, "reward": float("nan")}]},
        {"turns": [{"sampled": 5, "media": ["no sum"]}]},
        {"turns": [{"observed": b"1234"}] * (wire.MAX_TURNS + 1)},
        {"stop": "bored"},
        {"score": {"type": "score", "value": float("inf")}},
    ],
)
def test_malformed_episodes_are_wire_errors(change: dict[str, object]):
    fields = msgspec.msgpack.decode(wire.encode(EPISODE))
    with pytest.raises(WireError):
        wire.decode(msgspec.msgpack.encode(fields | change), Sample)


HASH = "0f" * 32


def test_images_come_back_and_need_a_program_that_knows_them():
    """A program of schema 2 refuses what has images, instead of training it without them."""
    prompt = Prompt(v=3, tokens=wire.pack_int32([1, 2]), images=[HASH], blobs=[b"png"], processor="f")
    assert wire.decode(wire.encode(prompt), Prompt) == prompt
    turns = [EPISODE.turns[0], msgspec.structs.replace(EPISODE.turns[1], media=[HASH]), *EPISODE.turns[2:]]
    seen = msgspec.structs.replace(EPISODE, v=3, turns=turns, blobs=[b"png"])
    assert wire.decode(wire.encode(seen), Sample) == seen
    assert seen.images == [HASH]
    for message, old in ((prompt, 1), (prompt, 2), (seen, 2)):
        with pytest.raises(ValueError, match="images needs schema version 3"):
            msgspec.structs.replace(message, v=old)


def test_text_is_on_the_wire_what_it_was_before_images():
    plain = Prompt(tokens=wire.pack_int32([1, 2]), text="ab")
    assert set(msgspec.msgpack.decode(wire.encode(plain))) == {"type", "tokens", "text"}
    assert {"blobs", "images"}.isdisjoint(msgspec.msgpack.decode(wire.encode(EPISODE)))
    assert EPISODE.v == 2
