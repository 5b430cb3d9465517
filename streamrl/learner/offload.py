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
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        storages = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
        self._storages = [storage for storage in storages.values() if storage.nbytes()]
        self._copies: list[torch.UntypedStorage] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that move."""
        return sum(storage.nbytes() for storage in self._copies or self._storages)

    def to_host(self) -> None:
        """Copy everything to the host, then free the device. Whole or not at all; a repeat does nothing."""
        if self._copies is not None:
            return
        copies = []
        for storage in self._storages:
            copy = torch.empty(storage.nbytes(), dtype=torch.uint8).untyped_storage()
            copy.copy_(storage)
            copies.append(copy)
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
