"""The figures of all reward workers, as one view of each reward; and those of each source of prompts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import orjson

from streamrl.queues.keys import REWARD_FIGURES, SOURCE_FIGURES


@dataclass(frozen=True, slots=True)
class RewardView:
    """One reward in all living workers; docs/guides/lag.md says what each figure means."""

    name: str
    workers: int
    ok: int
    failed: int
    retried: int
    dead: int
    tokens: int
    mean: float | None
    p50: float | None
    p95: float | None
    trouble: tuple[str, ...]
    per_second: float | None = None
    away: int = 0


def reward_views(roles: Mapping[str, Mapping[str, str]]) -> tuple[RewardView, ...]:
    """One view of each reward, in the order of the workers."""
    found: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for role, status in sorted(roles.items()):
        for name, line in orjson.loads(status.get(REWARD_FIGURES, "{}")).items():
            found.setdefault(name, []).append((role, line))
    return tuple(_view(name, lines) for name, lines in found.items())


def source_figures(roles: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Figures by source: of training from the learner, of held-out prompts from the feeder."""
    found: dict[str, dict[str, float]] = {}
    for _, status in sorted(roles.items(), reverse=True):
        for source, figures in orjson.loads(status.get(SOURCE_FIGURES, "{}")).items():
            found.setdefault(source, {}).update(figures)
    return found


def with_reward_rates(
    now: Iterable[RewardView], before: Iterable[RewardView], seconds: float
) -> tuple[RewardView, ...]:
    """The views with their rates over `seconds`; a restarted worker counts from the next call on."""
    old = {view.name: view for view in before}
    return tuple(
        replace(view, per_second=max(0, view.ok - old[view.name].ok) / seconds) if view.name in old else view
        for view in now
    )


def _view(name: str, lines: list[tuple[str, dict[str, Any]]]) -> RewardView:
    def total(key: str) -> int:
        return sum(int(line.get(key) or 0) for _, line in lines)

    ok = total("ok")
    weighted = [(line.get("ok") or 0) * mean for _, line in lines if (mean := line.get("mean")) is not None]
    halves = [p50 for _, line in lines if (p50 := line.get("p50")) is not None]
    slowest = [p95 for _, line in lines if (p95 := line.get("p95")) is not None]
    return RewardView(
        name=name,
        workers=len(lines),
        ok=ok,
        failed=sum(sum((line.get("failed") or {}).values()) for _, line in lines),
        retried=total("retried"),
        dead=total("dead"),
        tokens=total("tokens"),
        mean=math.fsum(weighted) / ok if ok and weighted else None,
        p50=math.fsum(halves) / len(halves) if halves else None,
        p95=max(slowest, default=None),
        trouble=tuple(f"{role}: {line['trouble']}" for role, line in lines if line.get("trouble")),
        away=total("away"),
    )
