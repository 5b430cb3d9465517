"""When what died comes back: exit codes, pauses, and how often."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.config import SupervisorConfig
from streamrl.errors import ConfigError, ExitClass, Fenced, Unreachable, classify, unwrap, unwrapped
from streamrl.restarts import HEALTHY_SECONDS, Deaths, RestartPolicy

POLICY = RestartPolicy(max_restarts=3, window=100.0, backoff=0.5, max_backoff=30.0)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (0, ExitClass.FINISHED),
        (1, ExitClass.CRASHED),
        (2, ExitClass.CRASHED),
        (3, ExitClass.HOPELESS),
        (63, ExitClass.CRASHED),
        (64, ExitClass.HOPELESS),
        (69, ExitClass.CRASHED),
        (70, ExitClass.HOPELESS),
        (73, ExitClass.HOPELESS),
        (75, ExitClass.CRASHED),
        (78, ExitClass.HOPELESS),
        (79, ExitClass.CRASHED),
        (137, ExitClass.CRASHED),
        (-9, ExitClass.CRASHED),
        (-11, ExitClass.CRASHED),
    ],
)
def test_what_an_exit_code_asks_for(code, kind):
    assert classify(code) is kind


def test_of_several_errors_the_one_counts_that_no_restart_can_cure():
    away, wrong, bug, old = Unreachable("a"), ConfigError("c"), ValueError("b"), Fenced("f")
    assert unwrap(ExceptionGroup("tasks", [old, bug, ExceptionGroup("in", [away, wrong])])) is wrong
    assert unwrap(ExceptionGroup("tasks", [old, bug, away])) is away
    assert unwrap(ExceptionGroup("tasks", [old, bug])) is bug
    assert unwrap(BaseExceptionGroup("tasks", [asyncio.CancelledError(), old])) is old
    with pytest.raises(ConfigError), unwrapped():
        raise ExceptionGroup("tasks", [away, wrong])


def test_pauses_double_to_a_limit_and_jitter_is_full():
    assert [POLICY.pause(failures, 0.5) for failures in (1, 2, 3)] == [0.25, 0.5, 1.0]
    assert POLICY.pause(1, 0.0) == 0.0
    assert POLICY.pause(20, 0.999) < 30.0
    assert POLICY.pause(10**6, 0.5) == 15.0


@given(st.integers(1, 10**9), st.floats(0, 1, exclude_max=True))
def test_no_pause_leaves_its_bounds(failures, jitter):
    assert 0.0 <= POLICY.pause(failures, jitter) <= POLICY.max_backoff


def test_the_policy_is_that_of_the_configuration():
    config = SupervisorConfig(max_restarts=2, window=5, backoff=0.25, max_backoff=1)
    assert RestartPolicy.of(config) == RestartPolicy(2, 5.0, 0.25, 1.0)


HALVES = st.integers(0, 2 * int(HEALTHY_SECONDS)).map(lambda halves: halves / 2)  # their sums are exact


@given(st.lists(st.tuples(HALVES, st.booleans()), max_size=30))
def test_never_more_deaths_within_the_window_than_allowed_and_pauses_grow_until_health(lives):
    """Each life: seconds until its end, and whether it was ready all that time."""
    deaths, now, came_back, failures = Deaths(POLICY), 0.0, [], 0
    for seconds, healthy in lives:
        deaths.started()
        if healthy:
            deaths.ready(now)
        now += seconds
        failures = 1 if healthy and seconds >= HEALTHY_SECONDS else failures + 1
        pause = deaths.died(now, 0.5)
        within = [at for at in came_back if now - at < POLICY.window]
        if pause is None:
            assert len(within) == POLICY.max_restarts
            return
        assert len(within) < POLICY.max_restarts
        assert pause == POLICY.pause(failures, 0.5)
        came_back.append(now)
