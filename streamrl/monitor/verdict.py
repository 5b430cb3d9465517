"""Who waits for whom, and whether a run stands still: pure functions of a snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from streamrl.config import RunConfig
from streamrl.monitor.lines import duration, latency, percent, printable, size
from streamrl.monitor.snapshot import Snapshot
from streamrl.queues.replies import read_number

Stage: TypeAlias = Literal[
    "feeder", "rollouts", "rewards", "learner", "weights", "checkpoint", "staleness", "none", "unknown"
]

_CANNOT_WRITE: Final = "Redis refuses writes, because it cannot write its append-only file"
_LITTLE: Final = 0.25
"""Waiting less than this share of the time is no bottleneck."""
_QUIET_SECONDS: Final = 10.0
_STATUS: Final = "`streamrl status` says why"
_LATE: Final = 2.0
"""A step that takes this many times the longest of the last ones is late."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The slowest stage, who waits for it, and one sentence of advice (empty: there is nothing to change)."""

    stage: Stage
    text: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a learner or a replica works by its last heartbeat; `waits` is a share of the time."""

    name: str
    tokens_per_second: float | None
    waits: float | None


def paces(snapshot: Snapshot, kind: str) -> list[Pace]:
    """Of all living roles of a kind; a role without a heartbeat is not there."""
    return [
        Pace(name, _field(fields, "tokens_per_second"), _field(fields, "waits"))
        for name, fields in sorted(snapshot.roles.items())
        if name.partition(".")[0] == kind and (kind != "learner" or name == "learner.0")
    ]


def judge(snapshot: Snapshot, config: RunConfig) -> Verdict:
    """Find the slowest stage: the learner, if it is busy; else the stage in which the groups are that it lacks."""
    learner, rollout = (_mean(paces(snapshot, kind)) for kind in ("learner", "rollout"))
    if not any(name.startswith(("learner.", "rollout.")) for name in snapshot.roles):
        return Verdict("unknown", "no learner and no replica sends a heartbeat")
    away = [printable(reward.name) for reward in snapshot.rewards if reward.away]
    if away:
        return Verdict("rewards", f"all wait for a reward: nobody scores {', '.join(away)}", _STATUS)
    if learner is not None and _late(snapshot, 1.0) and _ready(snapshot) < config.learner.groups_per_step:
        learner = 1.0  # its share is of the last step, and it waits since then
    if learner is not None and learner < _LITTLE:
        if rollout is None or rollout < _LITTLE:
            return Verdict("none", f"balanced: {_shares(learner, rollout)}")
        return _behind(snapshot, config) or _unfed(snapshot, config) or _learner(config, _shares(learner, rollout))
    if learner is None and _ready(snapshot) >= config.learner.groups_per_step:
        return Verdict("unknown", "the learner has ended no step yet")
    who = "the learner waits" if rollout is None or rollout < _LITTLE else "learner and rollouts wait"
    return (
        _behind(snapshot, config)
        or _rewards(snapshot, config, who, learner, rollout)
        or _unfed(snapshot, config)
        or _rollouts(snapshot, config, learner, rollout)
    )


def _learner(config: RunConfig, shares: str) -> Verdict:
    learner = config.learner
    advice = (
        f"raise learner.ranks (now {learner.ranks}) or learner.tokens_per_microbatch (now"
        f" {learner.tokens_per_microbatch})"
    )
    return Verdict("learner", f"the rollouts wait for the learner: {shares}", advice)


def _behind(snapshot: Snapshot, config: RunConfig) -> Verdict | None:
    """Replicas whose weights are too old for new prompts."""
    stale = [name for name, fields in snapshot.roles.items() if fields.get("stale") == "1"]
    if not stale:
        return None
    return Verdict(
        "weights",
        f"{', '.join(sorted(stale))} may take no prompts before newer weights come",
        f"raise max_staleness (now {config.max_staleness}), or bring weights faster: weights.transport (now"
        f" {config.weights.transport})",
    )


def _rewards(
    snapshot: Snapshot, config: RunConfig, who: str, learner: float | None, rollout: float | None
) -> Verdict | None:
    """Most of what is in flight waits for its score or is being scored."""
    scoring, making = snapshot.train.stream("rollouts"), snapshot.train.stream("prompts")
    groups = scoring.depth if scoring.unit == "groups" else scoring.depth / config.sampling.responses
    busy_elsewhere = making.depth if rollout is None or rollout < 1 - _LITTLE else 0
    if not scoring.depth or groups < busy_elsewhere:
        return None
    slowest = max(snapshot.rewards, key=lambda reward: reward.p50 or 0.0, default=None)
    named = f" (slowest: {printable(slowest.name)}, {latency(slowest.p50)})" if slowest and slowest.p50 else ""
    text = f"{who} for rewards: {scoring.lag} {scoring.unit} wait, {scoring.pending} are being scored{named}"
    worker, workers = config.reward_worker, sum(name.startswith("reward.") for name in snapshot.roles)
    if not scoring.lag:
        advice = f"raise max_staleness (now {config.max_staleness}), or make the reward faster"
    elif scoring.pending < worker.concurrency * max(1, workers):
        advice = f"raise reward_worker.replicas (now {worker.replicas})"
    else:
        advice = (
            f"raise reward_worker.concurrency (now {worker.concurrency}), or reward_worker.replicas (now"
            f" {worker.replicas}) if the reward computes"
        )
    return Verdict("rewards", f"{text}; {_shares(learner, rollout)}", advice)


def _unfed(snapshot: Snapshot, config: RunConfig) -> Verdict | None:
    """Nothing waits for a replica although there is room for more groups."""
    train = snapshot.train
    if train.stream("prompts").lag:
        return None
    if snapshot.hard_cap is not None and train.live >= snapshot.hard_cap:
        text = f"all wait for a checkpoint: {train.held} trained groups fill the hard cap of {snapshot.hard_cap}"
        return Verdict("checkpoint", text, f"lower checkpoint.every (now {config.checkpoint.every})")
    if snapshot.budget is None or train.live - train.held >= snapshot.budget:
        return None
    feeder = next((fields for name, fields in snapshot.roles.items() if name.startswith("feeder.")), None)
    if feeder is None:
        return Verdict("feeder", "all wait for the feeder, which sends no heartbeat", _STATUS)
    state = feeder.get("admission", "")
    if state == "end of data":
        return Verdict("feeder", "the data has ended", f"raise data.epochs (now {config.data.epochs})")
    if state == "stopped":
        return Verdict("feeder", printable(feeder.get("trouble", "admission stopped")), _STATUS)
    return None


def _rollouts(snapshot: Snapshot, config: RunConfig, learner: float | None, rollout: float | None) -> Verdict:
    waiting = snapshot.train.stream("prompts").lag
    if rollout is not None and rollout >= _LITTLE and not waiting:
        text = f"learner and rollouts wait for the last responses of a step: {_shares(learner, rollout)}"
        return Verdict("staleness", text, f"raise max_staleness (now {config.max_staleness})")
    advice = f"raise rollout.replicas (now {config.rollout.replicas}) or engine.slots (now {config.engine.slots})"
    return Verdict("rollouts", f"the learner waits for the rollouts: {_shares(learner, rollout)}", advice)


def stalled(snapshot: Snapshot) -> str:
    """Why the run stands still; empty if it does not. A step is late after twice the longest of the last ones."""
    server = snapshot.server
    if not server.aof_ok:
        return f"{_CANNOT_WRITE}: its disk is full or broken"
    if server.memory_limit_bytes and server.memory_bytes >= server.memory_limit_bytes:
        limit = size(server.memory_limit_bytes)
        return f"Redis refuses writes, because its memory is full ({limit}): raise redis.maxmemory"
    if (late := _late(snapshot, _LATE)) is None:
        return ""
    return f"no step for {duration(late[0])}, and the longest of the last ones took {duration(late[1])}"


def unanswered(error: str) -> str:
    """Why a run stands still whose Redis takes no connection, from the error of that."""
    _, full_disk, why = error.partition("MISCONF ")
    return f"{_CANNOT_WRITE}: {why}" if full_disk else "Redis does not answer: it hangs, or its host does"


def _late(snapshot: Snapshot, factor: float) -> tuple[float, float] | None:
    """Seconds since the last step, and of the longest of the last ones, if the next one is late by `factor`."""
    fields = snapshot.roles.get("learner.0", {})
    usual, ended, now = (_field(fields, name) for name in ("step_seconds", "stepped", "beat"))
    if usual is None or ended is None or now is None or fields.get("state") != "ready":
        return None
    since = now - ended
    return (since, usual) if since > max(_QUIET_SECONDS, factor * usual) else None


def _ready(snapshot: Snapshot) -> int:
    return snapshot.train.stream("scored").lag


def _shares(learner: float | None, rollout: float | None) -> str:
    return f"learner waits {percent(learner)}, rollouts {percent(rollout)}"


def _mean(found: list[Pace]) -> float | None:
    shares = [pace.waits for pace in found if pace.waits is not None]
    return sum(shares) / len(shares) if shares else None


def _field(fields: Mapping[str, str], name: str) -> float | None:
    return read_number(fields.get(name, ""))
