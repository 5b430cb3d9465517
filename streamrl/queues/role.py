"""What every role's coroutine gets: configuration, ledgers, stop signal, heartbeat and records."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import orjson

from streamrl.config import RunConfig
from streamrl.errors import StreamrlError, unwrapped
from streamrl.queues import embedded
from streamrl.queues.connection import Connection, open_to_look
from streamrl.queues.keys import BEAT_TTL, Keys
from streamrl.queues.ledgers import Ledgers, open_ledgers
from streamrl.queues.registry import RoleRegistry

logger = logging.getLogger(__name__)

BEAT_SECONDS: Final = 1.0


@dataclass
class Role:
    """One role of a run, as its coroutine sees it: `async def run_feeder(role: Role) -> None`.

    `stop` is set by the first SIGTERM: drain and return. `status` (version, progress) is shown beside pid, host and
    state.
    """

    name: str
    config: RunConfig
    run_dir: Path
    ledgers: Ledgers
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    status: dict[str, int | float | str] = field(default_factory=dict)
    last_record: dict[str, Any] = field(default_factory=dict)
    _ready: asyncio.Event = field(default_factory=asyncio.Event)
    _records: int | None = None
    _torn: bool = False
    _unwritable: bool = False
    _began: float = field(default_factory=time.time)

    def ready(self) -> None:
        if not self._ready.is_set():
            logger.info("role ready", extra={"seconds": round(time.time() - self._began, 3)})
        self._ready.set()

    @property
    def is_ready(self) -> bool:
        return self._ready.is_set()

    def record(self, line: dict[str, Any]) -> None:
        """Append one line to `metrics/<name>.jsonl`, with `at` (wall clock) and `mono` (monotonic clock), in seconds.

        One write per line, so a kill leaves no half line; numbers that are not finite become null. Safe from any
        thread. On a full disk the line is lost, with a warning, because the role matters more.
        """
        self.last_record = line
        data = {"at": 0.0, "mono": 0.0, **line} | {"at": time.time(), "mono": time.monotonic()}
        try:
            if self._records is None:
                path = self.run_dir / "metrics" / f"{self.name}.jsonl"
                path.parent.mkdir(parents=True, exist_ok=True)
                self._records = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            row = orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)
            if self._torn:
                row = b"\n" + row
            written = os.write(self._records, row)
            self._torn = written != len(row)
        except OSError as error:
            if not self._unwritable:
                extra = {"error": str(error), "hint": "check space and permissions of the run directory"}
                logger.warning("metrics cannot be written", extra=extra)
            self._unwritable = True
        else:
            self._unwritable = False

    async def beat(self) -> None:
        state = "draining" if self.stop.is_set() else "ready" if self.is_ready else "starting"
        await self.ledgers.roles.beat(self.name, self._shown(state), BEAT_TTL)

    def say_blocked(self, why: str, keep: Callable[[Connection], Awaitable[None]] | None = None) -> None:
        """Write a heartbeat from another thread, with a connection of its own: the event loop is blocked by `why`.

        `keep` gets that connection, for what the event loop would do meanwhile.
        """
        redis = self.config.redis

        async def say() -> None:
            async with open_to_look(redis, embedded.url(redis, self.run_dir)) as connection:
                shown = {**self._shown("blocked"), "trouble": why}
                await RoleRegistry(connection, Keys(self.config.name)).beat(self.name, shown, BEAT_TTL)
                if keep is not None:
                    await keep(connection)

        with contextlib.suppress(StreamrlError):
            asyncio.run(say())

    def _shown(self, state: str) -> dict[str, int | float | str]:
        about: dict[str, int | float | str] = {"pid": os.getpid(), "host": socket.gethostname(), "state": state}
        return {**self.status, **about, "started": self._began, "beat": time.time()}

    async def keep_beating(self) -> None:
        """Write a heartbeat each second, and at once when the role becomes ready, until cancelled.

        Unreachable: Redis was away for longer than `redis.patience`, so the role cannot go on.
        """
        while True:
            await self.beat()
            if self.is_ready:
                await asyncio.sleep(BEAT_SECONDS)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEAT_SECONDS):
                    await self._ready.wait()

    def close(self) -> None:
        if self._records is not None:
            os.close(self._records)
            self._records = None


@contextlib.asynccontextmanager
async def open_role(
    name: str, config: RunConfig, run_dir: Path, stop: asyncio.Event | None = None
) -> AsyncIterator[Role]:
    """Connect to the run and keep the heartbeat of a role for this block.

    If the heartbeat fails (Redis away for too long), the block is cancelled and the error raised from here.
    """
    async with open_ledgers(config, run_dir) as ledgers:
        role = Role(name, config, run_dir, ledgers, stop or asyncio.Event())
        try:
            with unwrapped():
                async with asyncio.TaskGroup() as tasks:
                    beating = tasks.create_task(role.keep_beating(), name=f"heartbeat {name}")
                    leaving = tasks.create_task(_leave(role), name=f"leave {name}")
                    yield role
                    beating.cancel()
                    leaving.cancel()
        finally:
            role.close()


async def _leave(role: Role) -> None:
    await role.stop.wait()
    role.ledgers.connection.leave()
