"""Copies of finished files of an archive in `archive.store`, made by a thread of their own.

A file is copied when the next one is begun or its writer closes, the oldest first. What a process that was killed did
not copy, the next one on its host does: whether a file is there is seen by its size (a thinned
one: by its name), and a repeat replaces it. Each recording has a folder named by its id, so that files of two hosts
never meet under one name. Local files are thinned only when they are copied.
"""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

from streamrl.archive.reader import read_header, recording_files
from streamrl.errors import ConfigError
from streamrl.store import ObjectStore

logger = logging.getLogger(__name__)
_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 60.0
LAST_SECONDS: Final = 60.0
"""Longest wait for the last files when the writer closes."""


class ArchiveCopies:
    """Copies files of `folder` below `name` of a store. A store that is away is a warning, once, and tried again."""

    def __init__(self, store: ObjectStore, folder: Path, name: str) -> None:
        self.copied: set[str] = set()
        self._store, self._folder, self._name = store, folder, name
        self._thread = ThreadPoolExecutor(1, "archive copies")
        self._work: Future[None] | None = None
        self._pause, self._retry_at = 0.0, 0.0

    def begin(self, but: str | None) -> None:
        """Copy in the background what is not there, `but` the file that is being written; does not wait."""
        if (self._work is None or self._work.done()) and time.monotonic() >= self._retry_at:
            self._work = self._thread.submit(self._copy, but)

    async def close(self) -> None:
        """Copy what is left, all files being finished; what cannot be copied in time waits for the next process."""
        last = asyncio.wrap_future(self._thread.submit(self._copy, None))
        self._thread.shutdown(wait=False)
        await asyncio.wait([last], timeout=LAST_SECONDS)
        left = [file.name for file in recording_files(self._folder) if file.name not in self.copied]
        if left:
            extra = {"folder": str(self._folder), "files": left, "hint": "the next start on this host copies them"}
            logger.warning("files of the archive are not in archive.store", extra=extra)

    def _copy(self, but: str | None) -> None:
        for file in recording_files(self._folder):
            if file.name == but or file.name in self.copied:
                continue
            try:
                self._put(file)
            except OSError as error:
                if file.exists():  # else it was removed meanwhile (`archive.max_bytes`)
                    self._wait(error)
                    return
            self.copied.add(file.name)
        self._pause = 0.0

    def _put(self, file: Path) -> None:
        try:
            header = read_header(file)
        except ConfigError as error:
            logger.warning("damaged file in the archive", extra={"file": str(file), "error": str(error)})
            return
        if header is None:
            return  # its writer died before it wrote anything
        name = f"{self._name}/{header.id}/{file.name}"
        if not self._store.has(name) or (header.one_in == 1 and self._store.size(name) != file.stat().st_size):
            self._store.put(file, name)

    def _wait(self, error: OSError) -> None:
        if not self._pause:
            extra = {"error": str(error), "hint": "the files stay in the archive of the run; it is tried again"}
            logger.warning("the archive cannot be copied", extra=extra)
        self._pause = min(_LONGEST_PAUSE, max(_FIRST_PAUSE, 2 * self._pause))
        self._retry_at = time.monotonic() + self._pause
