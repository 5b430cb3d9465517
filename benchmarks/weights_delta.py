"""Deltas of bfloat16 weights of which 1.2 % change, each by the least step that the type has."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from spread import spread

from streamrl.weight_sync import delta
from streamrl.weight_sync.files import checksum
from streamrl.weight_sync.tensors import encode_tensors, write_tensors

DENSITY = 0.012
ELEMENTS = 1 << 24
"""Of one tensor, at most."""


def measure(folder: Path, size: int, rounds: int) -> dict[str, Any]:
    """Bytes and speed; gigabytes are those of the full weights."""
    torch.set_num_threads(1)
    total = size // 2
    shapes = [min(ELEMENTS, total - start) for start in range(0, total, ELEMENTS)]
    old = {f"t{number}": (0.02 * torch.randn(count)).to(torch.bfloat16) for number, count in enumerate(shapes)}
    target = {name: tensor.clone() for name, tensor in old.items()}
    path = folder / "delta"
    share: list[float] = []
    count: list[float] = []
    seconds: dict[str, list[float]] = {"compare": [], "encode": [], "decode": []}
    for _ in range(rounds):
        new = {name: changed(tensor) for name, tensor in old.items()}
        begin = time.perf_counter()
        differing = sum(delta.changed(old[name], new[name]) for name in old)
        compared = time.perf_counter()
        encoded = {name: delta.encode(old[name], new[name]) for name in old}
        changes = {name: one for name, one in encoded.items() if one is not None}
        shard = delta.write_delta_shard(path, changes, checksum(*encode_tensors(list(new.items()))))
        written = time.perf_counter()
        for name, one in delta.read_delta_shard(path, shard).items():
            delta.decode_into(target[name], one)
        decoded = time.perf_counter()
        assert all(torch.equal(target[name].view(torch.int16), new[name].view(torch.int16)) for name in new)
        path.unlink()
        share.append(100 * shard.bytes / (2 * total))
        count.append(100 * differing / total)
        seconds["compare"].append(compared - begin)
        seconds["encode"].append(written - compared)
        seconds["decode"].append(decoded - written)
        old = new
    full = time.perf_counter()
    write_tensors(path, list(old.items()), durable=False)
    full = time.perf_counter() - full
    path.unlink()
    speeds = {
        f"{name}_gigabytes_per_second": spread([2e-9 * total / one for one in runs]) for name, runs in seconds.items()
    }
    return {
        "bytes": 2 * total,
        "per_cent_changed": spread(count),
        "per_cent_of_full_bytes": spread(share),
        "bit_for_bit": True,
        **speeds,
        "full_write_gigabytes_per_second": float(f"{2e-9 * total / full:.4g}"),
    }


def changed(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with so many values one step up or down, at places drawn one by one."""
    chosen = torch.rand(tensor.numel()) < DENSITY
    steps = torch.randint(0, 2, (tensor.numel(),), dtype=torch.int16) * 2 - 1
    return (tensor.view(torch.int16) + steps * chosen).view(torch.bfloat16)
