"""The bounds of admission, and the pauses of an outage: pure functions, but for one look at the script."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.config import RunConfig
from streamrl.queues import Ledgers
from streamrl.queues.connection import LONGEST_PAUSE, Outage, pause
from streamrl.queues.records import AdmitOutcome
from tests.queues.ledger_kit import admit


def configured(staleness: int, groups: int, every: int, *, background: bool = False) -> RunConfig:
    return RunConfig.model_validate(
        {
            "max_staleness": staleness,
            "learner": {"groups_per_step": groups},
            "checkpoint": {"every": every, "background": background},
            "redis": {"maxmemory": 1 << 50},
        }
    )


def room(config: RunConfig, live: int, held: int) -> int:
    """Groups that `admit.lua` lets in (`test_the_room_of_these_tests_is_that_of_the_script`)."""
    return max(0, min(config.budget - (live - held), config.hard_cap - live))


def test_hand_computed_bounds():
    config = configured(2, 8, 3)
    assert (config.budget, config.hard_cap) == (24, 48)
    assert configured(2, 8, 3, background=True).hard_cap == 72
    assert [room(config, *counts) for counts in ((20, 0), (40, 20), (47, 40), (48, 0))] == [4, 4, 1, 0]
    assert not config.checkpoint_due(0, 24)
    assert [config.checkpoint_due(*counts) for counts in ((2, 16), (3, 0), (1, 24))] == [False, True, True]


@given(st.integers(0, 8), st.integers(1, 32), st.integers(1, 12), st.booleans(), st.integers(0, 30))
def test_the_bounds_are_those_of_promise_two(staleness, groups, every, background, steps):
    """Up to two intervals of trained groups are live where the next one begins before the checkpoint is written."""
    config = configured(staleness, groups, every, background=background)
    untrained = (staleness + 1) * groups
    trained = every * groups * (2 if background else 1)
    assert config.budget == untrained
    assert config.hard_cap == untrained + trained
    for held in (trained - 1, trained, trained + 1):
        due = steps >= every or held >= trained
        assert config.checkpoint_due(steps, held) == (due and steps > 0)


@pytest.mark.parametrize("background", [False, True])
async def test_the_room_of_these_tests_is_that_of_the_script(ledgers: Ledgers, background):
    """Ask the script until it is full, for all counts of live and of held groups up to more than the hard cap."""
    config = configured(1, 2, 2, background=background)
    keys, read = ledgers.train.keys, ledgers.connection.read
    bounds = {"budget": config.budget, "hard_cap": config.hard_cap}
    cursor = 0
    for live in range(config.hard_cap + 2):
        for held in range(live + 1):
            await read("DEL", keys.live)
            if live:
                await read(
                    "ZADD", keys.live, *(word for group_id in range(live) for word in (group_id, f"old-{group_id}"))
                )
            await read("HSET", keys.state, "held", held)
            before = cursor
            while (found := await admit(ledgers.train, cursor, **bounds)).outcome is AdmitOutcome.ADMITTED:
                cursor += 1
            assert found.outcome is AdmitOutcome.FULL
            assert cursor - before == room(config, live, held), (live, held)


@given(st.integers(0, 3), st.integers(1, 16), st.integers(1, 5), st.integers(1, 200))
def test_a_run_whose_checkpoints_work_never_stops(staleness, groups, every, rounds):
    """Admit what there is room for, train one step, save when it is due: every round trains a step."""
    config = configured(staleness, groups, every)
    live = held = steps = 0
    for _ in range(rounds):
        live += room(config, live, held)
        assert live <= config.hard_cap
        assert live - held >= groups, "the learner waits for ever"
        held, steps = held + groups, steps + 1
        if config.checkpoint_due(steps, held):
            live, held, steps = live - held, 0, 0


@given(st.integers(0, 3), st.integers(1, 16), st.integers(1, 5))
def test_failing_checkpoints_stop_admission_at_the_hard_cap(staleness, groups, every):
    """Hole 14: consuming frees the budget, but nothing retires."""
    config = configured(staleness, groups, every)
    live = held = 0
    for _ in range(1000):
        live += room(config, live, held)
        held = min(live, held + groups)
    assert live == config.hard_cap


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
