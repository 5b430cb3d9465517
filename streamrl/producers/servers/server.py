"""`Engine` over a server: one pooled HTTP session, any dialect, a server of our own or one that runs already."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from streamrl.config import RunConfig
from streamrl.producers.engines.contract import (
    Completion,
    EngineLoad,
    Listener,
    MemoryTag,
    PauseMode,
    Request,
)
from streamrl.producers.servers.dialect import Dialect
from streamrl.producers.servers.flights import ServerDied
from streamrl.producers.servers.managed import ManagedServer
from streamrl.weight_sync.version import Version

__all__ = ["ServerDied", "ServerEngine"]


class ServerEngine:
    """`Engine` over one server. One life: after its death or `close`, make another one.

    Its death (the process ends, connections are refused, no sign of life for a deadline, a control that does not end)
    fails every waiting `generate` with `ServerDied`, which carries what that request had heard.

    Args:
        dialect: of the server.
        config: the run.
        url: a server that runs already; exactly one of `url` and `server` is given.
        server: one to be started by `start` and stopped by `close`.
    """

    pause_seconds: float
    """How long decoding stood still for the last `apply`."""

    def __init__(
        self, dialect: Dialect, config: RunConfig, *, url: str | None = None, server: ManagedServer | None = None
    ) -> None:
        raise NotImplementedError

    async def start(self) -> None:
        """See `Engine.start`; also raises `Unreachable` when no server answers."""
        raise NotImplementedError

    async def close(self) -> None:
        """See `Engine.close`."""
        raise NotImplementedError

    async def generate(self, request: Request, listener: Listener | None = None) -> Completion:
        """See `Engine.generate`. Raises `ServerDied` when the server dies meanwhile."""
        raise NotImplementedError

    async def abort(self, request_id: str | None = None) -> int:
        """See `Engine.abort`."""
        raise NotImplementedError

    async def pause(self, mode: PauseMode = "keep") -> None:
        """See `Engine.pause`."""
        raise NotImplementedError

    async def resume(self) -> None:
        """See `Engine.resume`."""
        raise NotImplementedError

    async def apply(self, version: Version) -> None:
        """See `Engine.apply`."""
        raise NotImplementedError

    async def sleep(self, level: Literal[0, 1, 2] = 1) -> None:
        """See `Engine.sleep`."""
        raise NotImplementedError

    async def wake(self, tags: Sequence[MemoryTag] = ("weights", "kv_cache")) -> None:
        """See `Engine.wake`."""
        raise NotImplementedError

    async def load_adapter(self, name: str, folder: Path) -> None:
        """See `Engine.load_adapter`."""
        raise NotImplementedError

    async def unload_adapter(self, name: str) -> None:
        """See `Engine.unload_adapter`."""
        raise NotImplementedError

    def load(self) -> EngineLoad:
        """See `Engine.load`."""
        raise NotImplementedError

    async def health(self) -> None:
        """See `Engine.health`."""
        raise NotImplementedError
