"""When servers of reward models should be awake: the state machine alone, with a clock of the test's own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from streamrl.runtime.reward_model import Demand


def demand(wake_at: int = 8, wake_after: float = 5.0, linger: float = 1.0) -> Demand:
    return Demand(wake_at, wake_after, linger)


def asleep(**limits: float) -> Demand:
    one = demand(**limits)
    one.see(0, 0.0)
    assert not one.see(0, 100.0)
    return one


def test_it_begins_awake_and_sleeps_when_nothing_has_waited_for_a_moment():
    one = demand()
    assert one.awake
    assert one.see(0, 10.0)
    assert one.see(0, 10.9)
    assert not one.see(0, 11.0)
    assert not one.see(0, 99.0)


def test_work_that_comes_in_time_keeps_it_awake():
    one = demand()
    for now in range(100):
        assert one.see(now % 2, now * 0.9)


def test_enough_work_wakes_it_at_once():
    one = asleep()
    assert not one.see(7, 200.0)
    assert one.see(8, 200.1)


def test_little_work_wakes_it_after_a_while():
    one = asleep()
    assert not one.see(1, 200.0)
    assert not one.see(3, 204.9)
    assert one.see(1, 205.0)


def test_the_wait_of_little_work_begins_anew_when_it_went_away():
    one = asleep()
    one.see(1, 200.0)
    one.see(0, 203.0)
    assert not one.see(1, 206.0)
    assert not one.see(1, 210.9)
    assert one.see(1, 211.0)


def test_a_clock_that_goes_back_only_costs_time():
    one = asleep()
    one.see(1, 200.0)
    assert not one.see(1, 50.0)
    assert one.see(1, 55.0)


@given(st.lists(st.tuples(st.integers(0, 12), st.floats(0.01, 20.0)), max_size=60))
def test_it_never_sleeps_over_work_and_never_wakes_for_none(looks):
    """Whatever comes: after each look that found work it is awake, or the work has not waited for `wake_after`."""
    one, now, since = demand(), 0.0, None
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
