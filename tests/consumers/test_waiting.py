"""Whose fault it is that a program waits for a processor: that of others is no verdict, its own is no excuse."""

import pytest

from streamrl.consumers.rules.code import _Tally
from streamrl.consumers.sandbox import Execution, SandboxError
from streamrl.consumers.sandbox.inside import keeper, processes
from tests.consumers.sandboxes import run, sandbox

SPINS = """
import os, threading
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
for _ in range(3): os.fork()
while True: pass
"""
SPINS_IN_CHILDREN_THAT_END = """
import os, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
for _ in range(6):
    if os.fork() == 0:
        while True:
            if os.fork() == 0:
                end = time.process_time() + 0.02
                while time.process_time() < end: pass
                os._exit(0)
            os.wait()
while True: pass
"""


@pytest.mark.parametrize(
    ("threads", "run", "waited"),
    [
        ([], 0.0, 0.0),
        ([(5.0, 5.0)], 5.0, 5.0),
        ([(0.0, 0.1), (1.0, 9.0)], 1.0, 9.0),
        ([(1.0, 15.0)] * 16, 16.0, 0.0),
        ([(1.0, 45.0)] * 16, 16.0, 30.0),
        ([(1.0, 9.0)], 10.0, 0.0),
    ],
    ids=["none", "alone", "beside one that sleeps", "for its own", "for both", "for those that ended"],
)
def test_waiting_for_its_own_is_not_waiting_for_others(threads, run, waited):
    assert processes.kept_waiting(threads, run) == waited


@pytest.mark.parametrize("text", [SPINS, SPINS_IN_CHILDREN_THAT_END], ids=["processes", "children that end"])
async def test_a_program_that_spins_on_one_processor_waits_for_itself(text):
    execution = await run(sandbox(wall=3, cpu=60), text)
    # On one processor nobody else can have had it while the program ran, however busy the host is.
    assert execution.outcome == "time"
    assert execution.delay + execution.cpu <= 1.05 * execution.wall
    assert execution.cpu > 0


async def test_a_program_cannot_let_everybody_go_first():
    text = """
import os
for call in (lambda: os.nice(1), lambda: os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))):
    try: print(call())
    except PermissionError: print("refused")
"""
    assert (await run(sandbox(), text)).stdout == "refused\nrefused\n"


def look(monkeypatch, passed, ran, waited):
    monkeypatch.setattr(processes, "processor_time", lambda pids: (ran, waited))
    order = {"isolation": "none", "argv": [], "limits": {"memory": 1 << 40, "wall": 1, "cpu": 5, "slowest": 10}}
    return keeper.Run(order, "", "", keeper.ParentPipe())._look(passed)


@pytest.mark.parametrize(
    ("passed", "ran", "waited", "over"),
    [
        (0.9, 0.9, 0.0, None),
        (1.1, 0.1, 0.0, "time"),
        (1.1, 0.1, 0.5, None),
        (1.6, 0.1, 0.5, "time"),
        (9.9, 0.5, 9.4, None),
        (9.9, 5.1, 9.4, "time"),
    ],
)
def test_time_in_which_others_have_the_processor_does_not_count(monkeypatch, passed, ran, waited, over):
    assert look(monkeypatch, passed, ran, waited) == over


def test_a_host_that_keeps_a_program_waiting_for_ever_is_an_error_and_no_verdict(monkeypatch):
    with pytest.raises(OSError, match=r"the host is too busy: a program waited 9\.4 s"):
        look(monkeypatch, 10.1, 0.5, 9.4)


def scored(count, **figures):
    tally = _Tally(30.0)
    for _ in range(count):
        tally.add("time", Execution(outcome="time", code=None, stdout="", stderr="", result="", **figures))
        if tally.ends(at_failure=False):
            break
    return tally


def test_the_time_for_all_tests_does_not_count_what_others_had():
    assert scored(20, cpu=1.0, wall=11.0, delay=10.0).counts["time"] == 20
    assert scored(20, cpu=1.0, wall=11.0, delay=1.0).counts["time"] == 3


def test_a_program_that_has_used_its_time_cannot_wait_for_ever():
    assert scored(100, cpu=1.5, wall=11.0, delay=10.9).counts["time"] == 28


def test_tests_that_wait_for_ever_on_a_busy_host_are_an_error_and_no_verdict():
    with pytest.raises(SandboxError, match="the host is too busy: its tests took 308 s for 3 s of work"):
        scored(100, cpu=0.1, wall=11.0, delay=10.9)
