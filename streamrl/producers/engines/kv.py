"""Keys and values of a fixed number of slots, behind transformers' cache interface.

Each layer holds two tensors of shape (slots, key-value heads, capacity, head size). A sequence lives in one slot, its
token at position p in row p. The forward pass of an unmodified Hugging Face model writes and reads them through
`Cache.update`; `prefill` and `decode` say beforehand which slots it is about. Capacity grows by doubling, so memory
follows the longest sequence that was really seen.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

GRANULE = 16


def round_up(length: int) -> int:
    """Round a length up to the granule of attention: few distinct shapes, little wasted work."""
    return -(-length // GRANULE) * GRANULE


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer: tensors only, all logic is in `SlotCache`. Sizes are learned from the first forward pass."""

    is_sliding = False
    keys: torch.Tensor | None
    values: torch.Tensor | None

    def __init__(self, slots: int) -> None:
        super().__init__()
        self.slots = slots
        self.capacity = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate, or grow to `capacity` and keep what is there."""
        self.keys = self._grown(self.keys, key_states)
        self.values = self._grown(self.values, value_states)
        self.is_initialized = True

    def _grown(self, old: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        new = like.new_zeros(self.slots, like.shape[1], self.capacity, like.shape[3])
        if old is not None:
            new[:, :, : old.shape[2]] = old
        return new

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Not used: `SlotCache.update` knows the slots."""
        raise NotImplementedError

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Prefill attends over itself alone (decoding brings its own mask)."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """0: positions are always given, and a prefill begins at 0."""
        return 0

    def get_max_length(self) -> int:
        """Rows of a slot."""
        return int(self.capacity)


class SlotCache(Cache):  # type: ignore[misc]
    """Keys and values of `slots` sequences in `layers` layers, at most `context` tokens each."""

    def __init__(self, layers: int, slots: int, context: int) -> None:
        super().__init__(layers=[SlotLayer(slots) for _ in range(layers)])
        self._limit = round_up(context)
        self._capacity = 0
        self._sources: torch.Tensor | None = None
        self._slots: torch.Tensor | None = None
        self._rows: dict[int, torch.Tensor] = {}
        self._count = 0
        self._span = 0

    def reserve(self, length: int) -> None:
        """Make room for sequences of `length` tokens."""
        if length <= self._capacity:
            return
        self._capacity = min(self._limit, max(round_up(length), 2 * self._capacity, 4 * GRANULE))
        for layer in self.layers:
            layer.capacity = self._capacity
            if layer.is_initialized:
                layer.lazy_initialization(layer.keys, layer.values)

    def prefill(self, sources: torch.Tensor, slots: torch.Tensor) -> None:
        """Announce a forward pass over whole prompts: batch row `sources[i]` is copied into slot `slots[i]`."""
        self._sources, self._slots = sources, slots

    def decode(self, positions: torch.Tensor, span: int) -> None:
        """Announce a forward pass of one token in each of the first slots.

        Args:
            positions: where that token goes, shape (count,).
            span: rows the attention sees, from 0.
        """
        self._sources, self._slots = None, positions
        self._rows.clear()
        self._count, self._span = len(positions), span

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new keys and values; return all that the attention of this pass may see."""
        layer = self.layers[layer_idx]
        if not layer.is_initialized:
            layer.lazy_initialization(key_states, value_states)
        if self._sources is not None:
            length = key_states.shape[2]
            layer.keys[self._slots, :, :length] = key_states[self._sources]
            layer.values[self._slots, :, :length] = value_states[self._sources]
            return key_states, value_states
        rows = self._flat_rows(key_states.shape[1])
        # a tenth faster for the whole step than assignment to indices
        for cached, new in ((layer.keys, key_states), (layer.values, value_states)):
            cached.view(-1, new.shape[3]).index_copy_(0, rows, new.reshape(-1, new.shape[3]))
        return layer.keys[: self._count, :, : self._span], layer.values[: self._count, :, : self._span]

    def _flat_rows(self, heads: int) -> torch.Tensor:
        """Rows of this step in the view (slots x heads x capacity, head size); the same for all layers."""
        rows = self._rows.get(heads)
        if rows is None:
            assert self._slots is not None
            device = self._slots.device
            first = torch.arange(self._count * heads, device=device).view(-1, heads) * self._capacity
            rows = self._rows[heads] = (first + self._slots[:, None]).view(-1)
        return rows

    def move(self, sources: list[int], targets: list[int], length: int) -> None:
        """Copy the first `length` rows of slots to other slots; the two lists are disjoint."""
        for layer in self.layers:
            layer.keys[targets, :, :length] = layer.keys[sources, :, :length]
            layer.values[targets, :, :length] = layer.values[sources, :, :length]

    def free(self) -> None:
        """Give the memory back; the next `reserve` starts again."""
        self._capacity = 0
        for layer in self.layers:
            layer.keys = layer.values = None
            layer.is_initialized = False
