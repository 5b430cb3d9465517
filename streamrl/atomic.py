"""Files and directories that appear whole or not at all, and if needed survive a crash of the machine.

Content goes to a draft beside its place (`NAME.draft`), which is renamed when it is complete. A reader that finds the
name finds all of it; the next attempt overwrites a draft that a crash left.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Replace a small file; a crash of the machine may undo it. An OSError leaves the old file."""
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
    """Write a file to the disk; for the files of a directory that `finish_durably` renames."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def finish_durably(draft: Path, final: Path) -> None:
    """Durably rename a directory whose files are on the disk; `final` must be free."""
    fsync_directory(draft)
    draft.rename(final)
    fsync_directory(final.parent)


@contextmanager
def whole_directory(path: Path) -> Iterator[Path]:
    """Yield an empty draft of a directory, which replaces `path` when the block ends.

    If the block raises, the old content stays and the draft is removed.
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
    return path.with_name(f"{path.name}.draft")
