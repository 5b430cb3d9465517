"""Images of a run by their hash: small ones travel inside the messages of their group, larger ones are files."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from streamrl.config import ImagesConfig, RunConfig
from streamrl.errors import DataError
from streamrl.store import Folder, ObjectStore

FOLDER = "images"
_ABOVE = 4  # from a file of RUN/rescored/NAME/evaluation to the run


@dataclass(frozen=True, slots=True)
class ImageStore:
    """The files of the run directory, or of the store that `images.url` names; all methods block."""

    limits: ImagesConfig
    _files: Folder | ObjectStore | None = None  # without them all images travel
    _recorded: Folder | None = None  # the images of a recording that the run trains

    @classmethod
    def of(cls, config: RunConfig, run_dir: Path) -> ImageStore:
        url, path = config.images.url, config.recording.path
        files = Folder(run_dir / FOLDER) if url is None else ObjectStore(f"{url.rstrip('/')}/{FOLDER}", "images.url")
        return cls(config.images, files, None if path is None else files_beside(path))

    def keep(self, images: Mapping[str, bytes]) -> list[bytes]:
        """Write the large ones of these images, by name, once, and return the small ones, which have to travel."""
        for name, data in images.items():
            if self._files is not None and not self.travels(data) and not self._files.has(name):
                self._files.write(name, data)
        return list(filter(self.travels, images.values()))

    def travels(self, data: bytes) -> bool:
        return self._files is None or len(data) <= self.limits.inline

    def read(self, names: Collection[str], travelled: Iterable[bytes]) -> dict[str, bytes]:
        """The bytes of images by name. `DataError`: one is missing or damaged; `OSError`: an outage."""
        found = {hashlib.sha256(data).hexdigest(): data for data in travelled}
        return {name: found[name] if name in found else self._read(name) for name in names}

    def _read(self, name: str) -> bytes:
        hint = "set images.url to a store that all hosts see, or raise images.inline"
        files = self._recorded if self._recorded is not None and self._recorded.has(name) else self._files
        if files is None:
            raise DataError(f"the image {name[:12]} did not come with its group")
        try:
            data = files.read(name)
        except FileNotFoundError as error:
            raise DataError(f"the image {name[:12]} is not in {self._files}: {error}", hint) from error
        if hashlib.sha256(data).hexdigest() != name:
            raise DataError(f"the image {name[:12]} in {self._files} has other bytes than when it was kept")
        return data


def files_beside(path: Path) -> Folder:
    """The large images of a recording or an archive, which are in the directory of its run, at or above `path`."""
    places = [place / FOLDER for place in [path, *path.parents][: _ABOVE + 1]]
    return Folder(next(filter(Path.is_dir, places), places[0]))
