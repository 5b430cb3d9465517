"""Cutting the tensors of one rank into files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

import torch

Named: TypeAlias = tuple[str, torch.Tensor]


def buckets(tensors: Iterable[Named], limit: int) -> Iterator[list[Named]]:
    """Group tensors, in their order, so that each group has at most `limit` bytes of values.

    A group may have exactly `limit` bytes; a tensor with more is a group of its own and never cut. Tensors are taken
    one by one, and at most one group and one tensor are held. The same shapes give the same groups.
    """
    bucket: list[Named] = []
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket
