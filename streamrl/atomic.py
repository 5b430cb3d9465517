"""Files and directories that appear whole or not at all, and where it matters survive a crash of the machine.

What is written goes to a draft beside its place (`NAME.draft`) and gets its name when it is complete. A reader that
finds the name finds all of it; a draft that a crash leaves is written over by the next attempt.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Write a small file in place of one that is there; a crash of the machine may take it back.

    Raises:
        OSError: no room, or no permission; what was there is still there.
    """
    draft = draft_of(path)
    try:
        draft.write_bytes(data)
        draft.rename(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def write_durably(path: Path, data: bytes) -> None:
    """As `write_whole`; when it returns, the file is on the disk."""
    draft = draft_of(path)
    write_synced(draft, data)
    draft.rename(path)
    fsync_directory(path.parent)


def write_synced(path: Path, data: bytes) -> None:
    """Write a file, and its content to the disk; for the files of a directory that `finish_durably` names."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def finish_durably(draft: Path, final: Path) -> None:
    """Give a directory whose files are on the disk its name, which must be free, for good."""
    fsync_directory(draft)
    draft.rename(final)
    fsync_directory(final.parent)


@contextmanager
def whole_directory(path: Path) -> Iterator[Path]:
    """Yield an empty draft of a directory, which takes the place of what is there when the block ends.

    If the block raises, what was there stays, and nothing is left of the draft.
    """
    draft = draft_of(path)
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        yield draft
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
    """Where the draft of a file or directory is written."""
    return path.with_name(f"{path.name}.draft")
