"""Role `rollout.N`: leased prompts become samples, with the engines of the run, or with one of its own (`hf`).

```
prompts -> lease -> the samples that are missing -> Sampler.sample -> emit      (one task a sample)
                             ServerPool.generate -> engine.N
engine.kind hf:   weights -> Follower -> HfEngine.apply, HfEngine.generate
```
A response that was emitted is never generated again. While the weights are more than `max_staleness` steps old no
prompt is taken. With `rollout.placement: colocated` the engine sleeps while the learner has the devices. When a
worker's own engine dies, the worker exits with an error, and the supervisor starts it again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import traceback
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from itertools import count
from typing import Final, Literal

from streamrl.engine import Generator, life_seed
from streamrl.errors import DataError, DeadlineExceeded, RetryLater, Unreachable, WireError, unwrapped
from streamrl.images.store import ImageStore
from streamrl.producers.episodes.sampler import sampler_of
from streamrl.producers.meter import Meter
from streamrl.producers.sampler import SampleOrder, TurnJournal, seed_of
from streamrl.producers.tokenizer import Tokenizer
from streamrl.queues import Lease, Leases, Role
from streamrl.queues.device_lock import EngineDevices
from streamrl.sandbox import Sandbox
from streamrl.servers.pool import ServerPool
from streamrl.servers.server import key_of_servers
from streamrl.waits import first_of
from streamrl.weight_sync.follower import Follower
from streamrl.wire import Prompt, decode, encode

logger = logging.getLogger(__name__)
_ATTEMPTS: Final = 3
_LOOKAHEAD: Final = 4  # one more sample is leased for each so many slots, so that it is there before a slot is free
DRAIN_SHARE: Final = 0.22  # of the run's drain time, for the requests in flight; the rest is for the roles behind


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
                figures=lambda: {**follower.figures(), **engine.figures()},
            ).run()
        ended.set()
        following.cancel()


def lease_width(held: int, unopened: int, samples: int, slots: int, group_size: int) -> int:
    """How many prompts to hold: `samples` are missing of those opened (seldom whole groups), all of the others."""
    free = slots + math.ceil(slots / _LOOKAHEAD) - samples - unopened * group_size
    return held + max(0, math.ceil(free / group_size))


class RolloutWorker:
    """`behind`: how many steps the weights are behind the published ones; `news` returns when that may have changed."""

    def __init__(
        self,
        role: Role,
        engine: Generator,
        tokenizer: Tokenizer,
        *,
        behind: Callable[[], int],
        news: Callable[[], Awaitable[None]],
        figures: Callable[[], Mapping[str, int | float]] = dict,
    ) -> None:
        config = self._config = role.config
        self._role, self._engine = role, engine
        self._behind, self._news, self._more = behind, news, figures
        self._store = ImageStore.of(config, role.run_dir)
        self._sampler = sampler_of(config, engine, tokenizer, role.name, self._say_blocked)
        self._numbers = count()
        self._missing = self._opened = 0
        self._leases = Leases(
            [role.ledgers.train, role.ledgers.evaluation],
            "prompts",
            role.name,
            config.lease,
            width=self._width,
            handle=self.answer,
            drain=DRAIN_SHARE * config.supervisor.drain_deadline,
            first=role.ledgers.evaluation,  # a round should end before many newer versions exist
        )

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            metering = group.create_task(Meter(self._role, self._engine.load, self._figures).run())
            async with self._sampler:
                self._role.ready()
                await self._leases.run(self._role.stop)
            metering.cancel()

    async def answer(self, lease: Lease) -> None:
        """Generate the samples of a leased prompt that are still missing, and emit each as it ends.

        Cancelling gives up what is in flight; a repeat, in any process, generates only what is missing then.
        RetryLater: the weights stay too old, or no engine or program is available.
        """
        work = await lease.ledger.open_work(lease)
        if work is None:
            return
        try:
            prompt = decode(work.prompt, Prompt)
        except WireError as error:
            await lease.ledger.fail_prompt(lease, "not a prompt", str(error))
            return
        if not lease.ledger.evaluation:
            await self._wait_for_weights()
        self._opened += 1
        self._missing += len(work.missing)
        try:
            with unwrapped():
                async with asyncio.TaskGroup() as group:
                    for sample in work.missing:
                        group.create_task(self._answer_one(lease, prompt, sample)).add_done_callback(self._ended)
        finally:
            self._opened -= 1

    def _ended(self, _: asyncio.Task[None]) -> None:
        self._missing -= 1
        self._leases.recount()

    def _width(self) -> int:
        held = self._leases.leased
        if self._is_stale():
            return held
        capacity = self._sampler.capacity(self._engine.load().capacity)
        return lease_width(held, held - self._opened, self._missing, capacity, self._config.sampling.responses)

    def _figures(self) -> dict[str, int | float]:
        self._role.status["trouble"] = self._sampler.trouble()
        if Sandbox.weakness:
            self._role.status["sandbox"] = Sandbox.weakness
        return {**self._more(), **self._sampler.figures()}

    def _say_blocked(self, why: str, seconds: float) -> None:
        """Keep the leases while the event loop is held, for as long as a supervisor would let this process live."""
        slow = seconds < self._config.supervisor.liveness_deadline
        self._role.say_blocked(why, self._leases.renew_meanwhile if slow else None)

    def _is_stale(self) -> bool:
        stale = self._behind() > self._config.max_staleness
        self._role.status["stale"] = int(stale)
        return stale

    async def _wait_for_weights(self) -> None:
        """A read may return prompts admitted after a newer version. `RetryLater`: another worker may have it."""
        if self._is_stale():
            await first_of(self._fresh_weights(), self._role.stop.wait(), seconds=self._config.weights.deadline)
            if self._is_stale():
                raise RetryLater("the weights of this replica are too old")

    async def _fresh_weights(self) -> None:
        while self._is_stale():
            await self._news()

    async def _answer_one(self, lease: Lease, prompt: Prompt, sample: int) -> None:
        why, detail = "", ""
        for attempt in range(_ATTEMPTS):
            try:
                payload = encode(await self._sampler.sample(self._order(lease, prompt, sample)))
            except (Unreachable, RetryLater):
                raise
            except (DataError, WireError, DeadlineExceeded) as error:
                if isinstance(error, DeadlineExceeded):
                    await self._engine.health()  # a hanging engine must not turn prompts into dead letters
                why, detail = error.message, ""
                break
            except Exception as error:  # noqa: BLE001  (a healthy engine's error belongs to the request)
                await self._engine.health()
                why, detail = f"{type(error).__name__}: {error}", traceback.format_exc()
            else:
                await lease.ledger.emit(lease, sample, payload)
                return
            extra = {"group": lease.group_id, "sample": sample, "attempt": attempt + 1, "why": why}
            logger.warning("generation failed", extra=extra)
        await lease.ledger.fail_sample(lease, sample, why, detail)

    def _order(self, lease: Lease, prompt: Prompt, sample: int) -> SampleOrder:
        evaluation = lease.ledger.evaluation
        group = f"{'e' if evaluation else 'g'}{lease.group_id}"
        return SampleOrder(
            prompt,
            id=f"{self._role.name}-{next(self._numbers)}",
            affinity=group,
            # The greedy response has the index after the group's samples; held-out prompts have none.
            greedy=not evaluation and sample >= self._config.sampling.group_size,
            seed=seed_of(self._config, f"{group}/{sample}", evaluation=evaluation),
            journal=TurnJournal(lease, sample, self._leases.progressed),
            store=self._store,
        )
