"""Files in a store that fsspec knows: a directory, `s3://`, `gs://`, `az://`, `memory://` in tests.

A file appears whole or not at all, also when its writer dies: object stores do so by themselves, in a directory it is a
draft first (`.draft-ID-NAME`), which nobody sees and the next writer of that name removes.

Whatever a store raises is an OSError here, which names the key of the configuration: to its users a store that does
not answer is a disk that does not work. Credentials and addresses are fsspec's business (docs/guides/resume.md), so
they are neither in the run file nor in an argument.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Protocol

from streamrl.atomic import draft_of, fsync_directory, write_durably
from streamrl.config import RunConfig
from streamrl.errors import CannotCreate, ConfigError, StreamrlError, Unreachable

_DRAFT: Final = ".draft-"


class ReadableFile(Protocol):
    def read(self, size: int, /) -> bytes: ...
    def readinto(self, buffer: memoryview, /) -> int: ...


class Folder:
    """A directory, with the operations of `ObjectStore` that checkpoints need. Needs no fsspec."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def names(self) -> list[str]:
        return [path.name for path in self.path.iterdir()] if self.path.is_dir() else []

    def has(self, name: str) -> bool:
        return (self.path / name).exists()

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        write_durably(file, data)
        fsync_directory(self.path)

    def create(self, name: str) -> None:
        """Make an empty file; `FileExistsError`: it is there."""
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / name).touch(exist_ok=False)
        fsync_directory(self.path)

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with all that is in it; a repeat does nothing."""
        path = self.path / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


class ObjectStore:
    """The files below `url`; all methods block, and names are relative to it. `key` is where the user wrote the URL."""

    def __init__(self, url: str, key: str) -> None:
        """`ConfigError`: fsspec does not know the kind of store, or its package is missing.

        `Unreachable`: it is one of those that log in here, and does not answer.
        """
        self.url, self._key = url.rstrip("/"), key
        try:
            import fsspec.implementations.local  # nothing else of a role needs it

            # A listing that is remembered would hide what other processes wrote.
            self._files, root = fsspec.core.url_to_fs(self.url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"{key} {url!r}: {error}", "a directory, or a URL whose package is installed (s3fs, gcsfs, adlfs)"
            ) from error
        except Exception as error:  # packages of stores raise errors of their own
            raise Unreachable(
                f"{key} {url} does not answer: {error}", "fix its address or credentials (docs/guides/resume.md)"
            ) from error
        self._root = str(root).rstrip("/")
        self._is_directory = isinstance(self._files, fsspec.implementations.local.LocalFileSystem)

    def __str__(self) -> str:
        return self.url

    @property
    def directory(self) -> Path | None:
        """Where the files are, if they are on this host."""
        return Path(self._root) if self._is_directory else None

    def put(self, file: Path, name: str) -> None:
        """Copy a file there, durably; a repeat replaces it, and a crash half way leaves the one that was there."""
        place = self._at(name)
        with self._named(f"{name} cannot be written"):
            self._files.makedirs(place.rpartition("/")[0], exist_ok=True)
            if self._is_directory:
                self._put_here(file, Path(place))
            else:
                self._files.put_file(str(file), place)

    def _put_here(self, file: Path, place: Path) -> None:
        folder = place.parent
        for dead in folder.glob(f"{_DRAFT}*-{glob.escape(place.name)}"):
            dead.unlink(missing_ok=True)
        draft = folder / f"{_DRAFT}{uuid.uuid4().hex}-{place.name}"
        self._files.put_file(str(file), str(draft))
        with draft.open("rb") as written:
            os.fsync(written.fileno())
        draft.replace(place)
        for made in (folder, *folder.parents):
            fsync_directory(made)
            if made == Path(self._root):
                break

    def get(self, name: str, into: Path) -> None:
        """Copy a file from there, durably; a crash half way leaves the one that was here."""
        draft = draft_of(into)
        with self._named(f"{name} cannot be read"):
            self._files.get_file(self._at(name), str(draft))
            with draft.open("rb") as file:
                os.fsync(file.fileno())
            draft.replace(into)

    @contextlib.contextmanager
    def open(self, name: str, at: int) -> Iterator[tuple[ReadableFile, int]]:
        """Read a file from byte `at` on; tells its size too. `FileNotFoundError`: it is not there."""
        with self._named(f"{name} cannot be read"), self._files.open(self._at(name), "rb") as file:
            size = int(self._files.size(self._at(name)))
            file.seek(at)
            yield file, size

    def put_folder(self, folder: Path, name: str) -> None:
        """Copy a folder with all that is in it; then nothing else is there, below that name."""
        files = {f"{name}/{file.relative_to(folder).as_posix()}": file for file in folder.rglob("*") if file.is_file()}
        for place, file in sorted(files.items()):
            self.put(file, place.lstrip("/"))
        with self._named("what was there before cannot be removed"):
            places = {self._at(place.lstrip("/")) for place in files}
            for old in set(self._files.find(self._at(name))) - places:
                self._files.rm_file(old)

    def get_folder(self, name: str, into: Path) -> None:
        """Copy a folder from there with all that is in it; files that are only here stay."""
        with self._named(f"{name} cannot be read"):
            found = [str(path) for path in self._files.find(self._at(name))]
        for path in filter(_is_whole, found):
            file = path.removeprefix(f"{self._at(name)}/")
            (into / file).parent.mkdir(parents=True, exist_ok=True)
            self.get(f"{name}/{file}", into / file)

    def read(self, name: str) -> bytes:
        with self._named(f"{name} cannot be read"):
            return bytes(self._files.cat_file(self._at(name)))

    def write(self, name: str, data: bytes) -> None:
        place = self._at(name)
        with self._named(f"{name} cannot be written"):
            self._files.makedirs(place.rpartition("/")[0], exist_ok=True)
            self._files.pipe_file(place, data)

    def create(self, name: str) -> None:
        """As that of `Folder`, but of two who create a file in the same moment both succeed."""
        if self.has(name):
            raise FileExistsError(name)
        self.write(name, b"")

    def size(self, name: str) -> int:
        with self._named(f"{name} cannot be read"):
            return int(self._files.size(self._at(name)))

    def has(self, name: str) -> bool:
        with self._named("it cannot be read"):
            return bool(self._files.exists(self._at(name)))

    def names(self, folder: str = "") -> list[str]:
        """What lies directly in a folder; nothing when it is not there."""
        if not self.has(folder):
            return []
        with self._named("it cannot be read"):
            found = self._files.ls(self._at(folder), detail=False)
        return [str(path).rstrip("/").rpartition("/")[2] for path in found if _is_whole(str(path))]

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with all that is in it; a repeat does nothing."""
        if self.has(name):
            with self._named(f"{name} cannot be removed"):
                self._files.rm(self._at(name), recursive=True)

    def probe(self) -> None:
        """Write a small file, read it and remove it; `CannotCreate` when one of these fails."""
        name, mark = f".streamrl-probe-{uuid.uuid4().hex}", b"streamrl"
        try:
            with self._named("it cannot be written"):
                self._files.makedirs(self._root, exist_ok=True)
                self._files.pipe_file(self._at(name), mark)
                if self._files.cat_file(self._at(name)) != mark:
                    raise OSError("what was read back is not what was written")
                self._files.rm_file(self._at(name))
        except OSError as error:
            raise CannotCreate(
                str(error), "check that it exists, and the rights and credentials of this user (docs/guides/resume.md)"
            ) from error

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")

    @contextlib.contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except StreamrlError:
            raise
        except Exception as error:
            kind = "" if isinstance(error, OSError) and str(error) else f"{type(error).__name__}: "
            raised = FileNotFoundError if isinstance(error, FileNotFoundError) else OSError
            raise raised(f"{self._key} {self.url}: {what}: {kind}{error}") from error


def _is_whole(path: str) -> bool:
    return not path.rpartition("/")[2].startswith(_DRAFT)


def run_store(url: str | None, config: RunConfig, key: str, folder: str = "") -> ObjectStore | None:
    """The files of a run below the URL that it names; None without a URL. ConfigError as of `ObjectStore`."""
    return None if url is None else ObjectStore(f"{url.rstrip('/')}/{config.name}/{folder}", key)
