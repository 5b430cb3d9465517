"""A run on a Ray cluster. Each process is the child of a `RoleKeeper`, an actor on its node that holds its lifeline.

```
supervisor (driver) -> RayPlacement -> placement group of a unit -> RoleKeeper -> `python -m streamrl.runtime`
                             <------- news: lines of its status pipe, what it prints, its exit code
```
Ray places, and sees that an actor ends with its driver and its node. It restarts nothing: that is the supervisor's
work, with the budgets and exit codes of every other placement. No sample, weight or checkpoint goes through its object
store.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from typing_extensions import override

import streamrl
from streamrl.config import RunConfig
from streamrl.errors import ConfigError, Refused, Unreachable, need_packages
from streamrl.runtime.audit import EVALUATION_FILE
from streamrl.runtime.placement.local import LocalPlacement
from streamrl.runtime.placement.placement import OnBytes, PlacedProcess, Placement
from streamrl.runtime.placement.ray_node import KnownDirectory, News, NodeFacts, RoleKeeper, check_node, mark_of
from streamrl.runtime.plan import UnitSpec, threads
from streamrl.runtime.role_log import RoleLog
from streamrl.runtime.roles import stop_signals
from streamrl.weight_sync.files import TOKEN_FILE

logger = logging.getLogger(__name__)

_STORE_BYTES: Final = 100 << 20
"""Nothing goes through the object store."""
_LOOK_SECONDS: Final = 60.0
_HEAD_AWAY: Final = "86400"
"""Seconds after which Ray ends this process because its head does not answer; the supervisor decides that itself."""
_START_HEAD: Final = "start it again (`ray start --head`), then `streamrl up --resume --on ray` if the run has ended"
_LEAST_CPU: Final = 0.01
"""A placement group must ask for something."""


class RayProcess(PlacedProcess):
    """`lost` is set when the driver has joined another cluster; `on_loss` is called when Ray has lost the keeper."""

    def __init__(
        self, keeper: Any, pid: int, log: RoleLog, run_dir: Path, *, lost: asyncio.Event, on_loss: Callable[[], None]
    ) -> None:
        super().__init__(pid, log)
        self._keeper = keeper
        self._run_dir = run_dir
        self._lost = lost
        self._on_loss = on_loss
        self._signals: set[asyncio.Future[Any]] = set()

    @override
    def signal(self, number: int) -> None:
        if self._lost.is_set():
            return
        sent = asyncio.ensure_future(self._keeper.signal.remote(number))
        self._signals.add(sent)
        sent.add_done_callback(self._sent)

    @override
    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def _sent(self, future: asyncio.Future[Any]) -> None:
        self._signals.discard(future)
        if not future.cancelled() and (error := future.exception()) is not None:
            logger.info("a keeper cannot be told", extra={"pid": self.pid, "why": str(error).splitlines()[0]})

    def _append(self, name: str, data: bytes) -> None:
        """Lines of a role elsewhere; on a full disk they are lost, because the role matters more."""
        try:
            with (self._run_dir / name).open("ab") as file:
                file.write(data)
        except OSError as error:
            logger.warning("lines of a role cannot be written", extra={"file": name, "why": str(error)})

    @override
    async def _end(self, status: OnBytes, output: OnBytes) -> int:
        import ray

        try:
            while True:
                news = await self._news()
                for line in news.status:
                    status(line)
                if news.output:
                    output(news.output)
                for name, data in news.grown.items():
                    self._append(name, data)
                if news.code is not None:
                    return int(news.code)
        except ray.exceptions.RayError as error:  # of a lost node Ray may say that an answer is lost, or its owner dead
            self.error = self.error or f"its node or its keeper died: {str(error).splitlines()[0]}"
            self._on_loss()
            return -signal.SIGKILL
        finally:
            if not self._lost.is_set():
                ray.kill(self._keeper)

    async def _news(self) -> News:
        import ray

        asked, lost = asyncio.ensure_future(self._keeper.news.remote()), asyncio.create_task(self._lost.wait())
        await asyncio.wait({asked, lost}, return_when=asyncio.FIRST_COMPLETED)
        lost.cancel()
        if not asked.done():
            raise ray.exceptions.RayError("the head of its cluster was lost")
        news: News = asked.result()
        return news


def _why(error: Exception) -> str:
    """The last line of a traceback that Ray passes on, else the first."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1] if "Traceback" in str(error) else lines[0]


def _join(config: RunConfig) -> bool:
    """Connect to a cluster; return whether it is a new one on this machine, for the run alone."""
    import ray

    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", _HEAD_AWAY)
    address = config.cluster.address
    join = partial(ray.init, namespace=f"streamrl-{config.name}", log_to_driver=False, logging_level=logging.ERROR)
    if address != "local":
        try:
            join(address=address or "auto")
        except ConnectionError:
            if address is not None or "RAY_ADDRESS" in os.environ:
                raise
        else:
            return False
    join(address="local", include_dashboard=False, object_store_memory=_STORE_BYTES)
    return True


def _is_alive(node_id: str) -> bool:
    import ray

    return any(node["Alive"] for node in ray.nodes() if node["NodeID"] == node_id)


class RayPlacement(Placement):
    """Units of a run on a cluster: a placement group for each, a keeper for each of its processes.

    Redis of the run's own is a child of this process; the roles must reach it, so that a cluster of several hosts needs
    `redis.url`. Open it with `open`.
    """

    def __init__(self, config: RunConfig, run_dir: Path) -> None:
        self._config = config
        self._local = LocalPlacement(run_dir, config)
        names = ["run.json", *([TOKEN_FILE] if config.weights.pulled else [])]
        files = {name: (run_dir / name).read_bytes() for name in names}
        self._known = KnownDirectory(run_dir.resolve(), mark_of(run_dir), files)
        self._groups: dict[str, Any] = {}
        self._stale: set[str] = set()
        self._joining = asyncio.Lock()
        self._lost = asyncio.Event()
        self._meeting: dict[str, str] = {}

    @classmethod
    def open(cls, config: RunConfig, run_dir: Path, units: Sequence[UnitSpec]) -> RayPlacement:
        """Join the cluster of `cluster.address`, else of RAY_ADDRESS or this machine, else start one on this machine.

        `ConfigError`: Ray is not installed, or of another version than the cluster's. `Refused`: the cluster is too
        small. `Unreachable`: no cluster answers.
        """
        need_packages("`--on ray`", "ray", extra="ray")

        try:
            new = _join(config)
        except ConnectionError as error:
            hint = "ray start --head, or set cluster.address; a cluster with tokens wants RAY_AUTH_MODE=token"
            raise Unreachable(f"no Ray cluster answers: {error}", hint) from error
        except RuntimeError as error:  # other versions of Python or Ray
            raise ConfigError(f"the Ray cluster cannot be joined: {error}") from error
        placement = cls(config, run_dir)
        try:
            placement._check_room(units)
            if not new:  # the preflight has looked at this machine
                placement._check_nodes({unit.kind for unit in units} - {"redis"})
                placement._check_room(units)  # nodes may have died meanwhile
        except BaseException:
            placement.close()
            raise
        return placement

    def _check_nodes(self, kinds: set[str]) -> None:
        """Look at each node that Ray may choose, so that a node that cannot run a role is known before the start.

        ConfigError: another version of streamrl, missing packages, models, data or engines, a learner that would leave
        its checkpoints on a node. A node that dies meanwhile is passed over.
        """
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        looks = {}
        for node in ray.nodes():
            here = sorted(kind for kind in kinds if self._fits(node, kind))
            if here:
                strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                look = ray.remote(check_node).options(num_cpus=0, scheduling_strategy=strategy, max_retries=0)
                looks[node["NodeManagerAddress"], node["NodeID"]] = (
                    here,
                    look.remote(self._config, self._known, here),
                )
        for (address, node_id), (here, facts) in looks.items():
            try:
                self._check_facts(address, here, ray.get(facts, timeout=_LOOK_SECONDS))
            except ray.exceptions.RayError as error:
                if not _is_alive(node_id):
                    logger.warning("a node died while it was looked at", extra={"node": address, "why": _why(error)})
                    continue
                raise ConfigError(
                    f"Ray node {address} cannot be looked at: {_why(error)}",
                    f"each node needs streamrl {streamrl.__version__}, in the Python that started Ray there",
                ) from error

    def _check_facts(self, address: str, kinds: Sequence[str], facts: NodeFacts) -> None:
        if facts.version != streamrl.__version__:
            raise ConfigError(
                f"Ray node {address} has streamrl {facts.version}, here is {streamrl.__version__}",
                "install the same version on all nodes",
            )
        away = "or keep the role away from this node: cluster.resources.{}.custom"
        for kind, lacks in facts.lacks.items():
            raise ConfigError(f"Ray node {address} cannot run {kind}: {lacks}", f"fix it there, {away.format(kind)}")
        if facts.shares:
            return
        other = f"put the run directory on a shared file system, {away}"
        if "learner" in kinds and not self._config.checkpoint.store:
            raise ConfigError(
                f"Ray node {address} does not see {self._known.path}: the learner would leave its checkpoints there",
                f"set checkpoint.store, {other.format('learner')}",
            )
        if "recorder" in kinds:  # no store has copies of a recording
            raise ConfigError(
                f"Ray node {address} does not see {self._known.path}: the recorder would leave its recording there",
                other.format("recorder"),
            )

    def _fits(self, node: Mapping[str, Any], kind: str) -> bool:
        there = node["Resources"]
        return bool(node["Alive"]) and all(there.get(name, 0.0) >= n for name, n in self._bundle(kind).items())

    def _check_room(self, units: Sequence[UnitSpec]) -> None:
        import ray

        nodes = [node for node in ray.nodes() if node["Alive"]]
        if self._config.redis.url is None and len({node["NodeManagerAddress"] for node in nodes}) > 1:
            raise ConfigError(
                f"the cluster has {len(nodes)} nodes on several hosts, and the run's own Redis is reached on one only",
                "set redis.url to a Redis that all hosts reach",
            )
        asked: dict[str, float] = {}
        for unit in units:
            if unit.kind != "redis":
                for name, amount in self._bundle(unit.kind).items():
                    asked[name] = asked.get(name, 0.0) + amount * len(unit.processes)
        there = ray.cluster_resources()
        if short := [name for name, amount in asked.items() if amount > there.get(name, 0.0)]:
            lacks = ", ".join(f"{asked[name]:g} {name}, it has {there.get(name, 0.0):g}" for name in short)
            raise Refused(
                f"the Ray cluster is too small: the run asks for {lacks}", "add nodes, or lower cluster.resources"
            )

    def _bundle(self, kind: str) -> dict[str, float]:
        wanted = self._config.resources(kind)
        named = {"CPU": max(wanted.cpus, _LEAST_CPU), "GPU": wanted.gpus, **wanted.custom}
        return {name: amount for name, amount in named.items() if amount}

    @override
    async def start(self, unit: UnitSpec, position: int, start: str, log: RoleLog) -> PlacedProcess:
        import ray

        if unit.kind == "redis":
            return await self._local.start(unit, position, start, log)
        if unit.name in self._stale or not ray.is_initialized():
            await self._recover(unit)
        try:
            await self._room(unit)
        except ray.exceptions.RayError as error:
            self._stale.add(unit.name)
            raise OSError(f"Ray: {_why(error)}") from error
        keeper = self._keeper(unit, position)
        try:
            async with asyncio.timeout(self._config.supervisor.start_deadline):
                pid = await self._begin(keeper, unit, position)
                lose = partial(self._stale.add, unit.name)
                return RayProcess(keeper, pid, log, self._known.path, lost=self._lost, on_loss=lose)
        except (ray.exceptions.RayError, TimeoutError) as error:
            self._stale.add(unit.name)
            ray.kill(keeper)
            raise OSError(f"Ray: {_why(error)}") from error
        except BaseException:
            ray.kill(keeper)
            raise

    @override
    def release(self, unit: UnitSpec) -> None:
        import ray

        with contextlib.suppress(ray.exceptions.RayError):
            self._remove(unit)

    def _remove(self, unit: UnitSpec) -> None:
        import ray

        if (group := self._groups.pop(unit.name, None)) is not None:
            ray.util.remove_placement_group(group)

    async def _recover(self, unit: UnitSpec) -> None:
        """Have its placement group made anew; join the cluster again if its head came back without its memory.

        `OSError`: the head does not answer, or no cluster is there.
        """
        renewing = asyncio.create_task(self._renew(unit))  # goes on after the deadline
        await asyncio.wait({renewing}, timeout=self._config.supervisor.start_deadline)
        if not renewing.done():
            raise OSError(f"Ray: the head does not answer: {_START_HEAD}")
        renewing.result()

    async def _renew(self, unit: UnitSpec) -> None:
        import ray

        async with self._joining:
            try:
                if ray.is_initialized():
                    await asyncio.to_thread(self._remove, unit)
                    self._stale.discard(unit.name)
                    return
            except ray.exceptions.RayError as error:
                logger.warning("the head of the Ray cluster has forgotten this run", extra={"why": _why(error)})
            self._lost.set()
            self._lost = asyncio.Event()
            self._groups.clear()
            self._stale.clear()
            await asyncio.to_thread(ray.shutdown)
            try:
                await asyncio.to_thread(_join, self._config)
            except (ConnectionError, RuntimeError) as error:
                raise OSError(f"Ray: no cluster answers: {_START_HEAD}: {error}") from error
            for number in stop_signals():  # Ray has put handlers of its own before those of Python
                signal.signal(number, signal.getsignal(number))

    async def _begin(self, keeper: Any, unit: UnitSpec, position: int) -> int:
        """Start the process at a keeper; returns its pid."""
        version, address = await keeper.meeting_point.remote()
        if version != streamrl.__version__:
            raise OSError(f"its node has streamrl {version}, here is {streamrl.__version__}")
        command = unit.command(position)
        env = {**command.env, **threads(self._config, unit.group, cluster=True)}
        if len(unit.processes) > 1:
            self._meeting[unit.name] = address if position == 0 else self._meeting[unit.name]
            # Each rank sees its own devices only.
            env |= {"STREAMRL_RENDEZVOUS": f"tcp://{self._meeting[unit.name]}", "LOCAL_RANK": "0"}
        grow = [f"metrics/{unit.processes[position]}.jsonl", *([EVALUATION_FILE] if unit.kind == "feeder" else [])]
        return int(await keeper.start.remote(command, env, self._known, grow))

    async def _room(self, unit: UnitSpec) -> None:
        """Wait until all bundles of a unit are on living nodes; Ray moves those of a node that died."""
        import ray

        bundle = self._bundle(unit.kind)
        if unit.name not in self._groups:  # in a thread, because it waits while the head is away
            bundles = [bundle] * len(unit.processes)
            self._groups[unit.name] = await asyncio.to_thread(ray.util.placement_group, bundles, strategy="PACK")
        try:
            async with asyncio.timeout(self._config.supervisor.start_deadline):
                await self._groups[unit.name].ready()
        except TimeoutError as error:
            there = await asyncio.to_thread(ray.available_resources)
            free = ", ".join(f"{amount:g} {name}" for name, amount in there.items() if amount)
            raise OSError(f"no node has room for {bundle}; free in the cluster: {free}") from error

    def _keeper(self, unit: UnitSpec, position: int) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = self._bundle(unit.kind)
        strategy = PlacementGroupSchedulingStrategy(self._groups[unit.name], placement_group_bundle_index=position)
        actor = ray.remote(RoleKeeper).options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            resources={name: amount for name, amount in bundle.items() if name not in {"CPU", "GPU"}},
            scheduling_strategy=strategy,
            max_restarts=0,
        )
        return actor.remote()

    @override
    def close(self) -> None:
        import ray

        self._local.close()
        ray.shutdown()  # ends the keepers of this driver, and removes its placement groups
