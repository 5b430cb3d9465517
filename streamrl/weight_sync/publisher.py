"""The learner's side: a version is put together from the files of all ranks, so that a reader sees all or nothing.

The publisher keeps the newest version with all that it builds on (its anchor and the deltas after it) and, until the
next one is written, the version before; where versions are pulled, two before, so that a reader has time. With deltas
a new anchor is due as soon as the deltas have the size of an anchor, so that three times the weights are enough:
anchor, deltas, and the next anchor that is being written (four when one version suddenly changes almost everything on
all ranks but one).
"""

from __future__ import annotations

import errno
import logging
import math
import os
import shutil
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from streamrl.atomic import finish_durably, write_synced
from streamrl.config import WeightsConfig
from streamrl.errors import CannotCreate, DeadlineExceeded, WeightsError
from streamrl.weight_sync.files import create_root, store_of
from streamrl.weight_sync.manifest import (
    MANIFEST_FILE,
    Adapter,
    Manifest,
    Pair,
    TensorEntry,
    encode,
    folder_name,
    parse_folder,
    versions,
)
from streamrl.weight_sync.rank_writer import (
    DRAFT,
    Named,
    RankReport,
    RankWriter,
    draft_name,
    out_of_time,
    report_name,
    spare_of,
    take_report,
    wait_for,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class VersionFigures:
    """What the newest version cost: bytes of all files, and the share of values that changed (None: not known)."""

    bytes: int
    density: float | None
    kind: Literal["full", "delta", "adapter"]


@dataclass(frozen=True)
class _Kept:
    pair: Pair
    base: Pair | None
    bytes: int

    @property
    def folder(self) -> str:
        return folder_name(*self.pair)


class Publisher:
    """Publishes versions of the weights; rank 0 of the learner has one, and uses it from one thread.

    At start, temporaries of a publisher that died and all versions but the newest of earlier epochs, with what that one
    builds on, are removed; it stays for late joiners until this publisher has two of its own. A process that
    has the files mapped keeps them. A publisher only ever removes what was there when it started and what it published
    itself, so an old learner that wakes up cannot take away the versions of its successor.

    `manifest` and `figures` are those of the newest version that this publisher wrote, and do not exist before the
    first.
    """

    def __init__(self, config: WeightsConfig, run: str, run_dir: Path) -> None:
        self._config = config
        self._run = run
        self._store = store_of(config.transport, run_dir)
        self._writer = RankWriter(config, run_dir, 0)
        self._stopped = threading.Event()
        # Reuse files only for `shm`: sendfile may still send pages of a file long after it was closed.
        self._spares = config.transport == "shm" and not config.delta.enabled
        self._older = 2 if config.pulled else 1
        create_root(self._store)
        self._kept: list[_Kept] = self._leftover()
        self._deltas = 0
        self._chained = False
        self.manifest: Manifest
        self.figures: VersionFigures

    @property
    def root(self) -> Path:
        return self._store.root

    def next_base(self) -> Pair | None:
        """The version that the next one may be a delta against; None: every rank must write all of its values.

        That is so for the first version of a publisher, after a version that failed or whose files are gone, after
        `weights.delta.every` versions, and when the deltas since the last anchor are about to have its size.
        """
        config = self._config.delta
        if not (config.enabled and self._chained) or self._deltas + 1 >= config.every or not self.holds_newest():
            return None
        anchor, *deltas = self._chain()
        bytes_since = sum(kept.bytes for kept in deltas) + (deltas[-1].bytes if deltas else 0)
        return None if bytes_since > anchor.bytes else self._kept[-1].pair

    def publish(
        self,
        *,
        epoch: int,
        version: int,
        step: int,
        tensors: Iterable[Named],
        shapes: Mapping[str, Sequence[int]] | None = None,
        world: int = 1,
        base: Pair | Literal["next"] | None = "next",
        sources: Sequence[str] = (),
        adapter: Adapter | None = None,
    ) -> bytes:
        """Write rank 0's files of one version, wait for those of the other ranks, and return the encoded manifest.

        When it fails nothing is left behind, the newest version before it stays, and the next one is whole. The
        deadline is checked between shards only: nothing stops a write to a file system that hangs. Call it in a
        thread of its own, and hold that thread to a deadline.

        Args:
            epoch: of the learner.
            version: greater than all before it and never used before, failed ones included.
            step: optimizer step of the weights.
            tensors: Hugging Face names and this rank's rows; with deltas they must not be changed afterwards.
            shapes: shapes of the whole tensors; one that is left out is whole here.
            world: ranks of the learner.
            base: what the ranks were told; `next` asks `next_base`.
            sources: for the manifest.
            adapter: the tensors are those of an adapter alone, by the names of peft; `base` is None then.

        Raises:
            CannotCreate: no room, or no permission.
            WeightsError: the version exists already, a name comes twice, a dtype is unknown, or the parts of the ranks
                are not those of one model.
            DeadlineExceeded: it took longer than the configured deadline, all ranks together.
        """
        pair = (epoch, version)
        base = self.next_base() if base == "next" else base
        self._chained = False  # until this version is there
        draft = self.root / draft_name(pair)
        until = time.monotonic() + self._config.deadline
        create_root(self._store)  # a clean-up may have removed it from the shared memory
        spare = spare_of(draft)
        self._remove_older(spare if self._spares else None)
        try:
            draft.mkdir(mode=0o700)
            reports = [self._writer.write(pair, base, tensors, shapes or {}, until=until)]
            reports.extend(self._report(draft, rank, until) for rank in range(1, world))
            manifest = self._manifest(pair, base, step, reports, sources=sources, adapter=adapter)
            data = encode(manifest)
            self._finish(draft, manifest.folder, data)
        except OSError as error:
            if isinstance(error, (CannotCreate, DeadlineExceeded)):
                raise
            raise self._cannot(draft, error) from error
        finally:
            self._remove(draft.name)  # by another name: ranks that still write would fill it again
            shutil.rmtree(spare, ignore_errors=True)
        self.manifest = manifest
        self._note(manifest, reports)
        logger.info(
            "weights published", extra={"version": version, "epoch": epoch, "step": step, "bytes": manifest.total_bytes}
        )
        return data

    def begin_anew(self) -> None:
        self._chained = False

    def holds_newest(self) -> bool:
        """Whether the newest version and all it builds on are still there for engines that join now."""
        return bool(self._kept) and all((self.root / kept.folder / MANIFEST_FILE).exists() for kept in self._chain())

    def close(self, *, unlink: bool) -> None:
        """End the publisher and any wait for other ranks; `unlink` removes its versions, so no engine can join."""
        self._stopped.set()
        self._writer.stop()
        if unlink:
            while self._kept:
                self._remove(self._kept.pop(0).folder)
            try:
                self.root.rmdir()
            except OSError as error:
                logger.debug("weights folder not empty", extra={"folder": str(self.root), "error": str(error)})

    def _report(self, draft: Path, rank: int, until: float) -> RankReport:
        wait_for(draft, report_name(rank), until, self._stopped)
        if time.monotonic() > until:
            raise out_of_time(draft, self._config.deadline)
        return take_report(draft, rank)

    def _manifest(
        self,
        pair: Pair,
        base: Pair | None,
        step: int,
        reports: Sequence[RankReport],
        *,
        sources: Sequence[str],
        adapter: Adapter | None,
    ) -> Manifest:
        shards = [shard for report in reports for shard in report.shards]
        return Manifest(
            run=self._run,
            version=pair[1],
            epoch=pair[0],
            step=step,
            base=base if any(shard.kind == "delta" for shard in shards) else None,
            transport=self._config.transport,
            folder=folder_name(*pair),
            sources=list(sources),
            shards=shards,
            tensors=_table(reports),
            adapter=adapter,
        )

    def _note(self, manifest: Manifest, reports: Sequence[RankReport]) -> None:
        self._kept.append(_Kept(manifest.pair, manifest.base, manifest.total_bytes))
        self._deltas = 0 if manifest.base is None else self._deltas + 1
        self._chained = True
        counts = [report.changed for report in reports if report.changed is not None]
        elements = sum(report.elements for report in reports)
        density = sum(counts) / elements if elements and len(counts) == len(reports) else None
        self.figures = VersionFigures(manifest.total_bytes, density, manifest.kind)

    def _finish(self, draft: Path, folder: str, data: bytes) -> None:
        """Give the draft its name; from here on readers may see it."""
        target = self.root / folder
        if target.exists():
            if folder not in {kept.folder for kept in self._kept}:
                raise WeightsError(f"{target} was already published by another learner")
            self._kept = [kept for kept in self._kept if kept.folder != folder]
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

    def _leftover(self) -> list[_Kept]:
        """Remove what earlier publishers left, except the newest version and what it builds on, and return those."""
        found: list[Pair] = []
        for entry in self.root.iterdir():
            pair = parse_folder(entry.name)
            if pair is not None:
                found.append(pair)
            elif entry.name.startswith(DRAFT):
                self._remove(entry.name)
        known = versions(self.root)  # one that cannot be read builds on nothing
        self._kept = [
            _Kept(pair, known[pair].base, known[pair].total_bytes) if pair in known else _Kept(pair, None, 0)
            for pair in sorted(found)
        ]
        self._remove_older()
        return self._kept

    def _chain(self) -> list[_Kept]:
        """The newest version and what it builds on, the oldest first; there must be a version."""
        known = {kept.pair: kept for kept in self._kept}
        chain = [self._kept[-1]]
        while chain[-1].base in known and len(chain) < len(known):
            chain.append(known[chain[-1].base])
        return chain[::-1]

    def _remove_older(self, spare: Path | None = None) -> None:
        """Remove what is neither new nor what the newest version builds on; leave the last one's files in `spare`."""
        needed = self._chain() + self._kept[-self._older :] if self._kept else []
        older = [kept for kept in self._kept if kept not in needed]
        for kept in older:
            self._remove(kept.folder, spare if kept is older[-1] else None)
        self._kept = [kept for kept in self._kept if kept in needed]

    def _remove(self, name: str, spare: Path | None = None) -> None:
        # The version loses its name first, so that no reader finds a folder with some of its shards gone.
        gone = spare or self.root / f"{DRAFT}gone-{name}-{os.getpid()}"
        try:
            (self.root / name).rename(gone)
            if spare is None:
                shutil.rmtree(gone)
        except FileNotFoundError:
            return
        except OSError as error:
            logger.warning("old weights stay", extra={"folder": str(self.root / name), "error": str(error)})


def _table(reports: Sequence[RankReport]) -> list[TensorEntry]:
    """Join the parts of all ranks: their rows follow each other in the order of the ranks."""
    entries: dict[str, TensorEntry] = {}
    values: dict[str, int] = {}
    before = 0
    for report in reports:
        for part in report.parts:
            entry = entries.setdefault(part.name, TensorEntry(part.name, part.dtype, part.whole, [], []))
            if (entry.dtype, entry.shape, part.shape[1:]) != (part.dtype, part.whole, part.whole[1:]):
                raise WeightsError(f"rank {report.rank} holds another {part.name} than the ranks before it")
            entry.parts.append(before + part.shard)
            if part.hash:
                entry.hashes.append(part.hash)
            values[part.name] = values.get(part.name, 0) + math.prod(part.shape)
        before += len(report.shards)
    for name, entry in entries.items():
        if values[name] != math.prod(entry.shape):
            raise WeightsError(f"the ranks hold {values[name]} values of {name} {entry.shape} together")
    return list(entries.values())
