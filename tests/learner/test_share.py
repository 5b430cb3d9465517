"""Who computes which group: balanced by work, and nobody what has no gradient."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tiny_policy import make_batch

from streamrl.learner.batch import RowLimits, work_of
from streamrl.learner.groups import TrainGroup
from streamrl.learner.rank_group import UNASSIGNED, share

(ONE,) = make_batch(0, groups=1, size=1)
BOUNDS = RowLimits(tokens=1 << 20, shared=1024, hidden=64)


def group(group_id, *lengths, advantage=1.0):
    samples = tuple(
        replace(
            ONE,
            tokens=np.zeros(length, dtype=np.int32),
            logprobs=np.zeros(length, dtype=np.float32),
            steps=np.zeros(length, dtype=np.int64),
            advantages=np.full(length, advantage, dtype=np.float32),
        )
        for length in lengths
    )
    return TrainGroup(
        group_id=group_id, crashes=0, samples=samples, mixed_version=0, zero_gradient=not advantage, versions={}
    )


def work(samples):
    return work_of(samples, BOUNDS)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=12), st.integers(1, 4))
def test_no_rank_has_more_than_the_mean_and_one_group(lengths, world):
    groups = [group(number, length, length) for number, length in enumerate(lengths)]
    owners, costs = share(groups, world, work, all_read=False), [work(each.samples) for each in groups]
    assert set(owners) <= set(range(world))
    loads = [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(world)]
    assert max(loads) <= sum(costs) / world + max(costs)


def test_work_is_not_the_number_of_tokens():
    """Attention makes one response of 4000 tokens dearer than four of 1000."""
    groups = [group(0, 4000), group(1, 1000), group(2, 1000), group(3, 1000), group(4, 1000)]
    owners = share(groups, 2, work, all_read=False)
    assert owners == [0, 1, 1, 1, 1]


def test_nobody_computes_a_group_without_advantage():
    groups = [group(0, 5), group(1, 5, advantage=0.0)]
    assert share(groups, 2, work, all_read=False) == [0, UNASSIGNED]
    assert sorted(share(groups, 2, work, all_read=True)) == [0, 1], "a collected step counts all of its groups"
