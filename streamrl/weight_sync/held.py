"""Versions that somebody is pulling stay readable after the publisher has removed them.

Otherwise a replica whose pull takes longer than two steps of the learner would find each version gone and get none.
Holding is an open descriptor for each file, so nothing is left behind by a process that dies.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

HELD: Final = 2
"""Versions held at most: so many times the weights that memory may hold in addition."""
IDLE_SECONDS: Final = 30.0
"""A version that nobody asked for in this time is let go."""


@dataclass
class _Hold:
    used: float
    transfers: int = 0
    files: dict[str, int] = field(default_factory=dict)


class HeldVersions:
    """Open descriptors of the files of versions below `root`; the clock is an argument.

    Args:
        root: folder that holds the folders of the versions.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._holds: dict[str, _Hold] = {}

    def begin(self, folder: str, now: float) -> None:
        """A transfer of a file of this version begins: hold the version, if there is room for one more."""
        self.expire(now)
        hold = self._holds.get(folder)
        if hold is None and len(self._holds) < HELD:
            hold = self._holds[folder] = _Hold(now)
            with contextlib.suppress(FileNotFoundError):
                for entry in os.scandir(self._root / folder):
                    if entry.is_file(follow_symlinks=False):
                        hold.files[entry.name] = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        if hold is not None:
            hold.used, hold.transfers = now, hold.transfers + 1

    def end(self, folder: str, now: float) -> None:
        """A transfer has ended."""
        hold = self._holds.get(folder)
        if hold is not None:
            hold.used, hold.transfers = now, hold.transfers - 1

    def find(self, folder: str, name: str) -> Path | None:
        """A path under which a file of a held version can be opened."""
        hold = self._holds.get(folder)
        descriptor = None if hold is None else hold.files.get(name)
        return None if descriptor is None else Path(f"/proc/self/fd/{descriptor}")

    def expire(self, now: float) -> None:
        """Let go of what nobody wants any more."""
        for folder, hold in list(self._holds.items()):
            if not hold.transfers and now - hold.used >= IDLE_SECONDS:
                self._drop(folder)

    def close(self) -> None:
        """Let go of everything."""
        for folder in list(self._holds):
            self._drop(folder)

    def _drop(self, folder: str) -> None:
        for descriptor in self._holds.pop(folder).files.values():
            os.close(descriptor)
