"""Brings a version named by a message into a served engine: read from a folder, or pulled from its sources."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp
import msgspec
import torch

from streamrl.config import DeltaConfig, WeightsConfig
from streamrl.errors import StreamrlError, WeightsError
from streamrl.producers.serve.messages import Weights
from streamrl.weight_sync.chain import Fetched, Staging
from streamrl.weight_sync.files import read_token
from streamrl.weight_sync.follower import open_staging
from streamrl.weight_sync.manifest import MANIFEST_FILE, MAX_MANIFEST_BYTES, Manifest, decode, folder_name
from streamrl.weight_sync.tensors import Version, WholeTensors, map_private, map_version


class Deliveries:
    """Versions on their way into one engine; one at a time.

    `deadline` (seconds) is for pulling one version, and for reading it. `place` names the staging folder of pulled
    versions; the token of the weights lies there, unless $STREAMRL_WEIGHTS_TOKEN_FILE names it.
    """

    def __init__(self, deadline: float, place: Path, *, pulls: bool) -> None:
        self._deadline = deadline
        self._place = place
        self._pulls = pulls
        self._open = AsyncExitStack()
        self._staging: Staging | None = None
        self._near: tuple[Weights, Fetched | Version] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._near = None
        await self._open.aclose()

    async def prefetch(self, message: Weights, *, same_host: bool) -> None:
        """Fetch a version ahead and forget one that was fetched before and not taken. `WeightsError` when it fails."""
        self._near = None
        try:
            async with asyncio.timeout(self._deadline):
                self._near = message, await self._bring(message, same_host=same_host)
        except TimeoutError as error:
            raise WeightsError(
                f"version {message.pair[1]} was not here within {self._deadline:g} s", "raise weights.deadline"
            ) from error
        except WeightsError:
            raise
        except (StreamrlError, OSError) as error:
            raise WeightsError(
                f"version {message.pair[1]} cannot be fetched or read on this host: {error}",
                "weights.transport http brings it to other hosts",
            ) from error

    async def take(self, message: Weights, *, same_host: bool) -> Version:
        """Return a version, fetched ahead or now; raises like `prefetch`. It is valid until the next call."""
        if self._near is None or self._near[0] != message:
            await self.prefetch(message, same_host=same_host)
        assert self._near is not None
        found, self._near = self._near[1], None
        if isinstance(found, Version):
            return found
        assert self._staging is not None
        try:
            return await self._staging.make(found)
        except OSError as error:
            raise WeightsError(f"version {message.pair[1]} cannot be read: {error}") from error

    async def _bring(self, message: Weights, *, same_host: bool) -> Fetched | Version:
        here = same_host and Path(message.folder).is_dir()
        if here or not message.sources:
            return await asyncio.to_thread(read_folder, message)
        if not self._pulls:
            raise WeightsError(
                "this server pulls no weights from other hosts",
                "start it with --api-key-file, and see docs/guides/engines.md",
            )
        if self._staging is None:
            # a server that once saw a delta keeps the full files, as the base of the next
            config = WeightsConfig(transport="http", deadline=self._deadline, delta=DeltaConfig(enabled=message.deltas))
            opened = open_staging(config, self._place, name="served", board=None, status=None)
            self._staging = await self._open.enter_async_context(opened)
        return await self._staging.fetch(await self._manifest(message))

    async def _manifest(self, message: Weights) -> Manifest:
        headers = {"Authorization": f"Bearer {read_token(self._place)}"}
        failures = []
        async with aiohttp.ClientSession(headers=headers) as session:
            for source in message.sources:
                url = f"{source.rstrip('/')}/{folder_name(*message.pair)}/{MANIFEST_FILE}"
                try:
                    async with session.get(url, allow_redirects=False) as response:
                        if response.status != 200:
                            failures.append(f"{url} answered {response.status}")
                            continue
                        manifest = decode(await _read(response))
                except (aiohttp.ClientError, OSError) as error:
                    failures.append(f"{url}: {error}")
                    continue
                if manifest.pair != message.pair or manifest.run != message.run:
                    raise WeightsError(f"{url} is version {manifest.pair} of run {manifest.run!r}")
                return msgspec.structs.replace(manifest, sources=list(message.sources))
        raise WeightsError("; ".join(failures), "is the learner's host reachable from here (weights.host)?")


async def _read(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for data in response.content.iter_any():
        body += data
        if len(body) > MAX_MANIFEST_BYTES:
            break  # `decode` refuses it
    return bytes(body)


def read_folder(message: Weights) -> Version:
    """Map the files of a version and check them, against the manifest when one lies there."""
    folder = Path(message.folder)
    manifest = _manifest_in(folder)
    if manifest is not None and manifest.pair == message.pair and manifest.base is None:
        if manifest.run != message.run:
            raise WeightsError(f"{folder} holds weights of run {manifest.run!r}")
        return map_version(folder, manifest)
    tables = {file: map_private(folder / file) for file in message.files}
    if sum(map(len, message.parts.values())) != sum(map(len, tables.values())):
        raise WeightsError(f"{folder}: the files hold other tensors than those that are listed")
    found = {name: _joinable(folder, name, [tables[file] for file in files]) for name, files in message.parts.items()}
    return Version(
        pair=message.pair,
        step=message.step,
        tensors=WholeTensors(found),
        folder=folder,
        files=tuple(message.files),
        parts={name: tuple(files) for name, files in message.parts.items()},
        adapter=message.adapter,
    )


def _manifest_in(folder: Path) -> Manifest | None:
    try:
        return decode((folder / MANIFEST_FILE).read_bytes())
    except FileNotFoundError:
        return None


def _joinable(folder: Path, name: str, tables: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    parts = [table[name] for table in tables if name in table]
    if len(parts) != len(tables):
        raise WeightsError(f"{folder}: a file that should hold a part of {name} does not")
    first = parts[0]
    if len(parts) > 1 and any(
        not part.ndim or part.dtype != first.dtype or part.shape[1:] != first.shape[1:] for part in parts
    ):
        raise WeightsError(f"{folder}: the parts of {name} do not fit each other")
    return parts
