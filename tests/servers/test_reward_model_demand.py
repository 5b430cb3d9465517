"""When servers of reward models should be awake: the state machine alone, with a clock of the test's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.servers.reward_models import Demand

SLEEPS = [(0, 0.0, True), (0, 100.0, False)]


@pytest.mark.parametrize(
    "looks",
    [
        pytest.param([(0, 10.0, True), (0, 10.9, True), (0, 11.0, False), (0, 99.0, False)], id="no work: asleep"),
        pytest.param([(now % 2, now * 0.9, True) for now in range(100)], id="work in time keeps it awake"),
        pytest.param([*SLEEPS, (7, 200.0, False), (8, 200.1, True)], id="enough work wakes at once"),
        pytest.param([*SLEEPS, (1, 200.0, False), (3, 204.9, False), (1, 205.0, True)], id="little work after a while"),
        pytest.param(
            [*SLEEPS, (1, 200.0, False), (0, 203.0, False), (1, 206.0, False), (1, 210.9, False), (1, 211.0, True)],
            id="the while begins anew",
        ),
        pytest.param([*SLEEPS, (1, 200.0, False), (1, 50.0, False), (1, 55.0, True)], id="the clock goes back"),
    ],
)
def test_it_sleeps_without_work_and_wakes_for_enough_or_old_work(looks):
    """Each look: samples that wait, the time, and whether it should be awake then."""
    one = Demand(wake_at=8, wake_after=5.0, linger=1.0)
    assert one.awake
    assert [one.see(waiting, now) for waiting, now, _ in looks] == [awake for *_, awake in looks]


@given(st.lists(st.tuples(st.integers(0, 12), st.floats(0.01, 20.0)), max_size=60))
def test_it_never_sleeps_over_work_and_never_wakes_for_none(looks):
    """Whatever comes: after each look that found work it is awake, or the work has not waited for `wake_after`."""
    one, now, since = Demand(8, 5.0, 1.0), 0.0, None
    for waiting, passed in looks:
        now += passed
        before = one.awake
        after = one.see(waiting, now)
        since = None if not waiting else now if since is None else since
        if waiting >= 8:
            assert after
        if not after and since is not None:
            assert now - since < 5.0
        if before and not after:
            assert waiting == 0
        if after and not before:
            assert waiting > 0
