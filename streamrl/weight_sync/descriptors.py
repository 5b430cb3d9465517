"""Room for many open files: connections, programs, and each mapped or held file of a version take a descriptor."""

from __future__ import annotations

import contextlib
import resource
from typing import Final

_WANTED: Final = 1 << 16


def allow_many_files() -> None:
    """Raise this process's soft limit of open files, as far as its hard limit lets it. A repeat does nothing.

    Roles, the supervisor and `engines serve` do so at their start.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED if hard == resource.RLIM_INFINITY else min(_WANTED, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    with contextlib.suppress(OSError, ValueError):  # a container may forbid it; then the limit is met where it is
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
