"""Who waits for whom, and what a stall is, from snapshots by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from streamrl.monitor.reward_figures import RewardView
from streamrl.monitor.verdict import judge, stalled, unanswered
from streamrl.runfile import load

from .snapshots import SERVER, snapshot, stream

CONFIG = load(
    None,
    [
        "name=demo",
        "learner.groups_per_step=8",
        "max_staleness=1",
        "sampling.group_size=8",
        "reward_worker.concurrency=8",
    ],
    {},
).config
SLOW = RewardView("slow", 1, 100, 0, 0, 0, 0, 0.5, 0.962, 0.962, ())


def test_slow_rewards_are_named_with_the_key_that_helps():
    """Learner and rollouts wait 98 % of the time, and 200 samples wait for rewards: that is not balanced."""
    now = replace(snapshot(0.98, 0.98, stream("rollouts", 200, 8), live=32), rewards=(SLOW,))
    found = judge(now, CONFIG)
    assert found.stage == "rewards"
    assert "200 samples wait, 8 are being scored, mostly by slow (962ms)" in found.text
    assert "learner waits 98 %, rollouts 98 %" in found.text
    assert "reward_worker.concurrency (now 8)" in found.advice


@pytest.mark.parametrize(
    ("now", "stage", "advice"),
    [
        (snapshot(0.1, 0.2), "none", ""),
        (snapshot(0.05, 0.8, stream("scored", 12)), "learner", "learner.ranks (now 1)"),
        (snapshot(0.8, 0.05, stream("prompts", 6, 8)), "rollouts", "rollout.replicas (now 1)"),
        (snapshot(0.5, 0.5, stream("prompts", 0, 1), live=16), "staleness", "max_staleness (now 1)"),
        (snapshot(0.9, 0.9, stream("rollouts", 0, 64), live=16), "rewards", "max_staleness (now 1)"),
        (snapshot(0.9, 0.9, stream("rollouts", 30, 2), live=16), "rewards", "reward_worker.replicas (now 1)"),
        (snapshot(0.9, 0.1, stream("prompts", 6, 4), stream("rollouts", 200, 8)), "rewards", "concurrency (now 8)"),
        (snapshot(0.9, 0.1, stream("prompts", 6, 8), stream("rollouts", 2, 8)), "rollouts", "engine.slots (now 64)"),
        (snapshot(0.9, 0.9, roles={"rollout.0": {"stale": "1"}}, live=16), "weights", "weights.transport"),
        (snapshot(0.1, 0.9, roles={"rollout.0": {"stale": "1"}}, live=16), "weights", "max_staleness (now 1)"),
        (snapshot(0.9, 0.9, live=CONFIG.hard_cap, held=CONFIG.hard_cap), "checkpoint", "checkpoint.every"),
        (snapshot(0.9, 0.9, roles={"feeder.0": {"admission": "end of data"}}, live=2), "feeder", "data.epochs"),
        (snapshot(0.9, 0.9, roles={"feeder.0": {"admission": "stopped"}}, live=2), "feeder", "streamrl status"),
        (snapshot(None, 0.99, stream("rollouts", 200, 8)), "rewards", "reward_worker.concurrency (now 8)"),
        (snapshot(None, None), "unknown", ""),
        (snapshot(0.98, None, stream("prompts", 6, 8)), "rollouts", "streamrl status"),
    ],
)
def test_each_stage_can_be_the_slowest(now, stage, advice):
    found = judge(now, CONFIG)
    assert found.stage == stage, found
    assert advice in found.advice
    assert bool(found.advice) == (stage not in {"none", "unknown"})


def test_of_a_run_without_roles_nobody_waits():
    assert judge(replace(snapshot(), roles={}), CONFIG).text == "no role is alive"


def test_no_reward_worker_is_helped_by_no_key():
    now = snapshot(0.98, 0.98, stream("rollouts", 200, 0), live=32)
    del now.roles["reward.0"]
    found = judge(now, CONFIG)
    assert (found.stage, found.advice) == ("rewards", "`streamrl status` says why")


@pytest.mark.parametrize("mode", ["write", "read"])
def test_a_recording_lacks_a_stage_and_waits_for_none(mode):
    recording = CONFIG.model_copy(update={"recording": CONFIG.recording.model_copy(update={"mode": mode})})
    assert judge(snapshot(None, 0.9), recording).stage == "unknown"


def test_a_reward_that_nobody_gives_is_the_slowest_stage():
    now = replace(snapshot(0.9, 0.9), rewards=(replace(SLOW, away=1),))
    assert judge(now, CONFIG).text.startswith("all wait for rewards, and nobody scores slow")


def waited(seconds: float, usual: float = 4.0, state: str = "ready") -> dict[str, dict[str, str]]:
    step = {"stepped": "1000.0", "beat": str(1000 + seconds), "step_seconds": str(usual), "state": state}
    return {"learner.0": step}


def test_a_learner_whose_step_is_late_waits_whatever_its_last_step_says():
    parts = (stream("rollouts", 200, 8),)
    assert judge(snapshot(0.0, 0.99, *parts, roles=waited(5)), CONFIG).stage == "learner"
    assert judge(snapshot(0.0, 0.99, *parts, roles=waited(60)), CONFIG).stage == "rewards"


def test_a_run_is_stalled_by_refused_writes_or_a_late_step():
    now = snapshot(0.1, 0.1, roles=waited(5))
    assert stalled(now) == ""
    assert "its disk is full" in stalled(replace(now, server=replace(SERVER, aof_ok=False)))
    full = stalled(replace(now, server=replace(SERVER, memory_bytes=1 << 30)))
    assert full == "Redis refuses writes, because its memory is full (1.0 GiB): raise redis.maxmemory"
    late = stalled(snapshot(0.1, 0.1, roles=waited(21, 10.0)))
    assert late == "no step for 21s, the longest of the last ones took 10s"
    assert stalled(snapshot(0.1, 0.1, roles=waited(19, 10.0))) == ""
    assert stalled(snapshot(0.1, 0.1, roles=waited(9.9, 0.1))) == "", "ten seconds are no stall, however fast the steps"
    assert stalled(snapshot(0.1, 0.1, roles=waited(500, state="draining"))) == ""
    assert stalled(snapshot(0.1, 0.1)) == "", "two steps say what is usual"


def test_a_redis_that_takes_no_connection():
    error = "Redis at unix:///x does not answer: MISCONF Errors writing to the AOF file: No space left on device"
    assert unanswered(error).endswith("append-only file: Errors writing to the AOF file: No space left on device")
    assert unanswered("Redis at unix:///x does not answer: no reply within 5 s").startswith("Redis does not answer")
