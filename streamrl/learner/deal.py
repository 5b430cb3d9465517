"""Which rank computes which samples of a micro-batch, and their way there: rank 0 has opened them all."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any, get_args

import msgspec
import numpy as np

from streamrl.learner.batch import TrainSample
from streamrl.learner.groups import TrainGroup
from streamrl.learner.ranks import Ranks

Work = Callable[[Sequence[TrainSample]], int]


def deal(groups: Sequence[TrainGroup], world: int, work: Work, *, split: bool, every: bool) -> list[list[TrainSample]]:
    """Samples of each rank: the costliest piece first, to the idlest rank.

    The bound of this rule (Graham 1969, longest processing time first) is 4/3 of the best possible maximum. A piece is
    a group, which computes its prompt once; with `split` it is a part of a group that would be more than half the load
    of a rank. Groups without a gradient go to no rank, unless `every` one counts.
    """
    costs = [0 if group.zero_gradient else work(group.samples) for group in groups]
    half = max(1, sum(costs) // (2 * world))
    pieces: list[tuple[int, Sequence[TrainSample]]] = []
    for group, cost in zip(groups, costs, strict=True):
        if group.zero_gradient and not every:
            continue
        parts = min(len(group.samples), max(1, -(-cost // half))) if split and world > 1 else 1
        ordered = sorted(group.samples, key=lambda sample: -sample.cost) if parts > 1 else group.samples
        pieces += [(work(part) if cost else 0, part) for part in (ordered[first::parts] for first in range(parts))]
    shares: list[list[TrainSample]] = [[] for _ in range(world)]
    loads = [(0, rank) for rank in range(world)]
    for cost, part in sorted(pieces, key=lambda piece: -piece[0]):
        load, rank = heapq.heappop(loads)
        shares[rank] += part
        heapq.heappush(loads, (load + cost, rank))
    return shares


def scatter(ranks: Ranks, shares: Sequence[Sequence[TrainSample]]) -> Sequence[TrainSample]:
    """This rank's share; rank 0 has all of them. Collective."""
    if ranks.rank == 0:
        ranks.scatter([b"", *map(encode, shares[1:])])
        return shares[0]
    return decode(ranks.scatter(()))


def encode(samples: Sequence[TrainSample]) -> bytes:
    return msgspec.msgpack.encode(samples, enc_hook=np.ndarray.tobytes)


def decode(data: bytes) -> list[TrainSample]:
    return msgspec.msgpack.decode(data, type=list[TrainSample], dec_hook=_array)


def _array(kind: Any, data: bytes) -> np.ndarray[Any, Any]:
    """An array of `kind`, which is `NDArray[...]`; writable, as torch wants it."""
    (dtype,) = get_args(get_args(kind)[1])
    return np.frombuffer(bytearray(data), dtype)
