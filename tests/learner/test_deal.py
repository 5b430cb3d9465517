"""Who computes which samples: balanced by work, and nobody what has no gradient."""

from collections import Counter
from dataclasses import fields, replace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_policy import make_batch
from tree_kit import make_episodes

from streamrl.learner.batch import RowLimits, work_of
from streamrl.learner.groups import TrainGroup
from streamrl.learner.rank_group import deal, decode, encode

(ONE,) = make_batch(0, groups=1, size=1)
BOUNDS = RowLimits(tokens=1 << 20, shared=1024, hidden=64)


def group(group_id, *lengths, advantage=1.0):
    samples = tuple(
        replace(
            ONE,
            group_id=group_id,
            tokens=np.zeros(length, dtype=np.int32),
            logprobs=np.zeros(length, dtype=np.float32),
            steps=np.zeros(length, dtype=np.int64),
            advantages=np.full(length, advantage, dtype=np.float32),
        )
        for length in lengths
    )
    return TrainGroup(group_id=group_id, crashes=0, samples=samples, mixed_version=0, zero_gradient=not advantage)


def work(samples):
    return work_of(samples, BOUNDS)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=12), st.integers(1, 4))
def test_no_rank_has_more_than_the_mean_and_one_group(lengths, world):
    groups = [group(number, length, length) for number, length in enumerate(lengths)]
    shares, costs = deal(groups, world, BOUNDS, split=False, every=False), [work(each.samples) for each in groups]
    assert max(map(work, shares)) <= sum(costs) / world + max(costs)
    for each in groups:
        assert [len(each.samples)] == [count for share in shares if (count := of(share, each.group_id))]


@given(st.lists(st.lists(st.integers(1, 200), min_size=1, max_size=8), min_size=1, max_size=12), st.integers(1, 4))
def test_a_large_group_is_split_and_every_sample_dealt_once(lengths, world):
    groups = [group(number, *each) for number, each in enumerate(lengths)]
    shares = deal(groups, world, BOUNDS, split=True, every=False)
    assert Counter(id(one) for share in shares for one in share) == Counter(
        id(one) for each in groups for one in each.samples
    )


def test_one_long_group_keeps_all_ranks_busy():
    groups = [group(0, *[400] * 16), *(group(number, 20, 20) for number in range(1, 4))]
    whole, parts = (deal(groups, 8, BOUNDS, split=split, every=False) for split in (False, True))
    assert max(map(work, whole)) == work(groups[0].samples)
    assert max(map(work, parts)) <= 1.05 * sum(map(work, parts)) / 8


def test_work_is_not_the_number_of_tokens():
    """Attention makes one response of 4000 tokens dearer than four of 1000."""
    groups = [group(0, 4000), group(1, 1000), group(2, 1000), group(3, 1000), group(4, 1000)]
    shares = deal(groups, 2, BOUNDS, split=False, every=False)
    assert [[one.group_id for one in share] for share in shares] == [[0], [1, 2, 3, 4]]


def test_nobody_computes_a_group_without_advantage():
    groups = [group(0, 5), group(1, 5, advantage=0.0)]
    assert [[one.group_id for one in share] for share in deal(groups, 2, BOUNDS, split=True, every=False)] == [[0], []]
    shares = deal(groups, 2, BOUNDS, split=True, every=True)
    assert sorted(one.group_id for share in shares for one in share) == [0, 1], "a collected step counts all"


@given(st.builds(make_episodes, st.integers(0, 10_000), st.integers(1, 3), st.integers(1, 4)))
def test_samples_are_the_same_after_their_way(batch):
    for ours, theirs in zip(decode(encode(batch)), batch, strict=True):
        assert_equal(ours, theirs)
        if theirs.tree is not None:
            assert_equal(ours.tree, theirs.tree)
        torch.from_numpy(ours.tokens)  # warns of an array that it may not write to


def assert_equal(ours, theirs):
    for field in fields(theirs):
        one, other = getattr(ours, field.name), getattr(theirs, field.name)
        if field.name == "tree":
            assert (one is None) == (other is None)
        elif field.name == "observed":
            assert [ids.tolist() for ids in one] == [ids.tolist() for ids in other]
        elif isinstance(other, np.ndarray):
            assert one.dtype == other.dtype
            assert one.tolist() == other.tolist()
        else:
            assert one == other


def of(share, group_id):
    return sum(sample.group_id == group_id for sample in share)
