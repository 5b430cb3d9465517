"""What `up` shows for the supervisor's events, and what the supervisor leaves for `status` in another shell."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import orjson
import pytest

from streamrl.commands import viewers
from streamrl.commands.viewers import LogViewer, PlainViewer, Viewer, describe
from streamrl.monitor.board import Board, Goal
from streamrl.monitor.roles import KnownRole, RoleStates, read_states, states_said
from streamrl.runtime.events import DrainStage, LinesDropped, LogLine, Notice, StateChanged
from streamrl.runtime.instance import RoleState

from .run_kit import cli, data_of, make_run


def line(level: str, event: str, **fields: object) -> bytes:
    return orjson.dumps({"at": 1.5e9, "level": level, "event": event, **fields})


def viewer_of(kind: type[Viewer], run_dir: Path) -> Viewer:
    board = Board("demo", run_dir, Goal(), lambda: None)
    return kind(board)


EVENTS = [
    StateChanged("redis", RoleState.READY, pid=os.getpid()),
    StateChanged("rollout.0", RoleState.STARTING, pid=os.getpid()),
    LogLine("rollout.0", line("info", "model loaded", seconds=2)),
    LogLine("rollout.0", line("error", "no \x1b[2J memory")),
    LogLine("rollout.0", line("info", "shown again"), tail=True),
    StateChanged("rollout.0", RoleState.BACKOFF, "exit 1: no memory", 1, None, 1, 0.5),
    LinesDropped(7),
    DrainStage(("feeder.0",), 3.0, "Ctrl-C stops now"),
    Notice("run finished"),
]


def test_the_log_viewer_prints_each_line_once_with_the_name_of_its_role(tmp_path: Path, capsys):
    with viewer_of(LogViewer, tmp_path) as viewer:
        for event in EVENTS:
            viewer.on_event(event)
    shown = [text.partition(" | ")[2] for text in capsys.readouterr().out.splitlines()]
    assert shown[:5] == [
        "ready",
        "starting",
        "model loaded seconds=2",
        "ERROR no \\x1b[2J memory",
        "backoff: exit 1: no memory",
    ]
    assert shown[6:] == ["draining feeder.0: up to 3 s (Ctrl-C stops now)", "run finished"]


def test_the_plain_viewer_prints_news_only(tmp_path: Path, capsys):
    with viewer_of(PlainViewer, tmp_path) as viewer:
        for event in EVENTS:
            viewer.on_event(event)
    assert viewer.board.footer == "Ctrl-C stops now"
    shown = capsys.readouterr().out
    assert "! " in shown
    for words in ("redis ready", "rollout.0 backoff: exit 1: no memory, again in 0.5 s", "run finished"):
        assert words in shown
    assert "model loaded" not in shown
    assert "\x1b" not in shown


def test_what_is_worth_a_line():
    assert describe(EVENTS[2]) == ("", False)
    assert describe(EVENTS[4]) == ("", False)
    assert describe(EVENTS[3]) == ("rollout.0: no \\x1b[2J memory", True)
    died = line(
        "warning", "server died", server="rollout.0.server1", why="exit 9; its log ends with:\n a\n b", pause=0.5
    )
    assert describe(LogLine("rollout.0", died)) == (
        "rollout.0: server died, rollout.0.server1, exit 9; its log ends with: ... b",
        False,
    )
    dead = line("warning", "samples failed: 9", group=0, sample=3, why="ValueError: no")
    assert describe(LogLine("reward.0", dead))[0] == "reward.0: samples failed: 9 (group 0 sample 3), ValueError: no"
    assert describe(Notice("stopping", hint="again to kill")) == ("stopping (again to kill)", False)


def test_a_screen_that_fails_does_not_take_the_run_with_it(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    failed = threading.Event()

    def broken() -> None:
        failed.set()
        raise KeyError("surprise")

    viewer = viewer_of(PlainViewer, tmp_path)
    monkeypatch.setattr(viewers.PlainViewer, "seconds", 0.001)
    monkeypatch.setattr(viewer.board, "look", broken)
    with viewer:
        assert failed.wait(10)
        viewer.on_event(EVENTS[0])
    said = capsys.readouterr()
    assert said.err.count("the screen failed (see") == 1
    assert "the run goes on" in said.err
    assert "redis ready" in said.out


def test_another_shell_sees_the_states_while_the_supervisor_lives(tmp_path: Path):
    make_run(tmp_path)
    assert read_states(tmp_path).alive is False
    with RoleStates(tmp_path) as states:
        for event in EVENTS:
            if isinstance(event, StateChanged):
                states.note(event.role, event.known)
        data = data_of(cli("status", "--run", str(tmp_path), "--json").stdout, "streamrl.status/1")
        roles = {role["name"]: role for role in data["roles"]}
        assert (data["verdict"], data["supervised"], data["redis"]) == ("stalled", True, False)
        assert (roles["rollout.0"]["state"], roles["rollout.0"]["restarts"]) == ("backoff", 1)
        assert roles["rollout.0"]["reason"] == "exit 1: no memory"
        assert roles["feeder.0"]["state"] == "down"
    assert read_states(tmp_path).alive is False


def test_a_supervisor_that_was_killed_is_not_believed(tmp_path: Path):
    code = (
        "import sys, os, signal, pathlib\n"
        "from streamrl.monitor.roles import KnownRole, RoleStates\n"
        "RoleStates(pathlib.Path(sys.argv[1])).note('redis', KnownRole('ready', 1.0))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == -9
    found = read_states(tmp_path)
    assert (found.alive, found.roles["redis"].state) == (False, "ready")


@pytest.mark.parametrize("content", [b"", b"[]", b'{"roles": {"redis": {"unknown": 1}}}', b'{"pid": 1}'])
def test_a_broken_supervisor_file_is_no_supervisor(tmp_path: Path, content: bytes):
    (tmp_path / "supervisor.json").write_bytes(content)
    assert read_states(tmp_path).alive is False


@pytest.mark.parametrize("ahead", [-3600.0, 3600.0])
def test_states_of_a_supervisor_with_another_clock(ahead: float):
    there = time.time() + ahead
    states = orjson.dumps({"feeder.0": asdict(KnownRole("ready", there - 100.0))}).decode()
    found = states_said({"states": states, "beat": str(there)})
    assert found.roles["feeder.0"].since == pytest.approx(time.time() - 100.0, abs=30)
