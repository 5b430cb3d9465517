"""A program as an agent: a command with a process of its own for each sample."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import orjson
from typing_extensions import override

from streamrl.config import RunConfig
from streamrl.config.episode import AgentConfig
from streamrl.errors import DataError, PluginError, StreamrlError
from streamrl.isolation.kept_process import KeptProcess
from streamrl.producers.episodes.clock import EpisodeOver
from streamrl.producers.episodes.endpoint.door import AgentDoor
from streamrl.producers.episodes.endpoint.server import AgentEndpoint
from streamrl.producers.episodes.episode import Chat, Episode, Task
from streamrl.producers.episodes.session import EpisodeSession
from streamrl.score import Score
from streamrl.waits import first_of

logger = logging.getLogger(__name__)

TASK_FILE: Final = "STREAMRL_TASK"
_LAST_SECONDS: Final = 10.0  # how long an agent may go on after a limit of its episode: it may post a reward
_COMMAND_HINT: Final = "episode.agent.command: a program of the PATH, or with its whole path"
_PASSED: Final = re.compile(
    "PATH|HOME|USER|LOGNAME|SHELL|TERM|LANG(UAGE)?|LC_.*|TZ|TMP(DIR)?|TEMP|XDG_.*|LD_LIBRARY_PATH"
    "|PYTHON.*|VIRTUAL_ENV|CONDA_PREFIX|CUDA_VISIBLE_DEVICES|OMP_NUM_THREADS|HF_HOME|HF_HUB_OFFLINE"
    "|(?i:(https?|all|no)_proxy)|SSL_CERT_(FILE|DIR)|(REQUESTS|CURL)_CA_BUNDLE|NODE_EXTRA_CA_CERTS"
)
"""Variables that an agent gets from this process. A model's output drives it, and many of the others are keys."""
_LOG_BYTES: Final = 4 << 20


class AgentFailed(StreamrlError):
    """The agent ended with an exit code other than 0 before the model said anything."""


class AgentEpisode(Episode):
    """Runs `episode.agent.command` for each sample; an exit code other than 0, before a limit: the agent failed."""

    def __init__(self, config: RunConfig) -> None:
        assert config.episode.agent is not None
        self._agent: AgentConfig = config.episode.agent
        self._context, self._beside = config.model.context, config.plugin_paths
        program = self._agent.command[0]
        if shutil.which(program, path=search_path(self._agent.variables)) is None:
            raise PluginError(f"the agent {program} is no program that can be run", _COMMAND_HINT)
        self._endpoint: AgentEndpoint | None = None
        self._open = contextlib.AsyncExitStack()

    @override
    async def open(self) -> None:
        self._endpoint = await self._open.enter_async_context(AgentEndpoint.open(self._agent.host))

    @override
    async def close(self) -> None:
        await self._open.aclose()

    @override
    async def run(self, task: Task, chat: Chat) -> float | Score | None:
        assert self._endpoint is not None
        door = AgentDoor(chat.session, self._agent.max_calls, self._context, self._agent.ignore)
        folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="streamrl-agent-"))
        try:
            with self._endpoint.serving(door) as key:
                try:
                    failure = await self._accompany(task, chat.session, door, folder, key)
                finally:
                    await door.close()
            return self._failed(task, chat.session, failure) if failure else chat.session.posted
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def _failed(self, task: Task, session: EpisodeSession, failure: str) -> float | None:
        """The score of an agent that failed. What the model said may be the cause, so it is not asked again."""
        if not session.replied:
            raise AgentFailed(failure)
        session.end("agent_failed")
        if self._agent.failed == "drop":
            raise DataError(failure, "episode.agent.failed: drop makes a dead letter of it")
        logger.warning("an agent failed", extra={"line": task.line, "why": failure})
        return self._agent.failed_score if session.posted is None else session.posted

    async def _accompany(self, task: Task, session: EpisodeSession, door: AgentDoor, folder: Path, key: str) -> str:
        """Start the process and return at its end; how it failed, empty: it did not."""
        process = None
        try:
            async with session.part("start"):
                task = dataclasses.replace(task, messages=session.images.outside(task.messages))
                await asyncio.to_thread(self._write_task, task, folder)
                process = await start_agent(self._agent, folder, self._variables(key, folder), key, self._beside)
                await first_of(process.wait(), door.called.wait())
            await _attend(session, door, process)
        finally:
            if process is not None:
                await process.stop()
        if session.fault is not None:
            raise session.fault
        session.check_overflow()
        if session.stop is not None:
            raise EpisodeOver(session.stop)
        printed = f"; it printed last:\n{process.tail}" if process.tail else " and printed nothing"
        return f"the agent {self._agent.command[0]} ended ({process.end}){printed}" if process.code else ""

    def _write_task(self, task: Task, folder: Path) -> None:
        known = dataclasses.asdict(task)
        if not self._agent.answer:
            del known["answer"]
        (folder / "task.json").write_bytes(orjson.dumps(known))

    def _variables(self, key: str, folder: Path) -> dict[str, str]:
        assert self._endpoint is not None
        url = self._endpoint.url
        return {
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": key,
            TASK_FILE: str(folder / "task.json"),
        }


async def _attend(session: EpisodeSession, door: AgentDoor, process: KeptProcess) -> None:
    """Return when the agent has ended, or some time after its episode has; while it thinks, `tools` runs."""
    while process.alive and not door.over.is_set():
        await first_of(process.wait(), door.over.wait(), door.idle.wait())
        async with session.part("tools"):
            await first_of(process.wait(), door.over.wait(), door.busy.wait())
    if session.fault is None:
        await first_of(process.wait(), asyncio.sleep(_LAST_SECONDS))


async def start_agent(
    agent: AgentConfig, folder: Path, variables: Mapping[str, str], secret: str, beside: Sequence[Path] = ()
) -> KeptProcess:
    """Start the command; arguments that name files in `beside` or the working directory are found from anywhere."""
    work = agent.directory or folder / "work"
    if agent.directory is None:
        work.mkdir()
    program, *arguments = agent.command
    places = (*beside, Path.cwd())
    argv = [program if "/" not in program else _resolved(program, places)]
    argv += [_resolved(argument, places) for argument in arguments]
    process = KeptProcess(folder / "output", _LOG_BYTES, secrets=[secret], own=folder)
    try:
        await process.start(argv, _environment(agent, variables), work)
    except OSError as error:
        if isinstance(error, TimeoutError):  # a busy host is no fault of the command
            raise
        where = f"{_COMMAND_HINT}; episode.agent.directory: an existing one"
        raise PluginError(f"the agent {program} cannot be started in {work}: {error}", where) from error
    return process


def _resolved(argument: str, places: Sequence[Path]) -> str:
    found = (folder / argument for folder in places if argument and (folder / argument).is_file())
    return str(next(found, argument))


def search_path(variables: Mapping[str, str]) -> str:
    """Where programs are looked for: `python` is the interpreter of this process, also if no environment is active."""
    return variables.get("PATH", f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}")


def _environment(agent: AgentConfig, variables: Mapping[str, str]) -> dict[str, str]:
    """What an agent may see of the environment of this process; requests to the endpoint take no proxy."""
    environ = {name: value for name, value in os.environ.items() if _PASSED.fullmatch(name)}
    host = variables["OPENAI_BASE_URL"].split("/")[2].rpartition(":")[0].strip("[]")
    for name in ("NO_PROXY", "no_proxy"):
        environ[name] = ",".join(filter(None, [environ.get(name), host]))
    return {**environ, **agent.variables, **variables, "PATH": search_path(agent.variables)}
