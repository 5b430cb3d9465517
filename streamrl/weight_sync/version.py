"""One version of the weights on this host, whole and proved: what a follower hands to an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from streamrl.weight_sync.manifest import Adapter, Pair


class Readers:
    """How many engines read a version now; `with version.readers:` is one more."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> None:
        self.count += 1

    def __exit__(self, *_: object) -> None:
        self.count -= 1


@dataclass(frozen=True, eq=False)
class Version:
    """All weights of one version, or its adapter, in files of this host.

    Attributes:
        pair: (epoch, number).
        step: optimizer step of the weights.
        tensors: every parameter by its Hugging Face name, a tied one under one of its names; on the CPU, views of
            mapped files where a tensor lies in one piece. Only to be read, and only until the call that got it returns,
            or as long as `readers` says so.
        folder: holds the files; None when the version was made in memory (tests), which only an engine in this
            process can take.
        files: safetensors files in `folder`. A tensor that lies in several of them is cut along its first dimension,
            in the order of `parts[name]`.
        parts: name to the files that hold it, in the order of the rows.
        sources: servers that have the files of this version for other hosts (`Manifest.sources`).
        readers: who reads it after the call that got it has returned. Its bytes stay as they are as long; its files may
            lose their names.
        adapter: set when `tensors` are those of an adapter alone, by the names of peft (weight_sync/adapter.py).
    """

    pair: Pair
    step: int
    tensors: Mapping[str, torch.Tensor]
    folder: Path | None = None
    files: tuple[str, ...] = ()
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sources: tuple[str, ...] = ()
    readers: Readers = field(default_factory=Readers)
    adapter: Adapter | None = None

    @property
    def number(self) -> int:
        """The version's number, which tokens carry."""
        return self.pair[1]
