"""Learners as processes that can be killed, and a run with a player for them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import orjson
from playing import Player, make_config

from streamrl.learner.checkpoint import Checkpoints
from streamrl.queues.ledgers import open_ledgers
from streamrl.runtime.audit import audit

DEADLINE = 60


class Zygote:
    """Starts learners that can be killed."""

    def __init__(self) -> None:
        command = [sys.executable, str(Path(__file__).parent / "zygote.py")]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)
        assert self._line() == "ready"

    def _line(self) -> str:
        return self.process.stdout.readline().strip()

    def ask(self, **order) -> int:
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return int(self._line())

    def start(self, run_dir: Path, **order) -> int:
        return self.ask(start=str(run_dir), **order)

    async def wait(self, pid: int) -> int:
        """Exit code, negative for a signal. A learner that does not end within the deadline is killed."""
        waiting = asyncio.create_task(asyncio.to_thread(self.ask, wait=pid))
        done, _ = await asyncio.wait([waiting], timeout=DEADLINE)
        if not done:
            os.kill(pid, signal.SIGKILL)
            raise TimeoutError(f"the learner {pid} did not end: {await waiting}")
        return waiting.result()

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


class Run:
    """A run with a player; learners are started by the test."""

    def __init__(self, redis_run, model, zygote) -> None:
        self.run_dir, self.redis_run = redis_run.run_dir, redis_run
        self._model, self._zygote = model, zygote
        self.pids: list[int] = []
        self.players: list[Player] = []
        self.config = self.configure()

    def configure(self, **learner):
        self.config = make_config(self.redis_run.config, self._model, self.run_dir, **learner)
        return self.config

    def start(self, kill: str | None = None, **order) -> int:
        self.pids.append(self._zygote.start(self.run_dir, kill=kill, **order))
        return self.pids[-1]

    def kill(self) -> None:
        """Kill every learner that is still there."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def wait(self, pid: int) -> int:
        return await self._zygote.wait(pid)

    async def learn(self, kill: str | None = None, **order) -> int:
        return await self.wait(self.start(kill, **order))

    @contextlib.asynccontextmanager
    async def play(self, **options):
        async with open_ledgers(self.config, self.run_dir) as ledgers:
            player = Player(ledgers, self.config, **options)
            playing = asyncio.create_task(player.run())
            self.players.append(player)
            try:
                yield player
            finally:
                self.players.remove(player)
                playing.cancel()
                await asyncio.gather(playing, return_exceptions=True)

    async def audit(self):
        """Audit with every player at rest, so that no group is on the move."""
        async with contextlib.AsyncExitStack() as rest, open_ledgers(self.config, self.run_dir) as ledgers:
            for player in self.players:
                await rest.enter_async_context(player.working)
            found = await audit(self.config, self.run_dir, ledgers)
        assert (found.lost, found.twice, found.faults) == (0, 0, []), (found, self.log())
        return found

    def log(self, name: str = "learner.0") -> str:
        path = self.run_dir / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def steps(self, name: str = "learner.0") -> list[dict]:
        path = self.run_dir / "metrics" / f"{name}.jsonl"
        # The learner may be in the middle of its last line.
        whole = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""
        return [orjson.loads(line) for line in whole.splitlines()]

    def finished(self) -> dict:
        return orjson.loads((self.run_dir / "finished.json").read_bytes())

    def newest(self):
        return Checkpoints(self.run_dir / "checkpoints").greatest(None, 0)

    async def until(self, condition) -> None:
        """Look until it is so; files and processes ring no bell."""
        async with asyncio.timeout(DEADLINE):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)


def stopped(pid: int) -> bool:
    """Whether a process was stopped by SIGSTOP."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
