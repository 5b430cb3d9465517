"""A command that ends with the process that started it, and takes all that it has started along."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from streamrl.isolation import guard

logger = logging.getLogger(__name__)
_GUARD_SECONDS: Final = 15.0
_TAIL_BYTES: Final = 1 << 14
_TAIL_LINES: Final = 15
_SIGNALS: Final = frozenset(int(number) for number in signal.Signals)


class KeptProcess:
    """One life of a command under a guard (guard.py), which ends it when this process ends, for whatever reason.

    What it prints goes to `log`, without `secrets`; over `log_bytes` the log is rotated, keeping one old file. `own` is
    a directory that is removed if this process dies before the command does. `pid` is also that of the process group;
    `code` is the exit code (128 + signal), None before the end.
    """

    def __init__(
        self, log: Path, log_bytes: int, *, grace: float = 0.0, secrets: Sequence[str] = (), own: Path | None = None
    ) -> None:
        self.log = log
        self._order = {
            "log": str(log),
            "log_bytes": log_bytes,
            "grace": grace,
            "secrets": list(secrets),
            "own": None if own is None else str(own),
        }
        self._grace = grace
        self._begun_at = 0
        self._rotated_before: tuple[int, int] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._life: asyncio.Task[None] | None = None
        self.pid: int | None = None
        self.code: int | None = None

    @property
    def alive(self) -> bool:
        return self._life is not None and not self._life.done()

    async def start(self, argv: Sequence[str], environ: Mapping[str, str], folder: Path | None = None) -> None:
        """Return when it runs, in `folder`. Cancelling it kills what was started.

        Raises:
            TimeoutError: its guard does not answer.
            OSError: the command cannot be executed.
        """
        self._begun_at = self.log.stat().st_size if self.log.exists() else 0
        self._rotated_before = self._rotated()
        self._guard = subprocess.Popen(  # noqa: ASYNC220, S603 - asyncio's own kills the guard when a loop is closed
            [sys.executable, "-I", "-S", guard.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environ,
            cwd=folder,
            start_new_session=True,
        )
        begun: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._life = asyncio.create_task(self._live(self._guard, begun), name=f"{self.log.stem}-life")
        self._tell(json.dumps({**self._order, "argv": list(argv)}).encode())
        try:
            async with asyncio.timeout(_GUARD_SECONDS):
                said = json.loads(await begun or b'{"error": "its guard ended"}')
            if "error" in said:
                raise OSError(said["error"])
        except BaseException:
            await self.stop()
            raise
        self.pid = said["pid"]

    async def wait(self) -> int | None:
        """Return the exit code when it has ended, with all that it had started."""
        if self._life is not None:
            await asyncio.wait([self._life])
        return self.code

    async def stop(self) -> None:
        """SIGTERM, and after `grace` SIGKILL for all that is left; returns when all is gone. A repeat does nothing."""
        life, guarding = self._life, self._guard
        if life is None or guarding is None or life.done():
            return
        self._tell(b"stop")
        await asyncio.wait([life], timeout=self._grace + _GUARD_SECONDS)
        if life.done():
            return
        logger.warning("the guard of a process had to be killed", extra={"pid": guarding.pid})
        guarding.kill()
        await asyncio.wait([life], timeout=_GUARD_SECONDS)

    @property
    def end(self) -> str:
        """How it ended."""
        if self.code is None:
            return "stopped"
        number = -self.code if self.code < 0 else self.code - 128
        return f"killed by {signal.Signals(number).name}" if number in _SIGNALS else f"exit {self.code}"

    @property
    def tail(self) -> str:
        """The last lines that it printed; empty: none."""
        lines = self.written(_TAIL_BYTES).splitlines()
        return "\n".join(f"  {line[:300]}" for line in lines[-_TAIL_LINES:])

    def written(self, most: int) -> str:
        """The end of what it printed; that may be in two files when the log was rotated."""
        old = self._end_of(self._old_log, self._begun_at, most) if self._rotated() != self._rotated_before else None
        new = self._end_of(self.log, self._begun_at if old is None else 0, most)
        return ((old or b"") + new).decode(errors="replace")

    async def _live(self, guarding: subprocess.Popen[bytes], begun: asyncio.Future[bytes]) -> None:
        assert guarding.stdin is not None
        assert guarding.stdout is not None
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), guarding.stdout
        )
        try:
            line = await reader.readline()
            if not begun.done():
                begun.set_result(line)
            await reader.read()
            self.code = await asyncio.to_thread(guarding.wait, _GUARD_SECONDS)
        finally:
            transport.close()
            with suppress(OSError):
                guarding.stdin.close()  # a guard that is left kills everything then
        if self.code < 0 and self.pid is not None:  # the guard itself was killed before it could clean up
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def _tell(self, line: bytes) -> None:
        assert self._guard is not None
        assert self._guard.stdin is not None
        with suppress(OSError):  # it has ended, which its output says too
            self._guard.stdin.write(line + b"\n")
            self._guard.stdin.flush()

    @property
    def _old_log(self) -> Path:
        return self.log.with_name(f"{self.log.name}.1")

    def _rotated(self) -> tuple[int, int] | None:
        """Changes whenever the log is rotated."""
        try:
            found = self._old_log.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size

    @staticmethod
    def _end_of(path: Path, begin: int, most: int) -> bytes:
        try:
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(begin if begin <= size else 0, size - most))
                return file.read(most)
        except OSError:
            return b""
