"""The learner's side: writes a version so that a reader sees all of it or nothing."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import torch

from streamrl.config import WeightsConfig
from streamrl.errors import CannotCreate, DeadlineExceeded, WeightsError
from streamrl.weight_sync import safetensors_file
from streamrl.weight_sync.manifest import Manifest, Shard, TensorEntry, encode, folder_name, parse_folder
from streamrl.weight_sync.transports import Transport, check_room, create_root, make_transport

logger = logging.getLogger(__name__)
_DRAFT: Final = ".draft-"
_KEEP: Final = 2
_SLACK_BYTES: Final = 1 << 20


class Publisher:
    """Publishes versions of the weights; rank 0 of the learner has one, and uses it from one thread.

    At start, temporaries of a publisher that died and all versions but the newest of earlier epochs are removed; that
    newest one stays for late joiners until this publisher has two of its own. Removing is safe for whoever has the
    files mapped. A publisher only ever removes what was there when it started and what it published itself, so an old
    learner that wakes up cannot take away the versions of its successor.

    Args:
        config: transport, dtype, size of shards and deadline.
        run: name of the run; a follower refuses versions of another run.
        run_dir: run directory.

    Raises:
        CannotCreate: the root of the transport cannot be made.
    """

    def __init__(self, config: WeightsConfig, run: str, run_dir: Path) -> None:
        self._config = config
        self._run = run
        self._transport: Transport = make_transport(config.transport, run_dir)
        self._dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
        create_root(self._transport)
        self._kept: list[str] = self._leftover()

    @property
    def root(self) -> Path:
        """Folder that holds the folders of the versions."""
        return self._transport.root

    def publish(self, *, epoch: int, version: int, step: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> bytes:
        """Write one version and return its encoded manifest, which is for the weights stream.

        Floating tensors are cast to the configured dtype; tensors are taken one by one, and at most one shard of them
        is held. When it fails nothing is left behind and the newest version before it stays; a repeat is then fine.
        The deadline is looked at between shards only: nothing stops a write to a file system that hangs. Call it in a
        thread of its own, and hold that thread to a deadline.

        Args:
            epoch: epoch of the learner.
            version: number of the version, greater than all before it.
            step: optimizer step of the weights.
            tensors: Hugging Face names and CPU tensors.

        Raises:
            CannotCreate: no room, or no permission.
            WeightsError: the version exists already, a name comes twice, or a dtype is unknown.
            DeadlineExceeded: it took longer than the configured deadline.
        """
        draft = self.root / f"{_DRAFT}{epoch}-{version}-{os.getpid()}"
        create_root(self._transport)  # somebody may have cleaned up the shared memory
        self._remove_older(_KEEP - 1)  # two whole versions are then the most that memory must hold
        try:
            draft.mkdir(mode=0o700)
            shards, table = self._write(draft, tensors)
            manifest = Manifest(
                run=self._run,
                version=version,
                epoch=epoch,
                step=step,
                transport=self._config.transport,
                folder=folder_name(epoch, version),
                shards=shards,
                tensors=table,
            )
            data = encode(manifest)
            self._finish(draft, manifest.folder, data)
        except OSError as error:
            if isinstance(error, (CannotCreate, DeadlineExceeded)):
                raise
            raise self._cannot(draft, error) from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        self._kept.append(manifest.folder)
        logger.info(
            "weights published", extra={"version": version, "epoch": epoch, "step": step, "bytes": manifest.total_bytes}
        )
        return data

    def holds_newest(self) -> bool:
        """Whether the files of the newest version are still there for engines that join now."""
        return bool(self._kept) and (self.root / self._kept[-1] / "manifest.json").exists()

    def close(self, *, unlink: bool) -> None:
        """End the publisher. With `unlink` its versions are removed: nobody can join after that."""
        if unlink:
            self._remove_older(0)
            try:
                self.root.rmdir()
            except OSError as error:
                logger.debug("weights folder not empty", extra={"folder": str(self.root), "error": str(error)})

    def _write(self, draft: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[list[Shard], list[TensorEntry]]:
        deadline = time.monotonic() + self._config.deadline
        shards: list[Shard] = []
        table: list[TensorEntry] = []
        names: set[str] = set()
        for batch in _batches(self._cast(tensors), self._config.shard_bytes):
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"the weights were not written to {draft} within {self._config.deadline:g} s",
                    "raise weights.deadline, or use a faster transport",
                )
            check_room(self._transport, sum(tensor.nbytes for _, tensor in batch) + _SLACK_BYTES)
            path = draft / f"shard-{len(shards):05}.safetensors"
            for name, tensor in batch:
                if name in names:
                    raise WeightsError(f"tensor {name} was given twice")
                names.add(name)
                dtype = safetensors_file.DTYPE_NAMES[tensor.dtype]
                table.append(TensorEntry(name, dtype, list(tensor.shape), [len(shards)]))
            shards.append(safetensors_file.write(path, batch, durable=self._transport.durable))
        return shards, table

    def _cast(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            if tensor.dtype not in safetensors_file.DTYPE_NAMES:
                raise WeightsError(f"tensor {name} has dtype {tensor.dtype}, which cannot be published")
            cast = tensor.detach().to(self._dtype) if tensor.is_floating_point() else tensor.detach()
            yield name, cast.cpu().contiguous()

    def _finish(self, draft: Path, folder: str, data: bytes) -> None:
        """Give the draft its name; from here on readers may see it."""
        target = self.root / folder
        if target.exists():
            if folder not in self._kept:
                raise WeightsError(f"{target} was already published by another learner")
            self._remove(folder)
        with (draft / "manifest.json").open("xb") as file:
            file.write(data)
            if self._transport.durable:
                file.flush()
                os.fsync(file.fileno())
        if self._transport.durable:
            _fsync_folder(draft)
        draft.rename(target)
        if self._transport.durable:
            _fsync_folder(self.root)

    def _cannot(self, draft: Path, error: OSError) -> CannotCreate:
        hint = self._transport.hint if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        return CannotCreate(f"cannot write the weights to {draft}: {error}", hint)

    def _leftover(self) -> list[str]:
        """Remove what earlier publishers left, but for the newest version, and return the name of that."""
        versions: list[tuple[int, int]] = []
        for entry in self.root.iterdir():
            pair = parse_folder(entry.name)
            if pair is not None:
                versions.append(pair)
            elif entry.name.startswith(_DRAFT):
                self._remove(entry.name)
        names = [folder_name(*pair) for pair in sorted(versions)]
        for name in names[:-1]:
            self._remove(name)
        return names[-1:]

    def _remove_older(self, keep: int) -> None:
        while len(self._kept) > keep:
            self._remove(self._kept.pop(0))

    def _remove(self, name: str) -> None:
        # The version loses its name first, so that no reader finds a folder with some of its shards gone.
        gone = self.root / f"{_DRAFT}gone-{name}-{os.getpid()}"
        try:
            (self.root / name).rename(gone)
            shutil.rmtree(gone)
        except FileNotFoundError:
            return
        except OSError as error:
            logger.warning("old weights stay", extra={"folder": str(self.root / name), "error": str(error)})


def _batches(tensors: Iterable[tuple[str, torch.Tensor]], limit: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Group tensors so that each group has at most `limit` bytes; a larger tensor is a group of its own."""
    batch: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if batch and size + tensor.nbytes > limit:
            yield batch
            batch, size = [], 0
        batch.append((name, tensor))
        size += tensor.nbytes
    if batch:
        yield batch


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
