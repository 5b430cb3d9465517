"""What a host computes on: GPUs, and cores, which are divided among the processes that compute on them."""

from __future__ import annotations

import itertools
import math
import os
from pathlib import Path
from typing import Final

THREADS: Final = "OMP_NUM_THREADS"
"""Variable with the CPU threads of a process, for torch and for the servers that it starts."""
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")


def visible_cards() -> list[str]:
    """NVIDIA cards of this host that its processes may use, by index or UUID; looks at the device files only."""
    found = [str(number) for number in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]
    if (said := os.environ.get(VISIBLE)) is None or not found:
        return found
    return list(itertools.takewhile(lambda card: card and card != "-1", (card.strip() for card in said.split(","))))


def has_gpu() -> bool:
    return bool(visible_cards())


def usable_cores(quota: Path = _QUOTA) -> int:
    """Cores that this process may use: in a container often fewer than its host has."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        microseconds, period = quota.read_text().split()
        return max(1, min(cores, math.ceil(int(microseconds) / int(period))))
    except (OSError, ValueError):  # there is no such file, or it says `max`
        return cores


def share_cores(cores: int, processes: int, *, taken: int = 0) -> int:
    """CPU threads of each of `processes` that compute at the same time; `taken` are threads of others.

    Threads of numeric libraries spin while they wait for each other: one whose core another program has keeps all
    waiting. So there are no more threads than cores, and a process that computes alone leaves one core free.
    """
    return max(1, min(cores - 1, (cores - taken) // max(1, processes)))
