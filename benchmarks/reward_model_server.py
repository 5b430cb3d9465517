"""A reward model as `rewards.py` needs one: it takes requests in batches, and each batch takes as long as on a device.

    python benchmarks/reward_model_server.py BATCH SECONDS      prints its port

`POST /score {"text": ...}` answers `{"score": length of the text}`.
"""

from __future__ import annotations

import asyncio
import sys

import orjson
from aiohttp import web

_Waiting = tuple[asyncio.Future[float], str]


class Model:
    """One batch at a time, of at most `batch` requests, in `seconds`."""

    def __init__(self, batch: int, seconds: float) -> None:
        self._batch = batch
        self._seconds = seconds
        self._waiting: asyncio.Queue[_Waiting] = asyncio.Queue()

    async def answer(self, request: web.Request) -> web.Response:
        """Answer one request when its batch is done."""
        text = orjson.loads(await request.read())["text"]
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.put_nowait((future, text))
        return web.Response(body=orjson.dumps({"score": await future}), content_type="application/json")

    async def run(self) -> None:
        """Compute batches until cancelled."""
        while True:
            batch = [await self._waiting.get()]
            while len(batch) < self._batch and not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            await asyncio.sleep(self._seconds)
            for future, text in batch:
                if not future.done():
                    future.set_result(float(len(text)))


async def main(batch: int, seconds: float) -> None:
    model = Model(batch, seconds)
    app = web.Application()
    app.router.add_post("/score", model.answer)
    app.router.add_get("/", lambda _: web.Response(text="here"))
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await model.run()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2])))
