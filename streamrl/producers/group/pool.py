"""The servers of a group: which belong to it, which have the newest weights, and when none is left."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from streamrl.config import RunConfig
from streamrl.engine import Engine
from streamrl.errors import StreamrlError, Unreachable, WeightsError
from streamrl.producers.group.member import NOTHING, Member
from streamrl.producers.group.state import EngineGroupState
from streamrl.restarts import RestartPolicy
from streamrl.weight_sync.manifest import Pair
from streamrl.weight_sync.tensors import Version

logger = logging.getLogger(__name__)

SWEEP_SECONDS: Final = 0.25
_GRACE_SECONDS: Final = 1.0
"""A server that takes longer than the first one by this much, and by as much again as that took, is left behind."""


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """A server of a group.

    Attributes:
        name: its URL, or `server.N`.
        make: makes its engine, for one life.
        ours: whether the engine starts the server; a server of others is waited for as long as others serve.
    """

    name: str
    make: Callable[[], Engine]
    ours: bool


class ServerPool:
    """All servers of a group, each with the task that it lives in.

    Args:
        config: the run; `supervisor`, `engine.slots` and `engine.start_deadline` are read.
        state: what every server has to be brought to.
        changed: called when a server can take more than before, or one less is there.
    """

    def __init__(self, config: RunConfig, state: EngineGroupState, changed: Callable[[], None]) -> None:
        self._config = config
        self._state = state
        self._before: Pair = NOTHING
        self.changed = changed
        self._policy = RestartPolicy.of(config.supervisor)
        self._members: dict[str, Member] = {}
        self._lives: dict[str, asyncio.Task[None]] = {}
        self._leaving_since: dict[Member, float] = {}
        self._served_at = 0.0
        self._forgotten_preemptions = 0
        self._tasks: asyncio.TaskGroup

    @property
    def members(self) -> list[Member]:
        """All of them, also those that are down."""
        return list(self._members.values())

    @property
    def serving(self) -> list[Member]:
        """Those that can serve; whether they get prompts depends on their weights."""
        return [member for member in self._members.values() if member.serving]

    @property
    def preemptions(self) -> int:
        """Of all servers that ever belonged to the group."""
        return self._forgotten_preemptions + sum(member.load.preemptions for member in self._members.values())

    @property
    def reasons(self) -> str:
        """Why each server is as it is, for a message."""
        return "; ".join(f"{member.name}: {member.why or member.state}" for member in self._members.values())

    @property
    def newest(self) -> Pair:
        """The newest version that a server holds."""
        return max((member.pair for member in self.serving), default=NOTHING)

    def allows(self, member: Member) -> bool:
        """Whether the weights of a server allow a prompt.

        With the newest version that any server holds they do, and with the one before while it is taking the newest.
        A server that missed one takes the newest first.
        """
        return member.pair >= self.newest or (member.updating and member.pair >= self._before)

    def held_elsewhere(self, member: Member) -> bool:
        """Whether a server other than `member` holds the newest version."""
        target = self._state.weights.target
        return target is not None and any(other.pair >= target for other in self.serving if other is not member)

    async def apply(self, version: Version) -> None:
        """Have all servers take a version; see `EngineGroup.apply`."""
        weights = self._state.weights
        weights.begin(version)
        self._before = self.newest
        try:
            errors = await self._first_come({member.reach(version.pair) for member in self.serving}, version)
        finally:
            weights.end(version)
        refusals = [error for error in errors if isinstance(error, WeightsError)]
        if refusals and len(refusals) == len(errors):
            raise refusals[0]
        for member in self.serving:
            member.catch_up()

    async def _first_come(
        self, waiting: set[asyncio.Future[Exception | None]], version: Version
    ) -> list[Exception | None]:
        """What became of the servers; those that are much slower than the first to have it are left out.

        A version without a source is gone when the call that brought it returns, so then all are waited for.
        """
        loop = asyncio.get_running_loop()
        start, ended, limit = loop.time(), set[asyncio.Future[Exception | None]](), None
        while waiting:
            done, waiting = await asyncio.wait(waiting, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            ended |= done
            if not done:
                logger.warning("servers left behind", extra={"version": version.number, "servers": len(waiting)})
                break
            if limit is None and self._state.weights.has_source and any(future.result() is None for future in done):
                limit = max(_GRACE_SECONDS, loop.time() - start)
        return [future.result() for future in ended]

    async def run(self, first: Sequence[ServerSpec], running: asyncio.Event) -> None:
        """Own the tasks of all servers until cancelled; sets `running` once those of the first are there.

        Raises:
            ExceptionGroup: with `Unreachable` when none is left that can serve or could be mended.
        """
        try:
            async with asyncio.TaskGroup() as self._tasks:
                for spec in first:
                    self.add(spec)
                self._served_at = asyncio.get_running_loop().time()
                running.set()
                while True:
                    await asyncio.sleep(SWEEP_SECONDS)
                    self._sweep(asyncio.get_running_loop().time())
        finally:
            running.set()

    def add(self, spec: ServerSpec) -> None:
        """Add a server; one of this name that can still serve stays as it is."""
        present = self._members.get(spec.name)
        if present is not None and not self._lives[spec.name].done():
            return
        if present is not None:
            self._forget(present)
        member = Member(
            spec.name, spec.make, self._state, self, self._policy, ours=spec.ours, most=self._config.engine.slots
        )
        self._members[spec.name] = member
        self._lives[spec.name] = self._tasks.create_task(member.live(), name=f"server {spec.name}")
        logger.info("server added", extra={"server": spec.name})

    def remove(self, name: str) -> None:
        """Take a server out: it ends what it has, for a while, then the rest moves. An unknown name does nothing."""
        member = self._members.get(name)
        if member is None or member in self._leaving_since:
            return
        self._leaving_since[member] = asyncio.get_running_loop().time()
        member.leave()
        logger.info("server leaves", extra={"server": name, "in_flight": len(member.requests)})

    def _sweep(self, now: float) -> None:
        """Forget servers that have left, move what stays too long on one that leaves, and look whether any is left.

        Raises:
            Unreachable: none is.
        """
        for member, since in list(self._leaving_since.items()):
            if self._lives[member.name].done():
                self._forget(member)
            elif now - since > self._config.supervisor.drain_deadline and member.engine is not None:
                self._leaving_since[member] = now
                for request in member.requests:
                    self._tasks.create_task(_send_away(member.engine, request.request.id))
        members, limit = self.members, self._config.engine.start_deadline
        if not members or self.serving or not self._state.awake.is_set():
            self._served_at = now
        elif all(member.final for member in members):
            raise Unreachable(f"no server is left: {self.reasons}", "the logs of the servers say more")
        elif now - self._served_at > limit:
            raise Unreachable(
                f"no server could serve for {limit:g} s: {self.reasons}",
                "do they run, and can this host reach them? engine.start_deadline is how long is waited",
            )

    def _forget(self, member: Member) -> None:
        self._forgotten_preemptions += member.load.preemptions
        self._leaving_since.pop(member, None)
        del self._members[member.name], self._lives[member.name]


async def _send_away(engine: Engine, name: str) -> None:
    try:
        await engine.abort(name)
    except StreamrlError as error:
        logger.warning("request stays", extra={"request": name, "why": error.message})
