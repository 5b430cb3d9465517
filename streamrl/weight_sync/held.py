"""Versions that somebody is pulling stay readable after the publisher has removed them.

Otherwise a replica whose pull takes longer than two steps of the learner would find each version gone and get none.
Holding is an open descriptor for each file, so nothing is left behind by a process that dies.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)
HELD: Final = 2
"""Versions held at most: so many times the weights that memory may hold in addition."""
IDLE_SECONDS: Final = 30.0
"""A version that nobody asked for in this time is let go."""


@dataclass
class Hold:
    """One version that is held: last used when, transfers that run, a descriptor for each file."""

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
        self._holds: dict[str, Hold] = {}

    def begin(self, folder: str, now: float) -> Hold | None:
        """A transfer of a file of this version begins: hold the version, None when there is no room for one more."""
        self.expire(now)
        hold = self._holds.get(folder)
        if hold is None and len(self._holds) < HELD:
            hold = self._holds[folder] = Hold(now)
            try:
                for entry in os.scandir(self._root / folder):
                    if entry.is_file(follow_symlinks=False):
                        hold.files[entry.name] = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError as error:  # it is going already, or this process may not open so many files
                logger.debug("version not held", extra={"folder": folder, "error": str(error)})
                self._drop(folder)
                return None
        if hold is not None:
            hold.used, hold.transfers = now, hold.transfers + 1
        return hold

    def end(self, hold: Hold | None, now: float) -> None:
        """A transfer has ended; `hold` is what its `begin` returned."""
        if hold is not None:
            hold.used, hold.transfers = now, hold.transfers - 1

    def find(self, folder: str, name: str, now: float) -> Path | None:
        """A path under which a file of a held version can be opened; that version is held for a while from now on.

        The path names a descriptor, whose number may mean any other file once the version is let go.
        """
        hold = self._holds.get(folder)
        if hold is None or name not in hold.files:
            return None
        hold.used = now
        return Path(f"/proc/self/fd/{hold.files[name]}")

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
