"""One agent's process: started under a keeper, so that it ends with this process, with all that it has started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import orjson

from streamrl.config.episode import AgentConfig
from streamrl.errors import PluginError
from streamrl.isolation import keeper

COMMAND_HINT: Final = "episode.agent.command: a program of the PATH, or with its whole path"
_PASSED: Final = re.compile(
    "PATH|HOME|USER|LOGNAME|SHELL|TERM|LANG(UAGE)?|LC_.*|TZ|TMP(DIR)?|TEMP|XDG_.*|LD_LIBRARY_PATH"
    "|PYTHON.*|VIRTUAL_ENV|CONDA_PREFIX|CUDA_VISIBLE_DEVICES|OMP_NUM_THREADS|HF_HOME|HF_HUB_OFFLINE"
    "|(?i:(https?|all|no)_proxy)|SSL_CERT_(FILE|DIR)|(REQUESTS|CURL)_CA_BUNDLE|NODE_EXTRA_CA_CERTS"
)
"""Variables that an agent gets from this process. All others stay here, because a model's output drives the agent, and
many of them are keys."""
_START_SECONDS: Final = 15.0
_KILL_SECONDS: Final = 15.0
_LOG_BYTES: Final = 4 << 20
_TAIL_BYTES: Final = 1 << 13
_TAIL_LINES: Final = 15


class AgentProcess:
    """A command that runs in `folder/work`, or where the configuration says, and prints into `folder/output`.

    Arguments that name files in `beside` or in the working directory of this process are found from any directory.
    `code` is its exit code (128 + signal), None before its end.
    """

    def __init__(self, folder: Path, beside: Sequence[Path] = ()) -> None:
        self._folder = folder
        self._beside = (*beside, Path.cwd())
        self._log = folder / "output"
        self._keeper: asyncio.subprocess.Process | None = None
        self._pid: int | None = None
        self.code: int | None = None

    @property
    def ended(self) -> bool:
        return self.code is not None

    async def start(self, agent: AgentConfig, variables: Mapping[str, str], secret: str) -> None:
        """Return when it runs; what it prints is kept without `secret`. PluginError: it cannot be started."""
        work = agent.directory or self._folder / "work"
        if agent.directory is None:
            work.mkdir()
        program, *arguments = agent.command
        order = {
            "argv": [program if "/" not in program else self._resolved(program), *map(self._resolved, arguments)],
            "log": str(self._log),
            "log_bytes": _LOG_BYTES,
            "grace": 0.0,
            "secrets": [secret],
            "own": str(self._folder),
        }
        try:
            self._keeper = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", keeper.__file__),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=_environment(agent, variables),
                cwd=work,
                start_new_session=True,
            )
        except OSError as error:
            raise PluginError(f"the agent cannot be started in {work}: {error}", "episode.agent.directory") from error
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        with contextlib.suppress(OSError):  # its answer says more
            self._keeper.stdin.write(orjson.dumps(order) + b"\n")
            await self._keeper.stdin.drain()
        async with asyncio.timeout(_START_SECONDS):
            said = orjson.loads(await self._keeper.stdout.readline() or b'{"error": "its keeper ended"}')
        if "error" in said:
            raise PluginError(f"the agent {program} cannot be started: {said['error']}", COMMAND_HINT)
        self._pid = said["pid"]

    async def wait(self) -> int:
        """Return its exit code when it has ended, and all that it had started with it."""
        assert self._keeper is not None
        self.code = await self._keeper.wait()
        return self.code

    async def kill(self) -> None:
        """Kill it with all that it has started, and wait until they are gone. A repeat does nothing."""
        if self._keeper is None:
            return
        assert self._keeper.stdin is not None
        with contextlib.suppress(ConnectionError):
            self._keeper.stdin.write(b"stop\n")
        self._keeper.stdin.close()  # the keeper kills everything then
        try:
            async with asyncio.timeout(_KILL_SECONDS):
                await self.wait()
        except TimeoutError:
            self._keeper.kill()
        if (self.code is None or self.code < 0) and self._pid is not None:  # the keeper could not do its work
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, signal.SIGKILL)

    def _resolved(self, argument: str) -> str:
        found = (folder / argument for folder in self._beside if argument and (folder / argument).is_file())
        return str(next(found, argument))

    @property
    def cause(self) -> str:
        """How it ended, in words, with the end of what it printed."""
        code = self.code or 0
        number = -code if code < 0 else code - 128
        how = f"was killed by {signal.Signals(number).name}" if number in _SIGNALS else f"exited with code {code}"
        try:
            lines = self._log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").splitlines()[-_TAIL_LINES:]
        except OSError:
            lines = []
        return f"{how}; it printed last:\n" + "\n".join(lines) if lines else f"{how} and printed nothing"


_SIGNALS: Final = frozenset(int(number) for number in signal.Signals)


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
