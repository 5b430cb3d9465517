"""One version of the weights on this host, whole and proved: what a follower hands to an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from streamrl.weight_sync.manifest import Pair


@dataclass(frozen=True, eq=False)
class Version:
    """All weights of one version, in files of this host.

    Attributes:
        pair: (epoch, number).
        step: optimizer step of the weights.
        tensors: every parameter by its Hugging Face name, a tied one under one of its names; on the CPU, views of
            mapped files where a tensor lies in one piece. Only to be read, and only until the call that got it returns.
        folder: holds the files; None when the version was made in memory (tests), which only an engine in this
            process can take.
        files: safetensors files in `folder`. A tensor that lies in several of them is cut along its first dimension,
            in the order of `parts[name]`.
        parts: name to the files that hold it, in the order of the rows.
    """

    pair: Pair
    step: int
    tensors: Mapping[str, torch.Tensor]
    folder: Path | None = None
    files: tuple[str, ...] = ()
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def number(self) -> int:
        """The version's number, which tokens carry."""
        return self.pair[1]
