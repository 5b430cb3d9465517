"""Engines that sample when the test says so, die when it says so, and note what was asked of them."""

from __future__ import annotations

import asyncio

import numpy as np

from streamrl.config import RunConfig
from streamrl.engine import Completion, EngineLoad, Request
from streamrl.errors import Unreachable, WeightsError
from streamrl.producers.engines.slots import Spans
from streamrl.producers.group.flights import ServerDied
from streamrl.producers.group.group import EngineGroup, ServerSpec
from streamrl.weight_sync.tensors import Version

STOP = 9


class Flying:
    def __init__(self, request, listener, version):
        self.request, self.listener = request, listener
        self.tokens, self.logprobs = [], []
        self.spans = Spans(version)
        self.done = asyncio.get_running_loop().create_future()

    def runs(self):
        return self.spans.runs(len(self.tokens))

    def end(self, finish):
        if not self.done.done():
            self.done.set_result(finish)


class Player:
    """An engine in the hands of a test. Its tokens are the positions in the whole sequence, 100 and up."""

    def __init__(self, name):
        self.name = name
        self.flying: dict[str, Flying] = {}
        self.asked: list[Request] = []
        self.applied: list[tuple[int, int]] = []
        self.controls: list[str] = []
        self.version = 0
        self.dead: Unreachable | None = None
        self.closed = False
        self.start_error: Exception | None = None
        self.refuse: Exception | None = None
        self.slow: asyncio.Event | None = None
        self.starting: asyncio.Event | None = None
        self.waiting = self.preemptions = 0
        self.cache_use = 0.0

    async def start(self):
        if self.starting is not None:
            await self.starting.wait()
        if self.start_error is not None:
            raise self.start_error

    async def close(self):
        self.closed = True
        for flying in self.flying.values():
            flying.end("abort")

    def _check(self):
        if self.dead is not None:
            raise self.dead

    async def generate(self, request, listener=None):
        self._check()
        flying = self.flying[request.id] = Flying(request, listener, self.version)
        self.asked.append(request)
        try:
            finish = await flying.done
        finally:
            del self.flying[request.id]
        return Completion(
            tokens=np.asarray(flying.tokens, dtype=np.int32),
            logprobs=np.asarray(flying.logprobs, dtype=np.float32),
            runs=flying.runs(),
            finish=finish,
            prompt_tokens=len(request.tokens),
            seconds=0.0,
        )

    def give(self, count=1, token=None):
        """Sample so many tokens for every request in flight."""
        for flying in list(self.flying.values()):
            for _ in range(count):
                if flying.done.done():
                    break
                at = len(flying.request.tokens) + len(flying.tokens)
                flying.tokens.append(100 + at if token is None else token)
                flying.logprobs.append(-float(at))
                if flying.listener is not None:
                    flying.listener(flying.tokens[-1:], flying.logprobs[-1:])
                if token == STOP:
                    flying.end("stop")
                elif len(flying.tokens) == flying.request.max_new_tokens:
                    flying.end("length")

    def die(self, why="killed"):
        self.dead = Unreachable(f"{self.name}: {why}")
        for flying in list(self.flying.values()):
            if not flying.done.done():
                proved = next((first for first, _ in flying.runs()[1:]), len(flying.tokens))
                flying.done.set_exception(
                    ServerDied(self.dead.message, "", flying.tokens, flying.logprobs, flying.runs(), proved)
                )

    async def abort(self, request_id=None):
        self._check()
        chosen = [f for name, f in self.flying.items() if request_id in (None, name) and not f.done.done()]
        for flying in chosen:
            flying.end("abort")
        return len(chosen)

    async def apply(self, version):
        self._check()
        if self.slow is not None:
            await self.slow.wait()
            self._check()
        if self.refuse is not None:
            raise self.refuse
        if version.number < self.version:
            raise WeightsError("older")
        self.version = version.number
        self.applied.append(version.pair)
        for flying in self.flying.values():
            flying.spans.swap(len(flying.tokens), version.number)

    async def pause(self):
        self._check()
        self.controls.append("pause")

    async def resume(self):
        self._check()
        self.controls.append("resume")

    async def sleep(self, level=1):
        self._check()
        self.controls.append(f"sleep {level}")

    async def wake(self, tags=("weights", "kv_cache")):
        self._check()
        self.controls.append(f"wake {' '.join(tags)}")

    def load(self):
        return EngineLoad(len(self.flying), self.waiting, 0, 0.0, self.version, 8, self.cache_use, self.preemptions)

    async def health(self):
        self._check()


class Stage:
    """A group of players; each life of a server is a new one."""

    def __init__(self, *names, ours=True, stops=frozenset({STOP}), **config):
        self.lives: dict[str, list[Player]] = {name: [] for name in names}
        self.prepare = lambda player: None
        self.ours = ours
        self.config = group_config(**config)
        self.group = EngineGroup(self.config, [self.spec(name) for name in names], stops)

    def spec(self, name, ours=None):
        def make():
            player = Player(name)
            self.lives.setdefault(name, []).append(player)
            self.prepare(player)
            return player

        return ServerSpec(name, make, self.ours if ours is None else ours)

    def __getitem__(self, name):
        """The present life of a server."""
        return self.lives[name][-1]

    async def __aenter__(self):
        await self.group.start()
        await until(lambda: self.group.load().servers == len(self.lives) or self.prepare.__name__ != "<lambda>")
        return self

    async def __aexit__(self, *_):
        await self.group.close()

    def ask(self, name="r", prompt=(1, 2, 3), limit=8, affinity=""):
        request = Request(name, np.asarray(prompt, dtype=np.int32), limit, affinity=affinity)
        return asyncio.create_task(self.group.generate(request))

    async def on(self, name, request="r"):
        """Wait until a request is on a server, and return that server."""
        await until(lambda: self.lives.get(name) and self[name].dead is None and request in self[name].flying)
        return self[name]

    def where(self, request="r"):
        return next((n for n, lives in self.lives.items() for player in lives if request in player.flying), None)


def group_config(**sections):
    base = {
        "model": {"context": 64},
        "sampling": {"group_size": 4, "max_new_tokens": 8},
        "engine": {"slots": 64, "start_deadline": 5},
        "supervisor": {"backoff": 0.001, "max_backoff": 0.01, "drain_deadline": 30},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return RunConfig.model_validate(base)


def version(number, epoch=1):
    return Version(pair=(epoch, number), step=number, tensors={})


async def answer(task):
    return await asyncio.wait_for(task, 20)


async def until(check, seconds=20.0):
    async with asyncio.timeout(seconds):
        while not check():  # noqa: ASYNC110
            await asyncio.sleep(0.002)
