"""Threads for sync rewards that may hang: a call can be given up without blocking the loop or the exit."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

_R = TypeVar("_R")
_Job = tuple[Callable[..., Any], Any, asyncio.Future[Any], asyncio.AbstractEventLoop]


class CallThreads:
    """Daemon threads that run sync functions for coroutines of one event loop.

    A thread cannot be killed. When the caller of `run` is cancelled at its deadline, the thread is abandoned: it is
    used again if the function ever returns, and otherwise dies with the process. The standard executor joins its
    threads at exit, so one hanging reward would keep the whole process from ending. `abandoned` counts these calls,
    `started` the threads.
    """

    def __init__(self) -> None:
        self.abandoned = 0
        self.started = 0
        self._idle: list[queue.SimpleQueue[_Job]] = []

    async def run(self, call: Callable[..., _R], argument: Any) -> _R:
        """Return `call(argument)`, run in a thread. `SystemExit` and the like become `RuntimeError`."""
        loop = asyncio.get_running_loop()
        inbox = self._idle.pop() if self._idle else self._start()
        future: asyncio.Future[_R] = loop.create_future()
        inbox.put((call, argument, future, loop))
        try:
            return await future
        except asyncio.CancelledError:
            self.abandoned += 1
            raise

    def _start(self) -> queue.SimpleQueue[_Job]:
        inbox: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self.started += 1
        threading.Thread(target=self._work, args=(inbox,), name=f"reward-{self.started}", daemon=True).start()
        return inbox

    def _work(self, inbox: queue.SimpleQueue[_Job]) -> None:
        while True:
            call, argument, future, loop = inbox.get()
            result, error = None, None
            try:
                result = call(argument)
            except Exception as raised:  # noqa: BLE001 (handed to the caller of `run`)
                error = raised
            except BaseException as raised:  # noqa: BLE001 (a thread must not end the process or vanish)
                error = RuntimeError(f"{type(raised).__name__}: {raised}").with_traceback(raised.__traceback__)
            try:
                loop.call_soon_threadsafe(self._finish, inbox, future, result, error)
            except RuntimeError:
                return  # the loop is closed: the process is ending
            del call, argument, future, result, error

    def _finish(
        self, inbox: queue.SimpleQueue[_Job], future: asyncio.Future[Any], result: Any, error: Exception | None
    ) -> None:
        self._idle.append(inbox)
        if future.cancelled():
            self.abandoned -= 1
        elif error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)
