"""A whole small run: real feeder, rollout replica and reward worker in this process, a real learner in its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from pathlib import Path

from streamrl.consumers.worker import run_reward_worker
from streamrl.learner.leader import run_learner
from streamrl.producers.feeder import run_feeder
from streamrl.producers.worker import run_rollout
from streamrl.queues import Role
from streamrl.queues.ledger import Ledger
from streamrl.runtime.audit import Audit, audit
from tests.forked import kill
from tests.producers.producer_kit import Run, until, write_prompts

ROLES = {"feeder.0": run_feeder, "rollout.0": run_rollout, "reward.0": run_reward_worker}


class Pipeline:
    """A run of `prompts` groups, two a step; ends by itself at the end of its data."""

    def __init__(self, run: Run, prompts: int = 24) -> None:
        self.run, self.prompts = run, prompts
        write_prompts(run.train, prompts)
        run.set("data", epochs=1).set("engine", slots=8, threads=1)
        run.set("sampling", group_size=4).set("learner", threads=1, device="cpu", lr=1e-3).set("checkpoint", every=2)
        run.set(None, rewards=[{"use": "parity_reward:parity"}], plugin_paths=[str(Path(__file__).parent)])
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._roles: dict[str, Role] = {}
        self._stack: contextlib.AsyncExitStack

    @contextlib.asynccontextmanager
    async def running(self):
        """All roles are started; at the end those in this process are stopped, and have to end without an error."""
        learner = self.run.spawn(run_learner, "learner.0")
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(kill, learner)
            self._stack, self.learner = stack, learner
            for name in ROLES:
                await self._start(name)
            yield self

    async def _start(self, name: str) -> None:
        ledgers = await self._stack.enter_async_context(self.run.open())
        running = self.run.running(ROLES[name], name, ledgers)
        self._roles[name], self.tasks[name] = await self._stack.enter_async_context(running)

    async def restart(self, name: str) -> None:
        """Stop a role in this process, and start it again with the configuration that the run has now."""
        self._roles[name].stop.set()
        await asyncio.wait_for(self.tasks[name], 30)
        await self._start(name)

    def alive(self) -> bool:
        """No role has died. The learner may have reached its end."""
        return not any(task.done() for task in self.tasks.values()) and self.learner.exitcode in {None, 0}

    async def until_step(self, ledger: Ledger, version: int) -> None:
        await until(lambda: self._reached(ledger, version), 60)

    async def _reached(self, ledger: Ledger, version: int) -> bool:
        assert self.alive()
        return (await ledger.state()).version >= version

    async def end(self) -> Audit:
        """Wait for the learner's own end, with every role alive, and account for every group."""
        await until(lambda: not self.alive() or self.learner.exitcode is not None, 90)
        assert self.learner.exitcode == 0
        assert self.alive()
        async with self.run.open() as ledgers:
            found = await audit(self.run.config, self.run.run_dir, ledgers)
        assert (found.lost, found.twice, found.faults) == (0, 0, []), found
        assert found.admitted == self.prompts
        return found


def errors(caplog) -> Counter[str]:
    """Messages of level error, counted."""
    return Counter(record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR)
