"""Layout: every token once, in its place, seeing what it should; bounded sizes and padding."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_policy import make_batch

from streamrl.learner.batch import PADDING, RowLimits, TrainSample, pack

LIMITS = st.builds(
    RowLimits,
    tokens=st.integers(16, 400),
    longest=st.just(64),
    shared=st.sampled_from([0, 40, 200]),
    packed=st.booleans(),
    hidden=st.sampled_from([1, 64]),
)
BATCHES = st.builds(make_batch, st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 5))


def sample(**changes):
    values = {
        "group_id": 3,
        "prompt": np.asarray([1, 2], dtype=np.int32),
        "tokens": np.asarray([5, 6, 7], dtype=np.int32),
        "logprobs": np.asarray([-1, -2, -3], dtype=np.float32),
        "reward": 1.0,
    }
    values |= changes
    count = len(values["tokens"])
    defaults = {"steps": np.zeros(count, dtype=np.int64), "advantages": np.full(count, 0.5, dtype=np.float32)}
    return TrainSample(**{**defaults, **values})


@settings(max_examples=150, deadline=None)
@given(BATCHES, LIMITS)
def test_each_sampled_token_is_predicted_once_from_its_own_past(batch, limits):
    seen = Counter()
    for part in pack(batch, limits):
        width = part.input_ids.shape[1]
        ends = np.cumsum(part.counts)
        for index, end, count in zip(part.samples, ends, part.counts, strict=True):
            one = batch[index]
            seen[int(index)] += 1
            places = slice(end - count, end)
            assert part.targets[places].tolist() == one.tokens.tolist()
            assert part.behaviour[places].tolist() == one.logprobs.tolist()
            assert part.advantages[places].tolist() == one.advantages.tolist()
            assert part.steps[places].tolist() == one.steps.tolist()
            for target, flat in enumerate(part.positions[places]):
                assert past(part, *divmod(int(flat), width)) == [*one.prompt, *one.tokens[:target]]
    assert seen == Counter(range(len(batch)))


def past(part, row, column):
    """The token ids that the token at this place sees, in the order of their positions."""
    until, places = part.visible_until[row], part.position_ids[row]
    visible = [c for c in range(column + 1) if column < until[c]]
    assert [int(places[c]) for c in visible] == list(range(len(visible)))
    return [int(part.input_ids[row, c]) for c in visible]


def test_shared_rows_compute_a_prompt_once():
    batch = [sample(prompt=np.arange(30, dtype=np.int32)) for _ in range(4)]
    (part,) = pack(batch, RowLimits(tokens=512, shared=256, hidden=64))
    assert part.shared
    assert part.input_ids.shape == (1, 48)
    assert part.input_ids[0, :30].tolist() == list(range(30))
    assert (part.input_ids == 7).sum() == 1, "the prompt stands there once"


def test_prompts_are_not_shared_when_that_is_more_work():
    """Short prompts and long responses: attention between responses would cost more than the prompts."""
    tokens = np.zeros(160, dtype=np.int32)
    batch = [sample(tokens=tokens, logprobs=np.zeros(160, dtype=np.float32)) for _ in range(4)]
    assert not any(part.shared for part in pack(batch, RowLimits(tokens=4096, shared=1024, hidden=8)))
    assert pack(batch, RowLimits(tokens=4096, shared=1024, hidden=4096))[0].shared


def test_responses_to_different_prompts_do_not_share_even_under_one_id():
    batch = [sample(), sample(prompt=np.asarray([1, 3], dtype=np.int32))]
    assert not any(part.shared for part in pack(batch, RowLimits(tokens=512, shared=512, hidden=64)))


def test_samples_without_tokens_are_left_out():
    empty = sample(tokens=np.zeros(0, dtype=np.int32), logprobs=np.zeros(0, dtype=np.float32))
    assert pack([empty], RowLimits(tokens=64)) == []
    (part,) = pack([empty, sample()], RowLimits(tokens=64))
    assert part.samples.tolist() == [1]


def test_packed_rows_by_hand():
    """Two groups in a row: each with its prompt, positions from 0, segments of its own."""
    first = [
        sample(group_id=1),
        sample(group_id=1, tokens=np.asarray([8, 9], dtype=np.int32), logprobs=np.zeros(2, np.float32)),
    ]
    (part,) = pack([*first, sample(group_id=2)], RowLimits(tokens=512, shared=16, packed=True, hidden=64))
    assert part.shared
    assert part.input_ids.shape == (1, 128)
    assert part.samples.tolist() == [0, 1, 2]
    assert part.input_ids[0, :9].tolist() == [1, 2, 5, 6, 8, 1, 2, 5, 6]
    assert part.visible_until[0, :10].tolist() == [5, 5, 4, 4, 5, 9, 9, 9, 9, PADDING]
    assert part.position_ids[0, :9].tolist() == [0, 1, 2, 3, 2, 0, 1, 2, 3]
    assert part.positions.tolist() == [1, 2, 3, 1, 4, 6, 7, 8]
    assert part.targets.tolist() == [5, 6, 7, 8, 9, 5, 6, 7]


def test_padding_does_not_go_beyond_what_the_model_takes():
    tokens = np.zeros(20, dtype=np.int32)
    (part,) = pack(
        [sample(tokens=tokens, logprobs=np.zeros(20, dtype=np.float32))], RowLimits(tokens=64, longest=21, shared=16)
    )
    assert part.input_ids.shape == (1, 21)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"advantages": np.full(3, np.nan, dtype=np.float32)}, "not finite"),
        ({"prompt": np.zeros(0, dtype=np.int32)}, "without tokens"),
    ],
)
def test_a_sample_that_cannot_be_trained_is_refused_with_its_group(changes, message):
    with np.errstate(over="ignore"), pytest.raises(ValueError, match=f"group 3.*{message}"):
        sample(**changes)
