"""What a part of the learner (actor, critic, KL controller, ...) keeps in a checkpoint, and what the whole adds up to.

A part has tensors, or a few numbers, or both. Its tensors get its name before theirs (`actor/weight/...`) in the shard
of each rank, its numbers stand in `meta.json`. A checkpoint and a learner must have the same parts: state that is
missing cannot be made up, and state that is left over belongs to an algorithm that is not running any more.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec
import torch

from streamrl.errors import Refused
from streamrl.learner.checkpoint import FORMAT, Meta, shard_name
from streamrl.learner.ranks import Ranks
from streamrl.learner.shard_files import Progress, ShardWriter, open_shards


@runtime_checkable
class Tensors(Protocol):
    """A part with tensors (the rows of this rank; shard_files.py says how they are split)."""

    def shard_state(self) -> dict[str, torch.Tensor]:
        """Copies on the CPU of this rank's rows, by flat name; without dimensions: a number that all ranks have."""
        ...

    def load_shard_state(self, tensors: dict[str, torch.Tensor]) -> None:
        """Put back what `shard_state` returned, bit for bit.

        Raises:
            Refused: it does not fit; nothing is changed.
        """
        ...


@runtime_checkable
class Numbers(Protocol):
    """A part with a few numbers that are the same on all ranks: JSON, so nothing but finite ones."""

    def state(self) -> dict[str, Any]:
        """The numbers by name."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Put back what `state` returned.

        Raises:
            Refused: a number is missing or of another kind; nothing is changed.
        """
        ...


Part = Tensors | Numbers


def tensors_of(parts: Mapping[str, Part]) -> dict[str, torch.Tensor]:
    """This rank's tensors of all parts, as copies on the CPU, by `PART/NAME`."""
    return {
        f"{part}/{name}": tensor
        for part, held in parts.items()
        if isinstance(held, Tensors)
        for name, tensor in held.shard_state().items()
    }


def numbers_of(parts: Mapping[str, Part]) -> dict[str, dict[str, Any]]:
    """The numbers of all parts that have some, by part."""
    return {part: held.state() for part, held in parts.items() if isinstance(held, Numbers)}


def restore(parts: Mapping[str, Part], meta: Meta, tensors: Mapping[str, torch.Tensor]) -> None:
    """Put the state of a checkpoint back into all parts.

    Args:
        parts: of this learner, by name.
        meta: of the checkpoint.
        tensors: this rank's rows, by `PART/NAME`.

    Raises:
        Refused: the checkpoint is of another model.
    """
    for part, held in parts.items():
        if isinstance(held, Tensors):
            prefix = f"{part}/"
            mine = {name.removeprefix(prefix): rows for name, rows in tensors.items() if name.startswith(prefix)}
            held.load_shard_state(mine)
        if isinstance(held, Numbers):
            held.load_state(meta.numbers[part])


def check_parts(parts: Mapping[str, Part], meta: Meta) -> None:
    """Raise `Refused` when a checkpoint has state that this learner has no use for, or lacks state that it needs."""
    ours, theirs = set(parts), set(meta.parts)
    numbered = {part for part, held in parts.items() if isinstance(held, Numbers)}
    if missing := sorted((ours - theirs) | (numbered - meta.numbers.keys())):
        what = f"has no state of {', '.join(missing)}"
    elif left := sorted((theirs - ours) | (meta.numbers.keys() - numbered)):
        what = f"has state of {', '.join(left)}, which this learner has not"
    else:
        return
    raise Refused(
        f"ckpt-{meta.name} {what}: it was written with another algorithm",
        "go on with the settings of `learner` that wrote it, or start afresh with --fresh",
    )


class RankState:
    """This rank's share of the checkpoints of a learner.

    Attributes:
        parts: what is saved and loaded, by name; the same names on every rank.

    Args:
        ranks: the ranks of this learner.
        parts: as the attribute.
    """

    def __init__(self, ranks: Ranks, parts: Mapping[str, Part]) -> None:
        self.parts: dict[str, Part] = dict(parts)
        self._ranks = ranks
        self._writer = ShardWriter()

    def describe(self, meta: Meta) -> Meta:
        """The meta data of a checkpoint with what stands in it of the parts. Not collective."""
        return msgspec.structs.replace(
            meta, format=FORMAT, world=self._ranks.world, parts=sorted(self.parts), numbers=numbers_of(self.parts)
        )

    def save(self, draft: Path) -> None:
        """Copy the state to the host and begin to write this rank's file of a draft. Not collective.

        Training may go on at once. Call it between two steps, and not before the file before it is written or failed.
        """
        self._writer.start(draft / shard_name(self._ranks.rank, self._ranks.world), tensors_of(self.parts))

    def saved(self) -> Progress:
        """How far the file is on the slowest rank. Collective, one all-reduce; nobody waits for a disk."""
        return Progress(self._ranks.all_min(self._writer.progress())[0])

    def load(self, folder: Path, meta: Meta) -> None:
        """Put the state of a checkpoint back, whatever number of ranks wrote it. Not collective.

        Raises:
            Refused: it is of another model or another algorithm.
            InvalidCheckpoint: a file is missing or damaged.
        """
        check_parts(self.parts, meta)
        with open_shards(folder, meta.world) as shards:
            restore(self.parts, meta, shards.rows(self._ranks.rank, self._ranks.world))
