"""Two sets of scores of the same responses: how far they agree, and where they do not. Pure functions of arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]

_SAME: Final = 1e-6
_BINS: Final = 12


@dataclass(frozen=True, slots=True)
class Moments:
    """Mean, standard deviation (of the samples themselves), least and greatest value of one set of scores."""

    mean: float
    std: float
    min: float
    max: float


@dataclass(frozen=True, slots=True)
class Bin:
    """Scores from `low` to below `high` (the last one: and `high`); `low` equals `high` for a single value."""

    low: float
    high: float
    old: int
    new: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """How two sets of scores agree.

    Attributes:
        samples: responses that both have a score for; `groups` have one of them at least.
        groups: see `samples`.
        old: moments of the scores that were there.
        new: moments of the scores that were made now.
        same: share of responses with equal scores, to 1e-6 of the greater one.
        agreement: share on the same side of the threshold.
        pearson: linear correlation; None where one side is constant, or there is one response only.
        spearman: correlation of the ranks; None as `pearson`.
        order: of the pairs of responses to one prompt that the old scores tell apart, the share that the new ones
            order the same way, ties counted half; None where there is no such pair. This is what training sees.
        pairs: number of these pairs.
        flat_old: groups with equal old scores, of which a contrast within the group learns nothing.
        flat_new: the same of the new scores.
        histogram: both sets in common bins.
    """

    samples: int
    groups: int
    old: Moments
    new: Moments
    same: float
    agreement: float
    pearson: float | None
    spearman: float | None
    order: float | None
    pairs: int
    flat_old: int
    flat_new: int
    histogram: tuple[Bin, ...]


def compare(old: Sequence[float], new: Sequence[float], groups: Sequence[Any], threshold: float) -> Comparison:
    """Compare two sets of scores.

    Args:
        old: finite scores, at least one.
        new: finite scores of the same responses.
        groups: of each response, something that only responses to the same prompt share.
        threshold: above it a response is right.
    """
    a, b = np.asarray(old, dtype=np.float64), np.asarray(new, dtype=np.float64)
    won = pairs = 0.0
    flat_old = flat_new = members = 0
    for rows in _by_group(groups):
        won_here, pairs_here = _order(a[rows], b[rows])
        won, pairs, members = won + won_here, pairs + pairs_here, members + 1
        flat_old += bool(np.all(a[rows] == a[rows][0]))
        flat_new += bool(np.all(b[rows] == b[rows][0]))
    return Comparison(
        samples=len(a),
        groups=members,
        old=_moments(a),
        new=_moments(b),
        same=float(np.mean(_equal(a, b))),
        agreement=float(np.mean((a > threshold) == (b > threshold))),
        pearson=_correlation(a, b),
        spearman=_correlation(_ranks(a), _ranks(b)),
        order=won / pairs if pairs else None,
        pairs=int(pairs),
        flat_old=flat_old,
        flat_new=flat_new,
        histogram=_histogram(a, b),
    )


def most_different(old: Sequence[float], new: Sequence[float], count: int) -> list[int]:
    """Places of the responses whose scores differ most: by rank in each set, so that scales need not be alike.

    Args:
        old: as of `compare`.
        new: as of `compare`.
        count: at most so many; responses with equal scores are none.
    """
    a, b = np.asarray(old, dtype=np.float64), np.asarray(new, dtype=np.float64)
    ranks, values = np.abs(_ranks(a) - _ranks(b)), np.abs(a / 2 - b / 2)
    order = np.lexsort((-values, -ranks))
    return [int(place) for place in order[~_equal(a, b)[order]][:count]]


def _by_group(groups: Sequence[Any]) -> Iterator[npt.NDArray[np.int64]]:
    places: dict[Any, list[int]] = {}
    for place, group in enumerate(groups):
        places.setdefault(group, []).append(place)
    return (np.asarray(rows) for rows in places.values())


def _order(old: Values, new: Values) -> tuple[float, int]:
    """Pairs that `new` orders as `old` does, ties counted half, and pairs that `old` tells apart."""
    apart = old[:, None] > old
    above, tied = (new[:, None] > new)[apart], (new[:, None] == new)[apart]
    return float(above.sum() + tied.sum() / 2), int(apart.sum())


def _equal(a: Values, b: Values) -> npt.NDArray[np.bool_]:
    return np.abs(a / 2 - b / 2) <= _SAME / 2 * np.maximum(np.abs(a), np.abs(b))


def _moments(values: Values) -> Moments:
    scale = float(np.max(np.abs(values))) or 1.0  # no sum of huge scores overflows
    small = values / scale
    return Moments(
        mean=float(np.mean(small)) * scale,
        std=float(np.std(small)) * scale,
        min=float(np.min(values)),
        max=float(np.max(values)),
    )


def _ranks(values: Values) -> Values:
    """Ranks from 0 to 1; equal values share the middle of theirs."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray(((ends - counts / 2) / len(values))[places], dtype=np.float64)


def _correlation(a: Values, b: Values) -> float | None:
    if np.all(a == a[0]) or np.all(b == b[0]):
        return None
    x, y = (values / np.max(np.abs(values)) for values in (a, b))
    x, y = x - x.mean(), y - y.mean()
    norm = float(np.sqrt((x * x).sum() * (y * y).sum()))
    return float((x * y).sum() / norm) if norm > 0 else None


def _histogram(old: Values, new: Values) -> tuple[Bin, ...]:
    both = np.concatenate([old, new])
    values = np.unique(both)
    if len(values) <= _BINS:
        return tuple(Bin(float(v), float(v), int((old == v).sum()), int((new == v).sum())) for v in values)
    shares = np.arange(_BINS + 1) / _BINS
    edges = values[0] * (1 - shares) + values[-1] * shares  # no difference of huge scores overflows
    counts = [
        np.bincount(np.clip(np.searchsorted(edges, x, "right") - 1, 0, _BINS - 1), minlength=_BINS) for x in (old, new)
    ]
    return tuple(Bin(float(edges[k]), float(edges[k + 1]), int(counts[0][k]), int(counts[1][k])) for k in range(_BINS))
