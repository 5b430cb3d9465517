"""This rank's share of the weights, copied off the policy."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch.distributed.tensor import DTensor

from streamrl.weight_sync.manifest import Adapter

Rows: TypeAlias = Callable[[str, torch.Tensor], torch.Tensor]
"""Function from the name of a parameter and this rank's rows of it to the rows that are published."""


@dataclass(frozen=True)
class PolicySnapshot:
    """A copy of one rank's rows of all weights, valid until `Copies` needs its memory again; training may go on."""

    tensors: list[tuple[str, torch.Tensor]]  # Hugging Face names, rows on the CPU; without tensors of no rows
    shapes: dict[str, list[int]]  # of the whole tensors
    seconds: float = 0.0  # duration of the copy: the time that a step loses by a version
    adapter: Adapter | None = None  # set when the tensors are an adapter alone, by the names of peft


class Copies:
    """Host memory that snapshots are copied into, again and again: fresh memory costs six times the copy.

    A snapshot is overwritten by the one that comes `sets` after it.
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
    def take(self, changed: Rows | None = None) -> PolicySnapshot:
        """Copy this rank's rows, or what `changed` makes of them. Not collective."""
        started = time.monotonic()
        rows = {name: parameter.to_local().detach() for name, parameter in self._rows.items()}
        copies = self._sets.popleft() if len(self._sets) == self._most else [self._room(row) for row in rows.values()]
        for copy, (name, row) in zip(copies, rows.items(), strict=True):
            copy.copy_(row if changed is None else changed(name, row), non_blocking=True)
        for device in {row.device for row in rows.values() if row.device.type == "cuda"}:
            torch.cuda.synchronize(device)
        self._sets.append(copies)
        tensors, seconds = list(zip(self._rows, copies, strict=True)), time.monotonic() - started
        return PolicySnapshot(tensors, self._shapes, seconds, self._adapter)

    def _room(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.empty(rows.shape, dtype=self._dtype, pin_memory=rows.device.type == "cuda")
