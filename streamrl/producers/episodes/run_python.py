"""The built-in tool `run_python`: each call runs a program of the model in a sandbox of its own."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Final

from streamrl.errors import StreamrlError
from streamrl.producers.episodes.tools import Tool
from streamrl.sandbox import Execution, SandboxError, SandboxLimits, SandboxSettings
from streamrl.sandbox.sandbox import last_lines, most_at_once
from streamrl.wire import utf8

logger = logging.getLogger(__name__)

_FILE: Final = "program.py"
_SILENT: Final = "(the program printed nothing)"


def python_tool(settings: SandboxSettings | None = None) -> Tool:
    """The tool `run_python(code: str)`; `open` it before the first episode.

    How a program ends is its answer, so the outcome of such a call is `ok`. The outcome `error` means that the sandbox
    failed, which is logged. At most one program for each processor of this process runs at a time.

    Args:
        settings: limits and isolation; None: the defaults of the reward `code`.
    """
    settings = settings or SandboxSettings()
    sandbox, interpreter = settings.sandbox(), settings.interpreter()

    async def run_python(code: str) -> str:
        """Run a Python program and return what it prints.

        Each call starts a new program: variables and files of earlier calls are gone.

        Args:
            code: the whole program. Use print to see a result.
        """
        try:
            async with sandbox.start(interpreter.program(_FILE, {_FILE: utf8(code)})) as session:
                return _told(await session.run(""), sandbox.limits)
        except (StreamrlError, OSError) as error:
            logger.warning("a sandbox failed", extra={"tool": "run_python", "why": str(error)})
            raise SandboxError("the sandbox failed, and the program is not to blame") from error

    async def prepare() -> None:
        await sandbox.need(interpreter.path, interpreter.visible)

    slots = asyncio.Semaphore(most_at_once())
    return replace(Tool.of(run_python), keeps_state=False, slots=slots, preparation=prepare)


def _told(execution: Execution, limits: SandboxLimits) -> str:
    parts = [execution.stdout.rstrip(), last_lines(execution.stderr), _failure(execution, limits)]
    return "\n".join(filter(None, parts)) or _SILENT


def _failure(execution: Execution, limits: SandboxLimits) -> str:
    match execution.outcome:
        case "time" if execution.wall - execution.delay < limits.wall:
            return f"error: killed: no answer within {limits.cpu:g} s of processor time"
        case "time":
            return f"error: killed: no answer within {limits.wall:g} s"
        case "memory":
            return f"error: killed: out of memory ({limits.memory >> 20} MiB)"
        case "output":
            return f"error: killed: it printed more than {limits.output >> 10} KiB"
        case "signal":
            return "error: killed" if execution.code is None else f"error: killed by signal {-execution.code}"
        case "ended":
            return f"error: it ended with code {execution.code}" if execution.code else ""
