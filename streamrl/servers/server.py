"""One server that generates: started by streamrl or attached at its URL, checked, controlled, and asked."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Self

from streamrl.config import RunConfig
from streamrl.engine import Completion, Request, RequestLimits
from streamrl.errors import ConfigError
from streamrl.http import HttpClient, read_key
from streamrl.images.vision import describe
from streamrl.isolation.watchdog import Watchdog
from streamrl.servers.check import connect
from streamrl.servers.control import ServerControl
from streamrl.servers.dialect import ServerMetrics, folder_of
from streamrl.servers.environments import on_cpu
from streamrl.servers.kinds import make_dialect
from streamrl.servers.process import ANSWER_SECONDS, ManagedServer, ServerSettings, points_back
from streamrl.servers.request import Response, read_response
from streamrl.weight_sync.files import TOKEN_VARIABLE, read_token, staging_root, token_path
from streamrl.weight_sync.tensors import Version

logger = logging.getLogger(__name__)


async def _nothing() -> None: ...


def key_of_servers(config: RunConfig, run_dir: Path) -> str | None:
    """The key of the servers of a run: the one that people gave, else the token of the run for those we start."""
    if config.engine.api_key_file is None and config.engine.managed:
        return read_token(run_dir)
    return read_key("engine.api_key_file", config.engine.api_key_file)


class Server:
    """One life of a server, which `salt` names: the `index`-th of `engine.url` or of `engine.devices`."""

    control: ServerControl
    client: HttpClient
    limits: RequestLimits

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        name: str,
        index: int = 0,
        *,
        seed: int,
        key: str | None = None,
        announce: Callable[[], Awaitable[None]] = _nothing,
    ) -> None:
        if config.engine.url and index >= len(config.engine.url):
            raise ConfigError(f"{name} has no server: engine.url names {len(config.engine.url)}", "add its URL")
        self._config, self._run_dir, self._name, self._index = config, run_dir, name, index
        self._announce, self._key = announce, key
        self._stack = AsyncExitStack()
        self.dialect = make_dialect(config)
        self.salt = uuid.uuid4().hex
        self.process: ManagedServer | None = None
        if not config.engine.url:
            devices = config.engine.devices
            ours = {TOKEN_VARIABLE: str(token_path(run_dir).absolute())}
            ours["STREAMRL_LANDING"] = str(staging_root(run_dir, name))  # the role's `Follower` empties it
            settings = ServerSettings.of_engine(config, key, ours)
            device = devices[index % len(devices)] if devices else ""
            self.process = ManagedServer(self.dialect, settings, run_dir, f"{name}.server", device, seed=seed)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """`ConfigError`: no environment, or it does not fit the run; `Unreachable`: it ended, or was late."""
        config, process = self._config, self.process
        async with AsyncExitStack() as stack:
            if process is None:
                url, hint = config.engine.url[self._index], "check that it runs and that engine.url is right"
            else:
                if folder_of(config.model.path) is None:  # flags of its server depend on what it is
                    await asyncio.to_thread(describe, config.model)
                stack.push_async_callback(process.stop)
                url, hint = await process.start(), f"its log: {process.log}"
            self.client = HttpClient(url, self._key, hint)
            stack.push_async_callback(self.client.close)
            self.limits = await self._check()
            watchdog = None
            if process is None:
                calls = [(call.method, call.path, call.query, call.body) for call in self.dialect.resume]
                watchdog = await Watchdog.start(url, self.client.headers, calls)
            self.control = ServerControl(
                self.client,
                self.dialect,
                config.weights.deadline,
                self._announce,
                watchdog=watchdog,
                folder=self._run_dir / "adapters" / self._name,
                max_staleness=config.max_staleness,
                sleep_level=0 if on_cpu(config.engine) else 1,
            )
            stack.push_async_callback(self.control.close)
            self._stack = stack.pop_all()
        logger.info("engine server ready", extra={"url": url, "server": self.dialect.kind})

    async def close(self) -> None:
        """End a server that streamrl started, with its children; resume one that runs already. Repeatable."""
        await self._stack.aclose()

    async def _check(self) -> RequestLimits:
        process = self.process
        try:
            return await connect(self.client, self.dialect, self._config, external=process is None)
        except ConfigError as error:
            if process is None or not points_back(error.message):
                raise
            await process.stop()  # then its log is complete
            if not (cause := process.root_cause()):
                raise
            raise ConfigError(f"{process.name} fails: {cause}", f"the whole log: {process.log}") from error

    async def apply(self, version: Version) -> None:
        await self.control.apply(version)

    async def metrics(self) -> ServerMetrics:
        answer = await self.client.call(self.dialect.metrics, ANSWER_SECONDS, retry=False)
        return self.dialect.read_metrics(answer)

    async def generate(self, request: Request) -> Completion:
        control = self.control
        response = Response(request, self.limits, control.pair[1], self.salt, control.adapter)
        return await read_response(self.client, self.dialect, response, seconds=self._config.weights.deadline)
