"""Durable checkpoints: `checkpoints/ckpt-EPOCH-STEP/{rank-R-of-N.safetensors, meta.json}`, in a directory or a store.

Every rank writes its shard (checkpoint_files.py). When all are there, rank 0 writes `meta.json`, and the checkpoint
counts from then on: that file appears whole or not at all, also in an object store, which cannot rename a folder. There
is no "latest" file: a learner that was paused and wakes up cannot replace the file of its successor, and Redis says
which files are void (`eligible`). This module imports no torch: the audit reads with it.
"""

from __future__ import annotations

import fcntl
import logging
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from streamrl.atomic import fsync_directory
from streamrl.config import RunConfig
from streamrl.errors import CannotCreate, StreamrlError, Unreachable
from streamrl.learner.lineage import Interval, join
from streamrl.store import Folder, ObjectStore, run_store
from streamrl.weight_sync.files import file_checksum

logger = logging.getLogger(__name__)

Position = tuple[int, int]
Kind = Literal["model", "recording"]
NOWHERE: Final[Position] = (0, 0)  # the place before the first checkpoint: the model of the run itself
# Of what is in the files; raise it also when a part gains or loses numbers.
FORMAT: Final = 2  # 1 had the tensors of the policy alone, without the part they are of
CHECKPOINT_NAME: Final = re.compile(r"ckpt-(\d+)-(\d+)")
_EPOCH: Final = re.compile(r"(?:epoch|ckpt|trained)-(\d+)(?:-\d+|\.log)?")
"""Names that a learner of some epoch made: its mark, its checkpoints, and the log of versions of streamrl before."""
META_FILE: Final = "meta.json"


class CheckpointShard(msgspec.Struct, frozen=True):
    """One rank's file; the checksum is xxh3-128 in hexadecimal."""

    file: str
    bytes: int
    checksum: str


Link = tuple[str, int]  # a file and the bytes of it that count


class Meta(msgspec.Struct, frozen=True, kw_only=True):
    format: int = 1
    kind: Kind = "model"  # `recording`: groups were recorded and not trained, there are no weights
    parts: list[str] = []  # parts of the learner whose tensors are in the shards
    numbers: dict[str, dict[str, Any]] = {}  # what the parts keep besides tensors (checkpoint_files.py)
    epoch: int
    step: int
    version: int
    trained: list[Interval] = []  # ids of the groups that these weights were trained on, by what the ledger knows
    count: int = 0  # how many they are, by the updates that were applied to the weights
    versions: dict[int, int] = {}  # step of each version of the weights that may still be trained
    bases: list[Position] = []  # the checkpoint that each later learner of this line went on from, one per epoch
    world: int = 1
    model: str = ""  # `model.path`
    recording: list[Link] = []  # recorded groups, in the run directory
    shards: list[CheckpointShard] = []

    @property
    def position(self) -> Position:
        return self.epoch, self.step

    @property
    def name(self) -> str:
        return f"{self.epoch}-{self.step}"

    def covers(self, position: Position) -> bool:
        """Whether all that the checkpoint at `position` was trained on is in these weights."""
        line = [*self.bases, self.position]
        return position == NOWHERE or any(epoch == position[0] and step >= position[1] for epoch, step in line)


class InvalidCheckpoint(StreamrlError):
    pass


def parse_name(name: str | None) -> Position:
    """Parse the `EPOCH-STEP` that Redis holds, if any."""
    if not name:
        return NOWHERE
    epoch, _, step = name.partition("-")
    return int(epoch), int(step)


class Checkpoints:
    """The checkpoints of a run, in a directory or a store. Methods block; `OSError`: one of them does not work."""

    def __init__(self, folder: Path, store: ObjectStore | None = None) -> None:
        # With a store, `folder` has the shards on their way there, and a copy of the checkpoint that is loaded.
        self.folder, self.store = folder, store
        self.root: Folder | ObjectStore = store or Folder(folder)

    @classmethod
    def of(cls, config: RunConfig, run_dir: Path) -> Checkpoints:
        url = None if config.recording.mode == "write" else config.checkpoint.store
        store = run_store(url, config, "checkpoint.store", "checkpoints")
        if store is None:
            return cls(run_dir / "checkpoints")
        return cls(run_dir / "fetched", store) if store.directory is None else cls(store.directory)

    def positions(self) -> list[Position]:
        """The finished ones, ascending: `meta.json` is written last."""
        return [place for place in self._begun() if self.root.has(f"{folder_name(place)}/{META_FILE}")]

    def greatest_epoch(self) -> int:
        """Greatest epoch of a learner that was here; the next one's must be above it."""
        matches = (_EPOCH.fullmatch(name) for name in self.root.names())
        return max((int(match[1]) for match in matches if match), default=0)

    def mark_epoch(self, epoch: int) -> None:
        """Leave a mark of a learner, which counts also when Redis forgets it; CannotCreate: another one has it."""
        name = f"epoch-{epoch}"
        try:
            self.root.create(name)
        except FileExistsError as error:
            raise CannotCreate(
                f"{self.root}/{name} is there: another learner has this epoch", "start the learner again"
            ) from error

    def path(self, position: Position) -> Path:
        """Folder of the shards on this host; those of a store are there after `fetch`."""
        return self.folder / folder_name(position)

    def loadable(self, base: str | None, base_epoch: int, retired: str | None) -> Iterator[Meta]:
        """Meta data of the checkpoints that `greatest` may choose, the greatest first."""
        with self._reading():
            positions = self.positions()
        for position in reversed(eligible(positions, base, base_epoch)):
            try:
                meta = self.read(position)
            except InvalidCheckpoint as error:
                logger.warning("checkpoint not valid", extra={"error": error.message})
                continue
            if meta.covers(parse_name(retired)):
                yield meta

    def greatest(self, base: str | None, base_epoch: int, retired: str | None = None) -> Meta | None:
        """The greatest valid checkpoint that may be loaded.

        `base` (`EPOCH-STEP`) was declared by the last learner, of epoch `base_epoch`. `retired` is the checkpoint that
        Redis last retired groups for: one that does not go on from it lacks those groups. After a roll-back of Redis
        the older learner's line may be continued: the roll-back brought the groups of its successor back.
        """
        for meta in self.loadable(base, base_epoch, retired):
            try:
                return self.validate(meta.position)
            except InvalidCheckpoint as error:
                logger.warning("checkpoint not valid", extra={"error": error.message})
        return None

    def read(self, position: Position) -> Meta:
        name = folder_name(position)
        with self._reading(name):
            data = self.root.read(f"{name}/{META_FILE}")
            meta, before = msgspec.json.decode(data, type=Meta), msgspec.json.decode(data, type=_MetaBefore)
            if meta.position != position:
                raise InvalidCheckpoint(f"{self.root}/{name}: its meta data is of ckpt-{meta.name}")
            return before.converted(meta, self.root) if before.chain else meta

    def validate(self, position: Position) -> Meta:
        """Read a checkpoint whole and compare it with its checksums."""
        meta, name = self.read(position), folder_name(position)
        if len(meta.shards) != meta.world:
            raise InvalidCheckpoint(f"{self.root}/{name}: {len(meta.shards)} shards of {meta.world} ranks")
        folder = self.fetch(meta)
        with self._reading(name):
            for shard in meta.shards:
                if describe(folder / shard.file) != shard:
                    raise InvalidCheckpoint(f"{self.root}/{name}/{shard.file} is not what was written")
            for file, size in meta.recording:
                if (self.folder.parent / file).stat().st_size < size:
                    raise InvalidCheckpoint(f"{self.folder.parent / file} is shorter than ckpt-{meta.name} says")
        return meta

    def fetch(self, meta: Meta) -> Path:
        """Folder with the shards of a checkpoint: brought from the store once for all ranks of a host, and proved."""
        folder = self.path(meta.position)
        if self.store is None:
            return folder
        folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as lock, self._reading(folder.name):
            fcntl.flock(lock, fcntl.LOCK_EX)
            for other in self.folder.glob("ckpt-*"):
                if other != folder:
                    shutil.rmtree(other)
            for shard in meta.shards:
                if not (folder / shard.file).exists():
                    draft = folder / f"{shard.file}.part"
                    self.store.get(f"{folder.name}/{shard.file}", draft)
                    if file_checksum(draft) != shard.checksum:
                        raise InvalidCheckpoint(f"{self.store}/{folder.name}/{shard.file} is not what was written")
                    draft.rename(folder / shard.file)
        return folder

    def begin(self, position: Position) -> Path:
        """Make room for a checkpoint of this learner; what a failed attempt left goes."""
        self.remove(position)
        return self.draft(position)

    def draft(self, position: Position) -> Path:
        folder = self.path(position) if self.store is None else self.folder / "sending"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def send(self, position: Position, shard: Path) -> None:
        if self.store is not None:
            self.store.put(shard, f"{folder_name(position)}/{shard.name}")
            shard.unlink()

    def finish(self, meta: Meta) -> None:
        """Make all durable and write `meta.json`. After an error it may be one; no group may be retired for it."""
        name = folder_name(meta.position)
        if self.store is None:
            for shard in meta.shards:
                if (self.folder / name / shard.file).stat().st_size != shard.bytes:
                    raise InvalidCheckpoint(f"{self.folder / name / shard.file} is not what its rank has written")
            if meta.shards:
                fsync_directory(self.folder / name)
        self.root.write(f"{name}/{META_FILE}", msgspec.json.format(msgspec.json.encode(meta)))
        if msgspec.json.decode(self.root.read(f"{name}/{META_FILE}"), type=Meta) != meta:
            raise InvalidCheckpoint(f"{self.root}/{name}: its meta data read back is not what was written")

    def remove(self, position: Position) -> None:
        self.root.remove(f"{folder_name(position)}/{META_FILE}")  # first: without it the other files do not count
        self.root.remove(folder_name(position))

    def remove_unfinished(self, epoch: int) -> None:
        """Remove what learners before `epoch` left half written."""
        finished = self.positions()
        for position in self._begun():
            if position[0] < epoch and position not in finished:
                self.remove(position)

    def remove_older(self, current: Meta, keep: int, keep_every: int = 0) -> None:
        """Remove what is older than the newest `keep` in the line of `current`; call it after Redis retired for that.

        The first checkpoint at or after each multiple of `keep_every` steps stays too (0: none).
        """
        places = self.positions()
        line = [place for place in places if current.covers(place)]
        kept = {*line[-keep:], *milestones(line, keep_every)}
        for position in places:
            if position < line[-keep:][0] and position not in kept:
                self.remove(position)

    def _begun(self) -> list[Position]:
        matches = (CHECKPOINT_NAME.fullmatch(name) for name in self.root.names())
        return sorted((int(match[1]), int(match[2])) for match in matches if match)

    @contextmanager
    def _reading(self, name: str = "") -> Iterator[None]:
        """What is wrong with a checkpoint is InvalidCheckpoint, and a store that does not answer is Unreachable."""
        try:
            yield
        except msgspec.MsgspecError as error:
            raise InvalidCheckpoint(f"{self.root}/{name}: {error}") from error
        except OSError as error:
            if self.store is None or isinstance(error, FileNotFoundError):
                raise InvalidCheckpoint(f"{self.root}/{name}: {error}") from error
            raise Unreachable(str(error), "bring the store back and try again") from error


def eligible(places: Iterable[Position], base: str | None, base_epoch: int) -> list[Position]:
    """Those of `places` that may be loaded: the declared base and what was written after it.

    Another one of an older epoch is void: its learner was paused in its save while a successor went on from the base.
    """
    declared = parse_name(base)
    return [place for place in places if not base or place == declared or place[0] >= base_epoch]


def milestones(line: Sequence[Position], every: int) -> list[Position]:
    """The first checkpoint at or after each multiple of `every`; removing the others does not change the choice."""
    before = [0, *(step for _, step in line)]
    return [place for place, step in zip(line, before, strict=False) if every and place[1] // every > step // every]


def folder_name(position: Position) -> str:
    return f"ckpt-{position[0]}-{position[1]}"


class _MetaBefore(msgspec.Struct):
    """What versions of streamrl before 2026-11-28 wrote: ids and versions were in files beside the checkpoints."""

    chain: list[Link] = []

    def converted(self, meta: Meta, root: Folder | ObjectStore) -> Meta:
        epochs = {meta.epoch, *(epoch for epoch, _ in meta.bases)}  # of the learners that made these weights
        logs = [root.read(file)[:size] for file, size in self.chain]
        group_ids = [line for log in logs for line in log.split()]
        notes = re.findall(rb"^(\d+) (\d+) (\d+) \w+$", root.read("versions.log"), re.MULTILINE)
        numbers = [(int(epoch), int(version), int(step)) for epoch, version, step in notes]
        if [len(log) for log in logs] != [size for _, size in self.chain] or not all(map(bytes.isdigit, group_ids)):
            raise InvalidCheckpoint(f"{root}: a log of trained groups is not what ckpt-{meta.name} says")
        return msgspec.structs.replace(
            meta,
            trained=join((int(group_id), int(group_id)) for group_id in group_ids),
            versions={version: step for epoch, version, step in numbers if epoch in epochs and step <= meta.step},
        )


def shard_name(rank: int, world: int) -> str:
    return f"rank-{rank}-of-{world}.safetensors"


def describe(path: Path) -> CheckpointShard:
    return CheckpointShard(path.name, path.stat().st_size, file_checksum(path))
