"""Which processes a run has, what each waits for, and what each is given."""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from streamrl.config import RunConfig
from streamrl.config.rewards import REWARD_MODEL_ROLE as REWARD_MODEL
from streamrl.queues import embedded
from streamrl.queues.embedded import STARTER
from streamrl.runtime.process import RoleCommand


@dataclass(frozen=True, slots=True)
class RoleKind:
    # All units start at once; each waits for these kinds before it is ready.
    waits_for: frozenset[str] = frozenset({"redis"})
    # Share of the drain deadline; what a stage leaves over goes to the next.
    drain_share: float = 0.0
    # Exit code 0 without being asked is the end of its work.
    finishes: bool = False
    # Its end is the end of the run.
    ends_run: bool = False


ROLE_KINDS: Final = {
    "feeder": RoleKind(drain_share=0.05, finishes=True),
    "player": RoleKind(),  # in the place of a feeder
    "rollout": RoleKind(frozenset({"redis", "learner", "recorder"}), 0.3),  # for the first version of the weights
    "reward": RoleKind(frozenset({"redis", REWARD_MODEL}), 0.2),
    REWARD_MODEL: RoleKind(drain_share=0.05),
    "learner": RoleKind(drain_share=0.35, finishes=True, ends_run=True),
    "recorder": RoleKind(finishes=True, ends_run=True),  # in the place of a learner
    "redis": RoleKind(frozenset(), 0.05),
}
"""In the order of the drain, which is the order of the data; Redis last."""

RENDEZVOUS: Final = "rendezvous"
"""Directory in the run's where the ranks of a learner find each other, one file for each start."""


@dataclass(frozen=True, slots=True)
class Checkup:
    """Health checks for a process that sends no heartbeats (Redis).

    `ready` returns when it can work. `answers` is asked once a second from then on: after `silence` seconds without an
    answer the process is killed, and `describe(pid)` goes to the log.
    """

    ready: Callable[[], Awaitable[None]]
    answers: Callable[[], Awaitable[bool]]
    silence: float
    describe: Callable[[int], Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """Processes that live and die together: one role instance, or all ranks of the learner."""

    kind: str
    processes: tuple[str, ...]
    # Command of the process at a position; the token is new for each start, and the ranks of a start meet by it.
    command: Callable[[int, str], RoleCommand]
    finishes: bool = False
    # None: the processes send heartbeats.
    checkup: Checkup | None = None
    # Time to be ready, if longer than supervisor.start_deadline.
    start_seconds: float = 0.0
    # Kinds that must be ready before the first start.
    starts_after: frozenset[str] = frozenset()
    # Kinds that it waits for after its start; its start deadline does not run meanwhile.
    waits_for: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        return self.processes[0] if len(self.processes) == 1 else self.kind


def starts_after(kind: str, *, colocated: bool = False) -> frozenset[str]:
    """Kinds that must be ready before one of `kind` is started; all others start at once.

    `colocated`: engines share the devices with the learner, which has them first.
    """
    if kind == "reward":
        return frozenset({REWARD_MODEL})  # a reward may ask its model as soon as it is opened
    return frozenset({"learner"}) if kind == "rollout" and colocated else frozenset()


def plan(config: RunConfig, run_dir: Path) -> list[UnitSpec]:
    """The units of a run; those on the way to the first sampled token come first."""
    units = [] if config.redis.url is not None else [_redis(config, run_dir)]
    for kind, count in processes(config).items():
        places: list[Sequence[int]] = [range(count)] if kind == "learner" else [[index] for index in range(count)]
        units += [_unit(config, run_dir, kind, indices) for indices in places]
    return units


def processes(config: RunConfig) -> dict[str, int]:
    """Besides Redis; servers of a reward model are `reward_model.NAME`."""
    producing = {f"{REWARD_MODEL}.{name}": count for name, count in config.reward_servers.items()}
    producing |= {"rollout": config.rollout.replicas, "reward": config.reward_worker.replicas, "feeder": 1}
    if config.recording.mode == "write":
        return {"recorder": 1, **producing}
    if config.recording.mode == "read":
        return {"learner": config.learner.ranks, "player": 1}
    return {"learner": config.learner.ranks, **producing}


def role_names(config: RunConfig) -> list[str]:
    redis = [] if config.redis.url is not None else ["redis"]
    return redis + [f"{kind}.{index}" for kind, count in processes(config).items() for index in range(count)]


def _redis(config: RunConfig, run_dir: Path) -> UnitSpec:
    async def ready() -> None:
        await embedded.wait_ready(run_dir, config.supervisor.start_deadline)

    def command(_position: int, _token: str) -> RoleCommand:
        return _command(run_dir, "redis", 0, {})

    checkup = Checkup(
        ready=ready,
        answers=partial(embedded.answers, run_dir),
        silence=min(config.supervisor.liveness_deadline, config.redis.patience / 2),  # the roles survive the outage
        describe=partial(embedded.describe, run_dir),
    )
    return UnitSpec("redis", ("redis",), command, checkup=checkup)


def _unit(config: RunConfig, run_dir: Path, kind: str, indices: Sequence[int]) -> UnitSpec:
    def command(position: int, token: str) -> RoleCommand:
        env = threads(config, kind)
        if kind == "learner":
            env |= _rank(position, len(indices), run_dir, token)
        return _command(run_dir, kind, indices[position], env)

    names = tuple(f"{kind}.{index}" for index in indices)
    kind_of_unit = kind.partition(".")[0]
    return UnitSpec(
        kind_of_unit,
        names,
        command,
        finishes=ROLE_KINDS[kind_of_unit].finishes,
        start_seconds=_start_seconds(config, kind),
        starts_after=starts_after(kind_of_unit, colocated=config.rollout.placement == "colocated"),
        waits_for=ROLE_KINDS[kind_of_unit].waits_for,
    )


def _start_seconds(config: RunConfig, kind: str) -> float:
    """A replica is ready when its first server has the weights; a learner when it has its devices."""
    if kind == "learner" and config.rollout.placement == "colocated":
        return config.supervisor.start_deadline + config.turn_deadline
    if kind.startswith(f"{REWARD_MODEL}."):
        return config.reward_models[kind.partition(".")[2]].start_deadline + config.supervisor.term_grace
    serverless = kind != "rollout" or (config.engine.kind == "hf" and not config.engine.url)
    return 0.0 if serverless else config.engine.start_deadline + config.weights.deadline


def _command(run_dir: Path, kind: str, index: int, env: dict[str, str]) -> RoleCommand:
    # -P: the working directory must not shadow installed modules (a user's `redis/` or `queue.py`).
    argv = (sys.executable, "-P", "-m", "streamrl.runtime", kind, str(index), str(run_dir))
    return RoleCommand(argv, {"PYTHONUNBUFFERED": "1", STARTER: str(os.getpid()), **env})


def threads(config: RunConfig, kind: str) -> dict[str, str]:
    """Environment that bounds the CPU threads of a role: the configured number, else the library's choice.

    Feeder and reward workers get one thread: their numerics are tiny, and a pool per process would only fight for
    cores. Servers of reward models, which inherit it, are given theirs when they are started.
    """
    served = {f"{REWARD_MODEL}.{name}": None for name in config.reward_models}
    wanted = {"learner": config.learner.threads, "rollout": config.engine.threads, **served}.get(kind, 1)
    env = {"TOKENIZERS_PARALLELISM": "false"}
    if wanted is not None:
        env |= {f"{library}_NUM_THREADS": str(wanted) for library in ("OMP", "MKL", "OPENBLAS")}
    return env


def _rank(rank: int, world: int, run_dir: Path, token: str) -> dict[str, str]:
    env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    if world > 1:
        # A file store needs an unused file: a rank of a dead group may still hold the old one.
        env["STREAMRL_RENDEZVOUS"] = f"file://{run_dir.resolve() / RENDEZVOUS / token}"
    return env
