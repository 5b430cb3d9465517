"""A server that streamrl starts: its port, process, log, readiness and end."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

import orjson

from streamrl.config import RunConfig, SupervisorConfig
from streamrl.errors import ConfigError, DataError, Unreachable, WireError
from streamrl.http import HttpClient, read_key
from streamrl.isolation import keeper
from streamrl.servers.launch import Launch, Startable
from streamrl.servers.root_cause import root_cause

logger = logging.getLogger(__name__)
PORTS: Final = range(20_000, 32_000)
"""Below those from which the kernel takes the local ends of connections: a free one stays free until a server that
loads its model first gets to it."""
_CANDIDATES: Final = 200
_LISTENING: Final = "0A"
_PORT_ATTEMPTS: Final = 4
_READY_PAUSE: Final = 0.2
_READY_SECONDS: Final = 5.0
_SAY_SECONDS: Final = 10.0
"""Between two lines that say how long a server starts already."""
_KEEPER_SECONDS: Final = 15.0
_TAIL_BYTES: Final = 1 << 14
_CAUSE_BYTES: Final = 1 << 20
_TAIL_LINES: Final = 15
_USAGE: Final = 2  # the exit code of argparse for a bad command line
_TAKEN: Final = re.compile(r"address already in use|errno 98|port \d+ is (already|not)", re.IGNORECASE)


class _PortTakenError(Exception): ...


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What a server is started with, whatever its kind.

    `section` of the configuration is for messages; the key in `api_key_file` must not get into the log.
    """

    section: str
    model: str
    start_deadline: float
    supervisor: SupervisorConfig
    variables: Mapping[str, str] = field(default_factory=dict)
    api_key_file: Path | None = None

    @classmethod
    def of_engine(cls, config: RunConfig) -> Self:
        engine = config.engine
        return cls(
            "engine", config.model.path, engine.start_deadline, config.supervisor, engine.variables, engine.api_key_file
        )


class ManagedServer:
    """One server process, with all it starts, that lives no longer than this process.

    It sees the `devices` (CUDA_VISIBLE_DEVICES; empty: all).
    """

    def __init__(
        self, dialect: Startable, settings: ServerSettings, run_dir: Path, name: str, devices: str = "", *, seed: int
    ) -> None:
        self._dialect = dialect
        self._settings = settings
        self._devices = devices
        self._seed = seed % (1 << 31)
        self._process: subprocess.Popen[bytes] | None = None
        self._attending: asyncio.Task[None] | None = None
        self._begun_at = 0
        self._rotated_before: tuple[int, int] | None = None
        self.name = name
        self.url = ""  # empty before `start`
        self.log = run_dir / "logs" / f"{name}.log"
        self.pid: int | None = None  # also that of the process group; None before `start`

    @property
    def alive(self) -> bool:
        return self._attending is not None and not self._attending.done()

    async def start(self) -> str:
        """Start it and return its URL when it answers; works again after `stop` or its death.

        Cancelling it kills what was started. `ConfigError`: the environment is missing, or the command cannot be
        executed. `Unreachable`: it ended, or was not ready within its start deadline; the message quotes its log.
        """
        if self.alive:
            raise RuntimeError(f"{self.name} runs already")
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            port = free_port()
            launch = self._dialect.launch(model=self._settings.model, port=port, seed=self._seed)
            try:
                await self._spawn(launch)
                await self._await_ready(port)
            except _PortTakenError as error:
                logger.warning("port taken by another process", extra={"port": port, "server": self.name})
                await self.stop()
                if attempt == _PORT_ATTEMPTS:
                    raise Unreachable(
                        f"{self.name} found no free port: {error}", "ports 20000 to 31999 are looked at"
                    ) from error
            except BaseException:
                await self.stop()
                raise
            else:
                return self.url
        raise AssertionError("unreachable")

    async def wait_death(self) -> str:
        """Return the cause in words as soon as the process has ended."""
        if self._attending is not None:
            await asyncio.wait([self._attending])
        return self._cause()

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL for all it has started after `supervisor.term_grace`. A repeat does nothing."""
        process, attending = self._process, self._attending
        if process is None or process.stdin is None:
            return
        if attending is not None and not attending.done():
            grace = self._settings.supervisor.term_grace
            with suppress(OSError):
                process.stdin.write(b"stop\n")
                process.stdin.flush()
            await asyncio.wait([attending], timeout=grace + _KEEPER_SECONDS)
        with suppress(OSError):
            process.stdin.close()  # the keeper kills what is left when this pipe closes
        if attending is not None:
            await asyncio.wait([attending], timeout=_KEEPER_SECONDS)
            attending.cancel()
        process.kill()
        self._process = None

    # --- start -----------------------------------------------------------------------------------------------------

    async def _spawn(self, launch: Launch) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._begun_at = self.log.stat().st_size if self.log.exists() else 0
        self._rotated_before = self._rotated()
        key_option = f"{self._settings.section}.api_key_file"
        key = await asyncio.to_thread(read_key, key_option, self._settings.api_key_file)
        supervisor = self._settings.supervisor
        order = {
            "argv": list(launch.argv),
            "log": str(self.log),
            "log_bytes": supervisor.log_bytes,
            "grace": supervisor.term_grace,
            "secrets": [key] if key else [],
        }
        process = subprocess.Popen(  # noqa: ASYNC220, S603 - asyncio's own kills the keeper when a loop is closed
            [sys.executable, "-I", "-S", keeper.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self._environ(launch),
            start_new_session=True,
        )
        self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), process.stdout
        )
        process.stdin.write(orjson.dumps(order) + b"\n")
        process.stdin.flush()
        try:
            async with asyncio.timeout(_KEEPER_SECONDS):
                said = orjson.loads(await reader.readline() or b'{"error": "its keeper ended"}')
        except TimeoutError as error:
            transport.close()
            raise Unreachable(f"{self.name} cannot be started: its keeper process does not answer") from error
        if "error" in said:
            transport.close()
            raise ConfigError(
                f"{self.name} cannot be started: {said['error']}", f"streamrl engines install {self._dialect.kind}"
            )
        self.pid = said["pid"]
        self._attending = asyncio.create_task(self._attend(process, reader, transport), name=f"{self.name}-attend")
        logger.info("engine server started", extra={"server": self.name, "pid": self.pid, "log": str(self.log)})

    def _environ(self, launch: Launch) -> dict[str, str]:
        environ = {key: value for key, value in os.environ.items() if not key.startswith("STREAMRL_")}
        environ |= {**launch.environ, **self._settings.variables}
        return environ | ({"CUDA_VISIBLE_DEVICES": self._devices} if self._devices else {})

    async def _attend(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, transport: asyncio.BaseTransport
    ) -> None:
        try:
            while await reader.read(1 << 12):
                pass
            await asyncio.to_thread(process.wait, _KEEPER_SECONDS)
        finally:
            transport.close()
        if process.returncode < 0 and self.pid is not None:  # the keeper itself was killed before it could clean up
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    async def _await_ready(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        seconds = self._settings.start_deadline
        client = HttpClient(self.url)
        asking = asyncio.create_task(self._ask(client))
        assert self._attending is not None
        try:
            await self._wait_saying({asking, self._attending}, seconds)
            if self._attending.done():
                cause = self._cause()
                if _TAKEN.search(f"{cause}\n{self._tail()}"):  # the cause may be another error
                    raise _PortTakenError(cause)
                if self._process is not None and self._process.returncode == _USAGE and (said := self._refusal()):
                    section = self._settings.section
                    hint = f"fix {section}.flags and {section}.variables; the whole log: {self.log}"
                    raise ConfigError(f"{self.name} does not take its command line: {said}", hint)
                raise Unreachable(f"{self.name} did not start: {cause}", f"the whole log: {self.log}")
            if not asking.done():
                raise Unreachable(
                    f"{self.name} was not ready within {seconds:g} s; its log ends with:\n{self._tail()}",
                    f"{self._settings.section}.start_deadline; the whole log: {self.log}",
                )
            asking.result()
            if not await asyncio.to_thread(listens, self.pid or 0, port):
                raise _PortTakenError(f"another process answers on port {port}")
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await client.close()

    async def _wait_saying(self, either: set[asyncio.Task[None]], seconds: float) -> None:
        loop = asyncio.get_running_loop()
        began, done = loop.time(), set[asyncio.Task[None]]()
        while not done and (left := began + seconds - loop.time()) > 0:
            done, _ = await asyncio.wait(either, timeout=min(left, _SAY_SECONDS), return_when=asyncio.FIRST_COMPLETED)
            if not done:
                why = f"{loop.time() - began:.0f} s of at most {seconds:g} s"
                logger.warning("server is starting", extra={"server": self.name, "why": why})

    async def _ask(self, client: HttpClient) -> None:
        while True:
            try:
                await client.call(self._dialect.ready(), _READY_SECONDS, retry=False)
            except (Unreachable, DataError, WireError):
                await asyncio.sleep(_READY_PAUSE)
            else:
                return

    # --- end -------------------------------------------------------------------------------------------------------

    def _cause(self) -> str:
        code = self._process.returncode if self._process is not None else None
        killed = code is not None and (code < 0 or code > 128)
        if code is None:
            ended = "stopped"
        elif killed:
            ended = f"killed by {_signal_name(abs(code) % 128)}"
        else:
            ended = f"exit {code}"
        if not killed and (cause := self.root_cause()):  # a signal comes of no error in the log
            return f"{ended}: {cause}"
        tail = self._tail()
        return f"{ended}; its log ends with:\n{tail}" if tail else f"{ended}, and it has logged nothing"

    def root_cause(self) -> str:
        """The deepest error in this life's log; empty if there is none."""
        return root_cause(self._written(_CAUSE_BYTES))

    def _refusal(self) -> str:
        """Return the last error of the server's command line parser; empty when the log ends otherwise."""
        last = self._tail().rpartition("\n")[2].strip()
        return last.partition("error: ")[2]

    def _tail(self) -> str:
        lines = self._written(_TAIL_BYTES).splitlines()
        return "\n".join(f"  {line[:300]}" for line in lines[-_TAIL_LINES:])

    def _written(self, most: int) -> str:
        """The end of this life's log, which may lie in two files when it was rotated."""
        try:
            if self._rotated() == self._rotated_before:
                written = self._end_of(self.log, self._begun_at, most)
            else:
                written = self._end_of(self._old_log, self._begun_at, most) + self._end_of(self.log, 0, most)
        except OSError:
            return ""
        return written.decode(errors="replace")

    @property
    def _old_log(self) -> Path:
        return self.log.with_name(self.log.name + ".1")

    def _rotated(self) -> tuple[int, int] | None:
        """Changes whenever the log is rotated."""
        try:
            found = self._old_log.stat()
        except FileNotFoundError:
            return None
        return found.st_mtime_ns, found.st_size

    @staticmethod
    def _end_of(path: Path, begin: int, most: int) -> bytes:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(begin if begin <= size else 0, size - most))
            return file.read()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def free_port() -> int:
    """Return a port of the loopback interface without a listener; `Unreachable` when all are taken."""
    for port in random.sample(PORTS, _CANDIDATES):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise Unreachable("no free port between 20000 and 31999 on 127.0.0.1")


def listens(group: int, port: int) -> bool:
    """Whether a process of this process group listens on the port; True where the system does not tell (no /proc)."""
    tables = [Path("/proc/net") / name for name in ("tcp", "tcp6")]
    if not tables[0].exists():
        return True
    wanted = {f"socket:[{inode}]" for table in tables for inode in _inodes(table, port)}
    return any(wanted & _open_files(folder) for folder in _processes_of(group))


def _inodes(table: Path, port: int) -> set[str]:
    found = set()
    for line in table.read_text().splitlines()[1:] if table.exists() else ():
        fields = line.split()
        if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
            found.add(fields[9])
    return found


def _processes_of(group: int) -> list[Path]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # the name in parentheses may contain any character; state, parent and group follow it
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        if fields[2] == str(group):
            found.append(folder)
    return found


def _open_files(process: Path) -> set[str]:
    found = set()
    try:
        for handle in (process / "fd").iterdir():
            found.add(str(handle.readlink()))
    except OSError:
        return found  # it has ended meanwhile
    return found
