"""When admission stops because a run drops more than it trains, and how it goes on."""

from __future__ import annotations

import itertools

from streamrl.producers.admission import FIRST_PAUSE, LONGEST_PAUSE, WINDOW, Waste, wasted

BUDGET, STEP = 16, 8


class Run:
    """A run whose counts grow by so much a second."""

    def __init__(self, *, dropped=0, trained=0):
        self.waste = Waste(BUDGET, STEP)
        self.now, self.counts = 1000.0, [dropped, trained]
        self.waste.look(self.now, *self.counts)

    def on(self, seconds, *, dropped=0.0, trained=0.0):
        """Go on for some seconds; returns whether admission stopped at any moment."""
        stopped = False
        for _ in range(int(seconds)):
            self.now += 1
            self.counts[0] += dropped
            self.counts[1] += trained
            self.waste.look(self.now, *self.counts)
            stopped |= self.waste.stopped
        return stopped


def test_a_run_that_drops_more_than_it_trains_for_a_minute_stops():
    run = Run(dropped=500, trained=100)
    assert not run.on(WINDOW - 1, dropped=100, trained=2)
    assert run.on(1, dropped=100, trained=2)
    assert run.waste.allowed == 0
    assert run.waste.found == (6000, 120, WINDOW)


def test_a_healthy_run_never_stops():
    assert not Run().on(10_000, dropped=1, trained=1)
    assert not Run().on(10_000), "nothing happens: a step takes hours"
    assert not Run().on(10_000, trained=3)


def test_slow_steps_and_a_burst_of_stale_groups_stop_nothing():
    """What was in flight during a pause or a restart is dropped once, and the step that comes takes ten minutes."""
    run = Run()
    assert not run.on(1, dropped=BUDGET)
    assert not run.on(600)
    assert not run.on(1, trained=STEP)
    assert not run.on(6000, dropped=1 / 100, trained=1 / 60)


def test_a_run_of_which_one_replica_of_two_is_stale_stops_later():
    run = Run()
    assert not run.on(WINDOW, dropped=0.6, trained=0.4)
    assert run.on(WINDOW, dropped=0.6, trained=0.4)


def test_counts_that_go_back_count_as_nothing():
    """A learner that starts again trains a second time what no checkpoint held; Redis comes back from the past."""
    run = Run(dropped=100, trained=1000)
    run.counts = [100, 900]
    assert not run.on(WINDOW * 2)
    assert not run.on(100, dropped=1, trained=1)
    run.counts = [0, 0]
    assert not run.on(WINDOW * 2, dropped=1, trained=2)


def test_only_unwanted_drops_are_waste():
    assert wasted({"equal rewards": 1000, "dead letter dropped": 7}) == 0
    assert wasted({"equal rewards": 1000, "stale": 3, "the gradient was not finite": 2}) == 5


def stopped_run():
    run = Run()
    assert run.on(WINDOW, dropped=10)
    return run


def test_while_the_cause_lasts_one_step_is_lost_per_pause_that_doubles():
    run = stopped_run()
    admitted, trials, began = 0, [], run.now
    while run.now - began < 7200:
        run.on(1)
        if run.waste.allowed:
            trials.append(run.now - began)
            admitted += run.waste.allowed
            run.waste.admitted(run.waste.allowed)
            assert run.waste.allowed == 0
            run.on(5, dropped=STEP / 5)
    assert trials[:4] == [FIRST_PAUSE, 3 * FIRST_PAUSE, 7 * FIRST_PAUSE, 15 * FIRST_PAUSE]
    assert max(later - before for before, later in itertools.pairwise(trials)) == LONGEST_PAUSE
    assert admitted == STEP * len(trials) < 7200 / FIRST_PAUSE * STEP / 4


def test_it_goes_on_when_what_is_in_flight_is_trained():
    run = stopped_run()
    run.on(1, trained=STEP)
    assert (run.waste.stopped, run.waste.allowed) == (False, None)


def test_it_goes_on_after_a_trial_that_is_trained():
    run = stopped_run()
    run.on(FIRST_PAUSE, dropped=1 / 4)
    assert run.waste.allowed == STEP
    run.waste.admitted(STEP - 3)
    assert run.waste.allowed == 3, "there was room for some"
    run.on(1, dropped=1, trained=STEP - 1)
    assert not run.waste.stopped


def test_a_run_that_stops_again_soon_waits_longer():
    run = stopped_run()
    run.on(1, trained=STEP)
    assert run.on(WINDOW, dropped=10)
    assert run.waste.retry_at - run.now == 2 * FIRST_PAUSE
    run.on(1, trained=STEP)
    run.on(LONGEST_PAUSE, trained=1)
    assert run.on(WINDOW, dropped=10)
    assert run.waste.retry_at - run.now == FIRST_PAUSE
