"""When admission stops because a run drops what it samples, and how it goes on."""

from __future__ import annotations

from streamrl.producers.admission import TRIAL_PAUSE, DropGuard

BUDGET, STEP = 16, 8


class Run:
    """A run whose counts grow by so much a second."""

    def __init__(self, *, dropped=0, trained=0):
        self.guard = DropGuard(BUDGET, STEP)
        self.now, self.dropped, self.trained = 1000.0, {"stale": dropped}, trained
        self.guard.look(self.now, self.dropped, self.trained)

    def on(self, seconds, *, dropped=0, trained=0, why="stale"):
        """Go on for some seconds; returns whether admission stopped at any moment."""
        stopped = False
        for _ in range(int(seconds)):
            self.now += 1
            self.dropped[why] = self.dropped.get(why, 0) + dropped
            self.trained += trained
            self.guard.look(self.now, self.dropped, self.trained)
            stopped |= self.guard.allowed is not None
        return stopped


def test_more_drops_in_a_row_than_groups_in_flight_stop_admission():
    run = Run(dropped=500, trained=100)
    assert not run.on(BUDGET, dropped=1)
    assert run.on(1, dropped=1)
    assert (run.guard.allowed, run.guard.dropped, run.guard.why) == (0, BUDGET + 1, "stale")


def test_a_run_that_trains_never_stops():
    assert not Run().on(1000), "nothing happens: a step takes hours"
    assert not Run().on(1000, dropped=5, trained=1)
    run = Run()
    for _ in range(10):
        assert not run.on(BUDGET, dropped=1)
        assert not run.on(1, trained=1)


def test_drops_that_the_user_asked_for_do_not_count():
    run = Run()
    assert not run.on(100, dropped=BUDGET, why="equal rewards")
    assert not run.on(100, dropped=BUDGET, why="dead letter dropped")
    run.on(3, dropped=BUDGET, why="the gradient was not finite")
    assert run.guard.why == "the gradient was not finite", "fewer than those that count for nothing"


def test_counts_that_go_back_count_as_nothing():
    """A learner that starts again trains a second time what no checkpoint held; Redis comes back from the past."""
    run = Run(dropped=100, trained=1000)
    run.dropped, run.trained = {"stale": 0}, 900
    assert not run.on(100)
    assert not run.on(BUDGET, dropped=1)


def test_while_it_stands_one_step_is_tried_per_pause_until_a_group_is_trained():
    run = Run()
    run.on(1, dropped=BUDGET + 1)
    assert run.guard.retry_at == run.now + TRIAL_PAUSE
    for _ in range(3):
        run.on(run.guard.retry_at - run.now - 1)
        assert run.guard.allowed == 0
        run.on(1)
        assert run.guard.allowed == STEP
        run.guard.admitted(STEP - 3)
        assert run.guard.allowed == 3, "there was room for some"
        run.guard.admitted(3)
        run.on(STEP, dropped=1)
    assert not run.on(1, trained=1)
    assert (run.guard.allowed, run.guard.dropped) == (None, 0)
