"""Which groups the weights of a checkpoint were trained on, and which step each version of the weights came from.

Both are in the checkpoint's `meta.json`: the groups as intervals of ids, the steps of the versions that were still
young enough to be trained. This module imports no torch: the audit reads the same fields.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from streamrl.atomic import write_durably

Interval = tuple[int, int]
"""The first and the last id of groups without a gap."""
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
    """Write down, durably, that a version will be published; call before publishing it.

    A power loss may take the newest versions and their numbers from Redis, while engines on other hosts have them.
    """
    write_durably(run_dir / VERSION_FILE, b"%d\n" % version)


def greatest_version(run_dir: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return int((run_dir / VERSION_FILE).read_bytes())
    return 0


class Branch:
    """Steps of the surviving branch by version, so that staleness counts updates and not restarts.

    A version that is not known counts as the newest one before it. So a version of a lost branch counts as the step at
    which that branch left the surviving one. Its tokens are farther from the present policy than this number says; the
    importance weights account for it, because the log-probabilities of sampling are stored with the tokens.
    """

    def __init__(self, steps: Mapping[int, int]) -> None:
        self._steps = dict(sorted(steps.items()))
        self._order = list(self._steps)

    def note(self, version: int, step: int) -> None:
        """Numbers only grow."""
        self._steps[version] = step
        self._order.append(version)

    def step(self, version: int) -> int:
        """Step of a version, or of the newest version before it (0 when none)."""
        place = bisect.bisect_right(self._order, version)
        return self._steps[self._order[place - 1]] if place else 0

    def since(self, step: int) -> dict[int, int]:
        """The versions of this step and later ones."""
        return {version: at for version, at in self._steps.items() if at >= step}
