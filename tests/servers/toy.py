"""A small real HTTP server with an engine's routes and a way to go wrong at each, and the dialect that speaks to it.

Run as a script it is a process to be killed: `python toy.py PORT`. Of its environment: `TOY_FREE=1` samples by itself,
`TOY_STEPS` is the number of tokens that each request gets at once, `TOY_ABOUT` is JSON that it says of itself.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

from aiohttp import web

VOCABULARY = 24
FAULT = web.RequestKey("fault", object)


class Toy:
    """Decodes one token per step and request; a step is made when a test calls `step`, or by itself when `free`.

    `faults[path]` is a list, taken from the front, of what goes wrong: a status, "hang", "drop", "junk", "html", or
    for /generate what happens after one token: "die", "nan", "short", "silent", "late".
    """

    def __init__(self, *, free: bool = True) -> None:
        self.free = free
        self.steps = 0
        self.paused = False
        self.version = 0
        self.label = ""
        self.faults: dict[str, list[Any]] = {}
        self.calls: Counter[str] = Counter()
        self.bodies: list[tuple[str, Any]] = []
        self.about = {"version": "1", "model": "toy", "context": 64}
        self.figures: dict[str, Any] = {}
        self.sampled = 0
        self.running: dict[str, dict[str, Any]] = {}
        self.tell_runs = True
        self.cached: int | None = None  # told after the last token
        self.key: str | None = None
        self.fetch: list[str] = []  # what the next prefetches answer
        self._changed = asyncio.Condition()

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._faulty])
        app.router.add_post("/generate", self._generate)
        for path in ("pause", "resume", "prefetch", "update", "finish", "abort", "adapters", "sleep", "wake"):
            app.router.add_post(f"/{path}", getattr(self, f"_{path}", self._fine))
        app.router.add_post("/step", self._step)
        for path in ("ready", "about", "figures", "label", "log"):
            app.router.add_get(f"/{path}", getattr(self, f"_{path}"))
        return app

    @web.middleware
    async def _faulty(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.calls[request.path] += 1
        if request.method == "POST":
            self.bodies.append((request.path, await request.json() if request.can_read_body else None))
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "no key"}, status=401)
        if request.path == "/generate" and (log := os.environ.get("TOY_LOG")):
            print(Path(log).read_text(), flush=True)
            message = "EngineCore encountered an issue. See stack trace (above) for the root cause."
            return web.json_response({"error": {"message": message}}, status=500)
        fault = self.faults[request.path].pop(0) if self.faults.get(request.path) else None
        if isinstance(fault, int):
            return web.json_response({"error": {"message": f"fault {fault}"}}, status=fault)
        if fault == "hang":
            await asyncio.sleep(3600)
        if fault == "drop":
            request.transport.close()
        if fault == "junk":
            return web.Response(body=b"{nonsense", content_type="application/json")
        if fault == "html":
            return web.Response(body=b"<html>", content_type="text/html")
        if callable(fault):
            await fault()
        request[FAULT] = fault
        return await handler(request)

    async def _fine(self, _: web.Request) -> web.Response:
        return web.json_response({})

    async def _prefetch(self, _: web.Request) -> web.Response:
        return web.json_response({"state": self.fetch.pop(0) if self.fetch else ""})

    async def _ready(self, _: web.Request) -> web.Response:
        return web.json_response({}, status=503 if self.paused else 200)

    async def _about(self, _: web.Request) -> web.Response:
        return web.json_response(self.about)

    async def _figures(self, _: web.Request) -> web.Response:
        figures = {"running": len(self.running), "waiting": 0, "tokens_sampled": self.sampled, **self.figures}
        return web.json_response(figures)

    async def _label(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.label})

    async def _log(self, _: web.Request) -> web.Response:
        return web.json_response({"pid": os.getpid(), "bodies": self.bodies})

    async def _step(self, request: web.Request) -> web.Response:
        await self.step((await request.json())["count"])
        return web.json_response({})

    async def _pause(self, _: web.Request) -> web.Response:
        async with self._changed:
            self.paused = True
            self._changed.notify_all()
        return web.json_response({})

    _sleep = _pause

    async def _resume(self, _: web.Request) -> web.Response:
        async with self._changed:
            self.paused = False
            self._changed.notify_all()
        return web.json_response({})

    async def _update(self, request: web.Request) -> web.Response:
        assert self.paused
        body = await request.json()
        self.version, self.label = body["version"], body["label"]
        return web.json_response({})

    async def _abort(self, request: web.Request) -> web.Response:
        async with self._changed:
            for name in (await request.json())["ids"]:
                if name in self.running:
                    self.running[name]["abort"] = True
            self._changed.notify_all()
        return web.json_response({})

    async def step(self, count: int = 1) -> None:
        """Let every running request sample `count` tokens; returns when they have done so."""
        async with self._changed:
            for one in self.running.values():
                one["permits"] += count
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self.paused or not any(o["permits"] for o in self.running.values()))

    async def started(self, count: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.running) >= count)

    async def idle(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: not self.running)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        fault = request[FAULT]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        one = {"permits": self.steps, "abort": False}
        runs: list[list[int]] = []
        sampled = 0
        async with self._changed:
            self.running[body["id"]] = one
            self._changed.notify_all()
        try:
            while True:
                async with self._changed:
                    await self._changed.wait_for(
                        lambda: one["abort"] or (not self.paused and (self.free or one["permits"] > 0))
                    )
                if one["abort"]:
                    await self._say(response, [], [], "abort", runs)
                    break
                if not runs or runs[-1][1] != self.version:
                    runs.append([sampled, self.version])
                sampled += 1
                self.sampled += 1
                token = sampled % VOCABULARY
                logprob = -0.5 - self.version / 100
                if sampled == 2 and fault == "die":
                    request.transport.close()
                    break
                if sampled == 2 and fault == "short":
                    return response
                if sampled == 2 and fault == "silent":
                    await asyncio.sleep(3600)
                if sampled == 2 and fault == "nan":
                    await response.write(b'data: {"tokens": [3], "logprobs": [NaN], "finish": null, "runs": null}\n\n')
                if fault == "outside":
                    token = VOCABULARY
                finish = "length" if sampled >= body["max"] else None
                await self._say(response, [token], [logprob], finish, runs)
                async with self._changed:
                    one["permits"] = max(0, one["permits"] - 1)
                    self._changed.notify_all()
                if finish:
                    if self.cached is not None and fault is None:
                        counts = {"tokens": [], "logprobs": [], "finish": None, "runs": None, "cached": self.cached}
                        await response.write(b"data: " + json.dumps(counts).encode() + b"\n\n")
                    if fault == "late":  # never closes its stream
                        await asyncio.sleep(3600)
                    break
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
        except (ConnectionResetError, asyncio.CancelledError):
            pass
        finally:
            async with self._changed:
                del self.running[body["id"]]
                self._changed.notify_all()
        return response

    async def _say(self, response: Any, tokens: Any, logprobs: Any, finish: Any, runs: Any) -> None:
        told = runs if finish and self.tell_runs else None
        message = {"tokens": tokens, "logprobs": logprobs, "finish": finish, "runs": told}
        await response.write(b"data: " + json.dumps(message).encode() + b"\n\n")


async def until(condition: Any, seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for sets no event
            await asyncio.sleep(0.005)


@asynccontextmanager
async def serving(toy: Toy, port: int = 0):
    """Yield the URL of a toy in this event loop."""
    runner = web.AppRunner(toy.app(), handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def _main(port: int) -> None:
    toy = Toy(free=os.environ.get("TOY_FREE") == "1")
    toy.steps = int(os.environ.get("TOY_STEPS", "0"))
    toy.about |= json.loads(os.environ.get("TOY_ABOUT", "{}"))
    async with serving(toy, port):
        print(f"toy at {port}, key {os.environ.get('TOY_KEY')}", flush=True)
        if os.environ.get("TOY_ORPHANS"):
            # one in the group of the server, one that has left it, one whose parent is gone
            for command in ("exec sleep 1000", "exec setsid sleep 1001", "(setsid sleep 1002 &) ; exit"):
                subprocess.Popen(["/bin/sh", "-c", command])  # noqa: ASYNC220
        if os.environ.get("TOY_STUBBORN"):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        await asyncio.sleep(3600)


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1])))


# --- the dialect: below the script, which must not import streamrl ---------------------------------------------------


def make_dialect() -> Any:
    from streamrl.errors import WireError
    from streamrl.http import Call
    from streamrl.servers.dialect import Chunk, Launch, ServerInfo, ServerMetrics

    class ToyDialect:
        kind: ClassVar[str] = "toy"
        fixed: bool = False

        def __init__(self) -> None:
            self.environ: dict[str, str] = {"TOY_FREE": "1"}
            self.argv: Sequence[str] | None = None
            self.ports: list[int] = []
            self.ready = Call("GET", "/ready", repeatable=True)
            self.pause = [Call("POST", "/pause", {}, repeatable=True)]
            self.resume = [Call("POST", "/resume", {}, repeatable=True)]
            self.label = Call("GET", "/label", repeatable=True)
            self.metrics = Call("GET", "/figures", repeatable=True)

        def launch(self, *, model, port, seed, host="127.0.0.1", key=None):
            self.ports.append(port)
            argv = self.argv or [sys.executable, str(Path(__file__)), str(port)]
            return Launch([part.replace("PORT", str(port)) for part in argv], self.environ)

        def about(self):
            return [Call("GET", "/about", repeatable=True)]

        def read_about(self, answers):
            try:
                about = dict(answers[0])
                probe = about.pop("probe", None)
                return ServerInfo(**about, probe=None if probe is None else tuple(probe))
            except (TypeError, ValueError) as error:
                raise WireError("no toy") from error

        def generation(self, request, *, version, salt="", adapter=None):
            body = {"id": request.id, "tokens": request.tokens.tolist(), "max": request.max_new_tokens}
            return Call("POST", "/generate", {**body, "salt": f"{salt}-{version}", "adapter": adapter})

        def chunk(self, message, *, received):
            try:
                runs = message["runs"]
                return Chunk(
                    message["tokens"],
                    message["logprobs"],
                    message["finish"],
                    None if runs is None else [(a, b) for a, b in runs],
                    cached_tokens=message.get("cached"),
                )
            except (KeyError, TypeError) as error:
                raise WireError("no chunk of a toy") from error

        def abort(self, request_id):
            return [Call("POST", "/abort", {"ids": [request_id]}, repeatable=True)]

        def prefetch(self, version):
            return [Call("POST", "/prefetch", {"version": version.number}, repeatable=True)]

        def read_prefetch(self, answer):
            return answer["state"]

        def update(self, version, label):
            return [Call("POST", "/update", {"version": version.number, "label": label}), Call("POST", "/finish", {})]

        def sleep(self, level):
            return [Call("POST", "/sleep", {"level": level}, repeatable=True)]

        def wake(self, tags):
            return [Call("POST", "/wake", {"tags": list(tags)}, repeatable=True)]

        def load_adapter(self, name, folder):
            return Call("POST", "/adapters", {"name": name})

        def unload_adapter(self, name):
            return Call("POST", "/adapters", {"drop": name})

        def read_metrics(self, answer):
            return ServerMetrics(**answer)

    return ToyDialect()
