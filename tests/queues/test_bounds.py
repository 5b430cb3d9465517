"""Pure functions: the bounds of admission and the pauses of an outage."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from streamrl.config import RunConfig
from streamrl.queues import budget
from streamrl.queues.outage import LONGEST_PAUSE, Outage, pause

counts = st.integers(0, 1000)


def test_hand_computed_bounds():
    assert budget.budget(max_staleness=2, groups_per_step=8) == 24
    assert budget.hard_cap(24, checkpoint_every=3, groups_per_step=8) == 48
    assert budget.hard_cap(24, checkpoint_every=3, groups_per_step=8, asynchronous=True) == 72
    assert budget.room(live=20, held=0, budget=24, hard_cap=48) == 4
    assert budget.room(live=40, held=20, budget=24, hard_cap=48) == 4
    assert budget.room(live=47, held=40, budget=24, hard_cap=48) == 1
    assert budget.room(live=48, held=0, budget=24, hard_cap=48) == 0


@given(st.integers(0, 9), st.integers(1, 64), st.integers(1, 64), st.booleans())
def test_the_configuration_has_the_same_bounds(staleness, groups, every, background):
    config = RunConfig.model_validate(
        {
            "max_staleness": staleness,
            "learner": {"groups_per_step": groups},
            "checkpoint": {"every": every, "background": background},
            "redis": {"maxmemory": 1 << 50},
        }
    )
    assert config.budget == budget.budget(staleness, groups)
    assert config.hard_cap == budget.hard_cap(config.budget, every, groups, asynchronous=background)


@given(counts, counts, counts, counts)
def test_admitting_the_room_keeps_both_bounds(live, held, most, extra):
    held = min(held, live)
    room = budget.room(live, held, most, most + extra)
    assert room >= 0
    if room:
        assert live + room <= most + extra
        assert live + room - held <= most


@given(st.integers(0, 3), st.integers(1, 16), st.integers(1, 5), st.integers(1, 200))
def test_a_run_whose_checkpoints_work_never_stops(staleness, groups, every, rounds):
    """Admit what there is room for, train one step, save when it is due: every round trains a step."""
    most = budget.budget(staleness, groups)
    cap = budget.hard_cap(most, every, groups)
    live = held = steps = 0
    for _ in range(rounds):
        live += budget.room(live, held, most, cap)
        assert live <= cap
        assert live - held >= groups, "the learner waits for ever"
        held, steps = held + groups, steps + 1
        if budget.checkpoint_due(steps, every, held, most, cap):
            live, held, steps = live - held, 0, 0


@given(st.integers(0, 3), st.integers(1, 16), st.integers(1, 5))
def test_failing_checkpoints_stop_admission_at_the_hard_cap(staleness, groups, every):
    """Hole 14: consuming frees the budget, but nothing retires."""
    most = budget.budget(staleness, groups)
    cap = budget.hard_cap(most, every, groups)
    live = held = 0
    for _ in range(1000):
        live += budget.room(live, held, most, cap)
        held = min(live, held + groups)
    assert live == cap


@given(st.integers(1, 10_000), st.floats(0, 1, exclude_max=True))
def test_pauses_are_jittered_and_bounded(failures, chance):
    assert 0 <= pause(failures, chance) <= LONGEST_PAUSE
    assert pause(failures, 0) == 0
    assert pause(1, 0.5) == 0.025
    assert pause(3, 0.5) == 0.1


def test_the_patience_of_an_outage_runs_from_its_first_failure():
    outage = Outage(patience=10)
    assert outage.failed(100.0, 0.5) == 0.025
    assert outage.failed(109.9, 0.5) == 0.05
    assert outage.failed(110.0, 0.5) is None
    outage.recovered()
    assert outage.failed(200.0, 0.0) == 0.0
