"""Weights, pauses and sleep of one server, one at a time: what role `engine.N` tells its server.

```
apply:  prefetch (it generates) -> pause -> update -> resume           an adapter: load it beside the weights
sleep:  pause -> free memory          wake:  weights -> the version that came meanwhile -> keys and values -> resume
```
Requests at the server stay there and are sampled on afterwards. A call that fails leaves the server in an unknown
state, so it raises `Unreachable`: the role ends, and its next life begins with whole weights.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final, Literal

from streamrl.engine import MemoryTag
from streamrl.errors import (
    CannotCreate,
    ConfigError,
    DataError,
    NotFetched,
    StreamrlError,
    Unreachable,
    WeightsError,
    WireError,
)
from streamrl.http import BadAnswer, BadRequest, Call, HttpClient
from streamrl.isolation.watchdog import Watchdog
from streamrl.servers.dialect import BUSY, Dialect, refusal
from streamrl.servers.launch import adapters_in_flight
from streamrl.weight_sync.adapter import write_adapter
from streamrl.weight_sync.manifest import Pair
from streamrl.weight_sync.tensors import Version

logger = logging.getLogger(__name__)
_LAST_SECONDS: Final = 5.0  # for the resume of a server when its role ends
_LOOK_SECONDS: Final = 0.05  # between two looks at a server that fetches
_KEPT: Final = 4  # times as many adapters as may be in use: a request that waits long reads their files again


class ServerControl:
    """Controls of one server; each call to it ends within `seconds`.

    `announce` is awaited when the version, the adapter or `blocked` has changed. `watchdog` is None for a server that
    dies with this process. `folder` is for versions that are an adapter. `pair`, `step` and `adapter` (its name there;
    empty: none) are of the version in force, (0, 0) before the first. `blocked`: off its devices, and requests wait.
    """

    def __init__(
        self,
        client: HttpClient,
        dialect: Dialect,
        seconds: float,
        announce: Callable[[], Awaitable[None]],
        *,
        watchdog: Watchdog | None = None,
        folder: Path,
        max_staleness: int,
        sleep_level: Literal[0, 1],
    ) -> None:
        self._client, self._dialect, self._seconds = client, dialect, seconds
        self._announce, self._watchdog, self._folder = announce, watchdog, folder
        self._sleep_level = sleep_level
        self._most_adapters = adapters_in_flight(max_staleness)
        self._adapters: list[str] = []
        # A server that runs already may hold adapters of an earlier life.
        self._prefix = f"streamrl-{uuid.uuid4().hex[:8]}"
        self._lock = asyncio.Lock()
        self._weights_awake, self._applied = asyncio.Event(), asyncio.Event()
        self._weights_awake.set()
        self._applied.set()
        self._stands_still = self._inconsistent = False
        self._label = ""
        self.pair: Pair = (0, 0)
        self.step = 0
        self.adapter = ""
        self.blocked = False
        self.pause_seconds = 0.0

    @property
    def held(self) -> bool:
        """Whether no token can be expected now."""
        return self.blocked or self._stands_still

    async def idle(self) -> None:
        """Return when no call is under way: half an update would be worse than a short wait."""
        async with self._lock:
            return

    async def close(self) -> None:
        """Resume a server that we paused; one with inconsistent weights stays paused for the next life."""
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
        if self._watchdog is None:
            return
        resumed = True
        try:
            if self.held and not self._inconsistent:
                await self._send(self._dialect.wake(("weights", "kv_cache")) if self.blocked else (), _LAST_SECONDS)
                await self._send(self._dialect.resume, _LAST_SECONDS)
            for name in self._adapters:
                await self._send([self._dialect.unload_adapter(name)], _LAST_SECONDS)
        except StreamrlError as error:
            resumed = False
            logger.warning("a paused server is left to its watchdog", extra={"why": error.message})
        await self._watchdog.close(farewell=resumed)

    async def apply(self, version: Version, given_up: Callable[[], bool] = lambda: False) -> None:
        """Put a version in force, unless `given_up`; off the devices it waits until the weights are back.

        `WeightsError` or `NotFetched`: the server keeps the one before. Any other `Unreachable`: it has to start anew.
        """
        self._applied.clear()
        try:
            await self._weights_awake.wait()
            async with self._lock:
                name = "" if version.adapter is None else await self._load_adapter(version)
                if not name:
                    await self._replace(version, given_up)
                # together: a heartbeat between them would name another version than the one that samples
                self.pair, self.step, self.adapter = version.pair, version.step, name
        finally:
            self._applied.set()
        await self._announce()
        await self._forget_adapters()

    async def keep(self, version: Version) -> None:
        """Record a version for a server whose weights stay as they are: all that it samples is of the first one."""
        if self.pair == (0, 0):
            self.pair, self.step = version.pair, version.step
            await self._announce()

    async def _replace(self, version: Version, given_up: Callable[[], bool]) -> None:
        await self._prefetch(version, given_up)
        label = f"{version.number}.{self._prefix}"
        first, *rest = self._dialect.update(version, label)
        await self._is_ours()
        async with self._paused():
            self._inconsistent = True
            try:
                await self._send([first], self._seconds)
            except DataError as error:  # nothing was changed
                self._inconsistent = False
                raise refusal(version, error.message) from error
            await self._must(rest)
            self._inconsistent = False
            self._label = label

    async def _prefetch(self, version: Version, given_up: Callable[[], bool]) -> None:
        end = asyncio.get_running_loop().time() + self._seconds
        while asyncio.get_running_loop().time() < end and not given_up():
            try:
                answers = await self._send(self._dialect.prefetch(version), self._seconds)
            except (ConfigError, BadAnswer) as error:
                raise refusal(version, error.message) from error
            found = {self._dialect.read_prefetch(answer) for answer in answers} - {""}
            if not found:
                return
            if problem := "; ".join(found - {BUSY}):
                raise refusal(version, problem)
            await asyncio.sleep(_LOOK_SECONDS)
        why = "before a newer learner published" if given_up() else f"within {self._seconds:g} s"
        raise NotFetched(f"the server did not get version {version.number} {why}", "see its log")

    async def _is_ours(self) -> None:
        """`ConfigError`: the weights are not those that were given last. Nobody else knows a server that we started."""
        if self._watchdog is None or not self._label:
            return
        found = (await self._client.call(self._dialect.label, self._seconds)).get("weight_version")
        if found != self._label:
            raise ConfigError(
                f"somebody else changes the weights of the server at {self._client.url}: it has {found!r} instead of"
                f" {self._label!r}",
                "another run has this URL in its engine.url; give each run servers of its own",
            )

    @asynccontextmanager
    async def _paused(self) -> AsyncGenerator[None, None]:
        """Pause the server; resume it when the block has ended or the version is refused."""
        if self.blocked:
            yield
            return
        if self._watchdog is not None:
            self._watchdog.arm()
        begun = asyncio.get_running_loop().time()
        self._stands_still = True
        await self._must(self._dialect.pause)
        try:
            yield
        finally:
            if not self._inconsistent:
                await self._must(self._dialect.resume)
                self._stands_still = False
                self.pause_seconds = asyncio.get_running_loop().time() - begun
                if self._watchdog is not None:
                    self._watchdog.disarm()

    async def _load_adapter(self, version: Version) -> str:
        """Load a version that is an adapter and return its name; requests in flight keep the one they have."""
        assert version.adapter is not None
        if self.pair[1] and not self.adapter:
            said = f"version {version.number} is an adapter, and this server does not hold the weights it belongs to"
            raise WeightsError(said, "start the engines anew, or set learner.lora.publish: merged")
        name = f"{self._prefix}-{version.pair[0]}-{version.pair[1]}"
        folder = self._folder.absolute() / name
        try:
            await asyncio.to_thread(write_adapter, folder, version.adapter, version.tensors)
            await self._send([self._dialect.load_adapter(name, folder)], self._seconds)
        except (BadRequest, BadAnswer) as error:
            hint = "learner.lora.publish: merged works with every engine and every adapter"
            raise WeightsError(f"adapter {name!r} is refused: {error.message}", hint) from error
        except CannotCreate as error:
            raise WeightsError(error.message, error.hint) from error
        self._adapters.append(name)
        return name

    async def _forget_adapters(self) -> None:
        """Unload the oldest, long after the last requests that may name them have begun."""
        while len(self._adapters) > _KEPT * self._most_adapters:
            oldest = self._adapters.pop(0)
            with suppress(StreamrlError):  # some servers answer only when its last request has ended
                await self._send([self._dialect.unload_adapter(oldest)], _LAST_SECONDS)
            await asyncio.to_thread(shutil.rmtree, self._folder / oldest, ignore_errors=True)

    # --- devices that are shared with the learner ---------------------------------------------------------------------

    async def sleep(self) -> None:
        """Leave the devices. Requests at the server stay; their keys and values are computed anew after `wake`."""
        self._weights_awake.clear()
        async with self._lock:
            self.blocked = True
            await self._announce()
            await self._must(self._dialect.sleep(self._sleep_level))

    async def wake(self) -> None:
        """Come back to the devices, with the newest version that waits to be applied."""
        tags: tuple[MemoryTag, ...] = ("weights", "kv_cache")
        if not self._applied.is_set():
            if self._sleep_level:  # at 0 the weights are there, and vLLM would decode while they are replaced
                await self._must(self._dialect.wake(("weights",)))
                tags = ("kv_cache",)  # SGLang dies of waking the same twice
            self._weights_awake.set()
            await self._applied.wait()
        async with self._lock:
            await self._must(self._dialect.wake(tags))
            await self._must(self._dialect.resume)
            self.blocked = False
        self._weights_awake.set()
        await self._announce()

    # --- calls --------------------------------------------------------------------------------------------------------

    async def _must(self, calls: Sequence[Call]) -> None:
        """Send calls that the server may not refuse."""
        try:
            await self._send(calls, self._seconds)
        except Unreachable:
            raise
        except StreamrlError as error:
            raise Unreachable(f"the server cannot go on: {error.message}", error.hint) from error

    async def _send(self, calls: Sequence[Call], seconds: float) -> list[Any]:
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        answers = []
        for call in calls:
            try:
                answers.append(await self._client.call(call, max(0.0, end - loop.time())))
            except WireError as error:
                raise BadAnswer(error.message, error.hint) from error
        return answers
