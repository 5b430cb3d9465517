"""Controls of one server, one at a time: pause, new weights, sleep; requests wait where they must."""

from __future__ import annotations

import asyncio
import logging
import shutil
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, Literal, Protocol, TypeAlias

from streamrl.engine import MemoryTag
from streamrl.errors import CannotCreate, DataError, Refused, StreamrlError, Unreachable, WeightsError, WireError
from streamrl.http import BadAnswer, BadRequest, Call, HttpClient, Lost
from streamrl.isolation.watchdog import Watchdog
from streamrl.producers.group.flights import InFlightRequest
from streamrl.servers.dialect import Dialect
from streamrl.weight_sync.adapter import write_adapter
from streamrl.weight_sync.manifest import Pair
from streamrl.weight_sync.tensors import Version

logger = logging.getLogger(__name__)
_ANSWERED: Final = (BadAnswer, DataError, WireError)
_ABORT_DEADLINE: Final = 5.0
_LAST_SECONDS: Final = 5.0
"""For the resume of a server when its engine is being closed."""
_MANY: Final = 8
_MERGED: Final = "learner.lora.publish: merged works with every engine and every adapter"


Tell: TypeAlias = Callable[[list[str]], Coroutine[Any, Any, None]]
"""Tells the server to end the requests of these names."""


class ControlledEngine(Protocol):
    @property
    def flights(self) -> Sequence[InFlightRequest]:
        """All requests without an outcome."""
        ...

    @property
    def dead(self) -> bool: ...

    def die(self, cause: Unreachable) -> None: ...
    async def end(self, flights: Sequence[InFlightRequest], tell: Tell) -> int: ...


class Controls:
    """The controls of one server; a control that does not end within `seconds` counts as the server's death.

    `watchdog` resumes the server when this process dies; None for a server that dies with it. `folder` is this object's
    own, where the server reads versions that are an adapter; None: such versions are refused.
    """

    def __init__(
        self,
        client: HttpClient,
        dialect: Dialect,
        seconds: float,
        engine: ControlledEngine,
        *,
        watchdog: Watchdog | None = None,
        folder: Path | None = None,
    ) -> None:
        self._client = client
        self._dialect = dialect
        self._seconds = seconds
        self._engine = engine
        self._watchdog = watchdog
        self._loop = asyncio.get_running_loop()
        self._lock = asyncio.Lock()
        self._open = asyncio.Event()
        self._open.set()
        self._pair: Pair = (0, 0)
        self._paused = False
        self._level: Literal[0, 1] | None = None
        self._asleep: set[MemoryTag] = set()
        self._swapping = False
        self._torn = False
        self._kept_before = False
        self.serving: str | None = None  # the adapter that is the version in force; None: the weights are
        self.pause_seconds = 0.0  # how long decoding stood still for the last version
        self._folder = folder
        self._adapters: dict[str, Path] = {}  # folders of those that are loaded, by name
        # A server that we did not start may hold adapters that an earlier engine loaded.
        self._prefix = f"streamrl-{uuid.uuid4().hex[:8]}"

    @property
    def version(self) -> int:
        return self._pair[1]

    @property
    def held(self) -> bool:
        """Whether the server was told to stand still, or has no weights or cache to serve with."""
        return self._paused or self._level is not None or self._swapping

    async def passing(self) -> None:
        """Return when requests may go to the server; the caller sends its own before it awaits anything else."""
        while not self._open.is_set():
            await self._open.wait()

    async def close(self) -> None:
        """Resume a server that we paused; one that does not answer is left to the watchdog.

        A server with torn weights stays paused: the next engine gives it whole ones.
        """
        if self._watchdog is not None and not self._engine.dead:
            for name in self._adapters:
                await self._unload(name)
        if self._folder is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
        if self._watchdog is None:
            return
        farewell = True
        if (self._paused or self._swapping) and not self._torn:
            try:
                if self._engine.dead:
                    raise Unreachable("it counts as dead")
                await self._try(self._dialect.resume(), _LAST_SECONDS)
            except StreamrlError as error:
                farewell = False
                logger.warning("a paused server is left to its watchdog", extra={"why": error.message})
        await self._watchdog.close(farewell=farewell)

    async def pause(self) -> None:
        async with self._lock:
            if self._paused:
                return
            calls = self._dialect.pause()
            if not calls:
                raise Refused(f"this {self._dialect.kind} server cannot pause and keep its requests", "abort them")
            self._arm()
            self._paused = True
            self._gate()
            if self._level is None:
                await self._must(calls)

    async def resume(self) -> None:
        async with self._lock:
            if not self._paused:
                return
            if self._level is None:
                await self._must(self._dialect.resume())
            self._paused = False
            self._disarm()
            self._gate()

    async def apply(self, version: Version) -> None:
        """The prefetch runs while the server generates; it stands still only for the change itself."""
        with version.readers:  # keeps the files: the caller may leave before the end
            async with self._lock:
                await self._apply(version)

    async def _apply(self, version: Version) -> None:
        if version.pair == self._pair:
            return
        if version.pair < self._pair or version.number < self.version:
            raise WeightsError(f"version {version.pair} of the weights is older than {self._pair}, which is in force")
        if version.adapter is not None and not self._dialect.merges:
            await self._swap(version)
            return
        end = self._loop.time() + self._seconds
        await self._prefetch(version, end)
        calls = self._dialect.update(version)
        async with self._still(), self._weights_awake():
            await self._update(version, calls, end)
            self._pair, self.serving = version.pair, None
            for flight in self._engine.flights:
                flight.turn(version.number)
        logger.info("weights applied", extra={"version": version.number, "pause": round(self.pause_seconds, 4)})

    async def _swap(self, version: Version) -> None:
        """Load a version that is an adapter. New requests use it; those in flight end with the one they began with."""
        assert version.adapter is not None
        if self._folder is None or (self.version and self.serving is None):
            raise WeightsError(
                f"version {version.number} is an adapter, and this server does not hold the weights it belongs to",
                "start the replicas anew, or set learner.lora.publish: merged",
            )
        name = f"{self._prefix}-{version.pair[0]}-{version.pair[1]}"
        folder = self._folder.absolute() / name
        try:
            await asyncio.to_thread(write_adapter, folder, version.adapter, version.tensors)
            async with self._weights_awake():
                await self._load(name, folder)
        except (CannotCreate, Refused) as error:
            raise WeightsError(error.message, error.hint) from error
        self._adapters[name] = folder
        self._pair, self.serving = version.pair, name
        logger.info("adapter applied", extra={"version": version.number, "adapter": name})
        used = {flight.adapter for flight in self._engine.flights}
        for old in [old for old in self._adapters if old not in {name, *used}]:
            folder = self._adapters.pop(old)
            await self._unload(old)
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def keep(self, version: Version) -> None:
        """Record the version for a server that keeps its own weights: only the first one counts."""
        if self._pair == (0, 0):
            self._pair = version.pair
        elif version.pair > self._pair and not self._kept_before:
            self._kept_before = True
            logger.warning("a server keeps its own weights", extra={"in force": self.version, "new": version.number})

    async def sleep(self, level: Literal[0, 1]) -> None:
        async with self._lock:
            if self._level is not None and level <= self._level:
                return
            if any(flight.sent for flight in self._engine.flights):
                raise Refused(
                    "the engine cannot sleep: requests are at the server", "abort them, or wait for their end"
                )
            calls = self._dialect.sleep(level)
            before, self._level = self._level, level
            self._gate()
            try:
                await self._send(calls, self._seconds)
            except _ANSWERED as error:
                self._level = before
                self._gate()
                raise Refused(f"the server cannot sleep at level {level}: {error.message}") from error
            self._asleep = {"weights", "kv_cache"} if level else {"kv_cache"}

    async def wake(self, tags: Sequence[MemoryTag]) -> None:
        async with self._lock:
            wanted = [tag for tag in tags if tag in self._asleep]
            if not wanted:
                return
            await self._must(self._dialect.wake(wanted))
            self._asleep -= set(wanted)
            if not self._asleep:
                self._level = None
                # some servers sleep by a pause, others wake up without the one from before
                await self._must(self._dialect.pause() if self._paused else self._dialect.resume())
            self._gate()

    async def _load(self, name: str, folder: Path) -> None:
        try:
            await self._send([self._dialect.load_adapter(name, folder)], self._seconds)
        except _ANSWERED as error:
            if isinstance(error, BadRequest) and error.status in {404, 405}:
                why = f"the server cannot serve adapters: {error.message}"
                raise WeightsError(why, "see docs/guides/engines.md") from error
            raise WeightsError(f"adapter {name!r} is refused: {error.message}", _MERGED) from error

    async def _unload(self, name: str) -> None:
        try:
            await self._client.call(self._dialect.unload_adapter(name), self._seconds)
        except (*_ANSWERED, Lost) as error:
            logger.warning("an adapter may still be loaded", extra={"adapter": name, "why": error.message})

    async def tell_abort(self, ids: Sequence[str]) -> None:
        """Tell the server to end requests; an error is only logged, because no caller waits for them any more.

        While the server is paused this takes the lock: an abort may pause the server again, and must not come after a
        resume.
        """
        try:
            if self._paused:
                async with self._lock:
                    await self._send_aborts(ids, paused=self._paused and self._level is None)
            else:
                await self._send_aborts(ids, paused=False)
        except StreamrlError as error:
            logger.warning("an abort did not reach the server", extra={"why": error.message})

    async def _send_aborts(self, ids: Sequence[str], *, paused: bool) -> None:
        everything = (
            self._watchdog is None and len(ids) >= _MANY and len(ids) >= sum(f.sent for f in self._engine.flights)
        )
        names: Sequence[str | None] = [None] if everything else ids
        sends = [self._try(self._dialect.abort(name, paused=paused), _ABORT_DEADLINE) for name in names]
        for result in await asyncio.gather(*sends, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    async def _prefetch(self, version: Version, end: float) -> None:
        try:
            await self._send(self._dialect.prefetch(version), end - self._loop.time())
        except _ANSWERED as error:
            raise WeightsError(f"the server refuses version {version.number}: {error.message}") from error

    @asynccontextmanager
    async def _still(self) -> AsyncGenerator[None, None]:
        """Pause the server, and resume it afterwards whatever happened, unless it was paused or asleep before.

        A server with torn weights stays paused: it would sample from a mixture of two versions.
        """
        if self._paused:
            yield
            return
        self._arm()
        self._swapping = True
        self._gate()
        begun = self._loop.time()
        try:
            if calls := self._dialect.pause():
                await self._must(calls)
            else:
                await self._run_dry()
            yield
        except asyncio.CancelledError:
            raise  # the engine is dead or is being closed: `close` sees to it that the server goes on
        except BaseException:
            if not self._engine.dead:
                await self._go_on(begun)
            raise
        await self._go_on(begun)

    async def _run_dry(self) -> None:
        """Wait until a server that cannot pause has no requests; those that take too long end with what they have."""
        if sent := [flight for flight in self._engine.flights if flight.sent]:
            await asyncio.wait([flight.outcome for flight in sent], timeout=self._seconds / 2)
            await self._engine.end([flight for flight in sent if not flight.outcome.done()], self.tell_abort)

    async def _go_on(self, begun: float) -> None:
        if self._level is None:
            await self._must(self._dialect.resume())
        self.pause_seconds = self._loop.time() - begun
        self._swapping = False
        self._disarm()
        self._gate()

    @asynccontextmanager
    async def _weights_awake(self) -> AsyncGenerator[None, None]:
        """Wake the weights; put them to sleep again afterwards."""
        if "weights" not in self._asleep:
            yield
            return
        await self._must(self._dialect.wake(["weights"]))
        try:
            yield
        finally:
            if not self._engine.dead:
                await self._must(self._dialect.sleep(1))

    async def _update(self, version: Version, calls: Sequence[Call], end: float) -> None:
        """Send the update. After a failure with unknown state send all of it once more; then the server is dead."""
        self._torn = True
        first = True
        try:
            for call in calls:
                await self._send([call], end - self._loop.time())
                first = False
        except _ANSWERED as error:
            if first and isinstance(error, DataError):
                self._torn = False
                raise WeightsError(f"the server refuses version {version.number}: {error.message}") from error
            logger.warning(
                "an update failed and is sent once more", extra={"version": version.number, "why": error.message}
            )
            try:
                await self._try([*self._dialect.prefetch(version), *calls], end - self._loop.time())
            except StreamrlError as again:
                cause = Unreachable(f"the server may hold a mixture of two versions: {again.message}", "see its log")
                self._engine.die(cause)
                raise cause from again
        self._torn = False

    def _gate(self) -> None:
        if self.held:
            self._open.clear()
        else:
            self._open.set()

    def _arm(self) -> None:
        if self._watchdog is not None:
            self._watchdog.arm()

    def _disarm(self) -> None:
        if self._watchdog is not None and not self._paused:
            self._watchdog.disarm()

    async def _must(self, calls: Sequence[Call]) -> None:
        """Send calls whose failure means that the server is dead."""
        try:
            await self._try(calls, self._seconds)
        except StreamrlError as error:
            cause = error if isinstance(error, Unreachable) else Unreachable(error.message, error.hint)
            self._engine.die(cause)
            raise cause from error

    async def _send(self, calls: Sequence[Call], seconds: float) -> None:
        """Send calls that a server may refuse; no answer means that it is dead."""
        try:
            await self._try(calls, seconds)
        except Unreachable as error:
            if not isinstance(error, BadAnswer):
                self._engine.die(error)
            raise

    async def _try(self, calls: Sequence[Call], seconds: float) -> None:
        end = self._loop.time() + seconds
        for call in calls:
            await self._client.call(call, max(0.0, end - self._loop.time()))
