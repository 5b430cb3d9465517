"""Tracebacks as people see them."""

import asyncio
import traceback
from pathlib import Path

from streamrl.consumers.calls import Together, detail_of
from streamrl.consumers.scoring import ScoringFailed
from streamrl.monitor.lines import folded
from tests.consumers.calls_kit import calls_of, lease_end, loaded
from tests.consumers.samples import seen


def fails(sample):
    return float(sample.text)


def test_frames_of_the_framework_are_folded_and_those_of_the_reward_stay():
    calls = calls_of(loaded(fails), attempts=1)
    try:
        asyncio.run(calls.score(seen("four"), Together(lease_end())))
    except ScoringFailed as error:
        detail = error.detail
    lines = folded(detail)
    files = [line for line in lines if line.startswith("  File")]
    assert len(files) == 1
    assert f'"{__file__}"' in files[0]
    assert "    return float(sample.text)" in lines
    assert any(line.startswith("  ... ") and line.endswith(" of streamrl and asyncio") for line in lines)
    assert lines[-1] == "ValueError: could not convert string to float: 'four'"
    assert len(lines) < len(detail.splitlines())


def test_an_error_that_the_framework_raises_keeps_its_innermost_frame_and_what_is_no_traceback_stays():
    try:
        raise RuntimeError("outer") from ValueError("inner\nwith two lines")
    except RuntimeError as error:
        detail = detail_of(error)
    assert folded(detail) == detail.splitlines()
    framework = Path("/x/streamrl/consumers/calls.py")
    shown = traceback.StackSummary.from_list([(str(framework), 1, "a", "a()"), (str(framework), 2, "b", "b()")])
    text = "Traceback (most recent call last):\n" + "".join(shown.format()) + "TimeoutError: 30 s"
    assert folded(text) == [
        "Traceback (most recent call last):",
        "  ... 1 frame of streamrl and asyncio",
        f'  File "{framework}", line 2, in b',
        "    b()",
        "TimeoutError: 30 s",
    ]
    assert folded("no traceback\n  at all") == ["no traceback", "  at all"]
    assert folded("") == []
