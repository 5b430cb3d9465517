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


def test_a_reader_that_raises_gets_the_next_events_and_its_first_error_is_logged(caplog):
    seen = []

    def broken(event):
        seen.append(event.text)
        raise ValueError("no terminal")

    with EventPump(broken) as pump:
        for text in "abc":
            pump.send(Notice(text))
    assert seen == ["a", "b", "c"]
    assert [record.message for record in caplog.records] == ["an event cannot be shown"]
    assert "no terminal" in caplog.text


def test_a_reader_that_never_returns_does_not_hold_up_the_end():
    release = threading.Event()
    with EventPump(lambda event: release.wait(), linger=0.05) as pump:
        pump.send(Notice("x"))
    release.set()
