"""The spool: where a replica's host puts the versions that it fetches, private, bounded, and empty when it begins."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Final

from streamrl.errors import CannotCreate, WeightsError
from streamrl.weight_sync.manifest import MANIFEST_FILE, Manifest, decode, encode, parse_folder
from streamrl.weight_sync.transports import ShmTransport, check_room, create_root, spool_of_run

_DRAFT: Final = ".draft-"
_SLACK_BYTES: Final = 1 << 20


class Spool:
    """Folders of versions in the shared memory of this host, for one replica.

    A version is a draft until all of its files are there and proven; then it gets its name by one rename. `open` and
    `close` remove whatever lies there.

    Args:
        run_dir: of the run; spools of one run on one host lie next to each other.
        name: of the replica; one process at a time may use the spool of a name.
    """

    def __init__(self, run_dir: Path, name: str) -> None:
        self._place = ShmTransport(spool_of_run(run_dir, name))

    @property
    def root(self) -> Path:
        """Folder that holds the folders of the versions."""
        return self._place.root

    def open(self) -> None:
        """Make the spool, empty.

        Raises:
            CannotCreate: no permission, or the name belongs to somebody else.
        """
        self.close()
        create_root(self._place)

    def close(self) -> None:
        """Remove the spool; whoever has one of its files mapped keeps it. A repeat does nothing."""
        shutil.rmtree(self.root, ignore_errors=True)

    def holds(self, manifest: Manifest) -> Path | None:
        """Return the folder of a version that is here whole, None when it is not."""
        folder = self.root / manifest.folder
        try:
            found = decode((folder / MANIFEST_FILE).read_bytes())
        except (OSError, WeightsError):
            return None
        return folder if found.pair == manifest.pair and found.shards == manifest.shards else None

    def draft(self, manifest: Manifest, mark: str = "") -> Path:
        """Return the folder for the files of a version on their way; one that is there already is gone on with.

        Args:
            manifest: of the version.
            mark: tells apart drafts of one version that are written at the same time.

        Raises:
            CannotCreate: it cannot be made, or there is no room for the version.
        """
        folder = self.root / f"{_DRAFT}{manifest.folder}+{mark}"
        try:
            if not folder.is_dir():
                check_room(self._place, manifest.total_bytes + _SLACK_BYTES)
                folder.mkdir(mode=0o700)
        except OSError as error:
            if isinstance(error, CannotCreate):
                raise
            raise CannotCreate(f"cannot make {folder}: {error}", self._place.hint) from error
        return folder

    def finish(self, manifest: Manifest, draft: Path) -> Path:
        """Give a draft whose files are proven its name and return the folder; one that is here already stays.

        Raises:
            CannotCreate: it cannot be renamed, or the spool is full.
        """
        folder = self.root / manifest.folder
        if self.holds(manifest) is not None:  # broadcast and pulled: an engine may read the one that was first
            self.drop(draft)
            return folder
        try:
            (draft / MANIFEST_FILE).write_bytes(encode(manifest))
            shutil.rmtree(folder, ignore_errors=True)
            draft.rename(folder)
        except OSError as error:
            raise CannotCreate(f"cannot finish {folder}: {error}", self._place.hint) from error
        return folder

    def create(self, path: Path, size: int) -> None:
        """Make a file of a draft with all its room taken.

        The room is taken first because a write into mapped memory without room kills the process.

        Raises:
            CannotCreate: no room.
        """
        try:
            with path.open("xb") as file:
                file.truncate(size)
                if size:
                    os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            raise CannotCreate(f"no room for {path} ({size >> 20} MiB): {error}", self._place.hint) from error

    def drop(self, draft: Path) -> None:
        """Remove a draft or a version. A repeat does nothing."""
        shutil.rmtree(draft, ignore_errors=True)

    def count(self) -> int:
        """Return how many whole versions are here."""
        return sum(parse_folder(entry.name) is not None for entry in self.root.iterdir())

    def trim(self, keep: Collection[str]) -> None:
        """Remove every version and draft that is older than the newest one of those named in `keep`, but for these."""
        newest = max((pair for name in keep if (pair := parse_folder(name)) is not None), default=(0, 0))
        for entry in self.root.iterdir():
            folder = entry.name.removeprefix(_DRAFT).partition("+")[0]
            pair = parse_folder(folder)
            if pair is not None and pair < newest and folder not in keep:
                self.drop(entry)
