"""Which processes a run has, what each waits for, and what each is given."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from streamrl.config import RunConfig
from streamrl.config.rewards import REWARD_MODEL_ROLE as REWARD_MODEL
from streamrl.cores import THREADS, share_cores, usable_cores
from streamrl.runtime.model_checks import weight_files

_READ_BYTES: Final = 100 << 20
"""Bytes of a model that a learner reads, checks and compiles for in a second, at least."""


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
    # Members come and go while the run goes on (`streamrl scale`).
    scales: bool = False


ROLE_KINDS: Final = {
    "feeder": RoleKind(drain_share=0.05, finishes=True),
    "player": RoleKind(),  # in the place of a feeder
    # Both wait for the first version of the weights, a rollout for an engine that has it.
    "rollout": RoleKind(frozenset({"redis", "learner", "recorder", "engine"}), 0.27, scales=True),
    "engine": RoleKind(frozenset({"redis", "learner", "recorder"}), 0.03, scales=True),
    "reward": RoleKind(frozenset({"redis", REWARD_MODEL}), 0.2, scales=True),
    REWARD_MODEL: RoleKind(drain_share=0.05, scales=True),
    "learner": RoleKind(drain_share=0.35, finishes=True, ends_run=True),
    "recorder": RoleKind(finishes=True, ends_run=True),  # in the place of a learner
    "redis": RoleKind(frozenset(), 0.05),
}
"""In the order of the drain, which is the order of the data; Redis last."""


@dataclass(frozen=True, slots=True)
class RoleCommand:
    """What runs a role on any host: arguments of its Python, variables that are added to its environment."""

    arguments: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path | None = None


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """Processes that live and die together: one role instance, or all ranks of the learner."""

    kind: str
    processes: tuple[str, ...]
    # Command of the process at a position.
    command: Callable[[int], RoleCommand]
    finishes: bool = False
    # False: it is asked for its health (checkup.py).
    heartbeats: bool = True
    # Time to be ready, if longer than supervisor.start_deadline.
    start_seconds: float = 0.0
    # Kinds that must be ready before the first start.
    starts_after: frozenset[str] = frozenset()
    # Kinds that it waits for after its start; its start deadline does not run meanwhile.
    waits_for: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        return self.processes[0] if len(self.processes) == 1 else self.kind

    @property
    def group(self) -> str:
        """Name of all members of its role: `rollout`, `reward_model.NAME`."""
        return self.processes[0].rpartition(".")[0] or self.kind


def starts_after(kind: str, *, colocated: bool = False) -> frozenset[str]:
    """Kinds that must be ready before one of `kind` is started; all others start at once.

    `colocated`: engines share the devices with the learner, which has them first.
    """
    if kind == "reward":
        return frozenset({REWARD_MODEL})  # a reward may ask its model as soon as it is opened
    return frozenset({"learner"}) if kind in {"rollout", "engine"} and colocated else frozenset()


def plan(config: RunConfig, run_dir: Path) -> list[UnitSpec]:
    """The units of a run; those on the way to the first sampled token come first."""
    own_redis = UnitSpec("redis", ("redis",), lambda _: _command(run_dir, "redis"), heartbeats=False)
    units = [own_redis] if config.redis.url is None else []
    for kind, count in processes(config).items():
        places: list[Sequence[int]] = [range(count)] if kind == "learner" else [[index] for index in range(count)]
        units += [unit_of(config, run_dir, kind, indices) for indices in places]
    return units


def processes(config: RunConfig) -> dict[str, int]:
    """Besides Redis; servers of a reward model are `reward_model.NAME`."""
    producing = {f"{REWARD_MODEL}.{name}": count for name, count in config.reward_servers.items()}
    if config.engines:
        producing["engine"] = config.engines
    producing["rollout"] = config.rollout.replicas
    producing |= {"reward": config.reward_worker.replicas, "feeder": 1}
    if config.recording.mode == "write":
        return {"recorder": 1, **producing}
    if config.recording.mode == "read":
        return {"learner": config.learner.ranks, "player": 1}
    return {"learner": config.learner.ranks, **producing}


def role_names(config: RunConfig) -> list[str]:
    redis = [] if config.redis.url is not None else ["redis"]
    return redis + [f"{kind}.{index}" for kind, count in processes(config).items() for index in range(count)]


def unit_of(config: RunConfig, run_dir: Path, kind: str, indices: Sequence[int]) -> UnitSpec:
    """A unit of a role: one member of it, or all ranks of the learner."""

    def command(position: int) -> RoleCommand:
        env = threads(config, kind)
        if kind == "learner":
            env |= {"RANK": str(position), "LOCAL_RANK": str(position), "WORLD_SIZE": str(len(indices))}
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
    """A replica is ready when its first server has the weights; a learner when it has devices, models, checkpoint."""
    if kind == "learner":
        learner, path = config.learner, Path(config.model.path)
        models = 1 + (learner.reference.kind == "frozen") + (learner.critic.kind == "model")
        size = sum(file.stat().st_size for file in weight_files(path)) if path.is_dir() else 0
        more = float(models * size // _READ_BYTES)
        more += config.turn_deadline if config.rollout.placement == "colocated" else 0.0
        more += config.checkpoint.deadline if config.checkpoint.store is not None else 0.0
        return config.supervisor.start_deadline + more if more else 0.0
    if kind.startswith(f"{REWARD_MODEL}."):
        return config.reward_models[kind.partition(".")[2]].start_deadline + config.supervisor.term_grace
    return config.engine.start_deadline + config.weights.deadline if kind == "engine" else 0.0


def _command(run_dir: Path, kind: str, index: int = 0, env: Mapping[str, str] = MappingProxyType({})) -> RoleCommand:
    # -P: the working directory must not shadow installed modules (a user's `redis/` or `queue.py`).
    arguments = ("-P", "-m", "streamrl.runtime", kind, str(index), str(run_dir))
    return RoleCommand(arguments, {"PYTHONUNBUFFERED": "1", **env})


def threads(config: RunConfig, kind: str, *, cluster: bool = False) -> dict[str, str]:
    """Environment that bounds the CPU threads of a role, as far as the run file says it.

    Roles that compute get the configured number, or, on a `cluster`, their share of the cores that they ask for;
    without either one of the host's at the start (`use_cores`). All others get one thread: their numerics are tiny.
    """
    wanted, of = 1, computing(config)
    if kind in of:
        asked = config.resources(kind.partition(".")[0]).cpus if cluster else 0
        each = of[kind] // processes(config)[kind]
        shared = share_cores(math.ceil(asked), each) if asked else 0
        wanted = configured_threads(config).get(kind) or shared
    return {"TOKENIZERS_PARALLELISM": "false", **(numeric_threads(wanted) if wanted else {})}


def numeric_threads(count: int) -> dict[str, str]:
    return {name: str(count) for name in (THREADS, "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}


def configured_threads(config: RunConfig) -> dict[str, int]:
    named = {"learner": config.learner.threads, _engines(config): config.engine.threads}
    return {kind: number for kind, number in named.items() if number}


def computing(config: RunConfig) -> dict[str, int]:
    """The roles that compute with many threads, and in how many processes, servers of replicas included."""
    engine, found = config.engine, {}
    for kind, count in processes(config).items():
        if kind == "learner" or kind.startswith(f"{REWARD_MODEL}."):
            found[kind] = count
        elif kind == _engines(config) and not engine.url:
            found[kind] = count * engine.tensor_parallel
    return found


def _engines(config: RunConfig) -> str:
    """The roles that generate: servers, or the rollout workers themselves."""
    return "engine" if config.engines else "rollout"


def divide_cores(config: RunConfig, cores: int, present: Mapping[str, int]) -> dict[str, int]:
    """CPU threads of each computing process by role, on a host with `cores` and the processes that are `present`.

    Configured numbers stand; what they leave is divided evenly among all others. Colocated engines and the learner
    compute in turn, so each has what both would have.
    """
    given = {kind: number for kind, number in configured_threads(config).items() if kind in present}
    others = {kind: count for kind, count in present.items() if kind not in given}
    together = sum(others.values())
    if config.rollout.placement == "colocated" and {"learner", _engines(config)} <= others.keys():
        together -= min(others["learner"], others[_engines(config)])
    taken = sum(present[kind] * number for kind, number in given.items())
    return {**given, **dict.fromkeys(others, share_cores(cores, together, taken=taken))}


def use_cores(config: RunConfig, kind: str, index: int, *, alone: bool = False) -> None:
    """Bound the CPU threads of this process of a role, before it imports torch; OMP_NUM_THREADS wins if it is set.

    `alone`: no other role of the run is on this host. A member that was added to the run counts as one more.
    """
    of = computing(config)
    if kind in of and THREADS not in os.environ:
        each = of[kind] // processes(config)[kind]
        present = {kind: each} if alone else of | {kind: max(of[kind], (index + 1) * each)}
        os.environ |= numeric_threads(divide_cores(config, usable_cores(), present)[kind])
