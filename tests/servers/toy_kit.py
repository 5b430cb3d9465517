"""A toy with what streamrl puts around a server, and values for it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import numpy as np
from toy import VOCABULARY, make_dialect, serving

from streamrl.config import RunConfig
from streamrl.engine import Request, RequestLimits
from streamrl.http import HttpClient
from streamrl.isolation.watchdog import Watchdog
from streamrl.servers.control import ServerControl
from streamrl.servers.request import Response, read_response
from streamrl.weight_sync.tensors import Version

LIMITS = RequestLimits(64, VOCABULARY)


def config(**sections):
    base = {
        "model": {"path": "/nowhere", "context": 64},
        "sampling": {"max_new_tokens": 8},
        "engine": {"kind": "vllm", "slots": 8},
        "weights": {"deadline": 20},
    }
    return RunConfig.model_validate(
        {name: {**base.get(name, {}), **sections.get(name, {})} for name in base | sections}
    )


def request(name, prompt=(1, 2, 3), limit=6, **more):
    return Request(name, np.asarray(prompt, dtype=np.int32), limit, **more)


def version(number, epoch=1):
    return Version((epoch, number), number, {})


def paths(toy, *wanted):
    return [path for path, _ in toy.bodies if path in wanted]


def bodies(toy, path):
    return [body for where, body in toy.bodies if where == path]


def held_at(toy, path):
    """Hold the next call of a path: the first event says that it has come, the second lets it go on."""
    come, go = asyncio.Event(), asyncio.Event()

    async def hold():
        come.set()
        await go.wait()

    toy.faults[path] = [hold]
    return come, go


class Controlled:
    """The controls of a toy; `announced` is what was in force each time that they announced something."""

    def __init__(self, client, folder, watchdog, dialect, seconds):
        self.client, self.dialect, self.watchdog = client, dialect, watchdog
        self.announced = []
        self.control = ServerControl(
            client,
            dialect,
            seconds,
            self._announce,
            watchdog=watchdog,
            folder=folder,
            max_staleness=1,
            sleep_level=1,
        )

    async def _announce(self):
        self.announced.append((self.control.pair[1], self.control.blocked))


@asynccontextmanager
async def control_on(toy, folder, *, attached=False, dialect=None, seconds=20.0):
    """Controls of a toy in this event loop, which streamrl started or (`attached`) found."""
    dialect = dialect or make_dialect()
    async with serving(toy) as url:
        client = HttpClient(url)
        watchdog = await Watchdog.start(url, {}, [("POST", "/resume", {}, {})]) if attached else None
        controlled = Controlled(client, folder, watchdog, dialect, seconds)
        try:
            yield controlled
        finally:
            await controlled.control.close()
            await client.close()


def ask(controlled, name="a", limit=6):
    """A response of the toy, read with what is in force now."""
    control, dialect, wanted = controlled.control, controlled.dialect, request(name, limit=limit)
    response = Response(wanted, LIMITS, control.pair[1], adapter=control.adapter, wire_id=name)
    return asyncio.create_task(read_response(controlled.client, dialect, response, seconds=20))
