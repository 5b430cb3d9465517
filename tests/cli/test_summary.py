"""The figures of `summary.json`, from lines computed by hand."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.commands import finish
from streamrl.errors import CannotCreate, Refused, StreamrlError
from streamrl.runfile import load
from streamrl.runtime.audit import Audit
from streamrl.runtime.summary import (
    Accuracies,
    LearnerFigures,
    draw_curve,
    merged,
    read_learner,
    read_rollouts,
    read_rounds,
    share_within,
    summarize,
)

KEYS = [
    "accuracy_before",
    "accuracy_after",
    "train_seconds",
    "steps",
    "samples_per_second",
    "completion_tokens_per_second",
    "learner_idle_fraction",
    "rollout_idle_fraction",
    "share_of_tokens_sampled_during_learner_steps",
    "samples_spanning_versions",
    "staleness_max",
    "staleness_mean",
    "engine_gap",
    "groups_admitted",
    "groups_trained",
    "groups_dropped",
    "groups_dead",
    "groups_evaluated",
    "samples_dead",
    "sources",
]
COUNTS = {"admitted": 30, "trained": 8, "dropped": 1, "dead": 2, "evaluated": 9, "live": 10, "lost": 0, "twice": 0}
COUNTS["dead_samples"] = 414


def write(path: Path, lines: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines) + b'{"torn')


def step(number: int, busy: list[list[float]], **changed: object) -> dict:
    line = {
        "step": number,
        "version": number + 1,
        "loss": 0.0,
        "reward_mean": 0.5,
        "groups": 4,
        "tokens": 1000,
        "samples_spanning_versions": 3,
        "staleness": {"0": 600, "1": 400},
        "busy": busy,
        "epoch": 1,
        "at": 1e9 + busy[-1][1] + 0.001,
        "mono": busy[-1][1] + 0.001,
        "step_seconds": busy[-1][1] + 0.001 - busy[0][0],
    }
    return line | changed


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Two steps from second 10 to 20 with 2 seconds of waiting; a replica that samples all the time."""
    write(
        tmp_path / "metrics" / "learner.0.jsonl",
        [
            step(
                1, [[2.0, 3.0], [10.0, 14.0]], mono=14.0, step_seconds=4.0, engine_gap=0.03
            ),  # what is before is loading, no training
            step(2, [[15.0, 16.0], [17.0, 20.0]], staleness={"1": 500, "2": 500}, engine_gap=None),
        ],
    )
    ticks = [[10 + 0.05 * n, 10] for n in range(1, 201)]
    rollout = [
        {"at": 1e9 + 8.0, "mono": 8.0, "tokens": 0, "idle_seconds": 0.0, "timeline": [[9.0, 500]]},
        {"at": 1e9 + 10.0, "mono": 10.0, "tokens": 500, "idle_seconds": 1.0, "timeline": []},
        {"at": 1e9 + 15.0, "mono": 15.0, "tokens": 1500, "idle_seconds": 2.0, "timeline": ticks[:100]},
        {"at": 1e9 + 20.0, "mono": 20.0, "tokens": 2500, "idle_seconds": 2.5, "timeline": ticks[100:]},
        {"at": 1e9 + 25.0, "mono": 25.0, "tokens": 2500, "idle_seconds": 7.5, "timeline": []},
    ]
    write(tmp_path / "metrics" / "rollout.0.jsonl", rollout)
    rounds = [
        {"kind": "evaluation", "version": 1, "accuracy": 0.4, "responses": 100},
        {"other": 1},
        {"kind": "evaluation", "version": 3, "accuracy": 0.8, "responses": 100},
    ]
    write(tmp_path / "metrics" / "feeder.0.jsonl", rounds)
    return tmp_path


def test_the_summary_by_hand(run_dir: Path):
    config = load(None, ["sampling.group_size=8"], {}).config
    summary = summarize(
        config, run_dir, read_learner(run_dir), COUNTS, Accuracies({"accuracy": 0.4}, {"accuracy": 0.9})
    )
    assert list(summary) == KEYS
    assert summary == {
        "accuracy_before": 0.4,
        "accuracy_after": 0.9,
        "train_seconds": 10.0,
        "steps": 2,
        "samples_per_second": 6.4,  # 2 steps x 4 groups x 8 samples in 10 s
        "completion_tokens_per_second": 200.0,
        "learner_idle_fraction": 0.2,
        "rollout_idle_fraction": 0.15,  # 1.5 of the 10 s from 10 to 20; what is before and after does not count
        "share_of_tokens_sampled_during_learner_steps": 0.64,  # 0.8 x 2000 of 2500 tokens
        "samples_spanning_versions": 6,
        "staleness_max": 2,
        "staleness_mean": 0.95,  # (400 + 500 + 1000) / 2000
        "engine_gap": 0.03,  # of the one step that had tokens of the newest version
        "groups_admitted": 30,
        "groups_trained": 8,
        "groups_dropped": 1,
        "groups_dead": 2,
        "groups_evaluated": 9,
        "samples_dead": 414,
        "sources": {},
    }
    assert ("responses dead", "414") in finish.rows(summary)
    assert ("held-out accuracy after", "0.900") in finish.rows(summary)


def test_several_responses_to_a_held_out_prompt_give_more_figures(run_dir: Path):
    config = load(None, [], {}).config
    after = {"accuracy": 0.5, "avg_at_4": 0.5, "pass_at_2": 0.6, "pass_at_4": 0.75}
    summary = summarize(config, run_dir, read_learner(run_dir), COUNTS, Accuracies({"accuracy": 0.25}, after))
    assert list(summary) == [*KEYS[:-1], "avg_at_4_after", "pass_at_2_after", "pass_at_4_after", "sources"]
    rows = dict(finish.rows(summary))
    assert rows["held-out accuracy before"] == "0.250"
    assert rows["held-out accuracy after"] == "0.500  avg@4 0.500  pass@4 0.750"


def test_a_run_without_a_step_has_zeros_and_no_accuracy(tmp_path: Path):
    config = load(None, [], {}).config
    summary = summarize(config, tmp_path, read_learner(tmp_path), COUNTS, Accuracies())
    assert list(summary) == KEYS
    assert (summary["accuracy_before"], summary["steps"], summary["train_seconds"]) == (None, 0, 0.0)


def test_a_measurement_that_fails_takes_no_other_figure_with_it(run_dir: Path, monkeypatch, capsys):
    async def audited(*_: object) -> Audit:
        return Audit(**COUNTS, lost_ids=[], twice_ids=[], checkpoint=None, unproved=[], faults=[])

    monkeypatch.setattr(finish, "find_run", lambda path: path)
    monkeypatch.setattr(finish, "audit_run", audited)
    config = load(None, ["evaluation.final_prompts=4"], {}).config
    with pytest.raises(StreamrlError, match="no held-out prompts"):
        finish.finish(config, run_dir)
    summary = orjson.loads((run_dir / "summary.json").read_bytes())
    assert (summary["steps"], summary["accuracy_before"], summary["accuracy_after"]) == (2, None, None)
    assert (run_dir / "curve.png").stat().st_size > 0
    assert "not measured" in capsys.readouterr().out


def test_a_step_that_was_done_again_counts_once_and_the_pause_before_it_not_at_all(run_dir: Path):
    path = run_dir / "metrics" / "learner.0.jsonl"
    lines = [step(1, [[10.0, 14.0]]), step(2, [[15.0, 20.0]]), step(2, [[3600.0, 3601.0]], tokens=7, epoch=2)]
    write(path, lines)
    figures = read_learner(run_dir)
    assert (sorted(figures.steps), figures.total("tokens")) == ([1, 2], 1007)
    assert figures.train_seconds == pytest.approx(11.0)
    assert figures.idle_fraction == pytest.approx(1 / 11)


def test_a_replica_that_was_restarted_counts_from_zero_again(tmp_path: Path):
    spent = ((0, 5.0), (1, 6.0), (2, 0.0), (3, 0.5))
    lines = [{"at": 1e9 + s, "mono": float(s), "tokens": s, "idle_seconds": idle} for s, idle in spent]
    write(tmp_path / "metrics" / "rollout.0.jsonl", lines)
    figures = read_rollouts(tmp_path, LearnerFigures(spans=[(0.0, 10.0)], clock=1e9))
    assert (figures.covered_seconds, figures.idle_seconds) == (2.0, 1.5)


@pytest.mark.parametrize("apart", [0.0, 0.3, 5000.0])
def test_times_of_a_replica_on_another_machine_are_brought_to_the_clock_of_the_learner(tmp_path: Path, apart: float):
    """`apart`: the machines were started that many seconds one after the other; less than a second is drift."""
    mono = 0.0 if apart < 1 else apart
    lines = [
        {
            "at": 1e9 + s + apart - mono,
            "mono": s + mono,
            "tokens": s,
            "idle_seconds": s / 2,
            "timeline": [[s + mono, 3]],
        }
        for s in (1.0, 2.0, 3.0)
    ]
    write(tmp_path / "metrics" / "rollout.0.jsonl", lines)
    figures = read_rollouts(tmp_path, LearnerFigures(spans=[(0.0, 2.0)], clock=1e9))
    assert figures.ticks == [(1.0, 3), (2.0, 3), (3.0, 3)]
    assert (figures.covered_seconds, figures.idle_seconds) == (1.0, 0.5)


intervals = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)).map(lambda p: (p[0], p[0] + p[1])), max_size=12)


@given(intervals)
def test_merged_intervals_cover_the_same_seconds_once(parts: list[tuple[int, int]]):
    result = merged([(float(start), float(end)) for start, end in parts])
    assert all(end < start for (_, end), (start, _) in pairwise(result))
    covered = {second for start, end in parts for second in range(start, end)}
    assert sum(end - start for start, end in result) == len(covered)


@given(intervals, st.lists(st.tuples(st.integers(0, 60), st.integers(1, 100)), min_size=1, max_size=30))
def test_share_within_agrees_with_counting(parts: list[tuple[int, int]], ticks: list[tuple[int, int]]):
    """Each tick ends in the middle of a second, so it is wholly inside or wholly outside."""
    busy = merged([(float(start), float(end)) for start, end in parts])
    placed = [(at + 0.5, tokens) for at, tokens in ticks]
    seconds = {second for start, end in parts for second in range(start, end)}
    inside = sum(tokens for at, tokens in ticks if at in seconds)
    assert share_within(placed, busy) == pytest.approx(inside / sum(tokens for _, tokens in ticks))


def test_nothing_sampled_or_nothing_trained_is_a_share_of_zero():
    assert share_within([], [(0.0, 1.0)]) == 0.0
    assert share_within([(1.0, 5)], []) == 0.0


def test_rounds_belong_to_the_step_that_made_their_version(run_dir: Path):
    rounds = read_rounds(run_dir, read_learner(run_dir))
    assert [(step, line["accuracy"], line["responses"]) for step, line in rounds] == [(0, 0.4, 100), (2, 0.8, 100)]


def test_sources_have_their_last_figures_and_their_accuracies(run_dir: Path):
    def line(number: int, epoch: int, **groups: int) -> dict:
        sources = {
            name: {"groups": count, "reward_mean": 0.1 * number, "zero_variance": 0.5, "length": 7.0}
            for name, count in groups.items()
        }
        return step(number, [[10.0 * number, 10.0 * number + 1]], epoch=epoch, sources=sources)

    # The second learner counts anew, and does step 2 again.
    lines = [line(1, 1, math=4), line(2, 1, math=8), line(2, 2, math=3, code=2), line(3, 2, math=5, code=2)]
    write(run_dir / "metrics" / "learner.0.jsonl", lines)
    before = {"accuracy": 0.5, "accuracy/math": 0.25, "accuracy/pass_at_2": 0.5}
    after = {"accuracy": 0.75, "accuracy/math": 0.75, "accuracy/pass_at_2": 1.0}
    config, learner = load(None, [], {}).config, read_learner(run_dir)
    summary = summarize(config, run_dir, learner, COUNTS, Accuracies(before, after))
    last = {"reward_mean": pytest.approx(0.3), "zero_variance": 0.5, "length": 7.0}
    assert summary["sources"] == {
        "math": {"groups": 4 + 5, **last, "accuracy_before": 0.25, "accuracy_after": 0.75},
        "code": {"groups": 2, **last},
        "pass_at_2": {"accuracy_before": 0.5, "accuracy_after": 1.0},
    }
    assert list(summary) == KEYS, "a source with such a name is no figure of several samples"
    assert finish.rows(summary)[1:4] == [
        ("held-out accuracy after", "0.750"),
        ("  of math", "0.250 -> 0.75"),
        ("  of pass_at_2", "0.500 -> 1"),
    ]
    sources = {"math": {"accuracy": 0.5, "responses": 8}}
    rounds = [(1, {"accuracy": 0.5, "responses": 8, "sources": sources}), (2, {"accuracy": 0.5, "responses": 8})]
    draw_curve(run_dir / "curve.png", "demo", learner.steps, summary, rounds[:1])
    draw_curve(run_dir / "other.png", "demo", learner.steps, summary, [rounds[0], (2, {**rounds[1][1], "sources": {}})])


@pytest.mark.parametrize("accuracies", [Accuracies({"accuracy": 0.4}, {"accuracy": 0.9}), Accuracies()])
def test_the_curve_is_a_picture(run_dir: Path, accuracies: Accuracies):
    config = load(None, [], {}).config
    learner = read_learner(run_dir)
    summary = summarize(config, run_dir, learner, COUNTS, accuracies)
    draw_curve(run_dir / "curve.png", "demo", learner.steps, summary, read_rounds(run_dir, learner))
    data = (run_dir / "curve.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 10_000
    draw_curve(run_dir / "empty.png", "demo", {}, summary, [])
    with pytest.raises(CannotCreate):
        draw_curve(run_dir / "nowhere" / "curve.png", "demo", learner.steps, summary, [])


def test_a_run_of_which_nothing_was_trained_fails_with_the_cause(tmp_path: Path, monkeypatch, capsys):
    """Too few responses to end early: 12 of them failed with the same error, and then the data was at its end."""
    counts = COUNTS | {"trained": 0, "dead": 3, "dead_samples": 12, "live": 0, "admitted": 3, "dropped": 0}

    async def audited(*_: object) -> Audit:
        return Audit(**counts, lost_ids=[], twice_ids=[], checkpoint=None, unproved=[], faults=[])

    async def most_died_of(*_: object) -> str:
        return "ValueError: no judge today [mine]"

    monkeypatch.setattr(finish, "find_run", lambda path: path)
    monkeypatch.setattr(finish, "audit_run", audited)
    monkeypatch.setattr(finish, "most_died_of", most_died_of)
    config = load(None, ["evaluation.final_prompts=0"], {}).config
    with pytest.raises(
        Refused, match=r"nothing was trained: 3 groups and 12 responses are dead, most of them: ValueError"
    ):
        finish.finish(config, tmp_path)
    assert "responses dead" in capsys.readouterr().out
