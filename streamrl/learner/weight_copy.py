"""The weights on the host of rank 0, gathered from all ranks bucket by bucket."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from streamrl.weight_sync.manifest import Adapter

Rows: TypeAlias = Callable[[str, torch.Tensor], torch.Tensor]
"""Function from the name of a parameter and this rank's rows of it to the rows that are published."""
_BUCKET_BYTES: Final = 128 << 20
"""Of whole tensors that are gathered together: one message for each tensor would be slow. A larger one goes alone."""


@dataclass(frozen=True)
class PolicySnapshot:
    """A copy of all weights, valid until `Copies` needs its memory again."""

    tensors: list[tuple[str, torch.Tensor]]  # Hugging Face names, on the CPU; empty on ranks above 0
    seconds: float = 0.0  # duration of the copy: the time that a step loses by a version
    adapter: Adapter | None = None  # set when the tensors are an adapter alone, by the names of peft


class Copies:
    """Host memory for snapshots, used again after `sets` of them: fresh memory costs six times the copy."""

    def __init__(
        self, parameters: Mapping[str, DTensor], dtype: torch.dtype, sets: int = 1, adapter: Adapter | None = None
    ) -> None:
        self._parameters, self._dtype, self._most, self._adapter = parameters, dtype, sets, adapter
        self._sets: deque[dict[str, torch.Tensor]] = deque()

    @torch.no_grad()
    def take(self, changed: Rows | None = None) -> PolicySnapshot:
        """Copy the weights, or what `changed` makes of each rank's rows, to rank 0. Collective."""
        started = time.monotonic()
        copies = self._sets.popleft() if len(self._sets) == self._most else self._room()
        for bucket in self._buckets():
            rows = {name: parameter.to_local().detach() for name, parameter in bucket.items()}
            if changed is not None:
                rows = {name: changed(name, own) if own.numel() else own for name, own in rows.items()}
            _gather(
                list(bucket.values()), list(rows.values()), [copies[name] for name in bucket if copies], self._dtype
            )
        if any(parameter.device_mesh.device_type == "cuda" for parameter in self._parameters.values()):
            torch.cuda.synchronize()
        self._sets.append(copies)
        return PolicySnapshot(list(copies.items()), time.monotonic() - started, self._adapter)

    def _buckets(self) -> Iterator[dict[str, DTensor]]:
        bucket: dict[str, DTensor] = {}
        size = 0
        for name, parameter in self._parameters.items():
            size += parameter.numel() * self._dtype.itemsize
            if bucket and size > _BUCKET_BYTES:
                yield bucket
                bucket, size = {}, parameter.numel() * self._dtype.itemsize
            bucket[name] = parameter
        if bucket:
            yield bucket

    def _room(self) -> dict[str, torch.Tensor]:
        return {
            name: torch.empty(
                parameter.shape, dtype=self._dtype, pin_memory=parameter.device_mesh.device_type == "cuda"
            )
            for name, parameter in self._parameters.items()
            if not parameter.device_mesh.get_rank()
        }


def _gather(
    parameters: list[DTensor], rows: list[torch.Tensor], wholes: list[torch.Tensor], dtype: torch.dtype
) -> None:
    """Copy the rows of all ranks into `wholes` of rank 0 (empty elsewhere), which has most. Collective."""
    mesh = parameters[0].device_mesh
    if mesh.size() == 1:
        for whole, own in zip(wholes, rows, strict=True):
            whole.copy_(own, non_blocking=True)
        return
    pieces = [-(-len(parameter) // mesh.size()) * math.prod(parameter.shape[1:]) for parameter in parameters]
    flat = torch.zeros(sum(pieces), dtype=dtype, device=mesh.device_type)
    for place, own in zip(torch.split(flat, pieces), rows, strict=True):
        place[: own.numel()].copy_(own.reshape(-1))
    parts = [torch.empty_like(flat) for _ in range(mesh.size())] if wholes else None
    dist.gather(flat, parts, group=mesh.get_group(), group_dst=0)
    for rank, part in enumerate(parts or ()):
        for whole, place, piece in zip(wholes, torch.split(part, pieces), pieces, strict=True):
            there = whole.view(-1)[rank * piece : (rank + 1) * piece]
            there.copy_(place[: there.numel()], non_blocking=True)
