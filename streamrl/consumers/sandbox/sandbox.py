"""The worker's side of the sandbox: which isolation works here, and sessions with a keeper."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import orjson

from streamrl.consumers.sandbox.execution import SLOWEST, Execution, Limits, Program, SandboxError
from streamrl.consumers.sandbox.temporary import own_folder, sweep
from streamrl.consumers.sandbox.wrappers import ENVIRON, WRAPPERS, interpreter
from streamrl.errors import ConfigError

logger = logging.getLogger(__name__)

Isolation = Literal["namespaces", "bubblewrap", "nsjail", "none"]

_START: Final = "import sys; sys.path.insert(0, sys.argv[1]); from inside.keeper import main; main()"
_FOLDERS: Final = "streamrl-code-"
_KEEPER_SECONDS: Final = 20.0
"""How long a keeper may take to start, and to kill and clean up, on a busy machine."""
_ANSWER_ROOM: Final = 1 << 19
"""The keeper notices that output is over its limit when up to four pipes have given a chunk more."""
_BYTES_PER_BYTE: Final = 6
"""JSON writes a control character, and what is no UTF-8, as six characters."""
_HINT: Final = (
    "allow user namespaces (sysctl kernel.apparmor_restrict_unprivileged_userns=0 or user.max_user_namespaces; in a"
    " container its seccomp profile), or install bubblewrap; or take the risk with isolation: none and network: allow,"
    " which lets programs read, write and send whatever this user can"
)


class Sandbox:
    """Runs programs of strangers.

    Args:
        limits: of every run.
        network: whether programs may use the network.
        isolation: `auto` takes the first of namespaces, bubblewrap and nsjail that works; `none` is no isolation but
            limits, a session, a directory and an environment of its own.

    Raises:
        ConfigError: a system that is not Linux, or `none` without `network`: nothing would keep it from the network.
    """

    def __init__(
        self, limits: Limits, *, network: bool = False, isolation: Isolation | Literal["auto"] = "auto"
    ) -> None:
        if sys.platform != "linux":
            raise ConfigError("programs can be run on Linux only", "run the reward workers in a Linux container")
        if isolation == "none" and not network:
            raise ConfigError(
                "isolation: none cannot keep programs from the network", "say network: allow, or leave isolation out"
            )
        self._limits = limits
        self._network = network
        self._wanted = isolation
        self._opening = asyncio.Lock()
        self.isolation: Isolation | None = None

    async def open(self) -> Isolation:
        """Find an isolation that works here by running a small program in it; a repeat returns what was found.

        Raises:
            ConfigError: none works; says why each does not, and what to do.
        """
        async with self._opening:
            if self.isolation is None:
                await asyncio.to_thread(sweep, _FOLDERS)
                self.isolation = await self._find()
                logger.info("sandbox ready", extra={"isolation": self.isolation, "network": self._network})
        return self.isolation

    @asynccontextmanager
    async def start(self, program: Program) -> AsyncIterator[Session]:
        """Yield a session with the program; at its end, and when it is cancelled, nothing of it stays.

        Raises:
            ConfigError: no isolation works here (`open`).
            SandboxError: the keeper does not start.
        """
        async with self._session(await self.open(), program) as session:
            yield session

    async def _find(self) -> Isolation:
        tried: tuple[Isolation, ...] = ("namespaces", "bubblewrap", "nsjail")
        if self._wanted != "auto":
            tried = (self._wanted,)
        reasons = []
        python = interpreter()
        probe = Program(argv=(python.path, "-I", "-S", "-c", "print(6 * 7)"), visible=python.visible)
        for isolation in tried:
            try:
                async with self._session(isolation, probe) as session:
                    execution = await session.run("")
            except (SandboxError, OSError) as error:
                reasons.append(f"{isolation}: {str(error).strip().splitlines()[-1]}")
                continue
            if execution.stdout.strip() == "42":
                return isolation
            said = (execution.stderr.strip() or execution.outcome).splitlines()[-1]
            reasons.append(f"{isolation}: a small program does not run in it: {said}")
        raise ConfigError(f"programs cannot be isolated here ({'; '.join(reasons)})", _HINT)

    @asynccontextmanager
    async def _session(self, isolation: Isolation, program: Program) -> AsyncIterator[Session]:
        async with self._folder(isolation) as folder:
            order = self._order(isolation, program, folder)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", "-c", _START, str(Path(__file__).parent)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
                env={"PATH": os.defpath},
                limit=_BYTES_PER_BYTE * (self._limits.output + _ANSWER_ROOM),
            )
            try:
                yield Session(process, order, self._limits)
            finally:
                await _end(process)

    @asynccontextmanager
    async def _folder(self, isolation: Isolation) -> AsyncIterator[str]:
        """A directory of the host, where the sandbox has none of its own; the keeper removes it, unless killed."""
        if isolation == "namespaces":
            yield ""
            return
        own = own_folder(_FOLDERS)
        folder = await asyncio.to_thread(own.__enter__)
        try:
            yield folder
        finally:
            await asyncio.to_thread(own.__exit__, None, None, None)

    def _order(self, isolation: Isolation, program: Program, folder: str) -> dict[str, Any]:
        for name in program.files:
            if Path(name).name != name or name in {"", ".", ".."}:
                raise ValueError(f"{name!r} is no plain name of a file")
        argv, kind = list(program.argv), "none"
        if isolation == "namespaces":
            kind = "namespaces"
        elif isolation != "none":
            kind = "wrapped"
            argv = WRAPPERS[isolation](program, self._limits, self._network)
        return {
            "isolation": kind,
            "network": self._network,
            "argv": argv,
            "environ": {**ENVIRON, **program.environ},
            "files": dict(program.files),
            "visible": [[os.path.realpath(path), path] for path in program.visible],
            "folder": folder,
            "limits": {**asdict(self._limits), "slowest": SLOWEST},
        }


class Session:
    """One program and its keeper."""

    def __init__(self, process: asyncio.subprocess.Process, order: Mapping[str, Any], limits: Limits) -> None:
        self._process = process
        self._order: Mapping[str, Any] | None = order
        self._seconds = SLOWEST * limits.wall + 2 * _KEEPER_SECONDS

    async def run(self, stdin: str) -> Execution:
        """Run the program once, from a fresh directory, and return what came of it; one run at a time.

        Raises:
            SandboxError: the sandbox failed, or did not answer long after `wall`.
        """
        lines = [] if self._order is None else [self._order]
        self._order = None
        try:
            async with asyncio.timeout(self._seconds):
                answer = await self._ask(b"".join(orjson.dumps(line) + b"\n" for line in (*lines, {"stdin": stdin})))
        except TimeoutError as error:
            raise SandboxError(
                f"a sandbox did not answer within {self._seconds:g} s", "is the machine busy?"
            ) from error
        if not answer:
            raise SandboxError("the keeper of a sandbox was killed", "is there enough memory?")
        said = orjson.loads(answer)
        if "error" in said:
            raise SandboxError(f"a sandbox failed: {said['error']}")
        return msgspec.convert(said, Execution)

    async def _ask(self, data: bytes) -> bytes:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(ConnectionError):  # it has ended, and its last words are to be read
            self._process.stdin.write(data)
            await self._process.stdin.drain()
        return await self._process.stdout.readline()


async def _end(process: asyncio.subprocess.Process) -> None:
    """End the keeper, which kills what runs and cleans up."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(_KEEPER_SECONDS):
            await process.wait()
    except TimeoutError:
        logger.warning("the keeper of a sandbox had to be killed", extra={"pid": process.pid})
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
