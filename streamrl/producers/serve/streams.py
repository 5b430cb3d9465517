"""One response as server-sent events: what was sampled goes out in pieces, and a client that hangs up aborts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import orjson
from starlette.types import Message, Receive, Send

from streamrl.engine import Completion, Engine, Request
from streamrl.errors import Unreachable

Describe: TypeAlias = Callable[[Exception], dict[str, Any]]


class _News:
    """What a request has sampled and not sent."""

    def __init__(self, interval: int) -> None:
        self.due = asyncio.Event()
        self.sent = 0
        self._interval = interval
        self._tokens: list[int] = []
        self._logprobs: list[float] = []

    def hear(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        self._tokens += tokens
        self._logprobs += logprobs
        if len(self._tokens) >= self._interval:
            self.due.set()

    def take(self) -> dict[str, Any] | None:
        """Return the next event, None when it is not worth one."""
        self.due.clear()
        if len(self._tokens) < self._interval:
            return None
        event = {"tokens": self._tokens, "logprobs": self._logprobs}
        self.sent += len(self._tokens)
        self._tokens, self._logprobs = [], []
        return event

    def last(self, done: Completion) -> dict[str, Any]:
        """Return the event that ends the response, with all that was not sent."""
        return {
            "tokens": done.tokens[self.sent :].tolist(),
            # the shortest digits of each float32 are those of the number that was sampled with
            "logprobs": done.logprobs[self.sent :].astype(float).tolist(),
            "finish": done.finish,
            "runs": done.runs,
            "prompt_tokens": done.prompt_tokens,
        }


class ResponseStream:
    """A response that is being sampled for one client.

    Args:
        engine: that samples.
        request: what.
        interval: tokens between two events.
    """

    def __init__(self, engine: Engine, request: Request, interval: int) -> None:
        self._news = _News(interval)
        self._sampling = asyncio.create_task(engine.generate(request, self._news.hear), name=f"generate {request.id}")
        self._sampling.add_done_callback(lambda _: self._news.due.set())

    async def refusal(self) -> Exception | None:
        """Return what is wrong with the request when the engine says so at once, before anything was sent."""
        await asyncio.sleep(0)
        if self._sampling.done() and not self._sampling.cancelled():
            error = self._sampling.exception()
            return error if isinstance(error, Exception) else None
        return None

    async def cancel(self) -> None:
        """Abort; the tokens are lost."""
        self._sampling.cancel()
        await asyncio.gather(self._sampling, return_exceptions=True)

    async def run(self, receive: Receive, send: Send, describe: Describe) -> None:
        """Send the events until the response ends or the client leaves.

        The death of the engine breaks the connection off: the client has what it has, and must look after the server.

        Args:
            receive: of ASGI.
            send: of ASGI.
            describe: makes the event of an error.

        Raises:
            Unreachable: the engine died.
        """
        leaving = asyncio.create_task(_disconnected(receive), name="disconnect")
        leaving.add_done_callback(lambda _: self._news.due.set())
        try:
            await send(_START)
            while not self._sampling.done():
                await self._news.due.wait()
                if leaving.done():
                    return
                if not self._sampling.done() and (event := self._news.take()) is not None:
                    await send(_event(event, more=True))
            await send(_event(self._end(describe), more=False))
        finally:
            leaving.cancel()
            await self.cancel()
            await asyncio.gather(leaving, return_exceptions=True)

    def _end(self, describe: Describe) -> dict[str, Any]:
        try:
            return self._news.last(self._sampling.result())
        except Unreachable:
            raise
        except Exception as error:  # noqa: BLE001 - the client reads it
            return describe(error)


_START: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")],
}


def _event(event: dict[str, Any], *, more: bool) -> Message:
    return {"type": "http.response.body", "body": b"data: " + orjson.dumps(event) + b"\n\n", "more_body": more}


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
