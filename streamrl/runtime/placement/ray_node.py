"""What runs on the nodes of a Ray cluster: a look at a node before the start, and the keeper of each process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import streamrl
from streamrl.atomic import write_whole
from streamrl.config import RunConfig
from streamrl.errors import StreamrlError, need_packages
from streamrl.runtime.model_checks import check_models
from streamrl.runtime.placement.child import Child, Lifeline
from streamrl.runtime.plan import RoleCommand
from streamrl.runtime.preflight import check_data, check_engine

_WAITING_BYTES: Final = 4 << 20
"""Output that a keeper holds for a supervisor that does not ask; what is more is lost, the oldest first."""
_ANSWER_BYTES: Final = 32 << 10
"""Of output, and of each file, in one answer: larger ones go through Ray's object store, which dies with its node."""
_LOCK: Final = "supervisor.lock"


def mark_of(run_dir: Path) -> bytes:
    """What tells whether a run directory is that of the living supervisor."""
    return (run_dir / _LOCK).read_bytes()


@dataclass(frozen=True, slots=True)
class KnownDirectory:
    """The supervisor's run directory: its path, its mark, and what a role needs of it."""

    path: Path
    mark: bytes
    files: Mapping[str, bytes]

    def is_here(self) -> bool:
        try:
            return mark_of(self.path) == self.mark
        except OSError:
            return False


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Of a node: version of streamrl, whether it has the supervisor's run directory, and what roles lack there."""

    version: str
    shares: bool
    lacks: Mapping[str, str]


def check_node(config: RunConfig, directory: KnownDirectory, kinds: Sequence[str]) -> NodeFacts:
    lacks = {kind: why for kind in kinds if (why := _lacking(config, kind))}
    return NodeFacts(streamrl.__version__, directory.is_here(), lacks)


def _lacking(config: RunConfig, kind: str) -> str:
    try:
        if kind == "learner":
            need_packages("training", "torch", "transformers", "safetensors")
        elif kind == ("engine" if config.engines else "rollout"):
            check_engine(config)
        elif kind == "feeder":
            check_data(config)
        if kind in {"learner", "engine", "rollout", "feeder"}:
            check_models(config)
    except StreamrlError as error:
        return f"{error.message}; {error.hint}" if error.hint else error.message
    return ""


@dataclass(frozen=True, slots=True)
class News:
    """What a keeper has heard of its process since it was asked last.

    `grown` are bytes at the end of files that the supervisor does not see, by name; `code` is None while it runs.
    """

    status: list[bytes]
    output: bytes
    grown: dict[str, bytes]
    code: int | None


class GrowingFile:
    """Lines at the end of a file of the run directory of this node; what was in it before is left out."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def take(self) -> bytes:
        """Some of the whole lines since the last call; empty when there are no more."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(_ANSWER_BYTES) + file.readline()
        except FileNotFoundError:
            return b""
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole


class RoleKeeper:
    """Holds one process of a role on the node that Ray chose. Its own end ends the process, by the lifeline."""

    def __init__(self) -> None:
        self._lifeline = Lifeline()
        self._child: Child | None = None
        self._status: list[bytes] = []
        self._output = bytearray()
        self._growing: dict[str, GrowingFile] = {}
        self._code: int | None = None
        self._changed = asyncio.Event()

    async def meeting_point(self) -> tuple[str, str]:
        """Version of streamrl here, and an address where other processes of a gang can reach one on this node."""
        import ray

        with socket.socket() as free:
            free.bind(("", 0))
            return streamrl.__version__, f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

    async def start(
        self, command: RoleCommand, env: Mapping[str, str], directory: KnownDirectory, grow: Sequence[str]
    ) -> int:
        """Start the process; returns its pid.

        On a node without the supervisor's run directory one is made, and what the process appends to the files `grow`
        is news.
        """
        run_dir = directory.path
        if not directory.is_here():
            run_dir.mkdir(parents=True, exist_ok=True)
            for name, content in directory.files.items():
                write_whole(run_dir / name, content, private=True)
            self._growing = {name: GrowingFile(run_dir / name) for name in grow}
        inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}  # Ray's own choice
        argv = [sys.executable, *command.arguments]
        self._child = await Child.spawn(argv, {**inherited, **env}, self._lifeline, command.cwd or run_dir)
        self._ending = asyncio.create_task(self._end(self._child))
        return self._child.pid

    async def news(self) -> News:
        """Return when there is any; the last one comes when nothing is left to say."""
        await self._changed.wait()
        self._changed.clear()
        ended = self._code is not None  # before the files are read: then they hold all that the process wrote
        grown = {name: data for name, file in self._growing.items() if (data := file.take())}
        output = bytes(self._output[:_ANSWER_BYTES])
        del self._output[:_ANSWER_BYTES]
        more = bool(self._output or grown)
        if more:
            self._changed.set()
        news = News(self._status, output, grown, self._code if ended and not more else None)
        self._status = []
        return news

    async def signal(self, number: int) -> None:
        if self._child is not None and self._code is None:
            if number == signal.SIGKILL:
                self._child.kill()
            else:
                self._child.signal(number)

    async def _end(self, child: Child) -> None:
        def status(line: bytes) -> None:
            self._status.append(line)
            self._changed.set()

        def output(data: bytes) -> None:
            self._output += data
            del self._output[:-_WAITING_BYTES]
            self._changed.set()

        self._code = await child.end(status, output)
        self._changed.set()
