"""Files of a version that has lost its name, written over for a new one.

A write into a new file of the shared memory waits for the kernel to find each of its pages, which costs as much as the
copy itself. The pages of the version that is being removed are there already. They are taken only when the kernel says
that nobody has their file open or mapped: it grants a write lease (fcntl(2), F_SETLEASE) on nothing else, and without a
name nobody can open the file afterwards. Whoever still reads that version keeps it as it is.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def take_spare(spare: Path, path: Path) -> int | None:
    """Give a file that nobody reads another name, in order to write over it.

    Args:
        spare: a file of our own that readers know by other names only, if at all.
        path: its new name, which must be free and unknown to readers.

    Returns:
        Its size; None when there is no such file, or somebody reads it: then neither name is taken.
    """
    try:
        spare.rename(path)
    except OSError:
        return None
    try:
        size = _size_if_unread(path)
    except OSError:
        size = None
    if size is None:
        path.unlink(missing_ok=True)
    return size


def _size_if_unread(path: Path) -> int | None:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        found = os.fstat(descriptor)
        if found.st_nlink > 1:  # it has another name after all
            return None
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return found.st_size
    finally:
        os.close(descriptor)
