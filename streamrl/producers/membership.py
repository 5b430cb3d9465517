"""Servers come and go while a run goes on: a replica does within a second what `streamrl engines add|remove` say."""

from __future__ import annotations

import asyncio
from typing import Final

from streamrl.producers.group.fleet import Fleet
from streamrl.producers.group.group import EngineGroup
from streamrl.producers.group.state import Source
from streamrl.queues import Role

_LOOK_SECONDS: Final = 1.0


class Membership:
    """Keeps the group of a replica to the list of the run, and reports how its servers are.

    Args:
        role: the replica's role.
        group: its engine, started.
        fleet: which servers belong to it.
    """

    def __init__(self, role: Role, group: EngineGroup, fleet: Fleet) -> None:
        self._servers = role.ledgers.servers
        self._name = role.name
        self._group = group
        self._fleet = fleet

    def follow(self, source: Source) -> None:
        """Say where the servers get the newest weights; see `EngineGroup.follow`."""
        self._group.follow(source)

    async def run(self) -> None:
        """Look and report once a second until cancelled.

        Raises:
            Unreachable: Redis was away for too long, or the group died.
        """
        while True:
            await self.look()
            await self._servers.report(self._name, self._group.rows())
            await asyncio.sleep(_LOOK_SECONDS)

    async def look(self) -> None:
        """Add and remove what the list says now.

        A server that was given up stays in the group, and so it is not tried again before it is removed and added.
        """
        wanted, present = set(self._fleet.wanted(await self._servers.enlisted())), set(self._group.rows())
        for name in sorted(wanted - present):
            self._group.add(self._fleet.spec(name))
        for name in sorted(present - wanted):
            self._group.remove(name)
