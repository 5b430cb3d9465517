"""Moving the learner's tensors between device and host, in place, so that engines can have the memory meanwhile."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class Offload:
    """The storages of some tensors, which lie on their device or, as copies, in the host's memory.

    The tensors stay the same objects with the same storages: whoever holds a view of them (FSDP, an optimizer) holds it
    afterwards. While they are on the host their storages have no bytes: nobody may touch them.

    Args:
        tensors: on any device; views of one storage move together.
        keep: the host's memory is kept, page-locked for a CUDA device, for the next time: for what moves often.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], *, keep: bool = False) -> None:
        storages = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
        self._storages = [storage for storage in storages.values() if storage.nbytes()]
        self._copies: list[torch.UntypedStorage] | None = None
        self._keep = keep
        self._kept: list[torch.UntypedStorage] = []

    @property
    def away(self) -> bool:
        """Whether the tensors are on the host."""
        return self._copies is not None

    @property
    def nbytes(self) -> int:
        """Bytes that move."""
        return sum(storage.nbytes() for storage in self._copies or self._storages)

    def to_host(self) -> None:
        """Copy everything to the host, then free the device. Whole or not at all; a repeat does nothing."""
        if self._copies is not None:
            return
        copies = self._kept or [self._room(storage) for storage in self._storages]
        for storage, copy in zip(self._storages, copies, strict=True):
            copy.copy_(storage)
        if self._keep:
            self._kept = copies
        for storage in self._storages:
            storage.resize_(0)
        self._copies = copies

    def to_device(self) -> None:
        """Bring everything back. Whole or not at all (a device without room); a repeat does nothing."""
        if self._copies is None:
            return
        grown = []
        try:
            for storage, copy in zip(self._storages, self._copies, strict=True):
                grown.append(storage)
                storage.resize_(copy.nbytes())
                storage.copy_(copy)
        except BaseException:
            for storage in grown:
                storage.resize_(0)
            raise
        self._copies = None

    def _room(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        locked = self._keep and storage.device.type == "cuda"
        return torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=locked).untyped_storage()
