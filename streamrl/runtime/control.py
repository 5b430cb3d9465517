"""Ties a supervisor to Redis: people on other machines see its roles and their logs, and ask it to end or to scale."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final, Protocol

import orjson

from streamrl.config import RunConfig
from streamrl.errors import Refused, StreamrlError
from streamrl.monitor.roles import KnownRole, is_alive
from streamrl.queues import embedded
from streamrl.queues.access import redact
from streamrl.queues.connection import open_to_look
from streamrl.queues.keys import BEAT_TTL
from streamrl.queues.supervision import KEPT_LINES, Asked, Published, Supervision
from streamrl.runtime.events import Event, LogLine, Notice
from streamrl.weight_sync.files import read_token

logger = logging.getLogger(__name__)

_SECONDS: Final = 0.5
_AWAY_SECONDS: Final = 1.0
_LAST_SECONDS: Final = 2.0
"""Seconds for the last words to a Redis of other people; the run's own has ended."""


async def publish(config: RunConfig, run_dir: Path, digest: str = "") -> None:
    """Make a run known to machines without its directory, so that they can join it. Unreachable: no Redis.

    `digest` names the manifests whose roles may join.
    """
    async with open_to_look(config.redis, embedded.url(config.redis, run_dir)) as connection:
        await _publish(Supervision(connection, config.name), config, run_dir, digest)


async def find_published(config: RunConfig) -> Published | None:
    """What this run has published before; None if it never did, or has no Redis of other people."""
    if config.redis.url is None:
        return None
    async with open_to_look(config.redis, config.redis.url) as connection:
        return await Supervision(connection, config.name).published()


async def _publish(supervision: Supervision, config: RunConfig, run_dir: Path, digest: str = "") -> None:
    token = read_token(run_dir) if config.weights.pulled else None
    run_file = orjson.loads((run_dir / "run.json").read_bytes())
    if config.redis.url is not None:  # observers may read it, and whoever joins has a URL of its own
        run_file["config"]["redis"]["url"] = redact(config.redis.url)
    await supervision.publish(Published(orjson.dumps(run_file), token, digest))


class Controlled(Protocol):
    """What a supervisor does when it is asked."""

    def be_asked(self, asked: Asked) -> None: ...

    def be_followed(self, reason: str) -> None: ...

    def members(self) -> Sequence[str]: ...


class RemoteControl:
    def __init__(self, config: RunConfig, run_dir: Path, on: str, states: Mapping[str, KnownRole]) -> None:
        self.id = secrets.token_hex(8)
        self._config = config
        self._run_dir = run_dir
        self._on = on
        self._began = time.time()
        self._states = states
        self._lines: dict[str, deque[bytes]] = {}
        self._claimed, self._lost = False, ""

    def note(self, event: Event) -> None:
        """Remember log lines for others; of those of an outage only the last ones."""
        if isinstance(event, LogLine) and not event.tail:
            self._lines.setdefault(event.role, deque(maxlen=KEPT_LINES)).append(event.line)

    @contextlib.asynccontextmanager
    async def alone(self, send: Callable[[Event], None]) -> AsyncIterator[None]:
        """Be the one supervisor of the run for this block; one that was killed elsewhere is waited for.

        Refused: another one is alive. While Redis is away nobody is asked.
        """
        url = self._config.redis.url
        if url is None:  # nobody but the holder of the lock of the run directory starts the run's own Redis
            yield
            return
        with _unless_away("at the start"):
            async with open_to_look(self._config.redis, url) as connection:
                await self._take_over(Supervision(connection, self._config.name), send)
        holding = asyncio.create_task(self._hold(url), name="claim")
        try:
            yield
        finally:
            holding.cancel()
            await asyncio.wait([holding])
            with _unless_away("at the end"):
                async with asyncio.timeout(_LAST_SECONDS), open_to_look(self._config.redis, url) as connection:
                    await Supervision(connection, self._config.name).leave(self.id)

    async def _hold(self, url: str) -> None:
        """Renew the claim until another supervisor has it, which `_talk` tells ours."""
        while not self._lost:
            with _unless_away("with its claim"):
                async with open_to_look(self._config.redis, url) as connection:
                    supervision = Supervision(connection, self._config.name)
                    try:
                        if not self._claimed:
                            await self._take_over(supervision, lambda _: None)
                        while await supervision.claim(self.id):  # noqa: ASYNC110 (Redis is asked)
                            await asyncio.sleep(BEAT_TTL / 5)
                        self._lost = f"{_who(await supervision.supervisor())} supervises this run now"
                    except Refused as error:
                        self._lost = error.message
            await asyncio.sleep(_AWAY_SECONDS)

    async def _take_over(self, supervision: Supervision, send: Callable[[Event], None]) -> None:
        deadline = time.monotonic() + BEAT_TTL + _AWAY_SECONDS
        first: Mapping[str, str] | None = None
        while not await supervision.claim(self.id):
            said = await supervision.supervisor()
            other = _who(said)
            if said is not None and said["host"] == socket.gethostname() and not is_alive(int(said["pid"])):
                await supervision.leave(said["id"])
            elif time.monotonic() > deadline or (first and said and said["beat"] != first["beat"]):
                raise Refused(
                    f"run {self._config.name} is running already: supervised by {other}",
                    "streamrl down ends it; or give this run a name of its own",
                )
            elif first is None:
                send(Notice(f"{other} supervised this run; waiting until it is known to be dead"))
                first = said or {}
            await asyncio.sleep(_SECONDS)
        self._claimed = True

    @contextlib.asynccontextmanager
    async def serving(self, supervisor: Controlled) -> AsyncIterator[None]:
        """Tell and listen for this block. While Redis is away nobody can ask, and the run goes on."""
        serving = asyncio.create_task(self._serve(supervisor), name="control")
        try:
            yield
        finally:
            serving.cancel()
            await asyncio.wait([serving], timeout=_LAST_SECONDS)

    async def _serve(self, supervisor: Controlled) -> None:
        redis = self._config.redis
        try:
            while True:
                try:
                    async with open_to_look(redis, embedded.url(redis, self._run_dir)) as connection:
                        return await self._talk(Supervision(connection, self._config.name), supervisor)
                except StreamrlError as error:
                    logger.debug("redis is away from the supervisor", extra={"why": error.message})
                await asyncio.sleep(_AWAY_SECONDS)
        except asyncio.CancelledError:
            raise
        except Exception:
            logger.exception("nobody can ask this supervisor any more: this is a bug")

    async def _talk(self, supervision: Supervision, supervisor: Controlled) -> None:
        """Until another supervisor has the run."""
        await _publish(supervision, self._config, self._run_dir)
        try:
            while not self._lost:
                await supervision.beat(self._said(supervisor))
                supervisor.be_asked(await supervision.asked(self.id))
                await supervision.add_lines(self._taken())
                await asyncio.sleep(_SECONDS)
            supervisor.be_followed(self._lost)
        except asyncio.CancelledError:
            with _unless_away("with its last lines"):
                await supervision.add_lines(self._taken())
            raise

    def _said(self, supervisor: Controlled) -> dict[str, str | int | float]:
        states = {name: asdict(role) for name, role in self._states.items()}
        return {
            "id": self.id,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "on": self._on,
            "state": "ready",
            "started": self._began,
            "beat": time.time(),
            "members": orjson.dumps(supervisor.members()).decode(),
            "states": orjson.dumps(states).decode(),
        }

    def _taken(self) -> Mapping[str, Sequence[bytes]]:
        taken = {role: list(lines) for role, lines in self._lines.items() if lines}
        for lines in self._lines.values():
            lines.clear()
        return taken


@contextlib.contextmanager
def _unless_away(when: str) -> Iterator[None]:
    try:
        yield
    except Refused:
        raise
    except (StreamrlError, TimeoutError) as error:
        logger.info("redis is away from the supervisor", extra={"when": when, "why": str(error)})


def _who(said: Mapping[str, str] | None) -> str:
    return "another process" if said is None else f"process {said['pid']} on {said['host']}"
