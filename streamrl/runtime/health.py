"""`/livez`, `/readyz` and `/metrics` of one role, for Kubernetes and Prometheus.

The figures are those of the role's last line in `metrics/ROLE.jsonl` and of its heartbeat: `streamrl_<kind>_<name>`
with the labels `run` and `role`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import math
import re
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Final

from aiohttp import web
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from typing_extensions import override

from streamrl.config import HealthConfig
from streamrl.errors import StreamrlError
from streamrl.http import own_key
from streamrl.listening import listen
from streamrl.monitor.reward_figures import source_figures
from streamrl.monitor.snapshot import StreamView, take
from streamrl.queues import Role

_OF_STREAMS: Final = {
    "depth": "entries in a stream",
    "pending": "entries that a consumer has leased",
    "lag": "entries that nobody has leased",
    "silent_seconds": "seconds without a sign of life from any consumer that has work",
}
TOKEN_FILE: Final = "health.token"  # noqa: S105  (a name, no secret)
_SCRAPE_SECONDS: Final = 2.0
_FOREIGN = re.compile(r"[^a-zA-Z0-9_]")


class RoleFigures(Collector):
    """All numbers that a role has said last, and the lag of the streams of its run, as gauges."""

    def __init__(self, role: Role) -> None:
        self.streams: tuple[StreamView, ...] = ()
        self._role = role
        self._kind = _FOREIGN.sub("_", role.name.partition(".")[0])

    @override
    def collect(self) -> Iterable[GaugeMetricFamily]:
        labels = {"run": self._role.config.name, "role": self._role.name}
        ready = {"ready": float(self._role.is_ready and not self._role.stop.is_set())}
        for name, value in {**_numbers(self._role.last_record), **_numbers(self._role.status), **ready}.items():
            family = GaugeMetricFamily(f"streamrl_{self._kind}_{_FOREIGN.sub('_', name)}", name, labels=list(labels))
            family.add_metric(list(labels.values()), value)
            yield family
        yield from self._of_sources()
        for name, what in _OF_STREAMS.items():
            family = GaugeMetricFamily(f"streamrl_{name}", what, labels=["run", "stream"])
            for stream in self.streams:
                family.add_metric([self._role.config.name, stream.name], float(getattr(stream, name)))
            yield family

    def _of_sources(self) -> Iterable[GaugeMetricFamily]:
        families: dict[str, GaugeMetricFamily] = {}
        for source, figures in source_figures({self._role.name: self._role.status}).items():
            for name, value in figures.items():
                key = f"streamrl_{self._kind}_source_{name}"
                family = families.setdefault(key, GaugeMetricFamily(key, name, labels=["run", "role", "source"]))
                family.add_metric([self._role.config.name, self._role.name, source], value)
        return families.values()


@contextlib.asynccontextmanager
async def serve_health(role: Role, config: HealthConfig) -> AsyncIterator[str]:
    """Serve for this block; yields the URL. `ConfigError`: the token cannot be read."""
    token = own_key("health.token_file", config.token_file, role.run_dir / TOKEN_FILE)
    registry, figures = CollectorRegistry(), RoleFigures(role)
    registry.register(figures)
    ProcessCollector(registry=registry)

    async def livez(_: web.Request) -> web.Response:
        return web.Response(text="the event loop of this role runs\n")

    async def readyz(_: web.Request) -> web.Response:
        if role.stop.is_set():
            return web.Response(status=503, text="draining\n")
        return web.Response(text="ready\n") if role.is_ready else web.Response(status=503, text="starting\n")

    async def metrics(request: web.Request) -> web.Response:
        given = request.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(errors="replace"), f"Bearer {token}".encode()):
            where = f"health.token_file, else of {TOKEN_FILE} in the directory of the run"
            return web.Response(status=401, text=f"/metrics wants the token of {where}\n")
        figures.streams = await _streams(role)
        body = generate_latest(registry)
        return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    app = web.Application()
    app.add_routes([web.get("/livez", livez), web.get("/readyz", readyz), web.get("/metrics", metrics)])
    hint = "set health.port to a free one; 0 is any"
    async with listen(app, config.host, config.port, what=f"the health of {role.name}", hint=hint) as url:
        yield url


async def _streams(role: Role) -> tuple[StreamView, ...]:
    """The streams of training; none while Redis does not answer."""
    try:
        async with asyncio.timeout(_SCRAPE_SECONDS):
            return (await take(role.ledgers.connection, role.config.name)).train.streams
    except (StreamrlError, TimeoutError):
        return ()


def _numbers(line: Mapping[str, object]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in line.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
