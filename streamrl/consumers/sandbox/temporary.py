"""Directories below the system's temporary one that do not stay when their process was killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from streamrl.consumers.sandbox.inside import folders

_YOUNG_SECONDS: Final = 60.0
"""A directory so young may be one whose process has not locked it yet."""


@contextlib.contextmanager
def own_folder(prefix: str) -> Iterator[str]:
    """Make a directory, lock it for as long as this process has it, and remove it at the end."""
    path = tempfile.mkdtemp(prefix=prefix)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            yield path
        finally:
            os.close(descriptor)
    finally:
        if Path(path).exists():
            folders.remove(path)


def sweep(prefix: str) -> None:
    """Remove the directories of this user that `own_folder` made in processes that were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # it is another user's, in use, or just gone
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                about = os.fstat(descriptor)
                if about.st_uid == os.geteuid() and time.time() - about.st_mtime > _YOUNG_SECONDS:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    folders.remove(str(path))
            finally:
                os.close(descriptor)
