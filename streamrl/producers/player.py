"""The player replaces feeder, replicas and reward workers in a run that trains a recording.

It admits one recorded group after the other, already closed (`Ledger.admit_closed`). Everything else works as with
fresh groups: the id is the place in the recording, the cursor lives in Redis, both bounds of admission hold, and
learner and audit see no difference. A recording is older than every version of this run, so its tokens count as
sampled by version 0: their age in steps is the step at which they are trained.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from streamrl import wire
from streamrl.archive.reader import Header, RecordedGroup, read_groups, read_header
from streamrl.atomic import write_durably
from streamrl.config import RunConfig
from streamrl.errors import CannotCreate, ConfigError, Refused, WireError, unwrapped
from streamrl.producers.admission import VersionWatcher, too_many_dead
from streamrl.producers.feeder import FIRST_PAUSE, IDLE_PAUSE, LONGEST_PAUSE
from streamrl.queues import Role
from streamrl.queues.ledger import MAX_SAMPLES
from streamrl.queues.records import AdmitOutcome

logger = logging.getLogger(__name__)
LENGTH_FILE: Final = "played.json"  # in the directory of a run that trains a recording more than once: its length


async def run_player(role: Role) -> None:
    """`ConfigError`: no recording that fits. `Refused`: it has grown, or the run holds groups of other data."""
    assert role.config.recording.path is not None
    path = role.config.recording.path
    header = await asyncio.to_thread(check_recording, role.config)
    count = await asyncio.to_thread(lambda: sum(1 for _ in read_groups(path)))
    if not count:
        raise ConfigError(f"{path}: the recording has no groups")
    await asyncio.to_thread(keep_length, role.run_dir / LENGTH_FILE, header, count, role.config.data.epochs)
    with unwrapped():
        await Player(role, header, Recorded(path, count)).run()


def check_recording(config: RunConfig) -> Header:
    path = config.recording.path
    header = read_header(path) if path is not None else None
    if header is None:
        raise ConfigError(f"{path} has no recording", "name RUN_DIR/recording of `streamrl up --rollout-only`")
    if header.temperature != config.sampling.temperature:
        sampled, asked = header.temperature, config.sampling.temperature
        what = f"{path} was sampled at temperature {sampled:g}, sampling.temperature is {asked:g}"
        hint = f"set sampling.temperature to {sampled:g}"
        raise ConfigError(f"{what}: every importance ratio would be wrong", hint)
    if not header.logprobs:
        what = f"{path} was archived without log-probabilities, so it cannot be trained"
        raise ConfigError(what, "archive.logprobs: true keeps them from then on")
    return header


def keep_length(path: Path, header: Header, count: int, epochs: int | None) -> None:
    """Refuse a changed length where there are several passes: a group is found by its id modulo the length."""
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=_Length) if path.exists() else None
        if kept is None and epochs != 1:
            write_durably(path, msgspec.json.encode(_Length(id=header.id, groups=count)))
    except (OSError, msgspec.MsgspecError) as error:
        raise CannotCreate(f"{path}: {error}", "check space and permissions; --fresh starts anew") from error
    if kept is not None and kept != _Length(id=header.id, groups=count):
        what = f"the recording has {count} groups, and had {kept.groups} when its first pass began"
        hint = "--fresh, or another name, trains the whole recording"
        raise Refused(f"{what}: ids of this run would mean other groups", hint)


class _Length(msgspec.Struct, frozen=True):
    id: str
    groups: int


class Recorded:
    """The groups of a recording by their place, read in order; after the last one the first comes again."""

    def __init__(self, path: Path, count: int) -> None:
        self._path, self.count, self._at = path, count, count
        self._groups: Iterator[RecordedGroup] = iter(())
        self._group: RecordedGroup | None = None  # the one at `_at`

    def group(self, place: int) -> RecordedGroup:
        """Return the group at a place, from 0; going back means reading from the first one again."""
        index = place % self.count
        if index < self._at:
            self._groups, self._at = read_groups(self._path), -1
        if index > self._at:
            self._group = next(itertools.islice(self._groups, index - self._at - 1, None), None)
            self._at = index
        if self._group is None:
            raise WireError(f"{self._path}: the recording has become shorter than its {self.count} groups")
        return self._group


class Player:
    def __init__(self, role: Role, header: Header, recorded: Recorded) -> None:
        self._role, self._config, self._ledger = role, role.config, role.ledgers.train
        self._recorded = recorded
        self._fingerprint = hashlib.sha256(f"recording {header.id}".encode()).hexdigest()[:32]
        epochs = role.config.data.epochs
        self._end = None if epochs is None else epochs * recorded.count
        self._versions = VersionWatcher(role.ledgers.weights)
        self._cursor = 0

    async def run(self) -> None:
        self._cursor = (await self._ledger.state()).cursor
        await self._versions.read()
        self._role.ready()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._versions.run(self._role.stop))
            await self._admit_all()

    async def _admit_all(self) -> None:
        pause = FIRST_PAUSE
        while not self._role.stop.is_set():
            version = self._versions.version
            if self._end is not None and self._cursor >= self._end:
                await self._finish(self._end // self._recorded.count)
                continue
            outcome = await self._admit()
            self._role.status.update(admitted=self._cursor, of=self._recorded.count, admission=outcome.value)
            waited = outcome is AdmitOutcome.FULL and not await self._versions.wait(version, pause)
            pause = min(2 * pause, LONGEST_PAUSE) if waited else FIRST_PAUSE

    async def _admit(self) -> AdmitOutcome:
        group = await asyncio.to_thread(self._recorded.group, self._cursor)
        config = self._config
        answer = await self._ledger.admit_closed(
            cursor=self._cursor,
            fingerprint=self._fingerprint,
            prompt=group.prompt,
            samples=[(as_sampled_before(payload), score) for payload, score in group.samples[:MAX_SAMPLES]],
            min_group=config.sampling.min_group,
            budget=config.budget,
            hard_cap=config.hard_cap,
            max_dead=config.max_dead,
        )
        self._cursor = answer.cursor
        if answer.outcome is AdmitOutcome.TOO_MANY_DEAD:
            raise await too_many_dead(self._ledger, config.max_dead, recorded=True)
        return answer.outcome

    async def _finish(self, epochs: int) -> None:
        """Store that the data ends at the cursor; after Redis went back, admit the lost groups again."""
        done = await self._ledger.finish(self._cursor, epochs)
        await self._versions.wait(self._versions.version, IDLE_PAUSE if done else LONGEST_PAUSE)
        self._cursor = (await self._ledger.state()).cursor


def as_sampled_before(payload: bytes) -> bytes:
    """All tokens as sampled by version 0. Of bytes that are no response, the learner makes a dead letter."""
    try:
        sample = wire.decode(payload, wire.Sample)
    except WireError as error:
        logger.warning("a recorded response cannot be decoded", extra={"error": str(error)})
        return payload
    return wire.encode(msgspec.structs.replace(sample, runs=[(0, 0)] if sample.tokens else []))
