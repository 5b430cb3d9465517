"""A server that streamrl starts: its port, process, log, readiness and end."""

from __future__ import annotations

from pathlib import Path

from streamrl.config import RunConfig
from streamrl.producers.servers.dialect import Dialect


class ManagedServer:
    """One server process, with all it starts, that lives no longer than this process.

    Args:
        dialect: says how it is started and when it is ready.
        config: `engine`, `model.path`, `supervisor.term_grace` and `log_bytes` are read.
        run_dir: its output goes to RUN_DIR/logs/NAME.log.
        name: `<role>.server<i>`.
        devices: CUDA_VISIBLE_DEVICES; empty: all.
        seed: of its sampling.

    Attributes:
        url: where it listens, once `start` has been called.
        log: path of its output.
    """

    url: str
    log: Path

    def __init__(
        self, dialect: Dialect, config: RunConfig, run_dir: Path, name: str, devices: str = "", *, seed: int
    ) -> None:
        raise NotImplementedError

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        raise NotImplementedError

    async def start(self) -> str:
        """Start it and return its URL when it answers; works again after `stop` or its death.

        Raises:
            ConfigError: the environment is missing, or the command cannot be executed.
            Unreachable: it ended, or was not ready within `engine.start_deadline`; the message quotes its log.
        """
        raise NotImplementedError

    async def wait_death(self) -> str:
        """Return when the process has ended by whatever cause, with the cause in words."""
        raise NotImplementedError

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL for all it has started after `supervisor.term_grace`. A repeat does nothing."""
        raise NotImplementedError
