"""Files of versions on this host: the folders they lie in, room for them, checksums, the token. Needs no torch."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import re
import resource
import secrets
import shutil
import stat
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import xxhash

from streamrl.atomic import write_whole
from streamrl.errors import CannotCreate, ConfigError, WeightsError
from streamrl.weight_sync.manifest import MANIFEST_FILE, Manifest, encode, parse_folder, read_manifest

TOKEN_VARIABLE: Final = "STREAMRL_WEIGHTS_TOKEN_FILE"  # noqa: S105  (a name, no secret)
SLACK_BYTES: Final = 1 << 20  # asked for beyond the values: headers and the manifest
CHUNK_BYTES: Final = 32 << 20
Buffer: TypeAlias = "bytes | memoryview[Any] | mmap.mmap"
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (the folder below it is private, see `create_root`)
_SHM_HINT: Final = "give the host (or container: --shm-size) a larger /dev/shm, or set weights.transport=directory"
_STAGING: Final = "-spool-"
_DRAFT: Final = ".draft-"
TOKEN_FILE: Final = "weights.token"  # noqa: S105  (a name, no secret)
_MIN_TOKEN_CHARACTERS: Final = 16
_OPEN_FILES: Final = 1 << 16


# ---- folders


@dataclass(frozen=True)
class VersionStore:
    root: Path
    durable: bool  # a version is on the disk before it gets its name
    hint: str  # what to do when there is no room


def shm_store(run_dir: Path) -> VersionStore:
    """The store in the shared memory of this host; the same for all processes of a user."""
    digest = hashlib.blake2b(os.fsencode(run_dir.resolve()), digest_size=8).hexdigest()
    return VersionStore(_SHARED_MEMORY / f"streamrl-{os.getuid()}-{digest}", durable=False, hint=_SHM_HINT)


def store_of(transport: str, run_dir: Path) -> VersionStore:
    """Where the learner's host keeps the versions: RUN_DIR/weights for `directory`, else shared memory."""
    if transport != "directory":
        return shm_store(run_dir)
    return VersionStore(run_dir.resolve() / "weights", True, "make room on the disk of the run directory")


def create_root(store: VersionStore) -> None:
    try:
        store.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = store.root.lstat()
    except OSError as error:
        raise CannotCreate(f"cannot make {store.root} for the weights: {error}", store.hint) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise CannotCreate(f"{store.root} belongs to somebody else", f"remove {store.root}")


def check_room(store: VersionStore, need: int) -> None:
    free = os.statvfs(store.root)
    left = free.f_bavail * free.f_frsize
    if left < need:
        raise CannotCreate(
            f"no room for the weights in {store.root}: {need >> 20} MiB needed, {left >> 20} MiB left", store.hint
        )


def staging_root(run_dir: Path, name: str) -> Path:
    """Folder in the shared memory of this host that holds what the replica `name` fetched."""
    root = shm_store(run_dir).root
    return root.with_name(f"{root.name}{_STAGING}{re.sub('[^A-Za-z0-9._-]', '_', name)}")


def memory_of(run_dir: Path) -> list[Path]:
    root = shm_store(run_dir).root
    return [folder for folder in (root, *root.parent.glob(f"{root.name}{_STAGING}*")) if folder.exists()]


def release_memory(run_dir: Path) -> None:
    """Free the shared memory of a run that ended; a mapped version stays readable. A repeat does nothing."""
    for folder in memory_of(run_dir):
        shutil.rmtree(folder, ignore_errors=True)


def allow_many_files() -> None:
    """Raise this process's soft limit of open files: each mapped or held file takes a descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    with contextlib.suppress(OSError, ValueError):  # a container may forbid it: keep the present limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


# ---- checksums: xxh3 finds torn, truncated and mixed-up files; it does not stop an attacker


def checksum(*buffers: Buffer) -> str:
    state = xxhash.xxh3_128()
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        for start in range(0, view.nbytes, CHUNK_BYTES):  # other threads run in between
            state.update(view[start : start + CHUNK_BYTES])
    return state.hexdigest()


def file_checksum(path: Path) -> str:
    state = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            state.update(chunk)
    return state.hexdigest()


# ---- staging: what a replica fetched


class StagingFolder:
    """Folders of versions in the shared memory of this host, for one replica: private, bounded, empty when it opens.

    A version is a draft until all of its files are there and proven; then it gets its name by one rename.
    """

    def __init__(self, run_dir: Path, name: str) -> None:
        self.root = staging_root(run_dir, name)
        self._store = VersionStore(self.root, durable=False, hint=_SHM_HINT)

    def open(self) -> None:
        self.close()
        create_root(self._store)

    def close(self) -> None:
        """Remove the folder; a process that has one of its files mapped keeps it. A repeat does nothing."""
        shutil.rmtree(self.root, ignore_errors=True)

    def holds(self, manifest: Manifest) -> Path | None:
        folder = self.root / manifest.folder
        try:
            found = read_manifest(folder)
        except (OSError, WeightsError):
            return None
        return folder if found.pair == manifest.pair and found.shards == manifest.shards else None

    def draft(self, manifest: Manifest) -> Path:
        """Folder for a version on its way, continued if there is one."""
        folder = self.root / f"{_DRAFT}{manifest.folder}"
        try:
            if not folder.is_dir():
                check_room(self._store, manifest.total_bytes + SLACK_BYTES)
                folder.mkdir(mode=0o700)
        except OSError as error:
            if isinstance(error, CannotCreate):
                raise
            raise CannotCreate(f"cannot make {folder}: {error}", self._store.hint) from error
        return folder

    def finish(self, manifest: Manifest, draft: Path) -> Path:
        """Give a draft whose files are proven its name and return the folder."""
        folder = self.root / manifest.folder
        try:
            (draft / MANIFEST_FILE).write_bytes(encode(manifest))
            shutil.rmtree(folder, ignore_errors=True)
            draft.rename(folder)
        except OSError as error:
            raise CannotCreate(f"cannot finish {folder}: {error}", self._store.hint) from error
        return folder

    def trim(self, keep: Collection[str]) -> None:
        """Remove every version and draft that is not in `keep` and older than the newest that is."""
        newest = max((pair for name in keep if (pair := parse_folder(name)) is not None), default=(0, 0))
        for entry in self.root.iterdir():
            folder = entry.name.removeprefix(_DRAFT)
            pair = parse_folder(folder)
            if pair is not None and pair < newest and folder not in keep:
                shutil.rmtree(entry, ignore_errors=True)


# ---- the bearer token of a run's weights: the learner's host makes the file, other hosts get a copy


def read_token(run_dir: Path) -> str:
    """The token in $STREAMRL_WEIGHTS_TOKEN_FILE, else in RUN_DIR/weights.token; ConfigError when it is missing."""
    path = token_path(run_dir)
    try:
        token = path.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"no token for the weights in {path}: {error}",
            f"copy RUN_DIR/{TOKEN_FILE} of the learner's host to this host and name it in ${TOKEN_VARIABLE}",
        ) from error
    if len(token) < _MIN_TOKEN_CHARACTERS:
        raise ConfigError(f"the token in {path} has fewer than {_MIN_TOKEN_CHARACTERS} characters", "remove the file")
    return token


def make_token(run_dir: Path, known: str | None = None) -> str:
    """Return the token; a missing file is made with the `known` one or a new one, readable by its owner alone."""
    if not token_path(run_dir).exists():
        keep_token(run_dir, known or secrets.token_urlsafe(32))
    return read_token(run_dir)


def keep_token(run_dir: Path, token: str) -> None:
    """Write the token of a run; CannotCreate if that fails."""
    path = token_path(run_dir)
    try:
        write_whole(path, f"{token}\n".encode("ascii"), private=True)
    except OSError as error:
        raise CannotCreate(f"cannot write the token of the weights to {path}: {error}") from error


def token_path(run_dir: Path) -> Path:
    named = os.environ.get(TOKEN_VARIABLE)
    return Path(named) if named else run_dir / TOKEN_FILE
