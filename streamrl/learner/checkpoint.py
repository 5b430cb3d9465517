"""Durable checkpoints: `checkpoints/ckpt-EPOCH-STEP/{meta.json, rank-R-of-N.safetensors}`.

Every rank writes its shard into `draft-EPOCH-STEP` (checkpoint_files.py). When all are there, rank 0 writes
`meta.json`, makes everything durable and renames the directory. There is no "latest" file: the name carries epoch and
step, so a learner that was paused and wakes up cannot replace the file of its successor, and Redis says which files
are void (`eligible`).

This module imports no torch, so that the audit can read `meta.json` and checksums without it.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import xxhash

from streamrl.atomic import finish_durably, write_synced
from streamrl.errors import CannotCreate, StreamrlError
from streamrl.learner.lineage import Interval, join

logger = logging.getLogger(__name__)

Position = tuple[int, int]
Kind = Literal["model", "recording"]
NOWHERE: Final[Position] = (0, 0)
"""The place before the first checkpoint: the model of the run itself."""
FORMAT: Final = 2
"""Of what is in the files: 1 had the tensors of the policy alone, without the part they are of."""
CHECKPOINT_NAME: Final = re.compile(r"ckpt-(\d+)-(\d+)")
_EPOCH: Final = re.compile(r"(?:epoch|ckpt|trained)-(\d+)(?:-\d+|\.log)?")
"""Names that a learner of some epoch made: its mark, its checkpoints, and the log of versions of streamrl before."""
META_FILE: Final = "meta.json"
_CHUNK: Final = 8 << 20


class CheckpointShard(msgspec.Struct, frozen=True):
    """One rank's file; the checksum is xxh3-128 in hexadecimal."""

    file: str
    bytes: int
    checksum: str


Link = tuple[str, int]
"""A file and the bytes of it that count."""


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

    @property
    def epochs(self) -> set[int]:
        """The learners that made these weights."""
        return {self.epoch, *(epoch for epoch, _ in self.bases)}

    def covers(self, position: Position) -> bool:
        """Whether all that the checkpoint at `position` was trained on is in these weights.

        False for a later one of this line, and for one of a learner that went on beside its successor.
        """
        line = [*self.bases, self.position]
        return position == NOWHERE or any(epoch == position[0] and step >= position[1] for epoch, step in line)


class InvalidCheckpoint(StreamrlError):
    pass


def parse_name(name: str | None) -> Position:
    """Parse the `EPOCH-STEP` that Redis holds; (0, 0) when it holds none."""
    if not name:
        return NOWHERE
    epoch, _, step = name.partition("-")
    return int(epoch), int(step)


class Checkpoints:
    """The checkpoints of a run; with `make=False` they are only read."""

    def __init__(self, folder: Path, *, make: bool = True) -> None:
        self.folder = folder
        if make:
            folder.mkdir(parents=True, exist_ok=True)

    @classmethod
    def of(cls, run_dir: Path, *, make: bool = True) -> Checkpoints:
        return cls(run_dir / "checkpoints", make=make)

    def positions(self) -> list[Position]:
        paths = self.folder.iterdir() if self.folder.is_dir() else ()
        matches = (CHECKPOINT_NAME.fullmatch(path.name) for path in paths)
        return sorted((int(match[1]), int(match[2])) for match in matches if match)

    def greatest_epoch(self) -> int:
        """Greatest epoch of a learner that was here, 0 when none; the next one's must be above it."""
        paths = self.folder.iterdir() if self.folder.is_dir() else ()
        matches = (_EPOCH.fullmatch(path.name) for path in paths)
        return max((int(match[1]) for match in matches if match), default=0)

    def mark_epoch(self, epoch: int) -> None:
        """Leave a mark of a learner, which counts also when Redis forgets it; CannotCreate: another one has it."""
        try:
            (self.folder / f"epoch-{epoch}").touch(exist_ok=False)
        except OSError as error:
            raise CannotCreate(f"{self.folder / f'epoch-{epoch}'} cannot be made: {error.strerror}") from error

    def path(self, position: Position) -> Path:
        return self.folder / f"ckpt-{position[0]}-{position[1]}"

    def loadable(self, base: str | None, base_epoch: int, retired: str | None) -> Iterator[Meta]:
        """Meta data of the checkpoints that `greatest` may choose, the greatest first; unreadable ones are logged."""
        for position in reversed(eligible(self.positions(), base, base_epoch)):
            path = self.path(position)
            try:
                meta = read_meta(path)
            except (OSError, msgspec.MsgspecError) as error:
                logger.warning("checkpoint not valid", extra={"path": str(path), "error": str(error)})
                continue
            if meta.covers(parse_name(retired)) and meta.position == position:
                yield meta

    def greatest(self, base: str | None, base_epoch: int, retired: str | None = None) -> Meta | None:
        """The greatest valid checkpoint that may be loaded; invalid ones are logged.

        `base` (`EPOCH-STEP`) was declared by the last learner, of epoch `base_epoch`. `retired` is the checkpoint that
        Redis last retired groups for: a checkpoint that does not go on from it lacks those groups. When Redis comes
        back from before a take-over and the older learner retires groups again, its line is continued; the same
        roll-back brought the groups of the successor back.
        """
        for meta in self.loadable(base, base_epoch, retired):
            path = self.path(meta.position)
            try:
                return self.validate(path)
            except InvalidCheckpoint as error:
                logger.warning("checkpoint not valid", extra={"path": str(path), "error": str(error)})
        return None

    def draft(self, position: Position) -> Path:
        return self.folder / f"draft-{position[0]}-{position[1]}"

    def begin(self, position: Position) -> Path:
        draft = self.draft(position)
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        return draft

    def finish(self, meta: Meta, *, whole: bool = True) -> None:
        """Write `meta.json`, make all durable, and rename; without `whole` some shards are in `checkpoint.store` only.

        After an OSError there is no checkpoint of this name. After InvalidCheckpoint no group may be retired for it.
        """
        draft, final = self.draft(meta.position), self.path(meta.position)
        for shard in meta.shards if whole else ():
            if (draft / shard.file).stat().st_size != shard.bytes:
                raise InvalidCheckpoint(f"{draft / shard.file} is not what its rank has written")
        write_synced(draft / META_FILE, msgspec.json.format(msgspec.json.encode(meta)))
        finish_durably(draft, final)
        found = read_meta(final)
        if found != meta:
            raise InvalidCheckpoint(f"{final}: its meta data read back is not what was written")

    def validate(self, path: Path) -> Meta:
        """Read a checkpoint whole, compare it with its checksums, and return its meta data."""
        try:
            meta = read_meta(path)
            if self.path(meta.position) != path or len(meta.shards) != meta.world:
                raise InvalidCheckpoint(f"{path}: its meta data is of another checkpoint")
            for shard in meta.shards:
                if describe(path / shard.file) != shard:
                    raise InvalidCheckpoint(f"{path / shard.file} is not what was written")
            for file, size in meta.recording:
                if (self.folder.parent / file).stat().st_size < size:
                    raise InvalidCheckpoint(f"{self.folder.parent / file} is shorter than {path} says")
        except (OSError, msgspec.MsgspecError) as error:
            raise InvalidCheckpoint(f"{path}: {error}") from error
        return meta

    def remove_drafts(self, epoch: int) -> None:
        for path in self.folder.glob("draft-*"):
            number = path.name.split("-")[1]
            if number.isdigit() and int(number) < epoch:
                shutil.rmtree(path, ignore_errors=True)

    def remove_older(self, current: Meta, keep: int, keep_every: int = 0) -> list[Position]:
        """Remove what is older than the newest `keep` checkpoints that `current` goes on from, itself included.

        Returns what was removed.

        Call it only after Redis retired for `current`. Checkpoints of another line do not count as newest. The first
        older checkpoint at or after each multiple of `keep_every` steps stays too (0: none).
        """
        line = [place for place in self.positions() if current.covers(place)]
        kept = {*line[-keep:], *milestones(line, keep_every)}
        old = [place for place in self.positions() if place < line[-keep:][0] and place not in kept]
        for position in old:
            shutil.rmtree(self.path(position), ignore_errors=True)
        return old


def eligible(places: Iterable[Position], base: str | None, base_epoch: int) -> list[Position]:
    """Those of `places` that may be loaded: the declared base itself and what was written after it.

    A checkpoint of an older epoch other than the base was written by a learner that was paused in its save while a
    successor went on from the base. It is void, although its number may be the greatest.
    """
    declared = parse_name(base)
    return [place for place in places if not base or place == declared or place[0] >= base_epoch]


def milestones(line: Sequence[Position], every: int) -> list[Position]:
    """The first checkpoint at or after each multiple of `every`; removing the others does not change the choice."""
    before = [0, *(step for _, step in line)]
    return [place for place, step in zip(line, before, strict=False) if every and place[1] // every > step // every]


def read_meta(path: Path) -> Meta:
    """Read the meta data of a checkpoint without checks; `OSError` or `msgspec.MsgspecError` when it cannot be read."""
    data = (path / META_FILE).read_bytes()
    meta, before = msgspec.json.decode(data, type=Meta), msgspec.json.decode(data, type=_MetaBefore)
    return before.converted(meta, path.parent) if before.chain else meta


class _MetaBefore(msgspec.Struct):
    """What versions of streamrl before 2026-11-28 wrote: ids and versions were in files beside the checkpoints."""

    chain: list[Link] = []

    def converted(self, meta: Meta, folder: Path) -> Meta:
        logs = [(folder / file).read_bytes()[:size] for file, size in self.chain]
        group_ids = [line for log in logs for line in log.split()]
        notes = re.findall(rb"^(\d+) (\d+) (\d+) \w+$", (folder / "versions.log").read_bytes(), re.MULTILINE)
        numbers = [(int(epoch), int(version), int(step)) for epoch, version, step in notes]
        if [len(log) for log in logs] != [size for _, size in self.chain] or not all(map(bytes.isdigit, group_ids)):
            raise OSError(f"a log of trained groups in {folder} is not what ckpt-{meta.name} says")
        return msgspec.structs.replace(
            meta,
            trained=join((int(group_id), int(group_id)) for group_id in group_ids),
            versions={version: step for epoch, version, step in numbers if epoch in meta.epochs and step <= meta.step},
        )


def shard_name(rank: int, world: int) -> str:
    return f"rank-{rank}-of-{world}.safetensors"


def describe(path: Path) -> CheckpointShard:
    checksum, size = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            checksum.update(chunk)
            size += len(chunk)
    return CheckpointShard(path.name, size, checksum.hexdigest())
