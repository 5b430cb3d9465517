"""How tools and agents of a replica's episodes fare: the newest calls of each, and in words what is wrong."""

from __future__ import annotations

from collections import deque
from typing import Final

from streamrl.producers.episodes.tools import left_behind
from streamrl.wire import Sample, StopReason, ToolUse

_NEWEST: Final = 32
"""Calls of a tool, and samples, that are looked at."""
_LEAST: Final = 8
"""Fewer calls or samples say nothing."""
_SLOW_SECONDS: Final = 1.0
_LASTING_SECONDS: Final = 10.0
_MOST_TOOLS: Final = 256
"""Agents name their tools themselves."""


class ToolFigures:
    """Hears of each sample that was made; `trouble` is for `streamrl status`, `agents_failed` counts failed agents."""

    def __init__(self) -> None:
        self.agents_failed = 0
        self._stops: deque[StopReason | None] = deque(maxlen=_NEWEST)
        self._uses: dict[str, deque[ToolUse]] = {}
        self._seconds: deque[tuple[float, float]] = deque(maxlen=_NEWEST)

    def add(self, sample: Sample) -> None:
        turns = sample.turns
        self._seconds.append((sum(turn.tool_seconds for turn in turns), sum(turn.model_seconds for turn in turns)))
        for use in (use for turn in turns for use in turn.tools if use.outcome not in {"unknown", "malformed"}):
            if use.name in self._uses or len(self._uses) < _MOST_TOOLS:
                self._uses.setdefault(use.name, deque(maxlen=_NEWEST)).append(use)

    def ended(self, stop: StopReason | None) -> None:
        """Hear of the end of any episode."""
        self._stops.append(stop)
        self.agents_failed += stop == "agent_failed"

    def trouble(self) -> str:
        """Name the tools that fail in half of their newest calls; empty: none.

        Those that are slow are named while episodes wait for tools most of their time, and code that was given up while
        it goes on.
        """
        tools, model = (sum(part) for part in zip(*self._seconds, strict=True)) if self._seconds else (0.0, 0.0)
        wait = len(self._seconds) >= _LEAST and tools > model
        hanging = left_behind.lasting(_LASTING_SECONDS)
        found = [f"{what} goes on after its cancellation, {calls}x" for what, calls in sorted(hanging.items())]
        failed = self._stops.count("agent_failed")
        if len(self._stops) >= _LEAST and failed * 2 >= len(self._stops):
            found.append(f"the agent failed in {failed} of the last {len(self._stops)} episodes")
        for name, uses in sorted(self._uses.items()):
            if len(uses) < _LEAST:
                continue
            failed = sum(use.outcome != "ok" for use in uses)
            mean = sum(use.seconds for use in uses) / len(uses)
            if failed * 2 >= len(uses):
                found.append(f"tool {name}: {failed} of the last {len(uses)} calls failed")
            elif wait and mean >= _SLOW_SECONDS:
                share = tools / (tools + model)
                found.append(f"tool {name}: {mean:.1f} s a call, and tools are {share:.0%} of the episodes' time")
        return "; ".join(found)
