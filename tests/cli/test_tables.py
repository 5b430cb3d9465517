"""The table of `streamrl status`."""

from __future__ import annotations

import io

from rich.console import Console

from streamrl.monitor.tables import status_table


def test_long_progress_wraps_and_leaves_the_other_columns_whole():
    progress = {f"figure{number}": "12345" for number in range(30)} | {"loss": "-0.0072290925201518984"}
    role = {"name": "rollout.0", "state": "ready", "pid": 4242, "up_seconds": 61.0, "restarts": 3, "version": 17}
    view = {**role, "progress": progress, "reason": "", "trouble": ""}
    out = io.StringIO()
    Console(file=out, width=100).print(status_table([view], "run demo: ready"))
    heading, row, *rest = out.getvalue().splitlines()
    assert heading.split() == ["ROLE", "STATE", "PID", "UP", "RESTARTS", "VERSION", "PROGRESS"]
    assert row.split()[:7] == ["rollout.0", "ready", "4242", "1m01s", "3", "17", "figure0=12345"]
    assert "figure29=12345 loss=-0.00723" in " ".join(" ".join(rest).split())
