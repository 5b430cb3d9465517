"""A replica of its own process whose engine notes what it sampled, and episodes of six turns for it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path

from streamrl.producers.engines import hf
from streamrl.producers.episodes.episode import Episode
from streamrl.producers.episodes.tools import Tool
from streamrl.producers.worker import run_rollout
from streamrl.score import Score

TURNS = 6


class Noting:
    """Notes each completion in a file that outlives the process, before anybody sees it."""

    def __init__(self, engine, path):
        self._engine = engine
        self._file = path.open("a", buffering=1)

    def __getattr__(self, name):
        return getattr(self._engine, name)

    async def generate(self, request):
        done = await self._engine.generate(request)
        parts = request.tokens.tolist(), done.tokens.tolist(), done.logprobs.tobytes().hex()
        self._file.write(json.dumps(parts) + "\n")
        return done


async def serve(role):
    real = hf.HfEngine
    note = role.run_dir / f"sampled-{os.getpid()}.jsonl"
    hf.HfEngine = lambda config, seed: Noting(real(config, seed), note)
    await run_rollout(role)


async def add(a: int, b: int) -> int:
    """Add two numbers."""
    await asyncio.sleep(0.1)  # time for a death
    return a + b


async def clock(a: int, b: int) -> int:
    """Tell the time."""
    await asyncio.sleep(0.1)
    return time.monotonic_ns()


class Honest(Episode):
    deterministic = True
    tool = Tool.of(add)

    def tool_of(self, task):
        return self.tool

    async def run(self, task, chat):
        messages, tool = task.messages, self.tool_of(task)
        for _ in range(TURNS):
            reply = await chat(messages, [tool])
            messages.append(reply.message)
            messages += await chat.answer(reply) if reply.calls else [{"role": "user", "content": "go on"}]
        return 1.0


async def die(a: int, b: int) -> int:
    """Take the process along."""
    os.kill(os.getpid(), signal.SIGKILL)
    return a + b


class Deadly(Honest):
    """The tool of line 1 of the data set kills its process."""

    def tool_of(self, task):
        return Tool.of(die, "add") if task.line == 1 else self.tool


class Blocking(Honest):
    """Its tool holds the event loop until the file `gate` is there."""

    def __init__(self, gate):
        self._gate = Path(gate)

    def tool_of(self, task):
        return Tool.of(self.add)

    async def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        while not self._gate.exists():
            time.sleep(0.01)  # noqa: ASYNC251 (as code that should not)
        return a + b


class Counter:
    """An environment with a state. Its tool notes each time that it runs, and never gives an answer twice.

    `name` is that of the sample in all its lives, because it is part of the state.
    """

    def __init__(self, notes):
        self._notes = Path(notes)

    def reset(self, **row):
        self.name, self.said = os.urandom(4).hex(), []

    async def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        self.said.append(os.urandom(4).hex())
        with self._notes.open("a") as notes:
            notes.write(f"{self.name} {len(self.said)} {self.said[-1]}\n")
        await asyncio.sleep(0.1)  # time for a death
        return self.said[-1]

    def get_state(self):
        return [self.name, self.said]

    def set_state(self, state):
        self.name, self.said = state

    def get_reward(self):
        return Score(len(self.said), {f"{number} {said}": 1.0 for number, said in enumerate(self.said, 1)})


class Changing(Honest):
    """Its tool answers otherwise each time, and it does not say the contrary."""

    deterministic = False
    tool = Tool.of(clock, "add")
