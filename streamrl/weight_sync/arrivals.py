"""What lies between the manifest of a version and the version itself, proven, in files of this host."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from streamrl.config import WeightsConfig
from streamrl.errors import WeightsError
from streamrl.weight_sync.bearer import read_token
from streamrl.weight_sync.descriptors import allow_many_files
from streamrl.weight_sync.hosts import RELAY_FIELD, Board
from streamrl.weight_sync.manifest import Manifest
from streamrl.weight_sync.mapping import map_version
from streamrl.weight_sync.mirror import Link, Mirror
from streamrl.weight_sync.sources import Source, Traffic, open_source
from streamrl.weight_sync.spool import Spool
from streamrl.weight_sync.version import Version

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fetched:
    """A version whose files are on this host.

    Attributes:
        manifest: of the version.
        chain: what the mirror is patched with; None: the files are whole and are used where they lie.
        folder: where they lie, without a mirror.
    """

    manifest: Manifest
    chain: list[Link] | None
    folder: Path | None


class Arrivals:
    """Brings versions near: `fetch` while the engine works, then `make`.

    Args:
        config: deadline, and whether deltas may come.
        source: where the files come from.
        spool: what of them lies here.
        mirror: what deltas are applied to.
    """

    def __init__(self, config: WeightsConfig, source: Source, spool: Spool, mirror: Mirror) -> None:
        self._config, self._source, self._spool, self._mirror = config, source, spool, mirror
        self._used: str = ""

    @property
    def traffic(self) -> Traffic:
        """What was fetched."""
        return self._source.traffic

    async def fetch(self, manifest: Manifest) -> Fetched:
        """Get the files of a version onto this host; does not touch what an engine may be reading.

        Raises:
            FileNotFoundError: they are gone, most likely because a newer version came.
            WeightsError: they are not what the manifest says.
            Unreachable, CannotCreate: trying again may help.
        """
        if manifest.base is not None or self._config.delta.enabled:
            return Fetched(manifest, await self._mirror.prepare(manifest), None)
        if self._source.proves:
            self._spool.trim({self._used, manifest.folder})
        return Fetched(manifest, None, await self._source.fetch(manifest))

    async def make(self, fetched: Fetched) -> Version:
        """Prove and map a version; no engine may be reading one meanwhile. Raises like `fetch`."""
        manifest, deadline = fetched.manifest, self._config.deadline
        try:
            async with asyncio.timeout(deadline):
                if fetched.folder is not None:
                    proven = self._source.proves
                    version = await asyncio.to_thread(map_version, fetched.folder, manifest, proven=proven)
                else:
                    version = await self._patch(manifest, fetched.chain or [])
        except TimeoutError as error:
            raise WeightsError(
                f"version {manifest.version} could not be read within {deadline:g} s", "raise weights.deadline"
            ) from error
        self._used = manifest.folder
        return version

    async def _patch(self, manifest: Manifest, chain: list[Link]) -> Version:
        try:
            return await self._mirror.patch(chain)
        except WeightsError as error:
            if chain and chain[0].manifest.base is None:
                raise
            extra = {"version": manifest.version, "error": error.message}
            logger.warning("weights do not fit what this host holds", extra=extra)
        return await self._mirror.patch(await self._mirror.prepare(manifest))


@contextlib.asynccontextmanager
async def open_arrivals(
    config: WeightsConfig,
    run_dir: Path,
    *,
    name: str,
    board: Board | None,
    status: MutableMapping[str, int | float | str] | None,
) -> AsyncIterator[Arrivals]:
    """Open what the configured transport needs on a replica's host, a relay included, for the length of the block.

    Args:
        config: of the weights.
        run_dir: of the run.
        name: of the replica's role.
        board: where relays announce themselves; None: files come from the learner's host alone.
        status: what this role says of itself on that board; a relay puts its URL there.

    Raises:
        CannotCreate: the spool cannot be made, or a relay cannot listen.
        ConfigError: no token for the http transport.
    """
    allow_many_files()
    async with contextlib.AsyncExitStack() as stack:
        source, spool = await stack.enter_async_context(open_source(config, run_dir, name=name, board=board))
        relays = config.relay and source.proves
        mirror = Mirror(spool, source, keep=relays)
        stack.callback(mirror.close)
        if relays and status is not None:
            await stack.enter_async_context(_relay(config, run_dir, spool, status))
        yield Arrivals(config, source, spool, mirror)


@contextlib.asynccontextmanager
async def _relay(
    config: WeightsConfig, run_dir: Path, spool: Spool, status: MutableMapping[str, int | float | str]
) -> AsyncIterator[None]:
    """Serve what this host holds to its neighbours."""
    from streamrl.listening import own_address
    from streamrl.weight_sync.shard_server import ShardServer, listen

    app = ShardServer(spool.root, read_token(run_dir)).app()
    async with listen(app, own_address(config.host), 0) as url:
        status[RELAY_FIELD] = url
        try:
            yield
        finally:
            status.pop(RELAY_FIELD, None)
