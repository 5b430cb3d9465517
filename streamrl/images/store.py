"""Images of a run by their hash: small ones travel inside the messages of their group, larger ones are files."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from streamrl.config import ImagesConfig, RunConfig
from streamrl.errors import DataError
from streamrl.store import Folder, ObjectStore, run_store

FOLDER = "images"
_ABOVE = 4  # from a file of RUN/rescored/NAME/evaluation to the run


class ImageStore:
    """The files of the run directory, or of the store that `images.url` names; all methods block."""

    def __init__(self, limits: ImagesConfig, files: Folder | ObjectStore, recorded: Folder | None = None) -> None:
        """`recorded` has the images of a recording that the run trains."""
        self.limits, self._files, self._recorded = limits, files, recorded

    @classmethod
    def of(cls, config: RunConfig, run_dir: Path) -> ImageStore:
        store = run_store(config.images.url, config, "images.url", FOLDER)
        path = config.recording.path
        recorded = None if path is None else files_beside(path)
        return cls(config.images, store or Folder(run_dir / FOLDER), recorded)

    @classmethod
    def nowhere(cls, limits: ImagesConfig) -> ImageStore:
        """For prompts that stay in this process: all of their images travel."""
        return cls(limits.model_copy(update={"inline": sys.maxsize}), Folder(Path(os.devnull)))

    def keep(self, images: Mapping[str, bytes]) -> list[bytes]:
        """Write the large ones of these images, by name, once, and return the small ones, which have to travel."""
        for name, data in images.items():
            if len(data) > self.limits.inline and not self._files.has(name):
                self._files.write(name, data)
        return [data for data in images.values() if len(data) <= self.limits.inline]

    def read(self, names: Collection[str], travelled: Iterable[bytes]) -> dict[str, bytes]:
        """The bytes of images by name. `DataError`: one did not travel, and is not here or damaged."""
        found = {hashlib.sha256(data).hexdigest(): data for data in travelled}
        return {name: found[name] if name in found else self._read(name) for name in names}

    def _read(self, name: str) -> bytes:
        hint = "set images.url to a store that all hosts see, or raise images.inline"
        files = self._recorded if self._recorded is not None and self._recorded.has(name) else self._files
        try:
            data = files.read(name)
        except OSError as error:
            raise DataError(f"the image {name[:12]} is not in {self._files}: {error}", hint) from error
        if hashlib.sha256(data).hexdigest() != name:
            raise DataError(f"the image {name[:12]} in {self._files} has other bytes than when it was kept")
        return data


def files_beside(path: Path) -> Folder:
    """The large images of a recording or an archive, which are in the directory of its run, at or above `path`."""
    places = [place / FOLDER for place in [path, *path.parents][: _ABOVE + 1]]
    return Folder(next(filter(Path.is_dir, places), places[0]))
