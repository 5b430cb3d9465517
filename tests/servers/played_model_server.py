"""Plays a server of a reward model as a process: vLLM's routes, and the faults that a real one cannot be made to show.

`PLAYED` in its environment: `no-sleep` (its routes for it are missing), `no-wake` (waking fails), `usage` (it does not
take its command line), `slow` (it never listens). `POST /hang`: nothing is answered from then on.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from aiohttp import web

PLAYED = os.environ.get("PLAYED", "")


def make_environment(folder: Path, *, cpu: bool = False) -> Path:
    """A virtual environment, as far as anybody can see from outside, whose Python is this server."""
    (folder / "bin").mkdir(parents=True)
    python = folder / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -P {Path(__file__).resolve()} "$@"\n')
    python.chmod(0o755)
    (folder / "streamrl-engine.json").write_text(f'{{"version": "0.32.0", "cpu": {str(cpu).lower()}}}')
    return folder


def app() -> web.Application:
    asleep = hangs = False

    @web.middleware
    async def hanging(request: web.Request, handler):
        if hangs:
            await asyncio.sleep(3600)
        return await handler(request)

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    async def is_sleeping(_: web.Request) -> web.Response:
        return web.json_response({"is_sleeping": asleep})

    async def sleep(request: web.Request) -> web.Response:
        nonlocal asleep
        if PLAYED == "no-sleep":
            raise web.HTTPNotFound
        asleep = True
        print("slept", dict(request.query), flush=True)
        return web.json_response({})

    async def wake(_: web.Request) -> web.Response:
        nonlocal asleep
        if PLAYED == "no-wake":
            raise web.HTTPInternalServerError
        asleep = False
        print("woke", flush=True)
        return web.json_response({})

    async def hang(_: web.Request) -> web.Response:
        nonlocal hangs
        hangs = True
        return web.json_response({})

    made = web.Application(middlewares=[hanging])
    made.router.add_get("/health", health)
    made.router.add_get("/is_sleeping", is_sleeping)
    made.router.add_post("/sleep", sleep)
    made.router.add_post("/wake_up", wake)
    made.router.add_post("/hang", hang)
    return made


async def serve(port: int) -> None:
    runner = web.AppRunner(app())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    await ended.wait()
    print("ended", flush=True)


if __name__ == "__main__":
    if PLAYED == "usage":
        sys.stderr.write("api_server.py: error: unrecognized arguments: --nonsense\n")
        sys.exit(2)
    print(" ".join(sys.argv[1:]), flush=True)
    if PLAYED == "slow":
        signal.pause()
    asyncio.run(serve(int(sys.argv[sys.argv.index("--port") + 1])))
