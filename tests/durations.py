"""The slowest tests of a run of pytest, appended to the file that `SLOWEST_TESTS` names: CI keeps them (`.ci/run`)."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

import pytest

_SHOWN = 40


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Sum up set-up, call and tear-down of each test, reruns too. Workers of xdist report to their controller."""
    path = os.environ.get("SLOWEST_TESTS")
    if not path or hasattr(config, "workerinput"):
        return
    seconds: dict[str, float] = defaultdict(float)
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid] += report.duration
    slowest = sorted(seconds.items(), key=lambda entry: -entry[1])[:_SHOWN]
    with Path(path).open("a") as file:
        file.write(f"{len(seconds)} tests, {sum(seconds.values()):.0f} s of all workers; the slowest:\n")
        file.writelines(f"{taken:8.1f} s  {nodeid}\n" for nodeid, taken in slowest)
