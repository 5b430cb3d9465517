"""This rank's share of the weights, copied off the policy, and other weights put into it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from streamrl.errors import WeightsError
from streamrl.learner.export import Rows
from streamrl.weight_sync.manifest import Adapter, read_manifest
from streamrl.weight_sync.tensors import map_version


@dataclass(frozen=True)
class Snapshot:
    """A copy of one rank's rows of all weights, valid until `Copies` needs its memory again; training may go on.

    Attributes:
        tensors: Hugging Face names and rows on the CPU; a tensor of which this rank has no row is left out.
        shapes: shapes of the whole tensors, by name.
        seconds: how long the copy took, which is the time a step loses by a version.
        adapter: set when the tensors are an adapter alone, by the names of peft.
    """

    tensors: list[tuple[str, torch.Tensor]]
    shapes: dict[str, list[int]]
    seconds: float = 0.0
    adapter: Adapter | None = None


class Copies:
    """Memory of the host that snapshots are copied into, again and again: fresh memory costs six times the copy.

    Args:
        parameters: sharded parameters by Hugging Face name.
        dtype: what they are cast to.
        sets: snapshots that somebody may still read: a snapshot is overwritten by the one that comes `sets` after it.
        adapter: the parameters are those of this adapter alone.
    """

    def __init__(
        self, parameters: Mapping[str, DTensor], dtype: torch.dtype, sets: int = 1, adapter: Adapter | None = None
    ) -> None:
        self._rows = {
            name: parameter
            for name, parameter in parameters.items()
            # An empty tensor belongs to the first rank, so that it is not lost.
            if parameter.to_local().numel() or not (parameter.numel() or parameter.device_mesh.get_rank())
        }
        self._shapes = {name: list(parameter.shape) for name, parameter in parameters.items()}
        self._dtype, self._most, self._adapter = dtype, sets, adapter
        self._sets: deque[list[torch.Tensor]] = deque()

    @torch.no_grad()
    def take(self, changed: Rows | None = None) -> Snapshot:
        """Copy this rank's rows. Not collective: nothing travels between ranks.

        Args:
            changed: makes the rows that are copied of this rank's own; None: they are copied as they are.
        """
        started = time.monotonic()
        rows = {name: parameter.to_local().detach() for name, parameter in self._rows.items()}
        copies = self._sets.popleft() if len(self._sets) == self._most else [self._room(row) for row in rows.values()]
        for copy, (name, row) in zip(copies, rows.items(), strict=True):
            copy.copy_(row if changed is None else changed(name, row), non_blocking=True)
        for device in {row.device for row in rows.values() if row.device.type == "cuda"}:
            torch.cuda.synchronize(device)
        self._sets.append(copies)
        tensors, seconds = list(zip(self._rows, copies, strict=True)), time.monotonic() - started
        return Snapshot(tensors, self._shapes, seconds, self._adapter)

    def _room(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.empty(rows.shape, dtype=self._dtype, pin_memory=rows.device.type == "cuda")


def rows_reader(
    folder: Path, parameters: Mapping[str, DTensor], adapter: Adapter | None = None
) -> Callable[[str], torch.Tensor]:
    """Open a pinned version and return what gives this rank's rows of a parameter by name. Not collective.

    Everything is checked before it returns; after that at most one whole tensor is held in memory at a time.

    Args:
        folder: of the version.
        parameters: that are trained, by the names that versions have.
        adapter: they are those of this adapter.

    Raises:
        WeightsError: a file is not what the manifest says, names and shapes are not those of the model, or it is no
            version of this adapter.
        OSError: a file cannot be read.
    """
    manifest = read_manifest(folder)
    if manifest.adapter != adapter:
        raise WeightsError(
            f"{folder} holds {_content(manifest.adapter)}, this learner trains {_content(adapter)}",
            "an adapter cannot be taken out of merged weights: learner.lora.publish adapter keeps both apart",
        )
    version = map_version(folder, manifest)
    found = {entry.name: entry.shape for entry in manifest.tensors}
    expected = {name: list(parameter.shape) for name, parameter in parameters.items()}
    if found != expected:
        odd = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        raise WeightsError(f"{folder} is of another model: {', '.join(odd[:3])} differ")

    def rows(name: str) -> torch.Tensor:
        mesh = parameters[name].device_mesh
        whole = version.tensors[name]
        return whole[rows_of(whole.shape[0], mesh.get_rank(), mesh.size())]

    return rows


def _content(adapter: Adapter | None) -> str:
    if adapter is None:
        return "whole weights"
    return f"a {adapter.kind} adapter of rank {adapter.rank}, alpha {adapter.alpha:g}, for {adapter.base}"


def rows_of(size: int, rank: int, world: int) -> slice:
    """Rows of a tensor with `size` of them that a rank holds: equal pieces, the last ones shorter or empty (FSDP2)."""
    piece = -(-size // world)
    return slice(min(rank * piece, size), min((rank + 1) * piece, size))
