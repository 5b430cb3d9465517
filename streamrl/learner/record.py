"""The durable record of trained groups: one frame per group, written before the group is retired.

Redis forgets a group when it is retired; `streamrl trace` reads it here. Each learner writes a file of its own,
`groups-EPOCH.msgpack`, and a checkpoint names the prefixes that belong to its weights, as it does with the logs of ids:
what is behind them was written for a checkpoint that never came to be, or by an old learner that woke up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from streamrl.learner.chain import EpochFile, Link
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


class GroupRecord(EpochFile):
    """The record of this learner's epoch, in the run directory."""

    def __init__(self, run_dir: Path, epoch: int) -> None:
        super().__init__(run_dir, record_file(epoch))

    def append(self, frame: dict[str, Any]) -> None:
        """Add the frame of one trained group; it is written by the next `sync`."""
        data = pack_frame(frame)
        with self._lock:
            self._unwritten += data
