"""Programs of tests in a sandbox."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from streamrl.errors import ConfigError
from streamrl.sandbox import Execution, Isolation, Program, Sandbox, SandboxLimits
from streamrl.sandbox.sandbox import interpreter
from tests.needs import missing

T = TypeVar("T")
SPACIOUS = SandboxLimits(cpu=20, wall=60)


_working: set[Isolation] = set()


def need(isolation: Isolation) -> None:
    """End the test where an isolation does not work; a machine that was only busy is asked again by the next one."""
    if isolation in _working:
        return
    box = Sandbox(SPACIOUS, network=isolation == "none", isolation=isolation)
    with ThreadPoolExecutor(1) as threads:  # with a loop of its own: the test has one that runs
        try:
            threads.submit(lambda: asyncio.run(box.open())).result()
        except ConfigError as error:
            missing(error.message)
    _working.add(isolation)


def sandbox(isolation: Isolation = "auto", *, network: bool = False, **limits: Any) -> Sandbox:
    """A sandbox of this isolation; ends the test where the machine does not allow it."""
    need(isolation)
    found = Sandbox(
        SandboxLimits(**{"cpu": 20, "wall": 60} | limits), network=network or isolation == "none", isolation=isolation
    )
    found.opened = True  # it is known to work: one program less for each sandbox
    return found


def python(text: str, *words: str) -> Program:
    """A program in Python."""
    found = interpreter()
    argv = (found.path, "-s", "-B", "solution.py", *words)
    return Program(argv=argv, files={"solution.py": text}, visible=found.visible)


async def run(box: Sandbox, text: str, *words: str, stdin: str = "") -> Execution:
    """One run of a program in Python."""
    async with box.start(python(text, *words)) as session:
        return await session.run(stdin)


async def together(runs: Mapping[str, Coroutine[Any, Any, T]]) -> dict[str, T]:
    """What comes of several runs, four at a time: most of them wait for their limits."""
    places = asyncio.Semaphore(4)

    async def one(run: Coroutine[Any, Any, T]) -> T:
        async with places:
            return await run

    async with asyncio.TaskGroup() as tasks:
        started = {name: tasks.create_task(one(run)) for name, run in runs.items()}
    return {name: task.result() for name, task in started.items()}


def running(mark: str) -> list[int]:
    """Processes of this machine with `mark` in their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def keepers() -> list[int]:
    """Keepers of sandboxes that this process has started."""
    return [pid for pid in running("from inside.keeper import main") if _parent(pid) == os.getpid()]


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # it has just ended: that of another test, perhaps
        return 0
