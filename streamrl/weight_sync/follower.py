"""The replica's side: sees the newest version, fetches its files, proves them, and hands them to the engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Final, TypeAlias

from streamrl.config import WeightsConfig
from streamrl.errors import CannotCreate, ConfigError, StreamrlError, Unreachable, WeightsError, unwrap
from streamrl.listening import own_address
from streamrl.queues.ledgers import WeightsStream
from streamrl.queues.registry import RoleRegistry
from streamrl.weight_sync.chain import Staging
from streamrl.weight_sync.files import StagingFolder, allow_many_files, read_token
from streamrl.weight_sync.manifest import Manifest, decode, folder_name
from streamrl.weight_sync.pull import RELAY_FIELD
from streamrl.weight_sync.serve import ShardServer, listen
from streamrl.weight_sync.tensors import Version
from streamrl.weight_sync.transports import open_source

logger = logging.getLogger(__name__)
_LOOK_SECONDS: Final = 0.5
_FIRST_PAUSE: Final = 0.5
_UNFIT: Final = 3
"""Refusals by an engine that has never taken a version, after which it counts as one for another model."""
_QUIET: Final = 2
"""Until a replica has its first version, this many fetches may find the files gone before the version counts as
refused."""
_LONGEST_PAUSE: Final = 30.0
_REFUSED_PAUSE: Final = 5.0
"""First pause before a refused version is tried again: most refusals are final, and a try costs all of its bytes."""

Apply: TypeAlias = Callable[[Version], Awaitable[None]]


class _Overtaken(Exception):
    pass


class _CannotFetch(Exception):
    """The files of a version could not be fetched here; trying again may help."""

    def __init__(self, cause: StreamrlError) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Follower:
    """Follows the newest version of the weights; one in each rollout replica.

    The files are fetched while the engine generates; only `apply` may stop it. Versions that come and go meanwhile are
    skipped. One whose files are here is applied even if a newer one is known by then: it is newer than what the engine
    has, and a replica whose network is slower than the learner would otherwise never apply any.

    A version that cannot be used (checksum, size, another run, an older epoch, names or shapes the engine does not
    know) is logged and counted in `refused`, and the version before it stays. It is tried again, with pauses, until a
    newer one comes, and sooner when it could only not be fetched: when all replicas refuse a version there is nothing
    to train on, so no newer one would ever come. A version whose files went away because a newer one came is no error.

    `apply` must have copied what it needs when it returns. It has a deadline of its own, because only the engine knows
    the state of weights that it was about to take. `WeightsError` from it means "not applied, the old version stays";
    any other error ends `run`. Relays announce themselves on `board` by a field of `status`; without a board, files
    come from the learner's host alone.

    Attributes:
        refused: versions that could not be fetched or applied.
        first: set after the first version was applied.
        newest_step: optimizer step of the newest version that is published, as far as this follower knows; 0: none.
        applied_step: optimizer step of the version applied last; 0: none.
        apply_seconds: spent in `apply` since the start; only grows.
    """

    def __init__(
        self,
        stream: WeightsStream,
        config: WeightsConfig,
        apply: Apply,
        *,
        run: str,
        run_dir: Path,
        name: str = "rollout",
        board: RoleRegistry | None = None,
        status: MutableMapping[str, int | float | str] | None = None,
    ) -> None:
        self._stream, self._config, self._apply, self._run, self._run_dir = stream, config, apply, run, run_dir
        self._name, self._board, self._status = name, board, status
        self._staging: Staging | None = None
        self._news = asyncio.Event()
        self._took = asyncio.Condition()
        self._known: tuple[int, bytes] | None = None
        self._fetching: Manifest | None = None
        self._newer_learner = asyncio.Event()
        self._applied: Manifest | None = None
        self.refused = 0
        self._unfit = 0
        self.first = asyncio.Event()
        self.newest_step = 0
        self.applied_step = 0
        self.apply_seconds = 0.0

    @property
    def version(self) -> int:
        return 0 if self._applied is None else self._applied.version

    @property
    def bytes_fetched(self) -> int:
        """Bytes that came over the network since the start; only grows."""
        return self._staging.traffic.bytes if self._staging else 0

    @property
    def fetch_seconds(self) -> float:
        """Seconds spent fetching since the start, while the engine generated; only grows."""
        return self._staging.traffic.seconds if self._staging else 0.0

    def figures(self) -> dict[str, int | float]:
        """For the metrics of the role."""
        return {
            "weights_refused": self.refused,
            "weights_fetched": self.bytes_fetched,
            "fetch_seconds": round(self.fetch_seconds, 4),
            "apply_seconds": round(self.apply_seconds, 4),
        }

    async def run(self, stop: asyncio.Event) -> None:
        """Follow until `stop` is set; called once.

        After a cancellation, `apply` decides the state of the engine. An engine that has refused every version since
        the first has another model (ConfigError).
        """
        opened = open_staging(self._config, self._run_dir, name=self._name, board=self._board, status=self._status)
        try:
            async with opened as staging, asyncio.TaskGroup() as group:
                self._staging = staging
                watching = group.create_task(self._watch(stop), name="watch weights")
                await self._take_all(staging, stop)
                watching.cancel()
        except BaseExceptionGroup as error:
            raise unwrap(error) from error

    async def next_applied(self) -> None:
        """Return when one more version was applied. Cancelling is harmless."""
        async with self._took:
            await self._took.wait()

    async def _watch(self, stop: asyncio.Event) -> None:
        """Note what is published, also while a version is fetched or applied."""
        seen = self.version
        while not stop.is_set():
            found = await self._stream.after(seen, _LOOK_SECONDS)
            if found is None:
                continue
            self._known, seen = found, found[0]
            with contextlib.suppress(WeightsError):  # `_take` decodes it again and refuses it
                manifest = decode(found[1])
                self.newest_step = manifest.step
                if self._fetching is not None and manifest.epoch > self._fetching.epoch:
                    self._newer_learner.set()
            self._news.set()
        self._news.set()

    async def _take_all(self, staging: Staging, stop: asyncio.Event) -> None:
        pause = 0.0  # until the same version is tried again; 0: not at all
        failures, told = 0, False  # of this version
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause or None):
                    await self._news.wait()
            if self._news.is_set():
                pause, failures, told = 0.0, 0, False
            self._news.clear()
            if stop.is_set() or self._known is None:
                continue
            number, data = self._known
            try:
                await self._take(staging, number, data)
                pause = 0.0
            except _Overtaken:
                logger.debug("weights overtaken", extra={"version": number})
                pause = 0.0
            except (WeightsError, _CannotFetch) as error:
                fetched = isinstance(error, WeightsError)
                failures += 1
                if not told and failures > (_QUIET if self._is_of_an_earlier_life(error) else 0):
                    self._refuse(number, error if isinstance(error, WeightsError) else error.cause)
                    told = True
                pause = min(max(2 * pause, _REFUSED_PAUSE if fetched else _FIRST_PAUSE), _LONGEST_PAUSE)

    async def _take(self, staging: Staging, number: int, data: bytes) -> None:
        manifest = decode(data)
        self._check(number, manifest)
        async with self._reading(number):
            version = await self._bring(staging, manifest)
        began = time.monotonic()
        try:
            await self._apply(version)
        except WeightsError as error:
            self._unfit += self._applied is None
            if self._unfit >= _UNFIT:
                raise ConfigError(
                    f"the engine has refused weights {self._unfit} times and never taken any: {error.message}",
                    error.hint or "engine and learner have to load the same model (model.path)",
                ) from error
            raise
        finally:
            self.apply_seconds += time.monotonic() - began
        self._applied = manifest
        self.applied_step = manifest.step
        self.first.set()
        async with self._took:
            self._took.notify_all()
        logger.info("weights applied", extra={"version": manifest.version, "epoch": manifest.epoch})

    async def _bring(self, staging: Staging, manifest: Manifest) -> Version:
        """Fetch a version, until a newer learner publishes: the host of the older one may be gone for good."""
        self._fetching = manifest
        self._newer_learner.clear()
        fetching = asyncio.create_task(staging.bring(manifest))
        overtaken = asyncio.create_task(self._newer_learner.wait())
        try:
            await asyncio.wait({fetching, overtaken}, return_when=asyncio.FIRST_COMPLETED)
            if not fetching.done():
                raise _Overtaken
            return fetching.result()
        finally:
            self._fetching = None
            fetching.cancel()
            overtaken.cancel()
            await asyncio.gather(fetching, overtaken, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def _reading(self, number: int) -> AsyncIterator[None]:
        """Translate errors of reading the files of a version."""
        try:
            yield
        except (Unreachable, CannotCreate) as error:
            raise _CannotFetch(error) from error
        except OSError as error:
            newest = await self._stream.newest()
            if newest is not None and newest[0] > number:
                raise _Overtaken from error
            raise WeightsError(
                f"the files of version {number} cannot be read: {error}",
                "shm works on one host only; use weights.transport=http for several",
            ) from error

    def _check(self, number: int, manifest: Manifest) -> None:
        if manifest.run != self._run:
            raise WeightsError(f"version {number} belongs to run {manifest.run!r}, this is {self._run!r}")
        if manifest.version != number or manifest.folder != folder_name(*manifest.pair):
            raise WeightsError(f"the manifest of version {number} names version {manifest.pair}, {manifest.folder}")
        if manifest.transport != self._config.transport:
            raise WeightsError(
                f"version {number} came by {manifest.transport}, this replica reads {self._config.transport}"
            )
        applied = self._applied
        if applied is not None and manifest.pair <= applied.pair:
            raise WeightsError(f"version {manifest.pair} is not newer than {applied.pair}, which is applied")

    def _is_of_an_earlier_life(self, error: Exception) -> bool:
        """Whether a learner that has ended may have published this, and the next one has not published yet."""
        return isinstance(error.__cause__, FileNotFoundError) and self._applied is None

    def _refuse(self, number: int, error: StreamrlError) -> None:
        self.refused += 1
        logger.error(
            "weights refused",
            extra={"version": number, "stays": self.version, "error": error.message, "hint": error.hint},
        )


@contextlib.asynccontextmanager
async def open_staging(
    config: WeightsConfig,
    run_dir: Path,
    *,
    name: str,
    board: RoleRegistry | None,
    status: MutableMapping[str, int | float | str] | None,
) -> AsyncIterator[Staging]:
    """Open what the configured transport needs on a replica's host, a relay included."""
    allow_many_files()
    async with contextlib.AsyncExitStack() as stack:
        folder = StagingFolder(run_dir, name)
        if config.delta.enabled or config.pulled:
            folder.open()
            stack.callback(folder.close)
        source = await stack.enter_async_context(open_source(config, run_dir, folder, name=name, board=board))
        relays = config.relay and source.proves
        staging = Staging(config, source, folder)
        if relays and status is not None:
            app = ShardServer(folder.root, read_token(run_dir)).app()
            status[RELAY_FIELD] = await stack.enter_async_context(listen(app, own_address(config.host), 0))
            stack.callback(status.pop, RELAY_FIELD, None)
        yield staging
