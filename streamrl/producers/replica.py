"""The rollout replica: leases prompts, keeps an engine full, emits every response as soon as it ends.

```
weights stream -> Follower -> Engine.apply           (in flight: a response may span versions)
prompts        -> lease -> the samples that are missing -> Sampler.sample -> emit      (one task a sample)
engines        -> Membership -> EngineGroup.add, remove
```
When its engine dies, the replica exits with an error, others take over its leases, and the supervisor starts it again.
A response that was emitted is never generated again. An engine whose weights are more than `max_staleness` steps old
takes no more prompts until it has newer ones.
"""

from __future__ import annotations

import asyncio
import logging
import math
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Final
from uuid import uuid4

from streamrl.engine import Engine
from streamrl.errors import DataError, DeadlineExceeded, Unreachable, WireError, unwrapped
from streamrl.producers.colocated import under_device_lock
from streamrl.producers.engines import make_engine
from streamrl.producers.episodes.journal import LedgerJournal
from streamrl.producers.episodes.sampler import sampler_of
from streamrl.producers.group.fleet import Fleet, life_seed
from streamrl.producers.group.group import EngineGroup
from streamrl.producers.group.pool import Source
from streamrl.producers.meter import Meter
from streamrl.producers.sampler import SampleOrder
from streamrl.producers.tokenizer import Tokenizer
from streamrl.queues import Lease, Leases, Role
from streamrl.queues.leases import NotNow
from streamrl.waits import first_of
from streamrl.weight_sync.follower import Follower
from streamrl.wire import Prompt, decode, encode

logger = logging.getLogger(__name__)
_ATTEMPTS: Final = 3
_LOOK_SECONDS: Final = 1.0
_LOOKAHEAD: Final = 4
"""One more sample is leased for each so many slots: the next ones are there before a slot is free."""
_DRAIN_SHARE: Final = 0.25
"""Share of the run's drain time for the requests in flight; the rest is for the roles behind the replica."""


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


def lease_width(held: int, unopened: int, samples: int, slots: int, group_size: int) -> int:
    """Return how many prompts a replica may hold: enough for every slot of its engine, and a quarter more.

    Prompts need unequal numbers of samples (a held-out one, or a group of which some exist already, needs fewer), so
    samples are counted, not prompts.

    Args:
        held: prompts held now.
        unopened: prompts whose missing samples are not known yet; each counts as a whole group.
        samples: samples that the others still miss.
        slots: samples that can be made at the same time; 0: it takes none now.
        group_size: samples of a whole group.
    """
    free = slots + math.ceil(slots / _LOOKAHEAD) - samples - unopened * group_size
    return held + max(0, math.ceil(free / group_size))


class Replica:
    """One started engine that serves two ledgers, training and held-out; `membership` keeps its servers."""

    def __init__(self, role: Role, engine: Engine, tokenizer: Tokenizer, membership: Membership | None = None) -> None:
        config = role.config
        self._role = role
        self._config = config
        self._engine = engine
        self._sampler = sampler_of(config, engine, tokenizer, role.name)
        self._numbers = count()
        self._missing = 0
        self._opened = 0
        self._stale = False
        self._membership = membership
        self._follower = Follower(
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
            membership.follow(self._follower.again)
        self._leases = Leases(
            [role.ledgers.train, role.ledgers.evaluation],
            "prompts",
            role.name,
            config.lease,
            width=self._width,
            handle=self.answer,
            drain=_DRAIN_SHARE * config.supervisor.drain_deadline,
            first=role.ledgers.evaluation,  # a round should end before many newer versions exist
        )

    async def run(self) -> None:
        ended = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            following = group.create_task(self._follower.run(ended))
            keeping = group.create_task(self._keep_servers())
            if await self._first_version():
                meter = Meter(self._role, self._engine.load, self._figures)
                metering = group.create_task(meter.run())
                async with self._sampler:
                    self._role.ready()
                    await self._leases.run(self._role.stop)
                metering.cancel()
            ended.set()
            following.cancel()
            keeping.cancel()

    async def _keep_servers(self) -> None:
        if self._membership is not None:
            await self._membership.run()

    async def answer(self, lease: Lease) -> None:
        """Generate the samples of a leased prompt that are still missing, and emit each as it ends.

        Cancelling gives up what is in flight; a repeat, in any replica, generates only what is missing then. `NotNow`:
        the weights stay too old.
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
        follower = self._follower
        return {
            "weights_refused": follower.refused,
            "weights_fetched": follower.bytes_fetched,
            "fetch_seconds": round(follower.fetch_seconds, 4),
            "apply_seconds": round(follower.apply_seconds, 4),
            **self._sampler.figures(),
        }

    def _is_stale(self) -> bool:
        behind = self._follower.newest_step - self._follower.applied_step
        stale = behind > self._config.max_staleness
        if stale != self._stale:
            self._stale = stale
            self._role.status["stale"] = int(stale)
            extra = {"steps_behind": behind, "max_staleness": self._config.max_staleness}
            if stale:
                logger.warning("takes no more prompts: the weights are too old", extra=extra)
            else:
                logger.info("takes prompts again", extra=extra)
        return stale

    async def _wait_for_weights(self) -> None:
        """Wait while the weights are too old: a read may return prompts that were admitted after a newer version.

        `NotNow`: no newer version was applied within `weights.deadline` (another replica may have it) or before the
        stop.
        """
        if not self._is_stale():
            return
        await first_of(self._fresh_weights(), self._role.stop.wait(), seconds=self._config.weights.deadline)
        if self._is_stale():
            raise NotNow("the weights of this replica are too old")

    async def _fresh_weights(self) -> None:
        while self._is_stale():
            await self._follower.next_applied()

    async def _answer_one(self, lease: Lease, prompt: Prompt, sample: int) -> None:
        why, detail = "", ""
        # The greedy response has the index after the group's samples; held-out prompts have none.
        greedy = not lease.ledger.evaluation and sample >= self._config.sampling.group_size
        for attempt in range(_ATTEMPTS):
            try:
                payload = encode(await self._sampler.sample(self._order(lease, prompt, sample, greedy)))
            except Unreachable:
                raise
            except (DataError, WireError) as error:
                why, detail = error.message, ""
                break
            except DeadlineExceeded as error:
                await self._engine.health()  # a hanging engine must not turn prompts into dead letters
                why, detail = error.message, ""
                break
            except Exception as error:  # noqa: BLE001  (a healthy engine's error belongs to the request)
                await self._engine.health()
                why, detail = f"{type(error).__name__}: {error}", traceback.format_exc()
            else:
                await lease.ledger.emit(lease, sample, payload)
                return
            logger.warning(
                "generation failed",
                extra={"group": lease.group_id, "sample": sample, "attempt": attempt + 1, "why": why},
            )
        await lease.ledger.fail_sample(lease, sample, why, detail)

    def _order(self, lease: Lease, prompt: Prompt, sample: int, greedy: bool) -> SampleOrder:
        return SampleOrder(
            prompt,
            id=f"{self._role.name}-{next(self._numbers)}",
            affinity=f"{'e' if lease.ledger.evaluation else 'g'}{lease.group_id}",
            greedy=greedy,
            journal=LedgerJournal(lease, sample, self._leases.progressed),
        )

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
