"""The side of the process that asks for programs: which isolation works here, and sessions with a keeper."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

import msgspec
import orjson

from streamrl.cores import usable_cores
from streamrl.errors import ConfigError, StreamrlError
from streamrl.sandbox.inside import jail

logger = logging.getLogger(__name__)

SMALLEST_MEMORY: Final = 64 << 20
SLOWEST: Final = 10
"""If a program waits for a processor until this multiple of its `wall`, the host is too busy for a verdict."""
_MOST_SHOWN: Final = 4000
_LINES_SHOWN: Final = 10
_COLOUR: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class SandboxError(StreamrlError):
    """The sandbox itself failed; the program may be right."""


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    cpu: float = 5.0  # seconds of processor time of each process, rounded up
    wall: float = 11.0  # seconds, without the time in which other programs had the processor
    memory: int = 512 << 20  # resident bytes of all its processes together, checked twenty times a second
    address_space: int | None = 1 << 30  # bytes of each process; None: no limit, for runtimes that reserve a lot
    disk: int = 64 << 20  # bytes of all files in a file system of its own, else of each file
    open_files: int = 64  # of each process
    processes: int = 16  # and threads, at the same time
    output: int = 1 << 20  # bytes on standard output and standard error together

    def __post_init__(self) -> None:
        numbers = {name: getattr(self, name) for name in self.__slots__}
        for name, number in numbers.items():
            if number is not None and not 0 < number < math.inf:
                raise ValueError(f"{name} is {number}; it must be above 0, and finite")
        if self.memory < SMALLEST_MEMORY:
            raise ValueError(f"memory is {self.memory} bytes; no program starts in less than {SMALLEST_MEMORY}")


@dataclass(frozen=True, slots=True)
class Program:
    argv: tuple[str, ...]  # the first word is an absolute path
    files: Mapping[str, str] = field(default_factory=dict)  # plain names and texts
    visible: tuple[str, ...] = ()  # directories of the host that it may read, besides the system's
    environ: Mapping[str, str] = field(default_factory=dict)  # all of its environment


class Execution(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one run. `outcome`: `ended` by itself; `signal`: killed; other words: killed for that limit."""

    outcome: Literal["ended", "signal", "time", "memory", "output"]
    code: int | None  # exit code, or minus the number of a signal; None: unknown
    stdout: str  # invalid bytes are replaced; cut off shortly after the limit
    stderr: str
    result: str  # what it wrote to descriptor 3
    cpu: float
    wall: float  # seconds, including the set-up of the sandbox
    delay: float  # seconds of `wall` in which other programs had the processor, as far as the kernel tells


def last_lines(text: str) -> str:
    """The end of what a program wrote to standard error, without colours and control characters."""
    lines = [line for line in _COLOUR.sub("", text[-_MOST_SHOWN:]).splitlines() if line.strip()]
    return "\n".join("".join(filter(str.isprintable, line.expandtabs())) for line in lines[-_LINES_SHOWN:])


def most_at_once() -> int:
    """Programs that a process may run at the same time. More would slow each other down."""
    return usable_cores()


_YOUNG_SECONDS: Final = 60.0
"""The process of a younger directory may not have locked it yet."""


@contextlib.contextmanager
def own_folder(prefix: str) -> Iterator[str]:
    path = tempfile.mkdtemp(prefix=prefix)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            yield path
        finally:
            os.close(descriptor)
    finally:
        if Path(path).exists():
            jail.remove_folder(path)


def sweep(prefix: str) -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # it is another user's, in use, or just gone
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                about = os.fstat(descriptor)
                if about.st_uid == os.geteuid() and time.time() - about.st_mtime > _YOUNG_SECONDS:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    jail.remove_folder(str(path))
            finally:
                os.close(descriptor)


ENVIRON: Final[Mapping[str, str]] = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",  # noqa: S108 - of the sandbox
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
"""The environment of a program. Threads count as processes, so libraries start none by themselves."""


@dataclass(frozen=True, slots=True)
class Interpreter:
    path: str
    visible: tuple[str, ...]

    def program(self, script: str, files: Mapping[str, str]) -> Program:
        """The program that is `script`, one of `files`."""
        return Program(argv=(self.path, "-s", "-B", script), files=files, visible=self.visible)


def interpreter(python: str = "") -> Interpreter:
    """`python`, or the Python that runs streamrl, without the packages of its environment.

    Programs see what it needs: itself, its libraries, `pyvenv.cfg` of an environment. `ConfigError`: it does not run.
    """
    path, prefixes = os.path.realpath(sys.executable), [sys.base_prefix]
    if python:
        try:
            said = subprocess.run(  # noqa: S603
                [python, "-I", "-c", _WHERE], capture_output=True, text=True, timeout=_KEEPER_SECONDS, check=True
            ).stdout
        except (OSError, subprocess.SubprocessError) as error:
            raise ConfigError(f"python: {python} does not run: {error}", "name an interpreter of this host") from error
        path, *prefixes = said.splitlines()
    needed = [path, *(f"{prefix}/{name}" for prefix in prefixes for name in ("lib", "lib64", "pyvenv.cfg"))]
    own = (one for one in needed if os.path.lexists(one) and not _of_the_system(one))
    return Interpreter(path, tuple(dict.fromkeys(own)))


_WHERE: Final = "import sys; print(sys.executable, sys.prefix, sys.base_prefix, sep='\\n')"


def _of_the_system(path: str) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in jail.SYSTEM)


_MOST_LINKS: Final = 40
"""As many as the kernel follows."""


def _shown(path: str) -> Iterator[tuple[str, str]]:
    """What a program must see to find `path`, as the host's path and its own: links as links, then what they name."""
    source, target = Path(path), path
    for _ in range(_MOST_LINKS):
        source = Path(os.path.realpath(source.parent), source.name)
        yield str(source), target
        if not source.is_symlink():
            return
        link = source.readlink()
        source, target = source.parent / link, os.path.normpath(Path(target).parent / link)


Isolation = Literal["auto", "strict", "none"]

_START: Final = "import sys; sys.path.insert(0, sys.argv[1]); from inside.keeper import main; main()"
_FOLDERS: Final = "streamrl-code-"
_KEEPER_SECONDS: Final = 20.0
"""Longest time for a keeper to start, and to kill and clean up, on a busy machine."""
_ANSWER_ROOM: Final = 1 << 19
"""Up to four pipes may deliver one more chunk before the keeper notices that output exceeds its limit."""
_BYTES_PER_BYTE: Final = 6
"""JSON writes control characters and invalid UTF-8 as six characters."""
_HINT: Final = (
    "allow user namespaces (sysctl kernel.apparmor_restrict_unprivileged_userns=0 or user.max_user_namespaces; in a"
    " container its seccomp profile); or take the risk with isolation: none and network: allow, which lets programs"
    " read, write and send whatever this user can"
)
_PROBE: Final = "import ctypes; print(6 * 7, ctypes.CDLL(None).unshare(0))"
"""The filter refuses `unshare`, which asks for nothing here."""
_NO_FILTER: Final = "no filter of system calls, because this kernel has no seccomp"


class Sandbox:
    """Runs untrusted programs.

    `isolation`: `auto` is namespaces, with a filter of system calls if the kernel has seccomp; `weakness` says if not.
    `strict` refuses to do without it. `none` only has limits, a session, a directory and an environment of its own.
    `ConfigError`: not Linux, or `none` without `network`, which it cannot prevent.
    """

    weakness: ClassVar[str] = ""
    """What the sandboxes of this process lack, for `streamrl status`."""

    def __init__(self, limits: SandboxLimits, *, network: bool = False, isolation: Isolation = "auto") -> None:
        if sys.platform != "linux":
            raise ConfigError("programs can be run on Linux only", "run streamrl in a Linux container")
        if isolation == "none" and not network:
            raise ConfigError(
                "isolation: none cannot keep programs from the network", "say network: allow, or leave isolation out"
            )
        self.limits = limits
        self._network = network
        self._isolation = isolation
        self._jailed = isolation != "none"
        self._opening = asyncio.Lock()
        self.opened = False

    async def open(self) -> None:
        """Check by a test run, once, that the isolation works here. `ConfigError` says why not, and what to do."""
        async with self._opening:
            if not self.opened:
                await asyncio.to_thread(sweep, _FOLDERS)
                await self._check()
                self.opened = True
                logger.info("sandbox ready", extra={"isolation": self._isolation, "network": self._network})

    async def need(self, executable: str, visible: tuple[str, ...]) -> None:
        """Check that an executable can be executed here by programs that see these directories. ConfigError if not."""
        probe = Program(argv=("/bin/sh", "-c", 'test -x "$0"', executable), visible=visible)
        async with self.start(probe) as session:
            if (await session.run("")).code != 0:
                raise ConfigError(
                    f"{executable} cannot be executed in the sandbox", "name the directories it needs in `visible`"
                )

    @asynccontextmanager
    async def start(self, program: Program) -> AsyncIterator[Session]:
        """Yield a session with the program, and remove all of it at the end. Raises as `open`."""
        await self.open()
        async with self._session(program) as session:
            yield session

    async def _check(self) -> None:
        python = interpreter()
        probe = Program(argv=(python.path, "-I", "-S", "-c", _PROBE), visible=python.visible)
        try:
            async with self._session(probe) as session:
                execution = await session.run("")
        except (SandboxError, OSError) as error:
            why = str(error).strip().splitlines()[-1]
        else:
            if execution.stdout == "42 -1\n":
                return
            if execution.stdout == "42 0\n":
                self._do_without_filter()
                return
            said = (execution.stderr.strip() or execution.outcome).splitlines()[-1]
            why = f"a small program does not run in the sandbox: {said}"
        raise ConfigError(f"programs cannot be isolated here: {why}", _HINT)

    def _do_without_filter(self) -> None:
        if self._isolation == "strict":
            raise ConfigError(f"isolation: strict: {_NO_FILTER}", "isolation: auto only warns; or use another kernel")
        if self._jailed:
            Sandbox.weakness = _NO_FILTER
            logger.warning("the sandbox is weak", extra={"why": _NO_FILTER})

    @asynccontextmanager
    async def _session(self, program: Program) -> AsyncIterator[Session]:
        async with self._folder() as folder:
            order = self._order(program, folder)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", "-c", _START, str(Path(__file__).parent)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
                env={"PATH": os.defpath},
                limit=_BYTES_PER_BYTE * (self.limits.output + _ANSWER_ROOM),
            )
            try:
                yield Session(process, order, self.limits)
            finally:
                await _end(process)

    @asynccontextmanager
    async def _folder(self) -> AsyncIterator[str]:
        if self._jailed:
            yield ""
            return
        own = own_folder(_FOLDERS)
        folder = await asyncio.to_thread(own.__enter__)
        try:
            yield folder
        finally:
            await asyncio.to_thread(own.__exit__, None, None, None)

    def _order(self, program: Program, folder: str) -> dict[str, Any]:
        for name in program.files:
            if Path(name).name != name or name in {"", ".", ".."}:
                raise ValueError(f"{name!r} is not a plain file name")
        return {
            "jailed": self._jailed,
            "network": self._network,
            "argv": program.argv,
            "environ": {**ENVIRON, **program.environ},
            "files": dict(program.files),
            "visible": [pair for path in program.visible for pair in _shown(path)],
            "folder": folder,
            "limits": {**asdict(self.limits), "slowest": SLOWEST},
        }


class Session:
    def __init__(self, process: asyncio.subprocess.Process, order: Mapping[str, Any], limits: SandboxLimits) -> None:
        self._process = process
        self._order: Mapping[str, Any] | None = order
        self._seconds = SLOWEST * limits.wall + 2 * _KEEPER_SECONDS

    async def run(self, stdin: str) -> Execution:
        """Run the program once in a fresh directory, one run at a time. `SandboxError`: the sandbox failed or hangs."""
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
        with suppress(ConnectionError):  # the keeper has ended; read its last line
            self._process.stdin.write(data)
            await self._process.stdin.drain()
        return await self._process.stdout.readline()


async def _end(process: asyncio.subprocess.Process) -> None:
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
