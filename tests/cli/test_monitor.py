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
from streamrl.monitor.progress import Progress
from streamrl.monitor.reward_figures import reward_views
from streamrl.monitor.roles import KnownRole
from streamrl.monitor.snapshot import Snapshot, StreamView
from streamrl.monitor.tail import Tail
from streamrl.queues.keys import REWARD_FIGURES
from streamrl.queues.pace import Pace
from streamrl.runfile import load

from . import snapshots

STREAMS = ("prompts", "rollouts", "scored")


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


def test_the_pace_of_a_role_is_that_of_the_last_ten_seconds():
    pace = Pace()
    assert pace.shown() == {}
    pace.mark(100.0, 1000, 5.0)
    assert pace.shown() == {}
    pace.mark(104.0, 1400, 6.0)
    assert pace.shown() == {"tokens_per_second": 100.0, "waits": 0.25}
    for second in range(105, 120):
        pace.mark(second, 1400 + (second - 104) * 200, 6.0)
    assert pace.shown() == {"tokens_per_second": 200.0, "waits": 0.0}


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
    rounds = [{"gid": g, "round": 1 if g < 4 else 4, "right": g % 2, "scores": [1.0]} for g in range(8)]
    write_lines(run_dir / "evaluation.jsonl", [*rounds, rounds[0]])
    progress = Progress(run_dir)
    progress.refresh()
    return progress


def test_progress_reads_what_the_roles_write(tmp_path: Path):
    progress = filled(tmp_path)
    assert [step.step for step in progress.steps] == [1, 2, 3, 4, 5]
    assert progress.steps[-1].staleness == {0: 250, 1: 750}
    assert progress.accuracy.groups == 8
    assert progress.accuracy.points() == [(1, 0.5), (4, 0.5)]
    assert progress.accuracy.points(least=5) == []


def test_a_learner_that_came_back_replaces_the_steps_of_the_lost_branch(tmp_path: Path):
    progress = filled(tmp_path)
    write_lines(tmp_path / "metrics" / "learner.0.jsonl", [learner_line(4, 0.9)])
    progress.refresh()
    assert [(step.step, step.reward) for step in progress.steps][-2:] == [(3, 0.5), (4, 0.9)]


def snapshot() -> Snapshot:
    paces = {"learner.0": ("1000.0", "0.25"), "rollout.0": ("5000.0", "0.5")}
    fields = {name: {"tokens_per_second": tokens, "waits": share} for name, (tokens, share) in paces.items()}
    return snapshots.snapshot(None, None, *map(stream, STREAMS), roles=fields, live=40, held=8, dead=2, cursor=77)


def stream(name: str) -> StreamView:
    return snapshots.stream(name, 6, 3, oldest_waiting_seconds=1.5)


def board_of(run_dir: Path) -> Board:
    config = load(None, ["name=demo"], {}).config
    board = Board("demo", run_dir, Goal(steps=60, accuracy=0.9, round_responses=4), snapshot, config)
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
    assert "tok/s" not in plain_line(board)


def test_the_plain_line(tmp_path: Path):
    filled(tmp_path)
    board = board_of(tmp_path)
    board.refresh()
    line = plain_line(board)
    for words in ("step 5/60 v6", "reward 0.5", "accuracy 0.500 (v4)", "stale 0.8", "prompts 6", "rollout.0 backoff"):
        assert words in line
    assert "learner.0 1,000 tok/s waits 25 %" in line
    assert line.count("tok/s") == 1, "of a replica that is not there"


def test_a_role_that_left_has_no_figures(tmp_path: Path):
    """Its files stay, and its heartbeat ends."""
    write_lines(
        tmp_path / "metrics" / "rollout.2.jsonl",
        [{"mono": 100.0 + s, "tokens": 5000 * s, "idle_seconds": 0.5 * s} for s in range(3)],
    )
    board = board_of(tmp_path)
    board.role("rollout.0", KnownRole("ready", 0))
    board.refresh()
    assert "rollout.0 5,000 tok/s waits 50 %" in plain_line(board)
    assert "rollout.2" not in plain_line(board)
    assert "rollout.2" not in drawn(board, 120)


def test_the_screen_and_the_plain_line_name_the_slowest_stage(tmp_path: Path):
    board = board_of(tmp_path)
    board.refresh()
    assert board.verdict().stage == "rollouts"
    assert plain_line(board).endswith("bottleneck rollouts")
    assert "rollout.replicas (now 1)" in " ".join(drawn(board, 200).split())


def test_a_stall_is_on_the_screen_and_at_the_end_of_the_plain_line(tmp_path: Path):
    board = board_of(tmp_path)
    board.look = lambda: replace(snapshot(), server=replace(snapshots.SERVER, aof_ok=False))
    board.refresh()
    assert "STALLED: Redis refuses writes" in plain_line(board).split(" | ")[-1]
    assert "stalled: Redis refuses writes" in drawn(board, 80)
    board.look = lambda: None
    board.role("rollout.0", KnownRole("ready", 0))
    board.refresh()
    assert plain_line(board).endswith("STALLED: Redis does not answer: it hangs, or its host does")
    board.role("learner.0", KnownRole("stopped", 0))
    assert "STALLED" not in plain_line(board), "a run that ends stops its Redis too"
