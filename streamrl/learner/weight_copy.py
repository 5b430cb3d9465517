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

    A snapshot is overwritten by the one that comes `sets` after it. With `gather`, rank 0 copies the rows of all ranks
    and the others copy nothing.
    """

    def __init__(
        self,
        parameters: Mapping[str, DTensor],
        dtype: torch.dtype,
        sets: int = 1,
        adapter: Adapter | None = None,
        *,
        gather: bool = False,
    ) -> None:
        self._gather = gather
        self._rows = {
            name: parameter
            for name, parameter in parameters.items()
            # An empty tensor belongs to the first rank, so that it is not lost.
            if gather or parameter.to_local().numel() or not (parameter.numel() or parameter.device_mesh.get_rank())
        }
        self._shapes = {name: list(parameter.shape) for name, parameter in parameters.items()}
        self._dtype, self._most, self._adapter = dtype, sets, adapter
        self._sets: deque[dict[str, torch.Tensor]] = deque()

    @torch.no_grad()
    def take(self, changed: Rows | None = None) -> PolicySnapshot:
        """Copy this rank's rows, or what `changed` makes of them. Collective with `gather` alone."""
        started = time.monotonic()
        copies = self._sets.popleft() if len(self._sets) == self._most else self._room()
        for name, parameter in self._rows.items():
            rows = parameter.to_local().detach()
            if changed is not None and rows.numel():
                rows = changed(name, rows)
            if self._gather:
                rows = _whole(parameter, rows.to(self._dtype))
            if name in copies:
                copies[name].copy_(rows, non_blocking=True)
        for device in {parameter.device for parameter in self._rows.values() if parameter.device.type == "cuda"}:
            torch.cuda.synchronize(device)
        self._sets.append(copies)
        return PolicySnapshot(list(copies.items()), self._shapes, time.monotonic() - started, self._adapter)

    def _room(self) -> dict[str, torch.Tensor]:
        return {
            name: torch.empty(
                parameter.shape if self._gather else parameter.to_local().shape,
                dtype=self._dtype,
                pin_memory=parameter.device.type == "cuda",
            )
            for name, parameter in self._rows.items()
            if not (self._gather and parameter.device_mesh.get_rank())
        }


def _whole(parameter: DTensor, rows: torch.Tensor) -> torch.Tensor:
    """The rows of all ranks, on each of them: one tensor at a time, as FSDP gathers them."""
    mesh, shape, stride = parameter.device_mesh, parameter.shape, parameter.stride()
    return DTensor.from_local(rows, mesh, parameter.placements, shape=shape, stride=stride).full_tensor()
