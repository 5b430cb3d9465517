"""Copies of checkpoints in an object store, for a learner that starts again on a host without the run directory.

The run directory stays the place where checkpoints are written and read. A finished one is copied, its logs first and
its `meta.json` last, before Redis retires its groups; what a learner does not find in its run directory, it fetches.
When the ranks of a learner share no run directory, each has copied its own shard before (`RankFiles`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from streamrl.atomic import finish_durably
from streamrl.config import RunConfig
from streamrl.learner.checkpoint import (
    CHECKPOINT_NAME,
    META_FILE,
    Checkpoints,
    InvalidCheckpoint,
    Meta,
    Position,
    eligible,
    parse_name,
    read_meta,
)
from streamrl.store import ObjectStore, run_store

logger = logging.getLogger(__name__)
_LOGS: Final = "checkpoints"


class CheckpointStore:
    """The copies of one run's checkpoints in `store`; all methods block. `OSError`: the store does not work."""

    def __init__(self, store: ObjectStore, run_dir: Path) -> None:
        self._store, self._run_dir = store, run_dir

    def put(self, meta: Meta, *, shards: bool = True) -> None:
        """Copy a finished checkpoint. A repeat replaces what a broken copy left.

        Without `shards`, the ranks have copied them already, and all of them are there.
        """
        folder = _folder((meta.epoch, meta.step))
        files = [file for file, _ in meta.recording]
        files += [f"{folder}/{shard.file}" for shard in meta.shards if shards]
        for file in files:
            if (self._run_dir / file).exists():
                self._store.put(self._run_dir / file, file)
        self._store.put(self._run_dir / folder / META_FILE, f"{folder}/{META_FILE}")

    def put_shard(self, position: Position, file: Path) -> None:
        self._store.put(file, f"{_folder(position)}/{file.name}")

    def positions(self) -> list[Position]:
        """Whole copies, ascending: `meta.json` is copied last."""
        return [place for place in self._begun() if self._store.has(f"{_folder(place)}/{META_FILE}")]

    def missing(self) -> list[Position]:
        """Whole copies of which the run directory lacks some or all files, ascending."""
        return [place for place in self.positions() if not self._is_here(place)]

    def fetch_newest(self, base: str | None = None, base_epoch: int = 0, retired: str | None = None) -> list[str]:
        """Bring longer logs and the one checkpoint that `Checkpoints.greatest` chooses, unless it is here.

        Another one is brought only if that is damaged. Returns what was brought.
        """
        checkpoints, brought, missing = Checkpoints.of(self._run_dir), self.fetch([]), self.missing()
        places = [place for place in eligible(self.positions(), base, base_epoch) if place >= parse_name(retired)]
        for place in reversed(places):
            if place not in missing:
                break
            if not self._meta(place).covers(parse_name(retired)):
                continue
            brought += self.fetch([place])
            if place == places[0]:
                break  # no other would do
            try:
                checkpoints.validate(checkpoints.path(place))
                break
            except InvalidCheckpoint as error:
                logger.warning("copy of a checkpoint not valid", extra={"error": str(error)})
        return brought

    def fetch(self, positions: Iterable[Position]) -> list[str]:
        """Bring these checkpoints to the run directory, and longer logs; returns what was brought.

        A repeat goes on after the last whole file that an attempt before it has brought.
        """
        checkpoints, brought = Checkpoints.of(self._run_dir), []
        for file in self._logs():
            local = self._run_dir / file
            if not local.exists() or local.stat().st_size < self._store.size(file):
                self._store.get(file, local)
                brought.append(file)
        for position in positions:
            final = checkpoints.path(position)
            if final.exists():
                self.bring(position, final)
            else:
                draft = self._draft(position)
                self.bring(position, draft)
                finish_durably(draft, final)
            brought.append(final.name)
        return brought

    def bring(self, position: Position, folder: Path) -> None:
        """Bring the files of a checkpoint that a folder lacks."""
        for name in self._store.names(_folder(position)):
            if not (folder / name).exists():
                self._store.get(f"{_folder(position)}/{name}", folder / name)

    def remove(self, positions: Iterable[Position], epoch: int) -> None:
        """Remove copies of checkpoints that were removed here, and those that learners before `epoch` left unfinished.

        A checkpoint loses its `meta.json` first: without it the others do not count.
        """
        whole = self.positions()
        unfinished = [place for place in self._begun() if place not in whole and place[0] < epoch]
        for position in (*positions, *unfinished):
            self._store.remove(f"{_folder(position)}/{META_FILE}")
            self._store.remove(_folder(position))

    def _draft(self, position: Position) -> Path:
        """Folder for what is fetched of a checkpoint; all files in it are whole, unlike those of a learner's draft."""
        draft = Checkpoints.of(self._run_dir).draft(position)
        draft = draft.with_name(f"{draft.name}-fetched")
        draft.mkdir(exist_ok=True)
        return draft

    def _meta(self, position: Position) -> Meta:
        """The meta data of a copy; a damaged one is an OSError."""
        folder = Checkpoints.of(self._run_dir, make=False).path(position)
        if not (folder / META_FILE).exists():
            folder = self._draft(position)
            self._store.get(f"{_folder(position)}/{META_FILE}", folder / META_FILE)
        try:
            return read_meta(folder)
        except msgspec.MsgspecError as error:
            raise OSError(f"{_folder(position)}/{META_FILE} in the store cannot be read: {error}") from error

    def _is_here(self, position: Position) -> bool:
        path = Checkpoints.of(self._run_dir, make=False).path(position)
        try:
            return all((path / shard.file).exists() for shard in read_meta(path).shards)
        except (OSError, msgspec.MsgspecError):
            return False

    def _begun(self) -> list[Position]:
        matches = (CHECKPOINT_NAME.fullmatch(name) for name in self._store.names(_LOGS))
        return sorted((int(match[1]), int(match[2])) for match in matches if match)

    def _logs(self) -> list[str]:
        return [f"{_LOGS}/{name}" for name in self._store.names(_LOGS) if name.endswith(".log")]


def store_of(config: RunConfig, run_dir: Path) -> CheckpointStore | None:
    """The store of a run; ConfigError as of `ObjectStore`."""
    store = run_store(config.checkpoint.store, config, "checkpoint.store")
    return None if store is None else CheckpointStore(store, run_dir)


def _folder(position: Position) -> str:
    return f"{_LOGS}/ckpt-{position[0]}-{position[1]}"
