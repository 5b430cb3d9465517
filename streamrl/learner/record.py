"""The durable record of trained groups, `groups.msgpack`: one frame per group, written before the group is retired.

Redis forgets a group when it is retired; `trace` and the summary read it here. Frames are collected in memory and
written with the checkpoint that holds their update, so that the file says what the surviving weights were trained on.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any, Final

from streamrl.wire import pack_frame

RECORD_FILE: Final = "groups.msgpack"


class GroupRecord:
    """Appends frames to the record of a run.

    Args:
        run_dir: directory of the run.
        size: length of the record that belongs to the loaded checkpoint. What is behind it was written for a
            checkpoint that never came to be and is cut off, so that no group stands there twice.
    """

    def __init__(self, run_dir: Path, size: int) -> None:
        self._descriptor = os.open(run_dir / RECORD_FILE, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
        if os.fstat(self._descriptor).st_size > size:
            os.ftruncate(self._descriptor, size)
        self._unwritten = b""

    def append(self, frame: dict[str, Any]) -> None:
        """Add the frame of one trained group; it is written by the next `sync`."""
        self._unwritten += pack_frame(frame)

    def sync(self) -> int:
        """Write the frames, make them durable and return the length of the record.

        Frames are appended in one write each time, so that a woken old learner cannot cut into them.

        Raises:
            OSError: the disk is full or broken; nothing is forgotten, call again later.
        """
        before = os.fstat(self._descriptor).st_size
        if self._unwritten and os.write(self._descriptor, self._unwritten) != len(self._unwritten):
            os.ftruncate(self._descriptor, before)
            raise OSError(errno.ENOSPC, "the record of groups was cut short by a full disk")
        self._unwritten = b""
        os.fsync(self._descriptor)
        return os.fstat(self._descriptor).st_size

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)
