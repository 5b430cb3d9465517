"""The circuit of a reward, with a clock that only the test moves."""

import math

from streamrl.consumers.limits import FIRST_PAUSE, LONGEST_PAUSE, SAMPLES, Circuit


def fail(circuit, now, sample, *, probe=False, unavailable=False):
    circuit.failure(now, sample, f"failure of {sample}", probe=probe, unavailable=unavailable)


def opened(now=0.0):
    circuit = Circuit()
    fail(circuit, now, 0, unavailable=True)
    assert circuit.open_since == now
    return circuit


def test_it_opens_after_so_many_samples_in_a_row():
    circuit = Circuit()
    for sample in range(SAMPLES - 1):
        fail(circuit, 1.0, sample)
    assert (circuit.open_since, circuit.wait(1.0)) == (None, 0.0)
    fail(circuit, 2.0, SAMPLES)
    assert (circuit.open_since, circuit.why, circuit.opened) == (2.0, f"failure of {SAMPLES}", 1)
    assert circuit.wait(2.0) == FIRST_PAUSE


def test_attempts_at_one_sample_count_once():
    circuit = Circuit()
    for _ in range(10 * SAMPLES):
        fail(circuit, 0.0, "poison")
    assert circuit.open_since is None


def test_a_success_in_between_begins_anew():
    circuit = Circuit()
    for sample in range(10 * SAMPLES):
        fail(circuit, 0.0, sample)
        if sample % (SAMPLES - 1) == 0:
            circuit.success()
    assert circuit.open_since is None


def test_after_the_pause_one_call_tries_and_its_success_closes():
    circuit = opened()
    assert circuit.wait(FIRST_PAUSE / 2) == FIRST_PAUSE / 2
    assert circuit.wait(FIRST_PAUSE) == 0
    assert circuit.enter()
    assert circuit.wait(FIRST_PAUSE) == math.inf, "the others wait for the one that tries"
    circuit.success()
    assert (circuit.open_since, circuit.wait(FIRST_PAUSE)) == (None, 0.0)
    assert not circuit.enter()


def test_the_pause_doubles_up_to_a_limit_and_is_short_again_after_a_success():
    circuit, now, pauses = opened(), 0.0, []
    for sample in range(8):
        pauses.append(circuit.wait(now))
        now += pauses[-1]
        fail(circuit, now, sample, probe=circuit.enter())
    assert pauses == [min(FIRST_PAUSE * 2**k, LONGEST_PAUSE) for k in range(8)]
    circuit.success()
    fail(circuit, now, "again", unavailable=True)
    assert circuit.wait(now) == FIRST_PAUSE


def test_a_late_failure_of_a_call_that_began_before_changes_nothing():
    circuit = opened()
    assert circuit.wait(FIRST_PAUSE) == 0
    assert circuit.enter()
    fail(circuit, FIRST_PAUSE, "late")
    assert circuit.wait(FIRST_PAUSE) == math.inf
    fail(circuit, 2.0, "the one that tries", probe=True)
    assert circuit.wait(2.0) == 2 * FIRST_PAUSE


def test_a_late_success_closes():
    circuit = opened()
    circuit.success()
    assert circuit.open_since is None


def test_a_try_that_was_cancelled_lets_another_try_at_once():
    circuit = opened()
    circuit.enter()
    circuit.inconclusive(probe=False)
    assert circuit.wait(FIRST_PAUSE) == math.inf
    circuit.inconclusive(probe=True)
    assert circuit.wait(FIRST_PAUSE) == 0
    assert circuit.enter()
