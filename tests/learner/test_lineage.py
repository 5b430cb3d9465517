"""Ids of trained groups as intervals, and the map from versions to steps of the surviving branch."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.learner.lineage import Branch, greatest_version, ids_of, join, use_version

IDS = st.lists(st.integers(0, 30), max_size=40)


@settings(deadline=None)
@given(IDS, IDS)
def test_intervals_hold_what_was_put_in_and_keep_a_repeat(first, second):
    intervals = join([*join((group_id, group_id) for group_id in first), *((each, each) for each in second)])
    assert Counter(ids_of(intervals)) == Counter(first + second)
    gaps = sum(each + 1 not in set(first) for each in set(first))
    assert len(join((each, each) for each in set(first))) == gaps, "neighbours are joined"


def test_numbers_of_versions_outlive_a_learner(tmp_path):
    assert greatest_version(tmp_path) == 0
    use_version(tmp_path, 4)
    use_version(tmp_path, 5)
    assert greatest_version(tmp_path) == 5


def test_staleness_counts_steps_of_the_surviving_branch():
    # Epoch 1 made steps 0 to 3 as versions 1 to 4; its checkpoint at step 2 survives. Epoch 2 went on from there with
    # versions 5 (step 2) and 6 (step 3) and died without a checkpoint. Epoch 3 goes on from step 2 again.
    branch = Branch({3: 2, 1: 0, 2: 1})
    branch.note(7, 2)
    branch.note(8, 3)
    assert [branch.step(version) for version in range(9)] == [0, 0, 1, 2, 2, 2, 2, 2, 3]
    assert branch.step(100) == 3
    assert branch.since(2) == {3: 2, 7: 2, 8: 3}
