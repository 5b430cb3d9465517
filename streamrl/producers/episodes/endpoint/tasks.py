"""Tasks of samples that wait for a program that fetches one."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final

from streamrl.producers.sampler import CannotNow

PATIENCE: Final = 60.0
"""Seconds without a program, after which prompts are handed back: another process may have some."""
_LOOK_SECONDS: Final = 0.25


class _Offer:
    def __init__(self, body: Mapping[str, Any]) -> None:
        self.body = body
        self.taken = asyncio.Event()


class TaskDesk:
    """Where samples wait for programs, and programs for samples; the first come first. For one event loop."""

    def __init__(self) -> None:
        self._offers: deque[_Offer] = deque()
        self._more = asyncio.Event()
        self._polls = self._played = 0
        self._heard = asyncio.get_running_loop().time()

    @property
    def places(self) -> int:
        """Programs that play a task or ask for one."""
        return self._played + self._polls

    @contextlib.asynccontextmanager
    async def played(
        self, body: Mapping[str, Any], clock: contextlib.AbstractAsyncContextManager[None], waits: Callable[[], None]
    ) -> AsyncIterator[None]:
        """Wait with `clock` until a program has fetched the task, which it plays during the block.

        `waits` is called again and again meanwhile.

        CannotNow: no program has asked for a while, and none is at work.
        """
        offer = _Offer(body)
        self._offers.append(offer)
        self._more.set()
        try:
            async with clock:
                while not offer.taken.is_set():
                    waits()
                    if not self.places and asyncio.get_running_loop().time() - self._heard > PATIENCE:
                        raise CannotNow(f"no program has asked for a task for {PATIENCE:g} s")
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_LOOK_SECONDS):
                            await offer.taken.wait()
            yield
        finally:
            if offer.taken.is_set():
                self._played -= 1
                self._heard = asyncio.get_running_loop().time()
            else:
                self._offers.remove(offer)

    async def fetch(self, seconds: float, gone: Callable[[], bool]) -> Mapping[str, Any] | None:
        """The next task; None: there was none for so long, or the client has gone."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        self._polls += 1
        try:
            while not gone():
                if self._offers:
                    offer = self._offers.popleft()
                    offer.taken.set()
                    self._played += 1
                    return offer.body
                if loop.time() >= end:
                    return None
                self._more.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(min(end, loop.time() + 1.0)):
                        await self._more.wait()
            return None
        finally:
            self._polls -= 1
            self._heard = loop.time()
