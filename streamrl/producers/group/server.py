"""`Engine` over one server: one pooled HTTP session, any dialect, a server of our own or one that runs already.

Each request has a task that reads its stream and completes it. Controls (`apply`, `pause`, ...) run one at a time, in
tasks of their own, so they end also when their caller has left. Each of their calls has a deadline; a missed deadline
counts as the death of the server, and so does a lack of any sign of life.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

from typing_extensions import override

from streamrl.config import RunConfig
from streamrl.engine import (
    Completion,
    EngineLoad,
    Listener,
    MemoryTag,
    PauseMode,
    Request,
    RequestLimits,
    StreamingEngine,
)
from streamrl.errors import ConfigError, DataError, StreamrlError, Unreachable, WireError
from streamrl.http import BadAnswer, HttpClient, Lost, read_key
from streamrl.isolation.watchdog import Watchdog
from streamrl.producers.group.connect import Facts, connect
from streamrl.producers.group.controls import Controls, Tell
from streamrl.producers.group.flights import InFlightRequest, ServerDied
from streamrl.servers.dialect import Dialect, ServerMetrics
from streamrl.servers.process import ManagedServer, points_back
from streamrl.weight_sync.tensors import Version

__all__ = ["ServerDied", "ServerEngine"]

logger = logging.getLogger(__name__)
ABORT_SECONDS: Final = 0.6
"""Seconds for a server to send the rest of an aborted response; later tokens are lost."""
_TAIL_SECONDS: Final = 0.5
_LOOK_SECONDS: Final = 0.25
_POLL_SECONDS: Final = 1.0
_POLL_DEADLINE: Final = 5.0
_PROBE_SECONDS: Final = 20.0
_LAST_SECONDS: Final = 10.0
_ANY_TOKEN: Final = 1 << 31
_LONGEST_GAP: Final = 1.0
"""Upper bound of the time counted between two looks: a process that was stopped (SIGSTOP) did not really wait."""


class Liveness:
    """Judges whether a server lives by its progress: no sign of it for `patience` seconds means death.

    Pure, with the clock as an argument. `busy_seconds` is the time in which requests were being decoded.
    """

    def __init__(self, patience: float, now: float) -> None:
        self._patience = patience
        self._looked_at = now
        self._still = 0.0
        self._silent = 0.0
        self.busy_seconds = 0.0

    def progress(self) -> None:
        """It has sampled tokens, or its metrics have changed."""
        self._still = self._silent = 0.0

    def answered(self) -> None:
        """It has answered something, which does not prove that it decodes."""
        self._silent = 0.0

    def look(self, now: float, *, busy: bool, held: bool) -> str:
        """Return why it counts as dead now, or an empty string. No progress is expected while it is `held`."""
        passed, self._looked_at = min(now - self._looked_at, _LONGEST_GAP), now
        if held:
            self._still = self._silent = 0.0
            return ""
        self._silent += passed
        if busy:
            self.busy_seconds += passed
            self._still += passed
        else:
            self._still = 0.0
        if self._still >= self._patience:
            return f"no token and no other sign of progress for {self._still:.0f} s"
        if self._silent >= self._patience:
            return f"no answer to anything for {self._silent:.0f} s"
        return ""


class ServerEngine(StreamingEngine):
    """`Engine` over one server. One life: after its death or `close`, make another one.

    Its death (the process ends, connections are refused, no sign of life for a deadline, a control that does not end)
    fails every waiting `generate` with `ServerDied`, which carries what that request had heard.

    `url` is a server that runs already; `server` is one that `start` starts and `close` stops; exactly one is given.
    `adapters` is a folder of this engine alone, visible to the server, for versions that are an adapter.
    """

    def __init__(
        self,
        dialect: Dialect,
        config: RunConfig,
        *,
        url: str | None = None,
        server: ManagedServer | None = None,
        adapters: Path | None = None,
    ) -> None:
        if (url is None) == (server is None):
            raise ValueError("a server engine has either a URL or a server of its own")
        self._dialect = dialect
        self._config = config
        self._url = url
        self._server = server
        self._adapters = adapters
        self._failure: Unreachable | None = None
        self._closed = False
        self._flights: dict[str, InFlightRequest] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._slots = asyncio.Semaphore(config.engine.slots)
        self._suspicion = asyncio.Lock()
        self._tokens = 0
        self._figures = ServerMetrics()
        self._queued = self._readings = 0
        self._client: HttpClient | None = None
        self._controls: Controls | None = None
        self._facts = Facts(config.model.context, None, fixed=False)
        self._liveness = Liveness(0.0, 0.0)

    @property
    def pause_seconds(self) -> float:
        return self._controls.pause_seconds if self._controls else 0.0

    @override
    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            key = await asyncio.to_thread(read_key, "engine.api_key_file", self._config.engine.api_key_file)
            url = self._url or (await self._server.start() if self._server is not None else "")
            hint = "see its log" if self._server else "check that it runs and that engine.url is right"
            client = self._client = HttpClient(url, key, hint)
            if self._server is not None:
                self._own(self._mourn(self._server), "engine-mourn")
            self._facts = await self._connect(client)
            watchdog = None
            if self._server is None and not self._facts.fixed:
                calls = [(call.method, call.path, call.query, call.body) for call in self._dialect.resume()]
                watchdog = await Watchdog.start(url, client.headers, calls)
            seconds = self._config.weights.deadline
            self._controls = Controls(client, self._dialect, seconds, self, watchdog=watchdog, folder=self._adapters)
        except BaseException:
            await self.close()
            raise
        if self._facts.fixed:
            logger.warning(
                "the weights of this server stay as they are: it never gets the trained weights",
                extra={"url": url, "server": self._dialect.kind},
            )
        longest = min(self._config.weights.deadline, self._config.lease.max_hold / 2)
        self._liveness = Liveness(longest, self._loop.time())
        self._own(self._watch(), "engine-watch")
        self._own(self._poll(client), "engine-poll")

    async def _connect(self, client: HttpClient) -> Facts:
        try:
            connecting = connect(client, self._dialect, self._config, external=self._server is None)
            facts: Facts = await self._unless_dead(connecting)
        except ConfigError as error:
            server = self._server
            if server is None or not points_back(error.message):
                raise
            await server.stop()  # then its log is complete
            if not (cause := server.root_cause()):
                raise
            raise ConfigError(f"{server.name} fails: {cause}", f"the whole log: {server.log}") from error
        return facts

    @override
    async def close(self) -> None:
        # A server that we did not start is resumed if we paused it.
        if self._closed:
            return
        self._closed = True
        for flight in list(self._flights.values()):
            flight.land("abort", self._loop.time())
        if self._server is None and (controls := [task for task in self._tasks if task.get_name() == "engine-control"]):
            await asyncio.wait(controls, timeout=_LAST_SECONDS)  # half an update would be worse than a short wait
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._controls is not None:
            await self._controls.close()
        if self._client is not None:
            await self._client.close()
        if self._server is not None:
            await self._server.stop()

    @override
    async def generate(self, request: Request, listener: Listener | None = None) -> Completion:
        # Fails with `ServerDied` when the server dies meanwhile.
        controls = self._serving()
        limit = RequestLimits(self._facts.context, self._facts.vocabulary or _ANY_TOKEN).check(request)
        if request.id in self._flights:
            raise ValueError(f"a request {request.id!r} is in flight")
        if request.adapter is not None and request.adapter not in controls.adapters:
            raise DataError(f"request {request.id!r}: no adapter {request.adapter!r} is loaded")
        flight = InFlightRequest(request, uuid.uuid4().hex, listener, self._loop.time())
        self._flights[request.id] = flight
        flight.conversation = self._own(self._fly(flight, limit, controls), "engine-flight")
        try:
            return await flight.outcome
        except asyncio.CancelledError:
            flight.hang_up()
            if flight.sent and self._failure is None and not self._closed:
                self._own(controls.tell_abort([flight.wire_id]), "engine-abort")
            raise
        finally:
            del self._flights[request.id]

    @override
    async def abort(self, request_id: str | None = None) -> int:
        # Takes at most `ABORT_SECONDS`, whatever the server does.
        controls = self._serving()
        chosen = [
            flight for name, flight in self._flights.items() if request_id in {None, name} and not flight.outcome.done()
        ]
        return await self.end(chosen, controls.tell_abort)

    @override
    async def pause(self, mode: PauseMode = "keep") -> None:
        await self._control(lambda controls: controls.pause(mode))

    @override
    async def resume(self) -> None:
        await self._control(lambda controls: controls.resume())

    @override
    async def apply(self, version: Version) -> None:
        # A server with weights of its own keeps them, and the version of the first call.
        if self._facts.fixed:
            self._serving().keep(version)
        else:
            await self._control(lambda controls: controls.apply(version))

    @override
    async def sleep(self, level: Literal[0, 1, 2] = 1) -> None:
        await self._control(lambda controls: controls.sleep(level))

    @override
    async def wake(self, tags: Sequence[MemoryTag] = ("weights", "kv_cache")) -> None:
        await self._control(lambda controls: controls.wake(tags))

    @override
    async def load_adapter(self, name: str, folder: Path) -> None:
        await self._control(lambda controls: controls.load_adapter(name, folder))

    @override
    async def unload_adapter(self, name: str) -> None:
        await self._control(lambda controls: controls.unload_adapter(name))

    @override
    def load(self) -> EngineLoad:
        sent = sum(flight.sent for flight in self._flights.values())
        waiting = min(sent, self._queued)
        return EngineLoad(
            running=sent - waiting,
            waiting=len(self._flights) - sent + waiting,
            tokens_sampled=self._tokens,
            busy_seconds=self._liveness.busy_seconds,
            version=self._controls.version if self._controls else 0,
            capacity=self._config.engine.slots,
            cache_use=self._figures.cache_use,
            preemptions=self._figures.preemptions,
            servers=int(self._controls is not None and self._failure is None and not self._closed),
            reading=self._readings,
        )

    @override
    async def health(self) -> None:
        controls = self._serving()
        self._look()
        if not controls.held:
            await self._there()
        self._serving()

    # --- what the controls need of the engine ----------------------------------------------------------------------

    @property
    def flights(self) -> Sequence[InFlightRequest]:
        return [flight for flight in self._flights.values() if not flight.outcome.done()]

    @property
    def dead(self) -> bool:
        return self._failure is not None

    def die(self, cause: Unreachable) -> None:
        if self._failure is not None or self._closed:
            return
        self._failure = cause
        logger.error("engine server died", extra={"url": self._client and self._client.url, "cause": cause.message})
        for flight in self.flights:
            flight.fail(flight.died(cause))
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()

    async def end(self, flights: Sequence[InFlightRequest], tell: Tell) -> int:
        for flight in flights:
            flight.aborting = True
            if not flight.sent:
                flight.land("abort", self._loop.time())
                flight.hang_up()
        sent = [flight for flight in flights if not flight.outcome.done()]
        if sent:
            self._own(tell([flight.wire_id for flight in sent]), "engine-abort")
            await asyncio.wait([flight.outcome for flight in sent], timeout=ABORT_SECONDS)
        for flight in sent:
            if not flight.outcome.done():
                flight.land("abort", self._loop.time())
                flight.hang_up()
        return sum(_aborted(flight) for flight in flights)

    # --- tasks -----------------------------------------------------------------------------------------------------

    def _own(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        """An error in one of the engine's own tasks counts as the server's death: without them it cannot serve."""
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, StreamrlError) and task.get_name() == "engine-control":
            return  # its caller gets the error, or has left
        logger.error("a task of the engine failed", extra={"task": task.get_name()}, exc_info=error)
        self.die(Unreachable(f"{task.get_name()} failed: {error!r}"))

    def _serving(self) -> Controls:
        if self._failure is not None:
            raise ServerDied(self._failure.message, self._failure.hint) from self._failure
        if self._controls is None or self._closed:
            raise Unreachable("the engine is closed" if self._closed else "the engine has not been started")
        return self._controls

    async def _control(self, work: Callable[[Controls], Coroutine[Any, Any, None]]) -> None:
        """Run a control to its end even when the caller leaves; the death of the server ends it."""
        await self._unless_dead(work(self._serving()))

    async def _unless_dead(self, work: Coroutine[Any, Any, Any]) -> Any:
        task = self._own(work, "engine-control")
        await asyncio.wait([task])
        if self._failure is not None:
            raise ServerDied(self._failure.message, self._failure.hint) from self._failure
        if task.cancelled():
            raise Unreachable("the engine was closed")
        return task.result()

    async def _mourn(self, server: ManagedServer) -> None:
        self.die(Unreachable(f"the engine server ended: {await server.wait_death()}", f"the whole log: {server.log}"))

    async def _watch(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(_LOOK_SECONDS)

    def _look(self) -> None:
        busy = any(flight.sent for flight in self.flights)
        if why := self._liveness.look(self._loop.time(), busy=busy, held=self._held):
            self.die(Unreachable(f"the engine server hangs: {why}", "see its log"))

    @property
    def _held(self) -> bool:
        return self._controls is None or self._controls.held

    async def _poll(self, client: HttpClient) -> None:
        """Read the server's metrics once a second; a change is a sign of life."""
        told = False
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            held = self._held
            try:
                answer = await client.call(self._dialect.metrics(), _POLL_DEADLINE, retry=False)
                self._liveness.answered()
                figures = self._dialect.read_metrics(answer)
            except Lost as error:
                if not error.sent:
                    await self._there()
            except (BadAnswer, DataError, WireError) as error:
                self._liveness.answered()
                if not told:
                    logger.warning("the server does not tell its figures", extra={"why": error.message})
                told = True
            else:
                if figures != self._figures:
                    self._liveness.progress()
                self._figures = figures
                # What waits for a server that stands still says nothing about its room.
                self._queued = 0 if held or self._held else figures.waiting
                self._readings += 1

    async def _there(self) -> bool:
        async with self._suspicion:
            if self._failure is not None or self._client is None:
                return False
            try:
                await self._client.call(self._dialect.ready(), _PROBE_SECONDS)
            except BadAnswer as error:
                if error.status != 503 or self._controls is None or not self._controls.held:
                    self.die(error)
            except Unreachable as error:
                self.die(error)
            except (DataError, WireError) as error:
                logger.warning("the server gave an invalid answer", extra={"why": error.message})
            return self._failure is None

    # --- conversations ---------------------------------------------------------------------------------------------

    async def _fly(self, flight: InFlightRequest, limit: int, controls: Controls) -> None:
        async with self._slots:
            await controls.passing()
            try:
                await self._converse(flight, limit, controls)
            except DataError as error:
                flight.fail(error)
            except WireError as error:
                flight.fail(error)
                await controls.tell_abort([flight.wire_id])
            except Unreachable as error:
                await self._broke_off(flight, error)
            except Exception as error:  # noqa: BLE001 - whatever a dialect or a listener raises is the request's
                flight.fail(error)

    async def _converse(self, flight: InFlightRequest, limit: int, controls: Controls) -> None:
        assert self._client is not None
        # The request keeps its adapter version to its end; the server names no version for its tokens.
        own = controls.serving if flight.request.adapter is None else None
        flight.send(controls.version, own)
        call = self._dialect.generation(
            replace(flight.request, id=flight.wire_id, max_new_tokens=limit, adapter=own or flight.request.adapter),
            version=controls.version,
        )
        async with aclosing(self._client.stream(call, self._config.weights.deadline)) as messages:
            async for message in messages:
                chunk = self._dialect.chunk(message, received=flight.heard)
                if chunk.tokens or chunk.finish is not None:
                    self._liveness.progress()
                flight.hear(chunk)
                self._tokens += len(chunk.tokens)
                if chunk.finish is not None:
                    if chunk.counts_follow:
                        await self._hear_counts(flight, messages)
                    runs = chunk.runs if own is None else None
                    flight.land(chunk.finish, self._loop.time(), runs, self._facts.vocabulary)
                    break
            else:
                raise Lost(f"{self._client.url} ended a response without a finish reason")
            await _read_out(messages)

    async def _hear_counts(self, flight: InFlightRequest, messages: AsyncGenerator[Any, None]) -> None:
        """Hear what the server counted; a response is whole without it."""
        try:
            async with asyncio.timeout(_TAIL_SECONDS):
                message = await anext(messages, None)
            if message is not None:
                flight.hear_counts(self._dialect.chunk(message, received=flight.heard))
        except (TimeoutError, StreamrlError):
            return

    async def _broke_off(self, flight: InFlightRequest, error: Unreachable) -> None:
        """Handle a stream that ended early: the server is dead, or only this connection broke.

        If the server lives, the response ends as aborted with what was heard, and its caller may continue from there.
        An error that the server reported belongs to the request.
        """
        if isinstance(error, BadAnswer) and error.status in {401, 403, 503}:
            self.die(error)
        elif await self._there():
            if isinstance(error, BadAnswer):
                flight.fail(StreamrlError(error.message, error.hint))
            else:
                logger.warning("a response broke off", extra={"request": flight.request.id, "why": error.message})
                flight.land("abort", self._loop.time())


async def _read_out(messages: Any) -> None:
    """Read to the end of the stream, so that the connection can be used again."""
    try:
        async with asyncio.timeout(_TAIL_SECONDS):
            async for _ in messages:
                pass
    except (TimeoutError, Unreachable, WireError):
        return


def _aborted(flight: InFlightRequest) -> bool:
    outcome = flight.outcome
    return not outcome.cancelled() and outcome.exception() is None and outcome.result().finish == "abort"
