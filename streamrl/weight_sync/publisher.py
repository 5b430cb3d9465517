"""The learner's side: a version is written so that a reader sees all or nothing.

The publisher keeps the newest version with all that it builds on (its anchor and the deltas after it) and, until the
next one is written, the version before; where versions are pulled, two before, so that a reader has time. With deltas
a new anchor is due as soon as the deltas have the size of an anchor, so that three times the weights are enough:
anchor, deltas, and the next anchor that is being written.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import torch

from streamrl.atomic import finish_durably, write_synced
from streamrl.config import WeightsConfig
from streamrl.errors import CannotCreate, ConfigError, DeadlineExceeded, WeightsError
from streamrl.weight_sync import delta
from streamrl.weight_sync.files import SLACK_BYTES, check_room, checksum, create_root, store_of
from streamrl.weight_sync.manifest import (
    MANIFEST_FILE,
    Adapter,
    LanePlace,
    Manifest,
    Pair,
    Quantised,
    Shard,
    TensorEntry,
    encode,
    folder_name,
    parse_folder,
    read_manifest,
)
from streamrl.weight_sync.quantize import QUANTISED, quantise_all
from streamrl.weight_sync.tensors import DTYPE_NAMES, Named, buckets, encode_tensors, is_finite, write_tensors

logger = logging.getLogger(__name__)
DRAFT: Final = ".draft-"


class Publisher:
    """Publishes versions of the weights; rank 0 of the learner has one, and uses it from one thread.

    At start, temporaries of a publisher that died and all versions but the newest that can be read, with what that one
    builds on, are removed; it stays for late joiners until this publisher has two of its own. A process that
    has the files mapped keeps them. A publisher only ever removes what was there when it started and what it published
    itself, so an old learner that wakes up cannot take away the versions of its successor.

    `manifest` and `density` (share of values that changed; None: not known) are those of the newest version that this
    publisher wrote, and do not exist before the first.
    """

    def __init__(self, config: WeightsConfig, run: str, run_dir: Path) -> None:
        self._config = config
        self._run = run
        self._store = store_of(config.transport, run_dir)
        self._older = 2 if config.pulled else 1
        create_root(self._store)
        self._unread: set[str] = set()  # folders of versions before this start that may be whole
        self._kept: list[Manifest] = []  # versions that can be read, the oldest first
        self._clean_up()
        self._last: dict[str, torch.Tensor] = {}  # the newest version, as long as the next one may be a delta of it
        self.manifest: Manifest
        self.density: float | None

    @property
    def root(self) -> Path:
        return self._store.root

    def publish(
        self,
        *,
        epoch: int,
        version: int,
        step: int,
        tensors: Iterable[Named],
        sources: Sequence[str] = (),
        lane: LanePlace | None = None,
        adapter: Adapter | None = None,
    ) -> bytes:
        """Write one version and return its encoded manifest.

        When it fails nothing is left behind, the version before it stays, and the next one is whole. `version` is
        greater than all before it, failed ones included. `tensors` are whole and contiguous on the CPU, and taken one
        by one; with deltas they must not be changed before the version after this one is written.

        Raises:
            CannotCreate: no room, or no permission.
            WeightsError: the version exists already.
            ConfigError: a value is not finite.
            DeadlineExceeded: it took longer than the deadline, which is checked between files only.
        """
        until = time.monotonic() + self._config.deadline
        create_root(self._store)  # a clean-up may have removed it from the shared memory
        self._remove_older()
        base, last, self._last = self._next_base(), self._last, {}
        whole = dict(tensors) if self._config.delta.enabled else {}
        density = None if base is None or adapter is not None else _density(last, whole)
        if density is None or density > self._config.delta.max_density:
            base = None
        draft = self.root / f"{DRAFT}{epoch}-{version}"
        try:
            draft.mkdir(mode=0o700)
            shards, entries, quantised = self._write(draft, whole.items() or tensors, last if base else None, until)
            manifest = Manifest(
                run=self._run,
                version=version,
                epoch=epoch,
                step=step,
                base=base,
                transport=self._config.transport,
                folder=folder_name(epoch, version),
                sources=list(sources),
                lane=lane,
                shards=shards,
                tensors=entries,
                adapter=adapter,
                quantised=quantised,
            )
            data = encode(manifest)
            self._finish(draft, manifest.folder, data)
        except OSError as error:
            if isinstance(error, (CannotCreate, DeadlineExceeded)):
                raise
            raise self._cannot(draft, error) from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        self._last = whole
        self.manifest, self.density = manifest, density
        self._kept.append(manifest)
        for name in self._unread:  # the first version of a life is whole: it needs none of them
            self._remove(name)
        self._unread.clear()
        extra = {"version": version, "epoch": epoch, "step": step, "bytes": manifest.total_bytes}
        logger.info("weights published", extra=extra)
        return data

    def force_full_next(self) -> None:
        """Have the next version written whole."""
        self._last = {}

    def holds_newest(self) -> bool:
        """Whether the newest version and all it builds on are still there for engines that join now."""
        chain = self._chain() if self._kept else []
        there = all((self.root / kept.folder / MANIFEST_FILE).exists() for kept in chain)
        return bool(chain) and chain[0].base is None and there

    def _next_base(self) -> Pair | None:
        """The version that the next one may be a delta of; None: it is written whole."""
        if not self._last or not self.holds_newest():  # the first one, after a failure, or without its files
            return None
        anchor, *deltas = self._chain()
        sizes = [kept.total_bytes for kept in [*deltas, *deltas[-1:]]]  # the next one is taken to be like the last
        due = len(deltas) + 1 >= self._config.delta.every or sum(sizes) > anchor.total_bytes
        return None if due else self._kept[-1].pair

    def _write(
        self, draft: Path, tensors: Iterable[Named], last: Mapping[str, torch.Tensor] | None, until: float
    ) -> tuple[list[Shard], list[TensorEntry], Quantised | None]:
        """Write the files of a version; with `last`, what differs from that."""
        shards: list[Shard] = []
        entries: list[TensorEntry] = []
        quantised = None if self._config.quantize is None else Quantised(self._config.quantize, [], [])
        for bucket in buckets(tensors, self._config.shard_bytes):
            if time.monotonic() > until:
                raise DeadlineExceeded(
                    f"the weights were not written to {draft} within {self._config.deadline:g} s",
                    "raise weights.deadline, or use a faster transport",
                )
            for name, tensor in bucket:
                _check_finite(name, tensor)
                entries.append(_entry(name, tensor, len(shards)))
            path = draft / f"{len(shards):05}.safetensors"
            if quantised is not None:
                small = list(quantise_all(quantised.kind, bucket))
                quantised.tensors.extend(_entry(name, tensor, len(shards)) for name, tensor in small)
                quantised.shards.append(self._full(path.with_name(f"{quantised.kind}-{path.name}"), small))
            shards.append(self._full(path, bucket) if last is None else self._delta(path, bucket, last))
        if quantised is not None and len(quantised.tensors) == len(entries):
            problem = f"weights.quantize: no matrix of the model is in a module whose name matches {QUANTISED}"
            raise ConfigError(problem, "leave it out: such models are not quantised")
        return shards, entries, quantised

    def _full(self, path: Path, bucket: Sequence[Named]) -> Shard:
        check_room(self._store, sum(tensor.nbytes for _, tensor in bucket) + SLACK_BYTES)
        return write_tensors(path, bucket, durable=self._store.durable)

    def _delta(self, path: Path, bucket: Sequence[Named], last: Mapping[str, torch.Tensor]) -> Shard:
        encoded = {}
        for name, tensor in bucket:
            if (changes := delta.encode(last[name], tensor)) is not None:
                encoded[name] = changes
        check_room(self._store, sum(changes.bytes for changes in encoded.values()) + SLACK_BYTES)
        makes = checksum(*encode_tensors(bucket))
        return delta.write_delta_shard(path, encoded, makes, durable=self._store.durable)

    def _finish(self, draft: Path, folder: str, data: bytes) -> None:
        """Give the draft its name; from here on readers may see it."""
        target = self.root / folder
        if target.exists():
            if folder not in {kept.folder for kept in self._kept}:
                raise WeightsError(f"{target} was already published by another learner")
            self._kept = [kept for kept in self._kept if kept.folder != folder]  # of a run before in this directory
            self._remove(folder)
        if self._store.durable:
            write_synced(draft / MANIFEST_FILE, data)
            finish_durably(draft, target)
        else:
            (draft / MANIFEST_FILE).write_bytes(data)
            draft.rename(target)

    def _cannot(self, draft: Path, error: OSError) -> CannotCreate:
        hint = self._store.hint if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        return CannotCreate(f"cannot write the weights to {draft}: {error}", hint)

    def _clean_up(self) -> None:
        """Remove what earlier publishers left, except the newest version and what it builds on."""
        known: dict[Pair, Manifest] = {}
        for name in [entry.name for entry in self.root.iterdir()]:
            pair = parse_folder(name)
            if name.startswith(DRAFT):
                self._remove(name)
            elif pair is not None:
                try:
                    known[pair] = read_manifest(self.root / name)
                except (WeightsError, FileNotFoundError, NotADirectoryError):  # nobody can read it
                    self._remove(name)
                except OSError as error:  # it may be whole: a shared file system fails for a moment
                    self._unread.add(name)
                    logger.warning("weights not read", extra={"folder": str(self.root / name), "error": str(error)})
        self._kept = [known[pair] for pair in sorted(known)]
        self._remove_older()

    def _chain(self) -> list[Manifest]:
        """The newest version and what it builds on, the oldest first; there must be a version."""
        known = {kept.pair: kept for kept in self._kept}
        chain = [self._kept[-1]]
        while chain[-1].base in known and len(chain) < len(known):
            chain.append(known[chain[-1].base])
        return chain[::-1]

    def _remove_older(self) -> None:
        """Remove what is neither new nor what the newest version builds on."""
        if self._unread:  # it may build on older ones by way of one of these
            return
        needed = {kept.pair for kept in self._chain() + self._kept[-self._older :]} if self._kept else set()
        for kept in self._kept:
            if kept.pair not in needed:
                self._remove(kept.folder)
        self._kept = [kept for kept in self._kept if kept.pair in needed]

    def _remove(self, name: str) -> None:
        # The version loses its name first, so that no reader finds a folder with some of its files gone.
        gone = self.root / f"{DRAFT}gone-{name}-{os.getpid()}"
        try:
            (self.root / name).rename(gone)
            shutil.rmtree(gone)
        except FileNotFoundError:
            return
        except OSError as error:
            logger.warning("old weights stay", extra={"folder": str(self.root / name), "error": str(error)})


def _density(old: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor]) -> float | None:
    """Share of values that differ; None when there is no delta from one to the other."""
    heads = [[(name, tensor.shape, tensor.dtype) for name, tensor in each.items()] for each in (old, new)]
    if heads[0] != heads[1]:
        return None
    changed = sum(delta.changed(old[name], new[name]) for name in new)
    return changed / max(1, sum(tensor.numel() for tensor in new.values()))


def _entry(name: str, tensor: torch.Tensor, shard: int) -> TensorEntry:
    return TensorEntry(name, DTYPE_NAMES[tensor.dtype], list(tensor.shape), shard)


def _check_finite(name: str, tensor: torch.Tensor) -> None:
    if not is_finite(tensor):
        raise ConfigError(
            f"{name} has values that are not finite: the training has diverged",
            "lower learner.lr, and start afresh or from a checkpoint before it (checkpoints/)",
        )
