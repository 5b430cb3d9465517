"""The recorder: the learner's place in a run that records rollouts and trains nothing.

```
take over -> publish the model once -> { closed groups -> files -> fsync -> checkpoint without weights -> retire }
```
To the ledger it is a learner: it fences, marks its epoch, and retires groups for checkpoints that say which groups are
durable. So the audit proves of a recording what it proves of a training.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from streamrl import wire
from streamrl.archive.reader import FOLDER, Header, RecordedGroup, read_header
from streamrl.archive.writer import RecordingWriter
from streamrl.config import RunConfig
from streamrl.errors import CannotCreate, ConfigError, Fenced, Forgotten, WireError
from streamrl.learner.checkpoint import Checkpoints
from streamrl.learner.ending import Finished, Reason, is_over, write_finished
from streamrl.learner.lineage import join, use_version
from streamrl.learner.takeover import Start, take_over
from streamrl.queues.role import Role
from streamrl.weight_sync.publisher import Publisher
from streamrl.weight_sync.transports import WeightServer, open_server

logger = logging.getLogger(__name__)
_DOORBELL_SECONDS: Final = 0.5
_SAVE_SECONDS: Final = 1.0
"""Longest time between a closed group and its durability; a checkpoint of a recording is a few kilobytes."""
_KEEP: Final = 2


async def run_recorder(role: Role) -> None:
    """Record until the run is over or `role.stop` is set; then everything recorded is durable and retired."""
    ledger = role.ledgers.train
    if await is_over(role.config, role.run_dir, ledger):
        role.ready()
        return
    checkpoints = Checkpoints.of(role.config, role.run_dir)
    start = await take_over(ledger, checkpoints, role.run_dir, kind="recording", model=role.config.model.path)
    try:
        await Recorder(role, checkpoints, start).run()
    except Fenced as error:
        if (await ledger.state()).epoch < start.epoch:
            raise Forgotten(f"Redis forgot epoch {start.epoch} of the recorder", "start it again") from error
        raise


class Recorder:
    def __init__(self, role: Role, checkpoints: Checkpoints, start: Start) -> None:
        config, run_dir = role.config, role.run_dir
        self._role, self._config, self._ledger = role, config, role.ledgers.train
        self._checkpoints, self._start = checkpoints, start
        folder = run_dir / FOLDER
        self._writer = RecordingWriter(folder, start.epoch, _header(config, folder), config.recording.file_bytes)
        self._durable = set(start.trained)
        self._fresh: set[int] = set()
        self._step, self._version = start.step, start.version + 1
        self._checkpoint = start.checkpoint
        self._manifest = b""
        self._saved_at = time.monotonic()

    async def run(self) -> None:
        try:
            publisher = await asyncio.to_thread(Publisher, self._config.weights, self._config.name, self._role.run_dir)
            async with open_server(self._config, self._role.run_dir, publisher.root) as weight_server:
                await self._publish(publisher, weight_server)
                self._role.ready()
                await self._record_all()
        finally:
            self._writer.close()

    async def _publish(self, publisher: Publisher, weight_server: WeightServer) -> None:
        from streamrl.learner.model_loading import load_model

        def write() -> bytes:
            import torch

            dtype: torch.dtype = getattr(torch, self._config.weights.dtype)
            model = load_model(self._config.model)
            use_version(self._role.run_dir, self._version)
            data = publisher.publish(
                epoch=self._start.epoch,
                version=self._version,
                step=0,
                tensors=((name, weight.detach().to(dtype)) for name, weight in model.named_parameters()),
                sources=weight_server.sources(),
                lane=weight_server.lane,
            )
            weight_server.store(publisher.manifest)
            return data

        self._manifest = await asyncio.to_thread(write)
        weight_server.announce(publisher.manifest)
        await self._ledger.finish_step(self._start.nonce, 0, self._version, self._manifest)

    async def _record_all(self) -> None:
        reason: Reason | None = None
        while not self._role.stop.is_set():
            closed = await self._ledger.closed()
            await self._take(
                [group_id for group_id in closed if group_id not in self._durable and group_id not in self._fresh]
            )
            revived = any(group_id in self._durable for group_id in closed)
            reason = await self._reason()
            if reason or len(self._durable) + len(self._fresh) >= self._goal:
                break
            if revived or (self._fresh and time.monotonic() >= self._saved_at + _SAVE_SECONDS):
                await self._save()
            # Also when nothing is new, so that engines find the version again after Redis lost some seconds.
            unretired = sum(group_id in self._fresh for group_id in closed)
            await self._ledger.finish_step(self._start.nonce, unretired, self._version, self._manifest)
            await self._ledger.wait_closed(_DOORBELL_SECONDS)
        await self._save()
        if len(self._durable) >= self._goal:
            reason = "steps"
        if reason is not None:
            write_finished(
                self._role.run_dir,
                Finished(
                    reason=reason,
                    step=len(self._durable) // self._config.learner.groups_per_step,
                    version=self._version,
                    epoch=self._start.epoch,
                    epochs=self._config.data.epochs,
                ),
            )
            logger.info("the recording is over", extra={"reason": reason, "groups": len(self._durable)})

    @property
    def _goal(self) -> float:
        steps = self._config.learner.steps
        return float("inf") if steps is None else steps * self._config.learner.groups_per_step

    async def _take(self, group_ids: Sequence[int]) -> None:
        for group_id in group_ids:
            if len(self._durable) + len(self._fresh) >= self._goal:
                return
            group = await self._ledger.read_group(group_id)
            if group is None:
                continue
            try:
                wire.decode(group.prompt, wire.Prompt)
                for payload, score in group.samples.values():
                    wire.decode(payload, wire.Sample)
                    wire.decode(score, wire.SampleScore)
            except WireError as error:
                await self._ledger.fail_group(self._start.nonce, group_id, f"cannot be recorded: {error}")
                continue
            self._writer.add(RecordedGroup.of(group))
            self._fresh.add(group_id)

    async def _reason(self) -> Reason | None:
        state, epochs = await self._ledger.state(), self._config.data.epochs
        if state.done != state.cursor or epochs is None or state.epochs < epochs or state.replays:
            return None
        closed = await self._ledger.closed()
        done = all(group_id in self._fresh or group_id in self._durable for group_id in closed)
        return "data" if done and state.live <= len(closed) else None

    async def _save(self) -> None:
        self._saved_at = time.monotonic()
        if self._fresh:
            try:
                await asyncio.to_thread(self._write)
            except OSError as error:
                raise CannotCreate(f"the recording cannot be written: {error}", "make room and go on") from error
        retired = [group_id for group_id in await self._ledger.closed() if group_id in self._durable]
        await self._ledger.retire(self._start.nonce, self._checkpoint, 0, retired)

    def _write(self) -> None:
        self._step += 1
        recorded = self._durable | self._fresh
        start, run_dir = self._start, self._role.run_dir
        files = [(f"{FOLDER}/{file}", size) for file, size in self._writer.sync()]
        meta = msgspec.structs.replace(
            start.next_checkpoint(
                step=self._step,
                version=self._version,
                trained=join((group_id, group_id) for group_id in recorded),
                count=len(recorded),
                oldest=0,
                model=self._config.model.path,
            ),
            kind="recording",
            world=0,
            recording=[*(start.meta.recording if start.meta else []), *files],
        )
        self._checkpoints.finish(meta)
        self._checkpoint = meta.name
        self._durable = recorded
        self._fresh.clear()
        self._checkpoints.remove_older(meta, _KEEP)
        figures = {"groups": meta.count, "bytes": sum((run_dir / file).stat().st_size for file, _ in meta.recording)}
        self._role.status.update(figures)
        self._role.record(figures)


def _header(config: RunConfig, folder: Path) -> Header:
    there = read_header(folder) if folder.exists() else None
    if there is not None:
        if there.temperature != config.sampling.temperature:
            raise ConfigError(
                f"{folder} was sampled at temperature {there.temperature:g}, sampling.temperature is"
                f" {config.sampling.temperature:g}: one recording has one temperature",
                f"set sampling.temperature to {there.temperature:g}, or record in another run",
            )
        return there
    return Header(
        id=uuid.uuid4().hex, run=config.name, model=config.model.path, temperature=config.sampling.temperature
    )
