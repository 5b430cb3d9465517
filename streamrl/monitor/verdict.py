"""Who waits for whom, and whether a run stands still: pure functions of a snapshot."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple

from streamrl.config import RunConfig
from streamrl.monitor.lines import duration, latency, percent, printable, size
from streamrl.monitor.snapshot import Snapshot
from streamrl.queues.replies import read_number

_LITTLE: Final = 0.25
"""Waiting less than this share of the time is no bottleneck."""
_QUIET_SECONDS: Final = 10.0
_LATE: Final = 2.0
"""A step that takes this many times the longest of the last ones is late."""
_STATUS: Final = "`streamrl status` says why"
_CANNOT_WRITE: Final = "Redis refuses writes, because it cannot write its append-only file"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The slowest stage, in words who waits for it, and one sentence of advice; empty: there is nothing to change."""

    stage: Literal["feeder", "rollouts", "rewards", "learner", "weights", "checkpoint", "staleness", "none", "unknown"]
    text: str
    advice: str = ""


class RolePace(NamedTuple):
    """What a learner or a replica said in its last heartbeat; `waits` is a share of the time."""

    name: str
    tokens_per_second: float | None
    waits: float | None


def paces(snapshot: Snapshot, kind: str) -> list[RolePace]:
    """Of all living roles of a kind that say something of it."""
    return [
        RolePace(name, read_number(fields.get("tokens_per_second", "")), read_number(fields["waits"]))
        for name, fields in sorted(snapshot.roles.items())
        if name.startswith(f"{kind}.") and "waits" in fields
    ]


def judge(snapshot: Snapshot, config: RunConfig) -> Verdict:
    """Find the slowest stage: the learner, if it is busy; else the stage in which the groups are that it lacks."""
    if not snapshot.roles:
        return Verdict("unknown", "no role is alive")
    if config.recording.mode != "off":
        return Verdict("unknown", "this run has no rollouts or no learner")
    learner, rollout = (_mean(paces(snapshot, kind)) for kind in ("learner", "rollout"))
    ready = snapshot.train.stream("scored").lag >= config.learner.groups_per_step
    if not ready and _late(snapshot, 1.0):
        learner = 1.0  # its share is of the last step, and it waits since then
    if learner is None and (ready or rollout is None):
        return Verdict("unknown", "not enough steps yet")
    if learner is None or learner >= _LITTLE:
        found = _behind(snapshot, config) or _rewards(snapshot, config, rollout) or _feeder(snapshot, config)
        found = found or _rollouts(snapshot, config, rollout)
    elif rollout is None or rollout < _LITTLE:
        found = Verdict("none", "balanced")
    else:
        found = _behind(snapshot, config) or _feeder(snapshot, config) or _learner(config)
    return replace(found, text=f"{found.text}: learner waits {percent(learner)}, rollouts {percent(rollout)}")


def _behind(snapshot: Snapshot, config: RunConfig) -> Verdict | None:
    stale = [name for name, fields in sorted(snapshot.roles.items()) if fields.get("stale") == "1"]
    if not stale:
        return None
    return Verdict(
        "weights",
        f"{', '.join(stale)} may take no prompts before newer weights come",
        f"raise max_staleness (now {config.max_staleness}), or change weights.transport (now"
        f" {config.weights.transport})",
    )


def _rewards(snapshot: Snapshot, config: RunConfig, rollout: float | None) -> Verdict | None:
    """Most of what is in flight waits for its score or is being scored."""
    away = [printable(reward.name) for reward in snapshot.rewards if reward.away]
    if away:
        return Verdict("rewards", f"all wait for rewards, and nobody scores {', '.join(away)}", _STATUS)
    stream, worker = snapshot.train.stream("rollouts"), config.reward_worker
    groups = stream.depth if stream.unit == "groups" else stream.depth / config.sampling.responses
    sampled = snapshot.train.stream("prompts").depth if rollout is None or rollout < 1 - _LITTLE else 0
    if not stream.depth or groups < sampled:
        return None
    slowest = max(snapshot.rewards, key=lambda reward: reward.p50 or 0.0, default=None)
    named = f", mostly by {printable(slowest.name)} ({latency(slowest.p50)})" if slowest and slowest.p50 else ""
    text = f"all wait for rewards: {stream.lag} {stream.unit} wait, {stream.pending} are being scored{named}"
    workers = sum(name.startswith("reward.") for name in snapshot.roles)
    if not workers:
        advice = _STATUS
    elif not stream.lag:
        advice = f"make the reward faster, or raise max_staleness (now {config.max_staleness})"
    elif stream.pending < worker.concurrency * workers:
        advice = f"raise reward_worker.replicas (now {worker.replicas})"
    else:
        advice = (
            f"raise reward_worker.concurrency (now {worker.concurrency}), or reward_worker.replicas (now"
            f" {worker.replicas}) if the reward computes"
        )
    return Verdict("rewards", text, advice)


def _feeder(snapshot: Snapshot, config: RunConfig) -> Verdict | None:
    """Nothing waits for a replica although there is room for more groups."""
    train, cap = snapshot.train, config.hard_cap
    if train.stream("prompts").lag:
        return None
    if train.live >= cap:
        text = f"all wait for a checkpoint, because {train.held} trained groups fill the hard cap of {cap}"
        return Verdict("checkpoint", text, f"lower checkpoint.every (now {config.checkpoint.every})")
    fields = snapshot.roles.get("feeder.0", {"admission": "stopped", "trouble": "all wait for the feeder"})
    if train.live - train.held < config.budget and fields.get("admission") == "stopped":
        return Verdict("feeder", printable(fields.get("trouble", "admission stopped")), _STATUS)
    if fields.get("admission") == "end of data":
        return Verdict("feeder", "the data has ended", f"raise data.epochs (now {config.data.epochs})")
    return None


def _learner(config: RunConfig) -> Verdict:
    ranks, tokens = config.learner.ranks, config.learner.tokens_per_microbatch
    advice = f"raise learner.ranks (now {ranks}) or learner.tokens_per_microbatch (now {tokens})"
    return Verdict("learner", "the rollouts wait for the learner", advice)


def _rollouts(snapshot: Snapshot, config: RunConfig, rollout: float | None) -> Verdict:
    if rollout is not None and rollout >= _LITTLE and not snapshot.train.stream("prompts").lag:
        advice = f"raise max_staleness (now {config.max_staleness})"
        return Verdict("staleness", "learner and rollouts wait for the last responses of a step", advice)
    more = (
        f"engine.servers (now {config.engines})"
        if config.engines
        else f"rollout.replicas (now {config.rollout.replicas})"
    )
    advice = f"raise {more} or engine.slots (now {config.engine.slots})"
    return Verdict("rollouts", "the learner waits for the rollouts", _STATUS if rollout is None else advice)


def stalled(snapshot: Snapshot) -> str:
    """Why the run stands still; empty if it does not. A step is late after twice the longest of the last ones."""
    server = snapshot.server
    if not server.aof_ok:
        return f"{_CANNOT_WRITE}: its disk is full or broken"
    if 0 < server.memory_limit_bytes <= server.memory_bytes:
        limit = size(server.memory_limit_bytes)
        return f"Redis refuses writes, because its memory is full ({limit}): raise redis.maxmemory"
    late = _late(snapshot, _LATE)
    return f"no step for {duration(late[0])}, the longest of the last ones took {duration(late[1])}" if late else ""


def unanswered(error: str) -> str:
    """Why a run stands still whose Redis takes no connection, from the error of that."""
    _, full_disk, why = error.partition("MISCONF ")
    return f"{_CANNOT_WRITE}: {why}" if full_disk else "Redis does not answer: it hangs, or its host does"


def _late(snapshot: Snapshot, factor: float) -> tuple[float, float] | None:
    """Seconds since the last step, and of the longest of the last ones, if the next one is late by `factor`."""
    fields = snapshot.roles.get("learner.0", {})
    usual, ended, now = (read_number(fields.get(name, "")) for name in ("step_seconds", "stepped", "beat"))
    if usual is None or ended is None or now is None or fields.get("state") != "ready":
        return None
    since = now - ended
    return (since, usual) if since > max(_QUIET_SECONDS, factor * usual) else None


def _mean(found: list[RolePace]) -> float | None:
    shares = [pace.waits for pace in found if pace.waits is not None]
    return sum(shares) / len(shares) if shares else None
