"""Which tools and agents of a worker's episodes fail: the newest calls of each, in words for `streamrl status`."""

from __future__ import annotations

from collections import deque
from typing import Final

from streamrl.producers.episodes.tools import left_behind
from streamrl.wire import Sample, StopReason

_NEWEST: Final = 32
"""Calls of a tool, and runs of the agent, that are looked at."""
_LEAST: Final = 8
"""Fewer say nothing."""
_LASTING_SECONDS: Final = 10.0
_AGENT: Final = "the agent"
_MOST_TOOLS: Final = 256
"""Agents name their tools themselves."""


class ToolFigures:
    """Hears of each sample and of the end of any episode; `agents_failed` counts failed agents."""

    def __init__(self) -> None:
        self.agents_failed = 0
        self._failed: dict[str, deque[bool]] = {}

    def add(self, sample: Sample) -> None:
        for use in (use for turn in sample.turns for use in turn.tools if use.outcome not in {"unknown", "malformed"}):
            self._note(f"tool {use.name}", use.outcome != "ok")

    def ended(self, stop: StopReason | None) -> None:
        self.agents_failed += stop == "agent_failed"
        self._note(_AGENT, stop == "agent_failed")

    def trouble(self) -> str:
        """Name what fails in half of its newest calls, and code that was given up and goes on; empty: none."""
        hanging = left_behind.lasting(_LASTING_SECONDS)
        found = [f"{what} goes on after its cancellation, {calls}x" for what, calls in sorted(hanging.items())]
        for name, calls in sorted(self._failed.items()):
            if len(calls) >= _LEAST and 2 * sum(calls) >= len(calls):
                so = f"{sum(calls)} of the last {len(calls)}"
                found.append(f"{name} failed in {so} episodes" if name == _AGENT else f"{name}: {so} calls failed")
        return "; ".join(found)

    def _note(self, name: str, failed: bool) -> None:
        if name in self._failed or len(self._failed) < _MOST_TOOLS:
            self._failed.setdefault(name, deque(maxlen=_NEWEST)).append(failed)
