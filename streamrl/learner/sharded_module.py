"""A model over rows of tokens, sharded over the ranks of the learner (FSDP2): laying rows out and running them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from streamrl.errors import StreamrlError
from streamrl.learner.batch import PADDING, Extent, Limits, Microbatch, TrainSample, dummy, layout, work_of_prompt
from streamrl.learner.ranks import Ranks


class ShardedModule:
    """A module over rows of tokens.

    Args:
        module: sharded by `sharding.shard`; takes the arrays of a `Microbatch` and returns tensors of shape (n,).
        ranks: the ranks of this learner.
        limits: of rows and micro-batches.
        vocabulary: token ids are below.

    Attributes:
        limits: of rows and micro-batches.
        vocabulary: token ids are below.
    """

    def __init__(self, module: nn.Module, ranks: Ranks, limits: Limits, *, vocabulary: int) -> None:
        self.ranks = ranks
        self.limits, self.vocabulary = limits, vocabulary
        self._module = module
        with torch.no_grad():
            # FSDP finishes its set-up in the first forward; only then are the local tensors the ones that will stay.
            self._forward(dummy())
        self._reshard()

    def misfit(self, batch: Sequence[TrainSample]) -> ValueError | None:
        """Why samples do not fit the model (unknown token, too long), None when they do. Not collective."""
        if not batch:
            return None
        # One look at all token ids first: it is what every good batch costs.
        ids = np.concatenate([array for sample in batch for array in (sample.prompt, sample.tokens)])
        known = ids.min() >= 0 and ids.max() < self.vocabulary
        for sample in batch:
            if sample.width > self.limits.longest:
                return ValueError(f"group {sample.gid}: {sample.width} tokens, the model takes {self.limits.longest}")
            both = () if known else np.concatenate([sample.prompt, sample.tokens])
            if any(token < 0 or token >= self.vocabulary for token in both):
                return ValueError(f"group {sample.gid}: a token id is not in the vocabulary of the model")
        return None

    def _reshard(self) -> None:
        """Give the gathered parameters back: afterwards the shards are all there is."""
        for module in self._module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def work(self, samples: Sequence[TrainSample]) -> int:
        """Work of the samples of one group, as `Limits.work` counts: a shared prompt once, attention by its width.

        Not collective.
        """
        prompts: dict[bytes, list[Extent]] = {}
        for sample in samples:
            prompts.setdefault(sample.prompt.tobytes(), []).append(Extent(len(sample.prompt), len(sample.tokens)))
        return sum(work_of_prompt(extents, self.limits) for extents in prompts.values())

    @property
    def _fsdp(self) -> FSDPModule:
        assert isinstance(self._module, FSDPModule)
        return self._module

    def _agree(self, batch: Sequence[TrainSample]) -> list[Microbatch]:
        """Lay out this rank's batch and fill up to the number of passes of the busiest rank. Collective.

        Raises:
            ValueError: a sample does not fit the model; the other ranks get a StreamrlError.
        """
        error = self.misfit(batch)
        parts = [] if error else layout(batch, self.limits)
        passes, refused = self.ranks.all_max(len(parts), int(error is not None))
        if error:
            raise error
        if refused:
            raise StreamrlError("another rank refused its samples", "the log of that rank names the group")
        return parts + [dummy()] * (passes - len(parts))

    def _forward(self, part: Microbatch, **options: Any) -> Any:
        """Call the module with the arrays of a micro-batch."""
        plain = not part.shared and not (part.segments == PADDING).any()
        return self._module(
            input_ids=self._to_device(part.input_ids),
            segments=None if plain else self._to_device(part.segments),
            position_ids=self._to_device(part.position_ids) if part.shared else None,
            positions=self._to_device(part.positions),
            targets=self._to_device(part.targets),
            **options,
        )

    def _to_device(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.ranks.device, non_blocking=True)
