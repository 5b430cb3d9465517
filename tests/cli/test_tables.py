"""The tables of `streamrl lag` and `streamrl status`: at every width, each value whole."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console, RenderableType

from streamrl.monitor.reward_figures import RewardView
from streamrl.monitor.snapshot import Consumer
from streamrl.monitor.tables import lag_table, status_table
from streamrl.monitor.verdict import Verdict

from .snapshots import snapshot

REWARD = RewardView("my_rewards:unit_tests", 1, 12345, 12, 345, 6, 0, 0.597, 0.962, 0.962, (), 7.98)


def drawn(table: RenderableType, width: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(table)
    return out.getvalue().splitlines()


def role(progress: dict[str, str]) -> dict:
    known = {"name": "rollout.0", "state": "ready", "pid": 4242, "up_seconds": 61.0, "restarts": 3, "version": 17}
    return {**known, "progress": progress, "reason": "", "trouble": ""}


def test_long_progress_wraps_and_leaves_the_other_columns_whole():
    progress = {f"figure{number}": "12345" for number in range(30)} | {"loss": "-0.0072290925201518984"}
    heading, row, *rest = drawn(status_table([role(progress)], "run demo: ready", [], 110), 110)
    assert heading.split() == ["ROLE", "STATE", "PID", "UP", "RESTARTS", "VERSION", "PROGRESS"]
    assert row.split()[:7] == ["rollout.0", "ready", "4242", "1m01s", "3", "17", "figure0=12345"]
    assert "figure29=12345 loss=-0.00723" in " ".join(" ".join(rest).split())


def test_status_cuts_no_value_at_80_columns():
    progress = {"health": "http://127.0.0.1:43567", "weights_fetched": "12345678901", "apply_seconds": "0.0057"}
    lines = drawn(status_table([role(progress)], "run demo: ready", [REWARD], 80), 80)
    assert "…" not in "".join(lines)
    words = " ".join(lines).split()
    for word in ("health=http://127.0.0.1:43567", "weights_fetched=12345678901", "apply_seconds=0.0057", "RETRIED"):
        assert word in words
    assert lines[-1] == "run demo: ready"


@pytest.mark.parametrize("width", [80, 110])
@pytest.mark.parametrize("unit", ["samples", "groups"])
def test_lag_cuts_no_value(width: int, unit: str):
    now = snapshot(cursor=12345)
    streams = tuple(
        replace(
            stream,
            unit=unit if stream.name == "rollouts" else "groups",
            in_per_second=12345.0,
            out_per_second=0.0218,
            drain_seconds=7505.0,
            oldest_waiting_seconds=599.0,
            oldest_leased_seconds=599.0,
            consumers=tuple(Consumer(f"c{number}", 1, 0.1) for number in range(16)),
        )
        for stream in now.train.streams
    )
    ledger = replace(now.train, streams=streams)
    verdict = Verdict("rewards", "all wait for rewards", "raise reward_worker.concurrency (now 8)")
    figures = {"groups": 412, "reward_mean": 0.5312, "zero_variance": 0.25, "length": 87.5, "accuracy": 0.5}
    sources = {"gsm8k": figures, "other": {"accuracy": 1.0, "responses": 4}}
    now = replace(now, train=ledger, evaluation=ledger, rewards=(REWARD,), sources=sources)
    lines = drawn(lag_table(now, verdict, width), width)
    assert "…" not in "".join(lines)
    rows = [line.split() for line in lines]
    heading = next(row for row in rows if row[:1] == ["STREAM"])
    assert ("DEPTH" in heading) == ("RETRIED" in heading) == (width == 110)
    for word in ("12.3k", "0.0218", "2h05m", "9m59s", "16/16", "my_rewards:unit_tests"):
        assert any(word in row for row in rows), word
    assert any(row == ["gsm8k", "412", "0.531", "0.25", "87.5", "0.5"] for row in rows)
    assert any(row == ["other", "-", "-", "-", "-", "1"] for row in rows)
    assert lines[-2:] == ["all wait for rewards", "to fix it: raise reward_worker.concurrency (now 8)"]
