"""Pictures, tails, progress and the screens made of them."""

from __future__ import annotations

import io
import time
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from streamrl.commands.viewers import plain_line
from streamrl.monitor import plots, screen
from streamrl.monitor.board import Board, Goal
from streamrl.monitor.lines import duration, log_line, number, printable, size
from streamrl.monitor.progress import Progress, Side
from streamrl.monitor.reward_figures import reward_views
from streamrl.monitor.roles import KnownRole
from streamrl.monitor.snapshot import LedgerView, ServerView, Snapshot, StreamView
from streamrl.monitor.tail import Tail
from streamrl.queues.keys import REWARD_FIGURES


def test_spark_by_hand():
    assert plots.spark([0, 1], 10) == "▁█"
    assert plots.spark([0, 0.5, 1], 10, 0, 2) == "▁▃▅"
    assert plots.spark([3, 3], 10) == "▁▁"
    assert plots.spark([0, 0, 4, 4], 2) == "▁█"
    assert plots.spark([], 10) == plots.spark([1], 0) == ""


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=50), st.integers(1, 60))
def test_resampling_keeps_the_mean_of_equal_shares_and_the_order_of_the_ends(values: list[float], width: int):
    shown = plots.resample(values, width)
    assert len(shown) == min(width, len(values))
    assert min(values) - 1e-3 <= min(shown)
    assert max(shown) <= max(values) + 1e-3


@given(st.lists(st.tuples(st.integers(0, 1000), st.floats(0, 1)), max_size=30), st.integers(1, 100), st.integers(1, 12))
def test_an_area_has_the_size_it_was_given(points: list[tuple[int, float]], width: int, height: int):
    rows = plots.area([(float(x), y) for x, y in points], width, height, 0.0, 1.0)
    assert len(rows) == height
    assert len({len(row) for row in rows}) == 1


def test_area_by_hand():
    assert plots.area([(0, 0.0), (4, 1.0)], 5, 2, 0.0, 1.0) == [" 1.00 ┤   ▄█", "      │ ▄███"]


def test_histogram_counts_the_rest_in_its_last_row():
    rows = plots.histogram({0: 50, 2: 25, 7: 20, 9: 5}, 4, most=3)
    assert [(label, share) for label, share, _ in rows] == [("0", 0.5), ("1", 0.0), ("2", 0.25), ("3+", 0.25)]
    assert rows[0][2] == "██░░"
    assert plots.histogram({}, 4) == []


def test_words():
    assert [duration(s) for s in (None, 0.44, 59.6, 60, 3661)] == ["-", "0.4s", "60s", "1m00s", "1h01m"]
    assert [number(n) for n in (None, 0.12345, 123.4, 1234, 12345)] == ["-", "0.123", "123", "1,234", "12.3k"]
    assert [size(n) for n in (0, 1536, 1 << 30)] == ["0 B", "1.5 KiB", "1.0 GiB"]


@given(st.text())
def test_nothing_that_is_printed_can_steer_a_terminal(text: str):
    assert all(char.isprintable() or char == "\t" for char in printable(text))


def test_log_lines_carry_level_fields_and_exception():
    record = {"at": 0, "level": "error", "event": "role failed", "why": "x", "exception": "Traceback\n  line"}
    assert log_line("rollout.0", 0, record, 10).splitlines() == [
        "         rollout.0  | ERROR role failed why=x",
        "         rollout.0  | Traceback",
        "         rollout.0  |   line",
    ]


def test_a_tail_gives_each_whole_line_once_whatever_happens_to_the_file(tmp_path: Path):
    path = tmp_path / "file.jsonl"
    tail = Tail(path)
    assert list(tail.read()) == []
    path.write_bytes(b'{"a":1}\n{"a":')
    assert list(tail.read()) == [{"a": 1}]
    with path.open("ab") as file:
        file.write(b"2}\nno json\n[1]\n")
    assert list(tail.read()) == [{"a": 2}, {"event": "no json"}, {"event": "[1]"}]
    path.rename(tmp_path / "file.jsonl.1")
    path.write_bytes(b'{"a":3}\n')
    assert list(tail.read()) == [{"a": 3}]
    path.write_bytes(b"")
    assert list(tail.read()) == []
    path.write_bytes(b'{"a":4}\n')
    assert list(tail.read()) == [{"a": 4}]


def test_a_side_measures_over_ten_seconds_and_starts_anew_with_a_new_process():
    side = Side()
    assert (side.tokens_per_second, side.idle_fraction) == (None, None)
    side.mark(100.0, 1000, 5.0)
    side.mark(104.0, 1400, 6.0)
    assert (side.tokens_per_second, side.idle_fraction) == (100.0, 0.25)
    for second in range(105, 120):
        side.mark(second, 1400 + (second - 104) * 200, 6.0)
    assert side.tokens_per_second == pytest.approx(200, rel=0.1)
    assert side.idle_fraction == pytest.approx(0, abs=0.1)
    side.mark(121, 10, 0.0)
    assert side.tokens_per_second is None


def learner_line(step: int, reward: float = 0.5) -> dict:
    return {
        "at": time.time(),
        "mono": 100.0 + step,
        "step": step,
        "version": step + 1,
        "loss": -0.01,
        "reward_mean": reward,
        "tokens": 1000,
        "idle_seconds": 0.25,
        "staleness": {"0": 250, "1": 750},
    }


def write_lines(path: Path, lines: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.writelines(orjson.dumps(line) + b"\n" for line in lines)


def filled(run_dir: Path) -> Progress:
    write_lines(run_dir / "metrics" / "learner.0.jsonl", [learner_line(step) for step in range(1, 6)])
    rollout = [{"mono": 100.0 + s, "tokens": 5000 * s, "idle_seconds": 0.5 * s} for s in range(3)]
    write_lines(run_dir / "metrics" / "rollout.0.jsonl", rollout)
    rounds = [{"gid": g, "round": 1 if g < 4 else 4, "right": g % 2, "scores": [1.0]} for g in range(8)]
    write_lines(run_dir / "evaluation.jsonl", [*rounds, rounds[0]])
    progress = Progress(run_dir)
    progress.refresh()
    return progress


def test_progress_reads_what_the_roles_write(tmp_path: Path):
    progress = filled(tmp_path)
    assert [step.step for step in progress.steps] == [1, 2, 3, 4, 5]
    assert progress.steps[-1].staleness == {0: 250, 1: 750}
    assert (progress.learner.tokens_per_second, progress.learner.idle_fraction) == (1000.0, 0.25)
    assert progress.rollouts["rollout.0"].tokens_per_second == 5000.0
    assert progress.accuracy.groups == 8
    assert progress.accuracy.points() == [(1, 0.5), (4, 0.5)]
    assert progress.accuracy.points(least=5) == []


def test_a_learner_that_came_back_replaces_the_steps_of_the_lost_branch(tmp_path: Path):
    progress = filled(tmp_path)
    write_lines(tmp_path / "metrics" / "learner.0.jsonl", [learner_line(4, 0.9)])
    progress.refresh()
    assert [(step.step, step.reward) for step in progress.steps][-2:] == [(3, 0.5), (4, 0.9)]


def ledger() -> LedgerView:
    streams = tuple(StreamView(name, 9, 3, 6, 1.5, 2.5, 0.1, 0) for name in ("prompts", "rollouts", "scored"))
    return LedgerView(streams, live=40, held=8, dead=2, dropped=1, cursor=77, done=None, version=5, epoch=1)


def snapshot() -> Snapshot:
    server = ServerView("7.0.15", 60, 1 << 20, 1 << 30, 0, 0, aof_ok=True)
    return Snapshot("demo", time.time(), server, ledger(), ledger(), 64, 96, 5, {"rollout.0": {"version": "4"}})


def board_of(run_dir: Path) -> Board:
    board = Board("demo", run_dir, Goal(steps=60, accuracy=0.9, round_responses=4), snapshot)
    board.role("learner.0", KnownRole("ready", 0))
    board.role("rollout.0", KnownRole("backoff", 0, restarts=2, reason="killed by SIGKILL"))
    board.event("rollout.0 backoff: killed by SIGKILL", bad=True)
    return board


def drawn(board: Board, width: int) -> str:
    text = io.StringIO()
    Console(file=text, width=width, force_terminal=True, color_system=None).print(screen.render(board, width))
    return text.getvalue()


def test_the_screen_says_which_reward_nobody_gives(tmp_path: Path):
    lines = {"judge[1]": {"ok": 1, "away": 1}, "rule": {"ok": 2, "away": 0}}
    rewards = reward_views({"reward.0": {REWARD_FIGURES: orjson.dumps(lines).decode()}})
    board = Board("demo", tmp_path, Goal(), lambda: replace(snapshot(), rewards=rewards))
    board.refresh()
    text = drawn(board, 120)
    assert "no scores from judge[1]" in text
    assert "no scores from rule" not in text


@pytest.mark.parametrize("width", [80, 96, 120, 200])
def test_the_screen_shows_the_essentials_and_fits(tmp_path: Path, width: int):
    filled(tmp_path)
    board = board_of(tmp_path)
    board.refresh()
    text = drawn(board, width)
    plain_text = "".join(text.split("\x1b[0m"))
    for words in (
        "step 5/60",
        "held-out accuracy",
        "0.500",
        "reward",
        "loss",
        "25 %",
        "rollout.0",
        "killed by SIGKILL",
    ):
        assert words in plain_text, words
    assert all(len(line) <= width for line in text.splitlines())
    assert len(text.splitlines()) <= (24 if width == 80 else 34)


def test_screens_of_a_run_that_has_not_begun(tmp_path: Path):
    board = Board("demo", tmp_path, Goal(), lambda: None)
    board.refresh()
    for width in (80, 120):
        assert "no version evaluated yet" in drawn(board, width)
    assert "learner - tok/s" in plain_line(board)


def test_the_plain_line(tmp_path: Path):
    filled(tmp_path)
    board = board_of(tmp_path)
    board.refresh()
    line = plain_line(board)
    for words in ("step 5/60 v6", "reward 0.5", "accuracy 0.500 (v4)", "stale 0.8", "prompts 6", "rollout.0 backoff"):
        assert words in line
    assert board.progress.rollouts["rollout.0"].tokens_per_second
    assert line.count("tok/s") == 1, "of a replica that is not there"


@pytest.mark.parametrize(
    ("learner", "rollout", "says"),
    [(0.5, 0.1, "the learner waits"), (0.1, 0.5, "the rollouts wait"), (0.2, 0.25, "balanced")],
)
def test_who_waits_for_whom(tmp_path: Path, learner: float, rollout: float, says: str):
    board = Board("demo", tmp_path, Goal(), lambda: None)
    assert screen.who_waits(board) == "not enough steps yet"
    for side, idle in (
        (board.progress.learner, learner),
        (board.progress.rollouts.setdefault("rollout.0", Side()), rollout),
    ):
        side.mark(0.0, 0, 0.0)
        side.mark(10.0, 100, 10 * idle)
    assert says in screen.who_waits(board)
