"""Snapshots of a run in which learner, replica, reward worker and feeder are alive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from streamrl.monitor.snapshot import LedgerView, ServerView, Snapshot, StreamView

SERVER = ServerView("7.0.15", 60, 1 << 20, 1 << 30, 0, 0, aof_ok=True)
EMPTY = StreamView("", 0, 0, 0, None, None, 0.0, 0)


def stream(name: str, waiting: int = 0, leased: int = 0, **more: Any) -> StreamView:
    """One stream; `rollouts` holds samples."""
    unit = "samples" if name == "rollouts" else "groups"
    return replace(EMPTY, name=name, depth=waiting + leased, lag=waiting, pending=leased, unit=unit, **more)


def ledger(**more: Any) -> LedgerView:
    """A ledger with empty streams, unless given."""
    streams = more.pop("streams", ())
    known = {view.name: view for view in streams}
    names = ("prompts", "rollouts", "scored")
    counts = {"live": 0, "held": 0, "dead": 0, "dropped": 0, "cursor": 0, "done": None, "version": 5, "epoch": 1}
    return LedgerView(tuple(known.get(name) or stream(name) for name in names), **{**counts, **more})


def snapshot(
    learner: float | None = None,
    rollout: float | None = None,
    *streams: StreamView,
    roles: Mapping[str, Mapping[str, str]] | None = None,
    **counts: Any,
) -> Snapshot:
    """`learner` and `rollout` are the shares of the time in which they wait; `roles` adds fields of roles."""
    known: dict[str, dict[str, str]] = {
        "learner.0": {"state": "ready", **({} if learner is None else {"waits": str(learner)})},
        "rollout.0": {"state": "ready", "version": "4", **({} if rollout is None else {"waits": str(rollout)})},
        "reward.0": {"state": "ready"},
        "feeder.0": {"state": "ready", "admission": "full"},
    }
    for name, fields in (roles or {}).items():
        known.setdefault(name, {"state": "ready"}).update(fields)
    train = ledger(streams=streams, **counts)
    return Snapshot("demo", 1e9, SERVER, train, ledger(), 16, 96, 5, known)
