"""Learners as processes that can be killed, and a run with a player for them."""

from __future__ import annotations

import asyncio
import contextlib
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import orjson
from playing import Player, make_config

from streamrl.learner import leader, recorder
from streamrl.learner.checkpoint import Checkpoints
from streamrl.producers import player
from streamrl.queues.ledgers import open_ledgers
from streamrl.runtime.audit import audit
from tests import forked

DEADLINE = 60
RUNNERS = {"learner": leader.run_learner, "recorder": recorder.run_recorder, "player": player.run_player}


class Run:
    """A run with a player; learners are started by the test."""

    def __init__(self, redis_run, model) -> None:
        self.run_dir, self.redis_run = redis_run.run_dir, redis_run
        self._model = model
        self._processes: dict[int, ForkServerProcess] = {}
        forked.server()  # not later, when a player has leases
        self.players: list[Player] = []
        self.config = self.configure()

    def configure(self, **learner):
        self.config = make_config(self.redis_run.config, self._model, self.run_dir, **learner)
        return self.config

    def start(self, kill: str | None = None, name: str = "learner.0", **options) -> int:
        process = forked.fork(RUNNERS[name.partition(".")[0]], self.run_dir, name, kill=kill, **options)
        self._processes[process.pid] = process
        return process.pid

    def kill(self) -> None:
        """Kill every learner that is still there."""
        for process in self._processes.values():
            forked.kill(process)

    async def wait(self, pid: int) -> int:
        """Exit code, negative for a signal. A learner that does not end within the deadline is killed."""
        process = self._processes[pid]
        await asyncio.to_thread(process.join, DEADLINE)
        if process.exitcode is None:
            forked.kill(process)
            raise TimeoutError(f"{process.name} did not end: {self.log(process.name)}")
        return process.exitcode

    async def learn(self, kill: str | None = None, **options) -> int:
        return await self.wait(self.start(kill, **options))

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
        try:
            async with asyncio.timeout(DEADLINE):
                while not condition():  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise TimeoutError(self.log()) from None


def stopped(pid: int) -> bool:
    """Whether a process was stopped by SIGSTOP."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
