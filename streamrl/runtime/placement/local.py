"""All processes of a run on this machine, as children of the supervisor."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

from typing_extensions import override

from streamrl.config import RunConfig
from streamrl.cores import VISIBLE, visible_cards
from streamrl.errors import ConfigError
from streamrl.queues.embedded import STARTER
from streamrl.runtime.devices import plan_devices
from streamrl.runtime.placement.child import Child, Lifeline
from streamrl.runtime.placement.placement import OnBytes, PlacedProcess, Placement
from streamrl.runtime.plan import UnitSpec
from streamrl.runtime.role_log import RoleLog

RENDEZVOUS: Final = "rendezvous"
"""Directory in the run's where the ranks of a learner find each other, one file for each start."""


class LocalProcess(PlacedProcess):
    def __init__(self, child: Child, log: RoleLog) -> None:
        super().__init__(child.pid, log)
        self._child = child

    @override
    def signal(self, number: int) -> None:
        self._child.signal(number)

    @override
    def kill(self) -> None:
        self._child.kill()

    @override
    async def _end(self, status: OnBytes, output: OnBytes) -> int:
        return await self._child.end(status, output)


class LocalPlacement(Placement):
    def __init__(self, run_dir: Path, config: RunConfig) -> None:
        self._config = config
        self._rendezvous = run_dir.resolve() / RENDEZVOUS
        self._lifeline = Lifeline()

    @override
    async def start(self, unit: UnitSpec, position: int, start: str, log: RoleLog) -> LocalProcess:
        command = unit.command(position)
        environ = {**os.environ, **command.env, STARTER: str(os.getpid()), **self._devices(unit.processes[position])}
        if len(unit.processes) > 1:
            # A file store needs an unused file: a rank of a dead group may still hold the old one.
            environ["STREAMRL_RENDEZVOUS"] = f"file://{self._rendezvous / start}"
        argv = [sys.executable, *command.arguments]
        return LocalProcess(await Child.spawn(argv, environ, self._lifeline, command.cwd), log)

    def _devices(self, name: str) -> dict[str, str]:
        if name == "redis":  # Ray starts it here, on a host with other cards than those of the run
            return {}
        try:
            taken = plan_devices(self._config, visible_cards(), name).get(name)
        except ConfigError as error:  # a member was added for which there is no card
            raise OSError(f"{error.message}: {error.hint}") from error
        return {} if taken is None else {VISIBLE: ",".join(taken), "LOCAL_RANK": "0"}

    @override
    def release(self, unit: UnitSpec) -> None:
        del unit  # nothing is kept

    @override
    def close(self) -> None:
        self._lifeline.close()
