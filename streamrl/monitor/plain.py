"""The same essentials as the live screen on one line, for places without a terminal."""

from __future__ import annotations

import time

from streamrl.monitor.board import Board
from streamrl.monitor.lines import duration, number, percent, printable


def line(board: Board) -> str:
    """One line: time, step, reward, loss, accuracy, staleness, queue, speed and idle share of each side, trouble."""
    progress = board.progress
    parts = [f"{duration(time.time() - board.started):>6}"]
    if progress.steps:
        step = progress.steps[-1]
        goal = f"/{board.goal.steps}" if board.goal.steps else ""
        parts.append(f"step {step.step}{goal} v{step.version}")
        parts.append(f"reward {number(step.reward)} loss {number(step.loss)}")
    points = board.accuracy()
    if points:
        parts.append(f"accuracy {points[-1][1]:.3f} (v{points[-1][0]})")
    staleness = _mean_staleness(board)
    if staleness is not None:
        parts.append(f"stale {staleness:.1f}")
    if board.snapshot is not None:
        lags = " ".join(f"{stream.name} {stream.lag}" for stream in board.snapshot.train.streams)
        parts.append(f"waiting {lags}")
    parts.append(
        f"learner {number(progress.learner.tokens_per_second)} tok/s waits {percent(progress.learner.idle_fraction)}"
    )
    for name, side in sorted(progress.rollouts.items()):
        parts.append(f"{name} {number(side.tokens_per_second)} tok/s waits {percent(side.idle_fraction)}")
    quiet = ("ready", "stopped")
    not_ready = [f"{name} {state.state}" for name, state in board.sorted_roles() if state.state not in quiet]
    parts.extend(not_ready)
    if board.snapshot is not None:
        shown = board.snapshot.roles.items()
        parts.extend(f"{name} blocked" for name, fields in shown if fields.get("state") == "blocked")
    if board.snapshot is not None and board.snapshot.train.dead:
        parts.append(f"{board.snapshot.train.dead} dead letters")
    if board.restarts:
        parts.append(f"{board.restarts} restarts")
    parts += [f"{name}: {printable(trouble)}" for name, trouble in board.troubles()]
    return " | ".join(parts)


def _mean_staleness(board: Board) -> float | None:
    counts = board.recent_staleness()
    tokens = sum(counts.values())
    return sum(age * count for age, count in counts.items()) / tokens if tokens else None
