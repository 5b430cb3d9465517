import threading

from streamrl.runtime.events import EventPump, LinesDropped, LogLine, Notice, StateChanged
from streamrl.runtime.instance import RoleState


def test_a_reader_that_does_not_read_blocks_nobody_and_loses_only_log_lines():
    seen, free, first = [], threading.Event(), threading.Event()

    def slow(event):
        first.set()
        free.wait(30)
        seen.append(event)

    with EventPump(slow, capacity=10) as pump:
        pump.send(Notice("start"))
        assert first.wait(30)
        for number in range(1000):
            pump.send(LogLine("x", b"%d" % number))
            if number % 100 == 0:
                pump.send(StateChanged("x", RoleState.READY))
        free.set()
    assert seen[0] == Notice("start")
    assert [event.line for event in seen if isinstance(event, LogLine)] == [b"%d" % number for number in range(10)]
    assert sum(event.count for event in seen if isinstance(event, LinesDropped)) == 990
    assert sum(isinstance(event, StateChanged) for event in seen) == 10


def test_a_reader_that_raises_is_left_alone_and_named():
    def broken(event):
        raise ValueError("no terminal")

    with EventPump(broken) as pump:
        for _ in range(3):
            pump.send(Notice("x"))
    assert isinstance(pump.broken, ValueError)


def test_a_reader_that_never_returns_does_not_hold_up_the_end():
    release = threading.Event()
    with EventPump(lambda event: release.wait(), linger=0.05) as pump:
        pump.send(Notice("x"))
    release.set()
