"""Role `rollout.N`: answers leased prompts with the engines of the run, or with one of its own (`engine.kind: hf`).

```
prompts        -> RolloutWorker -> ServerPool.generate -> engine.N
engine.kind hf:   RolloutWorker -> HfEngine.generate;  weights stream -> Follower -> HfEngine.apply
```
A response may span versions. With `rollout.placement: colocated` the engine sleeps while the learner has the devices,
and every response goes on afterwards. When a worker's own engine dies, the worker exits with an error, others take over
its leases, and the supervisor starts it again.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Literal

from streamrl.engine import life_seed
from streamrl.errors import unwrapped
from streamrl.producers.tokenizer import Tokenizer
from streamrl.producers.worker import RolloutWorker
from streamrl.queues import Role
from streamrl.queues.device_lock import EngineDevices
from streamrl.servers.pool import ServerPool
from streamrl.servers.server import key_of_servers
from streamrl.waits import first_of
from streamrl.weight_sync.follower import Follower


async def run_rollout(role: Role) -> None:
    """Make samples until `role.stop` is set. `PluginError`: no such episode. `Unreachable`: its own engine died."""
    with unwrapped():
        tokenizer = await asyncio.to_thread(Tokenizer.load, role.config.model)
        await (_with_servers(role, tokenizer) if role.config.engines else _with_own_engine(role, tokenizer))


async def _with_servers(role: Role, tokenizer: Tokenizer) -> None:
    key = await asyncio.to_thread(key_of_servers, role.config, role.run_dir)
    pool = ServerPool(role.config, role.ledgers, key)
    worker = RolloutWorker(role, pool, tokenizer, behind=pool.behind, news=pool.changed, figures=pool.figures)
    async with pool.follow():
        await first_of(pool.first(), role.stop.wait())
        if not role.stop.is_set():
            await worker.run()


async def _with_own_engine(role: Role, tokenizer: Tokenizer) -> None:
    import torch

    from streamrl.producers.engines.hf import HfEngine  # workers that call servers have no model

    config, engine = role.config, HfEngine(role.config, await life_seed(role))
    lock = role.ledgers.device_lock if config.rollout.placement == "colocated" else None
    # On a CPU there is no memory to give back: learner and engine share its cores.
    level: Literal[0, 1] = 1 if config.engine.device != "cpu" and torch.cuda.is_available() else 0
    devices = EngineDevices(lock, role.name, wake=engine.wake, sleep=partial(engine.sleep, level))
    async with devices.engine(engine.start, engine.close), asyncio.TaskGroup() as tasks:
        follower = Follower(
            role.ledgers.weights, config.weights, engine.apply, run=config.name, run_dir=role.run_dir, name=role.name
        )
        ended = asyncio.Event()
        following = tasks.create_task(follower.run(ended))
        await first_of(follower.first.wait(), role.stop.wait())
        if follower.first.is_set():
            await RolloutWorker(
                role,
                engine,
                tokenizer,
                behind=lambda: follower.newest_step - follower.applied_step,
                news=follower.next_applied,
                figures=follower.figures,
            ).run()
        ended.set()
        following.cancel()
