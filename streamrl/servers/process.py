"""A server that streamrl starts: its port, process, readiness and end, and the error in its log that began the end."""

from __future__ import annotations

import json
import logging
import os
import random
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from streamrl.atomic import write_whole
from streamrl.config import RunConfig, SupervisorConfig
from streamrl.errors import ConfigError, DataError, Unreachable, WireError
from streamrl.http import HttpClient
from streamrl.isolation.kept_process import KeptProcess
from streamrl.listening import own_address, url_of
from streamrl.servers.launch import LOOPBACK, Launch, Startable
from streamrl.waits import first_of

logger = logging.getLogger(__name__)
PORTS: Final = range(20_000, 32_000)  # below those from which the kernel takes the local ends of connections
_CANDIDATES: Final = 200
_READY_PAUSE: Final = 0.2
ANSWER_SECONDS: Final = 5.0  # for a question that a server answers at once whatever it does
_SAY_SECONDS: Final = 10.0  # between two lines that say how long a server starts already
_CAUSE_BYTES: Final = 1 << 20
_USAGE: Final = 2  # the exit code of argparse for a bad command line
_PREFIX: Final = re.compile(r"(?:\([^()]*pid=\d+[^()]*\) ?)?(?:ERROR [\d-]+ [\d:.]+ \[[^]]*\] ?)?")
_CHAINED: Final = "The above exception was the direct cause of the following exception:"
_ERROR: Final = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception|Timeout|Expired)(?:: .*)?$")
_POINTS_BACK: Final = re.compile(
    r"root cause|stack trace|messages above|relevant logs|is dead|EngineDeadError"
    r"|^(?:EOFError|SystemExit|(?:asyncio\.\S*)?CancelledError)\b"
)
_LONGEST: Final = 500


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What a server is started with, whatever its kind; it listens on `host`, and asks for the `key`."""

    section: str  # of the configuration, for messages
    model: str
    start_deadline: float
    supervisor: SupervisorConfig
    variables: Mapping[str, str] = field(default_factory=dict)
    host: str = LOOPBACK
    key: str | None = None

    @classmethod
    def of_engine(cls, config: RunConfig, key: str | None = None, ours: Mapping[str, str] = {}) -> Self:
        engine = config.engine
        path, variables, host = config.model.path, {**ours, **engine.variables}, own_address(engine.host)
        return cls("engine", path, engine.start_deadline, config.supervisor, variables, host, key)


class ManagedServer:
    """One server process, with all it starts, that lives no longer than this one; it sees `devices` (empty: all)."""

    def __init__(
        self, dialect: Startable, settings: ServerSettings, run_dir: Path, name: str, devices: str = "", *, seed: int
    ) -> None:
        self._dialect = dialect
        self._settings = settings
        self._devices = devices
        self._seed = seed % (1 << 31)
        self._process: KeptProcess | None = None
        self.name = name
        self.url = ""  # empty before `start`
        self.log = run_dir / "logs" / f"{name}.log"

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.alive

    async def start(self) -> str:
        """Start it and return its URL when it answers; works again after `stop` or its death."""
        settings = self._settings
        host, key = settings.host, settings.key
        with take_port(host) as taken:
            port = taken.getsockname()[1]
            launch = self._dialect.launch(model=settings.model, port=port, seed=self._seed, host=host, key=key)
            self.url = url_of(host, port)
            try:
                await self._await_ready(await self._spawn(launch))
            except BaseException:
                await self.stop()
                raise
        return self.url

    async def wait_death(self) -> str:
        """Return the cause in words as soon as the process has ended."""
        if self._process is None:
            return "stopped"
        await self._process.wait()
        return self._cause(self._process)

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL for all it has started after `supervisor.term_grace`. A repeat does nothing."""
        if self._process is not None:
            await self._process.stop()

    def root_cause(self) -> str:
        """The deepest error in this life's log; empty if there is none."""
        return "" if self._process is None else root_cause(self._process.written(_CAUSE_BYTES))

    async def _spawn(self, launch: Launch) -> KeptProcess:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        settings, supervisor = self._settings, self._settings.supervisor
        secrets = [settings.key] if settings.key else []
        process = KeptProcess(self.log, supervisor.log_bytes, grace=supervisor.term_grace, secrets=secrets)
        self._process = process
        try:
            await process.start([*launch.argv, *self._secret_flags(launch)], self._environ(launch))
        except TimeoutError as error:
            raise Unreachable(f"{self.name} cannot be started: its guard process does not answer") from error
        except OSError as error:
            hint = f"streamrl engines install {self._dialect.kind}"
            raise ConfigError(f"{self.name} cannot be started: {error}", hint) from error
        logger.info("engine server started", extra={"server": self.name, "pid": self.pid, "log": str(self.log)})
        return process

    def _secret_flags(self, launch: Launch) -> list[str]:
        """Words that name the file with flags that nobody else may see; JSON is YAML."""
        if not launch.secret_flags:
            return []
        path = self.log.with_suffix(".flags.yaml")
        lines = (f"{name}: {json.dumps(value)}\n" for name, value in launch.secret_flags.items())
        write_whole(path, "".join(lines).encode(), private=True)
        return ["--config", str(path)]

    def _environ(self, launch: Launch) -> dict[str, str]:
        environ = {key: value for key, value in os.environ.items() if not key.startswith("STREAMRL_")}
        environ |= {**launch.environ, **self._settings.variables}
        return environ | ({"CUDA_VISIBLE_DEVICES": self._devices} if self._devices else {})

    async def _await_ready(self, process: KeptProcess) -> None:
        """Ask until it answers, has ended, or its deadline is over."""
        seconds, began, say_at = self._settings.start_deadline, time.monotonic(), _SAY_SECONDS
        client = HttpClient(self.url, self._settings.key)
        try:
            while (waited := time.monotonic() - began) < seconds:
                if waited >= say_at:
                    say_at += _SAY_SECONDS
                    why = f"{waited:.0f} s of at most {seconds:g} s"
                    logger.warning("server is starting", extra={"server": self.name, "why": why})
                ready = await is_ready(client, self._dialect, min(ANSWER_SECONDS, seconds - waited))
                if not ready:
                    await first_of(process.wait(), seconds=_READY_PAUSE)
                if not process.alive:
                    raise self._refusal(process)
                if ready:
                    return
        finally:
            await client.close()
        said = f"{self.name} was not ready within {seconds:g} s; its log ends with:\n{process.tail}"
        raise Unreachable(said, f"{self._settings.section}.start_deadline; the whole log: {self.log}")

    def _refusal(self, process: KeptProcess) -> ConfigError | Unreachable:
        """Why a process that has ended did not start."""
        said = process.tail.rpartition("\n")[2].partition("error: ")[2].strip()
        if process.code == _USAGE and said:
            section = self._settings.section
            hint = f"fix {section}.flags and {section}.variables; the whole log: {self.log}"
            return ConfigError(f"{self.name} does not take its command line: {said}", hint)
        return Unreachable(f"{self.name} did not start: {self._cause(process)}", f"the whole log: {self.log}")

    def _cause(self, process: KeptProcess) -> str:
        # A signal comes of no error in the log.
        if not process.end.startswith("killed") and (cause := self.root_cause()):
            return f"{process.end}: {cause}"
        tail = process.tail
        return f"{process.end}; its log ends with:\n{tail}" if tail else f"{process.end}, and it has logged nothing"


async def is_ready(client: HttpClient, server: Startable, seconds: float) -> bool:
    try:
        await client.call(server.ready, seconds, retry=False)
    except (Unreachable, DataError, WireError):
        return False
    return True


def take_port(host: str = LOOPBACK) -> socket.socket:
    """Bind a free port, for a server that is started while it is bound. `Unreachable`: all are taken.

    A server that sets SO_REUSEADDR, as they all do, can listen there, and no other of streamrl takes it meanwhile.
    """
    for port in random.sample(PORTS, _CANDIDATES):
        taken = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            # For the server's sake only after it is bound: two that set it could bind the same port.
            taken.bind((host, port))
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        except OSError:
            taken.close()
            continue
        return taken
    raise Unreachable(f"no free port between 20000 and 31999 on {host}")


def points_back(error: str) -> bool:
    """Whether an error says no more than that there was another one before it."""
    return _POINTS_BACK.search(error) is not None


def root_cause(log: str) -> str:
    """The newest exception in a log of vLLM or SGLang that does not point back to another; empty: there is none.

    Their processes end one after the other, and each reports the end of the one before it. Of a chain it is the first.
    """
    found, chained, named = "", False, False
    for line in log.splitlines():
        prefix = _PREFIX.match(line)
        text = line[prefix.end() if prefix else 0 :].rstrip()
        if named and text.startswith("  "):
            found += f" {text.strip()}"  # pydantic says there what is wrong
        error = _ERROR.match(text) is not None
        named = error and not chained and not points_back(text)
        found = text if named else found
        chained = text == _CHAINED or (chained and not error)
    return found[:_LONGEST]
