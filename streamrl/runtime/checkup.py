"""Health of a process that sends no heartbeats: the run's own Redis."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from streamrl.config import RunConfig
from streamrl.queues import embedded


@dataclass(frozen=True, slots=True)
class Checkup:
    """Health checks for a process that sends no heartbeats.

    `ready` returns when it can work. `answers` is asked once a second from then on: after `silence` seconds without an
    answer the process is killed, and `describe(pid)` goes to the log.
    """

    ready: Callable[[], Awaitable[None]]
    answers: Callable[[], Awaitable[bool]]
    silence: float
    describe: Callable[[int], Mapping[str, str]]


def of_redis(config: RunConfig, run_dir: Path) -> Checkup:
    return Checkup(
        ready=partial(embedded.wait_ready, run_dir, config.supervisor.start_deadline),
        answers=partial(embedded.answers, run_dir),
        silence=min(config.supervisor.liveness_deadline, config.redis.patience / 2),  # the roles survive the outage
        describe=partial(embedded.describe, run_dir),
    )
