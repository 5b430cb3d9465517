"""The weights of a group: which version is the newest, who may serve with what he has, and how it gets to all."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

from streamrl.errors import WeightsError
from streamrl.producers.servers.member import NOTHING, Member
from streamrl.producers.servers.roster import Roster
from streamrl.weight_sync.manifest import Pair
from streamrl.weight_sync.tensors import Version

logger = logging.getLogger(__name__)

Apply: TypeAlias = Callable[[Version], Awaitable[None]]
Source: TypeAlias = Callable[[Apply], Awaitable[object]]
"""Hands the newest version to an `apply`, as often as it is asked to (`Follower.again`)."""

_GRACE_SECONDS: Final = 1.0
"""A server that takes longer than the first one by this much, and by as much again as that took, is left behind."""


class Newest:
    """The newest version, and what it means for each server.

    Attributes:
        target: the newest version that there is; None before the first.
    """

    def __init__(self) -> None:
        self.target: Pair | None = None
        self._before: Pair = NOTHING
        self._kept: Version | None = None
        self._source: Source | None = None

    def follow(self, source: Source) -> None:
        """Take versions from `source`, instead of holding on to the last one that came."""
        self._source = source

    async def deliver(self, apply: Apply) -> None:
        """Hand the newest version to `apply`: the one that is being spread, else what the source has."""
        kept = self._kept
        if kept is not None:
            with kept.readers:
                await apply(kept)
        elif self._source is not None:
            await self._source(apply)

    def best(self, roster: Roster) -> Pair:
        """The newest version that a server holds."""
        return max((member.pair for member in roster.serving), default=NOTHING)

    def allows(self, member: Member, roster: Roster) -> bool:
        """Whether a server may take a prompt.

        With the newest version that any server holds it may, and with the one before while it is taking the newest.
        Whoever missed one takes the newest first.
        """
        return member.pair >= self.best(roster) or (member.updating and member.pair >= self._before)

    def held_elsewhere(self, member: Member, roster: Roster) -> bool:
        """Whether a server other than `member` holds the newest version."""
        return any(
            self.target is not None and other.pair >= self.target for other in roster.serving if other is not member
        )

    async def spread(self, version: Version, roster: Roster) -> None:
        """Have all servers take a version; see `EngineGroup.apply`."""
        if self.target is not None and version.pair < self.target:
            raise WeightsError(f"version {version.pair} is older than {self.target}, which is in force")
        self._before = self.best(roster)
        self.target, self._kept = version.pair, version
        try:
            errors = await self._first_come({member.reach(version.pair) for member in roster.serving}, version)
        finally:
            if self._source is not None and self._kept is version:
                self._kept = None
        refusals = [error for error in errors if isinstance(error, WeightsError)]
        if refusals and len(refusals) == len(errors):
            raise refusals[0]
        for member in roster.serving:
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
            if limit is None and self._source is not None and any(future.result() is None for future in done):
                limit = max(_GRACE_SECONDS, loop.time() - start)
        return [future.result() for future in ended]
