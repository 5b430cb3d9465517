"""The limit of requests in flight: hand-computed courses, a simulated server, and properties of all courses."""

from hypothesis import given
from hypothesis import strategies as st

from streamrl.engine import EngineLoad
from streamrl.producers.group.concurrency import DECREASE, QUIET_SECONDS, Concurrency


def look(machine, now, in_flight, peak, running, waiting, preemptions=0, cache_use=0.0, reading=None):
    load = EngineLoad(running, waiting, 0, 0.0, 0, cache_use=cache_use, preemptions=preemptions, reading=reading)
    return machine.see(now, load, in_flight=in_flight, peak=peak)


def quiet(machine, now, count, **seen):
    """A look at a server that runs all it has."""
    return look(machine, now, count, count, count, 0, **seen)


def test_the_limit_doubles_while_it_is_used_in_full_and_nothing_queues():
    machine = Concurrency(64, first=8)
    course = [quiet(machine, now, machine.limit) for now in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0)]
    assert course == [8, 8, 16, 16, 32, 64, 64]


def test_a_limit_that_nobody_reaches_is_not_raised():
    machine = Concurrency(64, first=8)
    assert [quiet(machine, now, 7) for now in range(5)] == [8] * 5
    assert look(machine, 5.0, 7, 8, 7, 0, 0) == 16  # it was reached between two looks


def test_one_look_at_a_queue_is_none_and_two_bring_the_limit_to_what_runs():
    machine = Concurrency(64, first=40)
    assert look(machine, 0.0, 40, 40, 36, 4, 0) == 40
    assert quiet(machine, 0.2, 40) == 40
    assert look(machine, 0.4, 40, 40, 36, 4, 0) == 40
    assert look(machine, 0.6, 40, 40, 36, 4, 0) == 36


def test_looks_between_two_readings_of_the_server_see_one_queue():
    machine = Concurrency(64, first=40)
    for now in (0.0, 0.25, 0.5, 0.75):
        assert look(machine, now, 40, 40, 36, 4, reading=1) == 40
    assert look(machine, 1.0, 40, 40, 36, 4, reading=2) == 36
    for now in (1.25, 1.5, 1.75):
        assert look(machine, now, 36, 36, 32, 4, reading=2) == 36
    assert look(machine, 2.0, 36, 36, 36, 0, reading=3) == 36


def test_a_queue_behind_a_server_that_runs_little_costs_no_more_than_a_preemption():
    machine = Concurrency(64, first=40)
    for now in (0.0, 0.2):
        look(machine, now, 40, 40, 2, 38, 0)
    assert machine.limit == 30


def test_after_congestion_the_limit_grows_by_steps():
    machine = Concurrency(64, first=40)
    quiet(machine, 0.0, 0)
    look(machine, 0.0, 40, 40, 40, 0, 1)
    assert machine.limit == 30
    course = [quiet(machine, now, machine.limit, preemptions=1) for now in (1.0, 2.0, 3.0, 4.0)]
    assert course == [30, 34, 38, 42]  # steps of 64 / 16


def test_one_congestion_is_paid_once_until_what_is_in_flight_has_come_down():
    machine = Concurrency(64, first=40)
    quiet(machine, 0.0, 0)
    assert look(machine, 0.0, 40, 40, 40, 0, 1) == 30
    assert look(machine, 1.0, 38, 40, 36, 2, 5) == 30
    assert look(machine, 2.0, 31, 38, 31, 2, 9) == 30
    assert look(machine, 3.0, 30, 31, 30, 0, 10) == 22


def test_a_full_cache_holds_the_limit():
    machine = Concurrency(64, first=8)
    assert [quiet(machine, now, 8, cache_use=0.95) for now in range(4)] == [8] * 4
    assert quiet(machine, 4.0, 8, cache_use=0.85) == 16


def test_what_was_before_the_first_look_is_not_counted_and_a_restarted_server_counts_preemptions_anew():
    machine = Concurrency(64, first=8)
    quiet(machine, 0.0, 8, preemptions=50)
    quiet(machine, 0.5, 8, preemptions=0)
    assert machine.limit == 8
    quiet(machine, 0.6, 8, preemptions=1)
    assert machine.limit == 6


def test_a_pause_is_neither_quiet_nor_congestion():
    machine = Concurrency(64, first=8)
    look(machine, 0.0, 8, 8, 0, 8, 0)
    machine.interrupted()
    look(machine, 0.5, 8, 8, 0, 8, 0)
    assert machine.limit == 8
    quiet(machine, 0.6, 8)
    machine.interrupted()
    assert quiet(machine, 1.7, 8) == 8
    assert quiet(machine, 2.7, 8) == 16


@given(
    st.integers(1, 200),
    st.integers(1, 64),
    st.lists(
        st.tuples(
            st.floats(0, 3),
            st.integers(0, 300),
            st.integers(0, 300),
            st.integers(0, 50),
            st.integers(0, 9),
            st.floats(0, 1),
        ),
        max_size=60,
    ),
)
def test_whatever_is_seen_the_limit_keeps_its_bounds_and_moves_the_right_way(most, first, looks):
    machine = Concurrency(most, first)
    now = preemptions = 0
    quiet(machine, 0, 0)
    for seconds, in_flight, running, waiting, more, cache_use in looks:
        before, now, preemptions = machine.limit, now + seconds, preemptions + more
        look(machine, now, in_flight, in_flight, running, waiting, preemptions, cache_use)
        assert 1 <= machine.limit <= most
        assert machine.limit >= int(before * DECREASE)
        assert machine.limit <= before * 2
        if machine.limit > before:
            assert not more
            assert cache_use < 0.9
        if machine.limit < before:
            assert more or waiting


@given(st.integers(1, 150), st.integers(1, 64), st.sampled_from(["queue", "preempt"]), st.integers(1, 12))
def test_it_finds_the_capacity_of_a_server_and_stays_near_it(capacity, first, how, slow):
    """A server that always has demand; requests beyond the limit leave `slow` at a time."""
    most, machine = 128, Concurrency(128, first)
    in_flight = preemptions = 0
    course = []
    for at in range(1200):
        in_flight = machine.limit if in_flight <= machine.limit else max(machine.limit, in_flight - slow)
        over = max(0, in_flight - capacity)
        if how == "preempt" and over:
            preemptions += 1
        waiting = over if how == "queue" else 0
        look(machine, at * 0.25, in_flight, in_flight, min(in_flight, capacity), waiting, preemptions)
        course.append(machine.limit)
    late, best = course[800:], min(capacity, most)
    assert max(late) <= min(most, capacity + most // 16)
    assert min(late) >= int(best * DECREASE) - 1 if how == "preempt" else min(late) >= best - 1
    assert sum(late) / len(late) >= best * (0.8 if how == "preempt" else 0.98) - 1


def test_the_period_is_what_it_says():
    machine = Concurrency(64, first=8)
    quiet(machine, 0.0, 8)
    assert quiet(machine, QUIET_SECONDS - 0.001, 8) == 8
    assert quiet(machine, QUIET_SECONDS, 8) == 16
