"""Who holds the lock of a run's own Redis server, and the end of a server that its starter has left behind.

The server process inherits the lock, so the file is locked for as long as it lives; in it stands who started it.
Usually the kernel ends a server with its starter (SIGTERM). A server that hangs at that moment, or its child that
rewrites the append-only file, stays: then no other can start on these files, and nobody ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import orjson

logger = logging.getLogger(__name__)

STARTER: Final = "STREAMRL_SUPERVISOR"
"""Variable with the process id of the supervisor that starts a role."""
_FLUSH_SECONDS: Final = 10.0
"""For a server to write its append-only file and end."""
_KILL_SECONDS: Final = 10.0
_POLL: Final = 0.01


@dataclass(frozen=True, slots=True)
class Holder:
    """A server, and the process that started it; 0: a shell or a scheduler, which looks after it itself."""

    pid: int
    starter: int

    @property
    def is_orphan(self) -> bool:
        """Whether its starter is dead: it has another parent now, or has ended itself and left a child."""
        return self.starter != 0 and _parent(self.pid) != self.starter


def lock_path(run_dir: Path) -> Path:
    """The file that the server of a run holds locked."""
    return run_dir / "redis" / "server.lock"


def say_holder(handle: int, holder: Holder) -> None:
    """Record the holder in the lock file. On a full disk it only logs a warning."""
    data = orjson.dumps({"pid": holder.pid, "starter": holder.starter})
    try:
        os.ftruncate(handle, 0)
        os.pwrite(handle, data, 0)
    except OSError as error:
        logger.warning("the holder of the server lock cannot be written", extra={"why": str(error)})


def read_holder(run_dir: Path) -> Holder | None:
    """Who took the lock last; None when that is not known."""
    try:
        said = orjson.loads(lock_path(run_dir).read_bytes())
        return Holder(int(said["pid"]), int(said["starter"]))
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError, ValueError):
        return None


async def end_orphan(run_dir: Path) -> bool:
    """End the server of a run whose starter is dead; return whether there was one. A repeat does nothing.

    Only for the holder of the supervisor's lock. A server that a command has started for one call, or that was started
    by hand, is left alone, and so is one on another host.
    """
    if _is_free(run_dir):
        return False
    holder = read_holder(run_dir)
    if holder is None or not holder.is_orphan:
        return False
    family = [pid for pid in _open_in(lock_path(run_dir).resolve()) if holder.pid in {pid, _group(pid)}]
    if not family:
        return False
    logger.warning("ending a Redis server that a killed process has left behind", extra={"pids": family})
    for number, seconds in ((signal.SIGTERM, _FLUSH_SECONDS), (signal.SIGKILL, _KILL_SECONDS)):
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
                os.kill(pid, signal.SIGCONT)  # a stopped one writes what it has, and ends
        if await _is_soon_free(run_dir, seconds):
            return True
    logger.error("a Redis server does not end after SIGKILL", extra={"pids": family})
    return False


async def _is_soon_free(run_dir: Path, seconds: float) -> bool:
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while not _is_free(run_dir):
        if loop.time() >= end:
            return False
        await asyncio.sleep(_POLL)
    return True


def _is_free(run_dir: Path) -> bool:
    try:
        handle = os.open(lock_path(run_dir), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        return True
    finally:
        os.close(handle)


def _open_in(path: Path) -> Iterator[int]:
    """Processes of this host that have a file open; none where there is no /proc."""
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
    """Process id of the parent of a process; 0 when it has ended."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if after_name[0] in "ZX" else int(after_name[1])
