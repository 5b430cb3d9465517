"""One supervisor per run: a file lock, which the kernel releases when its holder dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import orjson

from streamrl.errors import CannotCreate, Refused


@contextlib.contextmanager
def supervisor_lock(run_dir: Path) -> Iterator[None]:
    """Hold `supervisor.lock` of a run for this block. No child inherits it.

    Raises:
        Refused: another process holds it; the message names it.
        CannotCreate: the file cannot be made.
    """
    path = run_dir / "supervisor.lock"
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise CannotCreate(f"{path}: {error.strerror}", "check space and permissions") from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Refused(
                f"{run_dir} is running already{_holder(path)}", "stop it first, or give this run a name"
            ) from error
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
        os.ftruncate(handle, 0)
        os.pwrite(handle, orjson.dumps(holder), 0)
        yield
    finally:
        os.close(handle)


def _holder(path: Path) -> str:
    try:
        holder = orjson.loads(path.read_bytes())
        return f": supervised by process {holder['pid']} on {holder['host']}"
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError):
        return ""  # the holder has not written its name yet
