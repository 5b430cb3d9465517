"""Programs of tests in a sandbox."""

from __future__ import annotations

import asyncio
import functools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from streamrl.consumers.sandbox import Execution, Isolation, Limits, Program, Sandbox
from streamrl.consumers.sandbox.wrappers import interpreter
from streamrl.errors import ConfigError

SPACIOUS = Limits(cpu=20, wall=60)


@functools.cache
def works(isolation: Isolation) -> str:
    """Why an isolation does not work on this machine; empty: it does."""
    box = Sandbox(SPACIOUS, network=isolation == "none", isolation=isolation)
    with ThreadPoolExecutor(1) as threads:  # with a loop of its own: the test has one that runs
        try:
            threads.submit(lambda: asyncio.run(box.open())).result()
        except ConfigError as error:
            return error.message
    return ""


def sandbox(isolation: Isolation = "namespaces", *, network: bool = False, **limits: Any) -> Sandbox:
    """A sandbox of this isolation; skips the test where the machine does not allow it."""
    if reason := works(isolation):
        pytest.skip(reason)
    return Sandbox(
        Limits(**{"cpu": 20, "wall": 60} | limits), network=network or isolation == "none", isolation=isolation
    )


def python(text: str, *words: str) -> Program:
    """A program in Python."""
    found = interpreter()
    argv = (found.path, "-s", "-B", "solution.py", *words)
    return Program(argv=argv, files={"solution.py": text}, visible=found.visible)


async def run(box: Sandbox, text: str, *words: str, stdin: str = "") -> Execution:
    """One run of a program in Python."""
    async with box.start(python(text, *words)) as session:
        return await session.run(stdin)


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


async def eventually(condition: Any) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
