"""Files and directories that appear whole or not at all, and if needed survive a crash of the machine.

Content goes to a draft beside its place, which is renamed when it is complete. A reader that finds the name finds all
of it. Each writer of a file has a draft of its own (`NAME.ID.draft`), so that several hosts may write the same file; a
crash leaves it there. The draft of a directory is `NAME.draft`, which the next attempt overwrites.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_whole(path: Path, data: bytes, *, private: bool = False) -> None:
    """Replace a small file; a crash of the machine may undo it. An OSError leaves the old file.

    A file that holds these bytes already only gets a new time: its readers on other hosts keep it. `private`: a new
    file is readable by its owner alone.
    """
    with contextlib.suppress(OSError):
        if path.read_bytes() == data:
            os.utime(path)
            return
    with _draft_of_its_own(path) as draft:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600 if private else 0o666)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        draft.rename(path)


def write_durably(path: Path, data: bytes) -> None:
    """Replace a small file; when it returns, the file is on the disk."""
    with _draft_of_its_own(path) as draft:
        write_synced(draft, data)
        draft.rename(path)
    fsync_directory(path.parent)


@contextmanager
def _draft_of_its_own(path: Path) -> Iterator[Path]:
    draft = draft_of(path.with_name(f"{path.name}.{uuid.uuid4().hex}"))
    try:
        yield draft
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def write_synced(path: Path, data: bytes) -> None:
    """Write a file to the disk; for the files of a directory that `finish_durably` renames."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def append_durably(path: Path, data: bytes) -> None:
    """Append whole lines to a file; when it returns, they are on the disk. An OSError leaves the file as it was."""
    size = path.stat().st_size if path.exists() else 0
    try:
        with path.open("ab") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        if path.exists():
            os.truncate(path, size)
        raise


def finish_durably(draft: Path, final: Path) -> None:
    """Durably rename a directory whose files are on the disk; `final` must be free."""
    fsync_directory(draft)
    draft.rename(final)
    fsync_directory(final.parent)


@contextmanager
def whole_directory(path: Path) -> Iterator[Path]:
    """Yield an empty draft of a directory, which replaces `path` when the block ends.

    If the block raises, the old content stays and the draft is removed. The files get the mode that the umask gives:
    safetensors makes them for their owner alone.
    """
    draft = draft_of(path)
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        yield draft
        for file in draft.rglob("*"):
            if file.is_file():
                file.chmod(draft.stat().st_mode & 0o666)
        if path.exists():
            shutil.rmtree(path)
        draft.rename(path)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def fsync_directory(path: Path) -> None:
    """Make renames and new files in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def draft_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.draft")
