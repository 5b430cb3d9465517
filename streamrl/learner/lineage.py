"""Which groups the weights of a checkpoint were trained on, and which step each version of the weights came from.

Both are in the checkpoint's `meta.json`. This module imports no torch: the audit reads the same fields.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from streamrl.atomic import write_durably

Interval = tuple[int, int]  # the first and the last id of groups without a gap
VERSION_FILE: Final = "weights.version"


def join(parts: Iterable[Interval]) -> list[Interval]:
    """The intervals in order, neighbours joined. An id that is in two of them stays in two, so that it is noticed."""
    joined: list[Interval] = []
    for first, last in sorted(parts):
        if joined and first == joined[-1][1] + 1:
            joined[-1] = joined[-1][0], last
        else:
            joined.append((first, last))
    return joined


def ids_of(intervals: Iterable[Interval]) -> list[int]:
    return [group_id for first, last in intervals for group_id in range(first, last + 1)]


def use_version(run_dir: Path, version: int) -> None:
    """Note a version durably before it is published: a power loss may take its number from Redis, not from engines."""
    write_durably(run_dir / VERSION_FILE, b"%d\n" % version)


def greatest_version(run_dir: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return int((run_dir / VERSION_FILE).read_bytes())
    return 0


class Branch:
    """Steps of the surviving branch by version, so that staleness counts updates and not restarts.

    A version of a lost branch counts as the step at which that branch left this one. Its tokens are farther from the
    policy than that says; the importance weights account for it, from the stored log-probabilities of sampling.
    """

    def __init__(self, steps: Mapping[int, int]) -> None:
        self._steps = dict(sorted(steps.items()))
        self._order = list(self._steps)

    def note(self, version: int, step: int) -> None:
        self._steps[version] = step
        self._order.append(version)

    def step(self, version: int) -> int:
        """Step of a version, or of the newest version before it."""
        place = bisect.bisect_right(self._order, version)
        return self._steps[self._order[place - 1]] if place else 0

    def since(self, step: int) -> dict[int, int]:
        return {version: at for version, at in self._steps.items() if at >= step}
