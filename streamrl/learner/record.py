"""The durable record of trained groups: one frame per group, written before the group is retired.

Redis forgets a group when it is retired; `streamrl trace` reads it here. Each learner writes a file of its own,
`groups-EPOCH.msgpack`, and a checkpoint names the prefixes that belong to its weights, as it does with the logs of ids:
what is behind them was written for a checkpoint that never came to be, or by an old learner that woke up.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from streamrl.errors import CannotCreate
from streamrl.learner.chain import Link
from streamrl.wire import pack_frame, read_frames


def record_file(epoch: int) -> str:
    """Name of the record of one epoch."""
    return f"groups-{epoch}.msgpack"


def read_record(run_dir: Path, record: Sequence[Link]) -> Iterator[dict[str, Any]]:
    """The frames of all groups that the weights of a checkpoint were trained on, in the order they were trained.

    Raises:
        WireError: a file of the record holds something else than frames.
        OSError: a file of the record cannot be read.
    """
    for file, size in record:
        yield from read_frames(run_dir / file, size)


class GroupRecord:
    """The record of this learner's epoch.

    Frames are held in memory until they could be written; writing repeats at the same offset, so a write that failed
    half way is simply done again.

    Args:
        run_dir: directory of the run.
        epoch: this learner's epoch.

    Raises:
        CannotCreate: the file is there already (another learner used this epoch) or cannot be made.
    """

    def __init__(self, run_dir: Path, epoch: int) -> None:
        self.file = record_file(epoch)
        try:
            self._descriptor = os.open(run_dir / self.file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except OSError as error:
            raise CannotCreate(f"{run_dir / self.file} cannot be made: {error.strerror}") from error
        self._unwritten = b""
        self._written = 0

    def append(self, frame: dict[str, Any]) -> None:
        """Add the frame of one trained group; it is written by the next `sync`."""
        self._unwritten += pack_frame(frame)

    def sync(self) -> Link:
        """Write the frames, make them durable and return the link of the record.

        Raises:
            OSError: the disk is full or broken; nothing is forgotten, call again later.
        """
        while self._unwritten:
            count = os.pwrite(self._descriptor, self._unwritten, self._written)
            self._unwritten = self._unwritten[count:]
            self._written += count
        os.fsync(self._descriptor)
        return self.file, self._written

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)
