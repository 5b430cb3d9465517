"""Where the shards lie: shared memory of this host, or a directory that publisher and followers both see.

A transport is only a root folder and what makes a write there last. Everything else is the same files and manifest.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, TypeAlias

from streamrl.errors import CannotCreate

_SPOOL = "-spool-"
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (the folder below it is private, see `create_root`)


@dataclass(frozen=True)
class ShmTransport:
    """Same host: /dev/shm/streamrl-UID-HASH, where HASH comes from the path of the run directory."""

    kind: ClassVar[Literal["shm"]] = "shm"
    durable: ClassVar[bool] = False
    root: Path
    hint: ClassVar[str] = (
        "give the host (or container: --shm-size) a larger /dev/shm, or set weights.transport=directory"
    )

    @classmethod
    def of_run(cls, run_dir: Path) -> ShmTransport:
        """Return the transport of a run; equal for every process of one user that sees the run under one path."""
        digest = hashlib.blake2b(os.fsencode(run_dir.resolve()), digest_size=8).hexdigest()
        return cls(_SHARED_MEMORY / f"streamrl-{os.getuid()}-{digest}")


@dataclass(frozen=True)
class DirectoryTransport:
    """A shared file system, or debugging: RUN_DIR/weights; every version is made durable before it has its name."""

    kind: ClassVar[Literal["directory"]] = "directory"
    durable: ClassVar[bool] = True
    root: Path
    hint: ClassVar[str] = "make room on the disk of the run directory"

    @classmethod
    def of_run(cls, run_dir: Path) -> DirectoryTransport:
        """Return the transport of a run."""
        return cls(run_dir.resolve() / "weights")


TransportKind: TypeAlias = Literal["shm", "directory", "http", "collective"]
Transport: TypeAlias = ShmTransport | DirectoryTransport


def make_transport(kind: TransportKind, run_dir: Path) -> Transport:
    """Return where the learner's host keeps the files of the transport that the configuration names."""
    return DirectoryTransport.of_run(run_dir) if kind == "directory" else ShmTransport.of_run(run_dir)


def create_root(transport: Transport) -> None:
    """Make the root of a transport, private to its user.

    Raises:
        CannotCreate: no permission, or somebody else put something of that name into the shared folder.
    """
    try:
        transport.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = transport.root.lstat()
    except OSError as error:
        raise CannotCreate(f"cannot make {transport.root} for the weights: {error}", transport.hint) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise CannotCreate(f"{transport.root} belongs to somebody else", f"remove {transport.root}")


def spool_of_run(run_dir: Path, name: str) -> Path:
    """Return the folder in the shared memory of this host that holds what the replica `name` fetched."""
    root = ShmTransport.of_run(run_dir).root
    return root.with_name(f"{root.name}{_SPOOL}{re.sub('[^A-Za-z0-9._-]', '_', name)}")


def release_memory(run_dir: Path) -> None:
    """Give back the shared memory of a run that ended; whoever has a version mapped keeps it. A repeat does nothing.

    For the supervisor, when no role is left: a run that is resumed publishes its weights again.
    """
    for folder in memory_of(run_dir):
        shutil.rmtree(folder, ignore_errors=True)


def memory_of(run_dir: Path) -> list[Path]:
    """The folders in the shared memory of this host that processes of a run have made."""
    root = ShmTransport.of_run(run_dir).root
    return [folder for folder in (root, *root.parent.glob(f"{root.name}{_SPOOL}*")) if folder.exists()]


def check_room(transport: Transport, need: int) -> None:
    """Raise `CannotCreate` when the file system of a transport has fewer than `need` bytes left."""
    free = os.statvfs(transport.root)
    left = free.f_bavail * free.f_frsize
    if left < need:
        raise CannotCreate(
            f"no room for the weights in {transport.root}: {need >> 20} MiB needed, {left >> 20} MiB left",
            transport.hint,
        )
