"""The replica's side: sees the newest version, fetches its files, proves them, and hands them to the engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, TypeAlias

from streamrl.config import WeightsConfig
from streamrl.errors import CannotCreate, ConfigError, NotFetched, StreamrlError, Unreachable, WeightsError, unwrapped
from streamrl.queues.ledgers import WeightsStream
from streamrl.weight_sync.chain import Staging
from streamrl.weight_sync.files import StagingFolder, allow_many_files
from streamrl.weight_sync.manifest import Manifest, decode, folder_name
from streamrl.weight_sync.source import Traffic
from streamrl.weight_sync.tensors import Version, announced_version
from streamrl.weight_sync.transports import open_source

logger = logging.getLogger(__name__)
_LOOK_SECONDS: Final = 0.5
_FIRST_PAUSE: Final = 0.5
_UNFIT: Final = 3  # refusals by an engine that has never taken a version: it has another model
_QUIET: Final = 2  # fetches that may find the files of the first version gone before it counts as refused
_LONGEST_PAUSE: Final = 30.0
_REFUSED_PAUSE: Final = 5.0  # longer than the first one: most refusals are final, and a try costs all of its bytes

Apply: TypeAlias = Callable[[Version], Awaitable[None]]


class Follower:
    """Follows the newest version of the weights; one in each rollout replica.

    The files are fetched while the engine generates; only `apply` may stop it. Versions that come and go meanwhile are
    skipped. One whose files are here is applied even if a newer one is known by then: it is newer than what the engine
    has, and a replica whose network is slower than the learner would otherwise never apply any.

    A version that cannot be used is logged and counted in `refused`, and the version before it stays. It is tried
    again, with pauses, until a newer one comes: when all replicas refuse a version there is nothing to train on, so no
    newer one would ever come. A version whose files went away because a newer one came is no error.

    `apply` must have copied what it needs when it returns. It has a deadline of its own, because only the engine knows
    the state of weights that it was about to take. `WeightsError` and `NotFetched` from it mean "not applied, the old
    version stays"; any other error ends `run`. With `fetches` the engine brings whole versions to its host itself, and
    `apply` gets them without values (`announced_version`).
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
        fetches: bool = False,
    ) -> None:
        self._stream, self._config, self._apply = stream, config, apply
        self._run, self._run_dir, self._name, self._fetches = run, run_dir, name, fetches
        self._news = asyncio.Event()
        self._took = asyncio.Condition()
        self._known: tuple[int, bytes] | None = None
        self._fetching: tuple[Manifest, asyncio.Timeout] | None = None
        self._applied: Manifest | None = None
        self._unfit = 0
        self.traffic = Traffic()
        self.refused = 0  # versions that could not be fetched or applied
        self.first = asyncio.Event()  # one was applied
        self.newest_epoch = 0  # of the newest version; `apply` may end the fetch of an older learner's
        self.newest_step = 0
        self.apply_seconds = 0.0

    @property
    def version(self) -> int:
        return 0 if self._applied is None else self._applied.version

    @property
    def applied_step(self) -> int:
        return 0 if self._applied is None else self._applied.step

    def figures(self) -> dict[str, int | float]:
        """For the metrics of the role."""
        return {
            "weights_refused": self.refused,
            "weights_fetched": self.traffic.bytes,
            "fetch_seconds": round(self.traffic.seconds, 4),
            "apply_seconds": round(self.apply_seconds, 4),
        }

    async def run(self, stop: asyncio.Event) -> None:
        """Follow until `stop` is set; `ConfigError`: the engine has another model."""
        allow_many_files()
        folder = StagingFolder(self._run_dir, self._name)
        with unwrapped():
            async with contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as group:
                if self._config.delta.enabled or self._config.pulled:
                    folder.open()
                    stack.callback(folder.close)
                opened = open_source(self._config, self._run_dir, folder, run=self._run)
                source = await stack.enter_async_context(opened)
                self.traffic = source.traffic
                self._staging = Staging(self._config, source, folder)
                watching = group.create_task(self._watch(stop), name="watch weights")
                await self._take_all(stop)
                watching.cancel()

    async def next_applied(self) -> None:
        """Return when one more version was applied."""
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
                self.newest_epoch, self.newest_step = manifest.epoch, manifest.step
                if self._fetching is not None and manifest.epoch > self._fetching[0].epoch:
                    # The host of the older learner may be gone for good.
                    self._fetching[1].reschedule(asyncio.get_running_loop().time())
                    self._fetching = None
            self._news.set()
        self._news.set()

    async def _take_all(self, stop: asyncio.Event) -> None:
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
            problem = await self._take(number, data)
            if problem is None:
                pause = 0.0
                continue
            failures += 1
            # A learner that has ended may have published it, and the next one has not published yet.
            gone = isinstance(problem, NotFetched) or isinstance(problem.__cause__, FileNotFoundError)
            quiet = gone and self._applied is None
            if not told and failures > (_QUIET if quiet else 0):
                self.refused += 1
                told = True
                extra = {"version": number, "stays": self.version, "error": problem.message, "hint": problem.hint}
                logger.error("weights refused", extra=extra)
            shortest = _REFUSED_PAUSE if isinstance(problem, WeightsError) else _FIRST_PAUSE
            pause = min(max(2 * pause, shortest), _LONGEST_PAUSE)

    async def _take(self, number: int, data: bytes) -> StreamrlError | None:
        """Fetch and apply a version; returns why that was not possible."""
        try:
            manifest = self._checked(number, data)
            try:
                async with asyncio.timeout(None) as limit:
                    self._fetching = manifest, limit
                    if self._fetches and manifest.kind == "full":
                        version = announced_version(manifest)
                    else:
                        version = await self._staging.bring(manifest)
            except TimeoutError:
                if limit.expired():
                    return None  # a newer learner has published
                raise
            finally:
                self._fetching = None
        except (WeightsError, Unreachable, CannotCreate) as error:
            return error
        except OSError as error:
            if await self._superseded(number):
                return None
            problem = WeightsError(
                f"the files of version {number} cannot be read: {error}",
                "shm works on one host only; use weights.transport=http for several",
            )
            problem.__cause__ = error
            return problem
        began = time.monotonic()
        try:
            await self._apply(version)
        except NotFetched as error:
            return None if await self._superseded(number) else error
        except WeightsError as error:
            self._unfit += self._applied is None
            if self._unfit >= _UNFIT:
                raise ConfigError(
                    f"the engine has refused weights {self._unfit} times and never taken any: {error.message}",
                    error.hint or "engine and learner have to load the same model (model.path)",
                ) from error
            return error
        finally:
            self.apply_seconds += time.monotonic() - began
        self._applied = manifest
        self.first.set()
        async with self._took:
            self._took.notify_all()
        logger.info("weights applied", extra={"version": manifest.version, "epoch": manifest.epoch})
        return None

    async def _superseded(self, number: int) -> bool:
        newest = await self._stream.newest()
        return newest is not None and newest[0] > number

    def _checked(self, number: int, data: bytes) -> Manifest:
        manifest, applied = decode(data), self._applied
        if manifest.run != self._run:
            raise WeightsError(f"version {number} belongs to run {manifest.run!r}, this is {self._run!r}")
        if manifest.version != number or manifest.folder != folder_name(*manifest.pair):
            raise WeightsError(f"the manifest of version {number} names version {manifest.pair}, {manifest.folder}")
        if manifest.transport != self._config.transport:
            raise WeightsError(f"version {number} came by {manifest.transport}, not by {self._config.transport}")
        if applied is not None and manifest.pair <= applied.pair:
            raise WeightsError(f"version {manifest.pair} is not newer than {applied.pair}, which is applied")
        found = manifest.quantised.kind if manifest.quantised else None
        if found != self._config.quantize:
            raise WeightsError(f"version {number} has quantize {found}, this run has {self._config.quantize}")
        return manifest.offered
