"""The rollout replica: keeps an engine at the newest weights, and answers leased prompts or the calls of agents.

```
weights stream -> Follower -> Engine.apply           (in flight: a response may span versions)
prompts        -> RolloutWorker -> Engine.generate   (episode.processes 0)
agents         -> Service -> Engine.generate         (episode.processes above 0: agents lease the prompts)
engines        -> Membership -> EngineGroup.add, remove
```
When its engine dies, the replica exits with an error, others take over its leases, and the supervisor starts it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final
from uuid import uuid4

from streamrl.engine import Engine
from streamrl.errors import unwrapped
from streamrl.producers.colocated import under_device_lock
from streamrl.producers.engines import make_engine
from streamrl.producers.group.fleet import Fleet, life_seed
from streamrl.producers.group.group import EngineGroup
from streamrl.producers.group.pool import Source
from streamrl.producers.serve.service import Service
from streamrl.producers.tokenizer import Tokenizer
from streamrl.producers.worker import RolloutWorker
from streamrl.queues import Role
from streamrl.waits import first_of
from streamrl.weight_sync.follower import Follower

_LOOK_SECONDS: Final = 1.0


async def run_rollout(role: Role) -> None:
    """Run a rollout replica until `role.stop` is set; then requests in flight are finished or handed back.

    `ConfigError`: no model or tokenizer, or an engine option that this machine cannot serve. `Unreachable`: the engine
    died.
    """
    config = role.config
    seed = life_seed(config.seed, role.name, await _life(role))
    engine = make_engine(config, seed, role.run_dir, role.name, await role.ledgers.servers.enlisted())
    membership = None
    if isinstance(engine, EngineGroup):
        membership = Membership(role, engine, Fleet(config, seed, role.run_dir, role.name))
    with unwrapped():
        tokenizer = await asyncio.to_thread(Tokenizer.load, config.model)
        async with _running(role, engine) as running:
            await Replica(role, running, tokenizer, membership).run()


@asynccontextmanager
async def _running(role: Role, engine: Engine) -> AsyncIterator[Engine]:
    if role.config.rollout.placement == "colocated":
        async with under_device_lock(role, engine) as shared:
            yield shared
        return
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


async def _life(role: Role) -> str:
    """`0` for the first life of this replica, so that a run can be repeated; a nonce for any later one, on any host.

    Its metrics tell of earlier lives too, in case Redis forgot them.
    """
    nonce = uuid4().hex
    first = await role.ledgers.roles.first_life(role.name, nonce)
    return "0" if first and not (role.run_dir / "metrics" / f"{role.name}.jsonl").exists() else nonce


class Replica:
    """One started engine that follows the weights; `membership` keeps its servers."""

    def __init__(self, role: Role, engine: Engine, tokenizer: Tokenizer, membership: Membership | None = None) -> None:
        config = role.config
        self._role = role
        self._membership = membership
        follower = self._follower = Follower(
            role.ledgers.weights,
            config.weights,
            engine.apply,
            run=config.name,
            run_dir=role.run_dir,
            name=role.name,
            board=role.ledgers.roles,
            status=role.status,
        )
        if membership is not None:
            membership.follow(follower.again)
        self._work: Service | RolloutWorker
        if config.episode.processes:
            self._work = Service(role, engine, follower, self._figures)
        else:
            self._work = RolloutWorker(
                role,
                engine,
                tokenizer,
                behind=lambda: follower.newest_step - follower.applied_step,
                news=follower.next_applied,
                figures=self._figures,
            )

    async def run(self) -> None:
        ended = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            following = group.create_task(self._follower.run(ended))
            keeping = group.create_task(self._keep_servers())
            if await self._first_version():
                await self._work.run()
            ended.set()
            following.cancel()
            keeping.cancel()

    async def _keep_servers(self) -> None:
        if self._membership is not None:
            await self._membership.run()

    def _figures(self) -> dict[str, int | float]:
        follower = self._follower
        return {
            "weights_refused": follower.refused,
            "weights_fetched": follower.bytes_fetched,
            "fetch_seconds": round(follower.fetch_seconds, 4),
            "apply_seconds": round(follower.apply_seconds, 4),
        }

    async def _first_version(self) -> bool:
        await first_of(self._follower.first.wait(), self._role.stop.wait())
        return self._follower.first.is_set()


class Membership:
    """Keeps a replica's servers equal to the list of the run (`streamrl engines add|remove`), and reports them."""

    def __init__(self, role: Role, group: EngineGroup, fleet: Fleet) -> None:
        self._servers = role.ledgers.servers
        self._name = role.name
        self._group = group
        self._fleet = fleet

    def follow(self, source: Source) -> None:
        self._group.follow(source)

    async def run(self) -> None:
        while True:
            await self.look()
            await self._servers.report(self._name, self._group.rows())
            await asyncio.sleep(_LOOK_SECONDS)

    async def look(self) -> None:
        """Add and remove servers as the list says now.

        A server that was given up stays in the group, so it is not tried again before it is removed and added.
        """
        wanted, present = set(self._fleet.wanted(await self._servers.enlisted())), set(self._group.rows())
        for name in sorted(wanted - present):
            self._group.add(self._fleet.spec(name))
        for name in sorted(present - wanted):
            self._group.remove(name)
