"""Held-out accuracy by version while training goes on, with a cursor and a small budget of its own.

Every `evaluation.every` versions a round begins: the next `evaluation.prompts` prompts of the held-out file, which
repeats, are admitted to the held-out ledger, as many at a time as the engines have slots. A round costs training the
same however it is spread, and a short one tells the accuracy of the version it was begun for. The prompts are answered
and scored like any other and never trained. A group that closes is written to `evaluation.jsonl` (fsync), then retired.
A round is complete when all its prompts were admitted and none of them is live; dead ones do not count.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Final, Literal, TypeVar
from uuid import uuid4

import msgspec
import orjson

from streamrl.archive.writer import Archive
from streamrl.atomic import append_durably, write_durably
from streamrl.config import RunConfig
from streamrl.pass_at_k import at_k
from streamrl.producers.admission import BURST, AdmissionTerms, Admitter, VersionWatcher
from streamrl.producers.dataset import PromptSet
from streamrl.producers.order import fingerprint_of
from streamrl.queues import Role
from streamrl.queues.keys import SOURCE_FIGURES
from streamrl.queues.records import AdmitOutcome, ClosedGroup
from streamrl.sources import series_of
from streamrl.wire import Prompt, Sample, SampleScore, decode

_T = TypeVar("_T")
logger = logging.getLogger(__name__)
LOG_NAME: Final = "evaluation.jsonl"
ROUND_NAME: Final = "evaluation-round.json"
_LOOK_SECONDS: Final = 0.1
_IDLE_SECONDS: Final = 0.5
_GATHER_SECONDS: Final = 0.02  # groups close in bursts; a short wait writes many with one fsync


def evaluation_budget(config: RunConfig) -> int:
    """Return how many held-out groups may be live: as many as fill the engines' slots once."""
    return max(1, config.slots // config.evaluation.samples)


class Evaluation:
    def __init__(self, role: Role, data: PromptSet, versions: VersionWatcher) -> None:
        config = role.config
        self._role, self._config, self._versions = role, config.evaluation, versions
        self._ledger = role.ledgers.evaluation
        fingerprint = fingerprint_of(data, samples=config.evaluation.samples)
        budget = evaluation_budget(config)
        terms = AdmissionTerms(fingerprint, config.evaluation.samples, 1, budget, budget, config.max_dead)
        self._admitter = Admitter(self._ledger, terms, lambda group_id: data.prompts[group_id % len(data)])
        self._data = data
        self._full = False
        self._nonce = uuid4().hex
        self._checkpoint = ""
        self._log: EvaluationLog
        self._archive = Archive(config, role.run_dir, evaluation=True)
        self._round: EvaluationRound | None = None
        self._open = False

    async def start(self) -> None:
        """Take over the held-out ledger and the round that an earlier feeder left; `Refused` if its data differ."""
        await self._admitter.locate()
        self._log = await asyncio.to_thread(EvaluationLog, self._role.run_dir)
        fence = await self._ledger.fence(self._nonce, 0)
        await self._ledger.advance_cursor(self._nonce, self._log.watermark)
        # No checkpoint covers this ledger; the name only says which feeder retired last.
        self._checkpoint = f"{fence.epoch}-0"
        await self._admitter.locate()
        self._round = self._log.read_round()
        self._open = self._round is not None and not await self._is_complete()
        self._show()

    async def run(self) -> None:
        """Admit, collect and publish until the role stops. `Fenced`: a newer feeder took over."""
        try:
            await self._run_rounds()
        finally:
            await self._archive.close()

    async def _run_rounds(self) -> None:
        while not self._role.stop.is_set():
            version = self._versions.version
            if not self._open and not await self._begin(version):
                await self._collect()
                await self._versions.wait(version, _IDLE_SECONDS)
                continue
            moved = await self._admit()
            collected = await self._collect()
            if await self._is_complete():
                await self._publish()
            elif not moved and not collected:
                await self._ledger.wait_closed(_LOOK_SECONDS)
                await asyncio.sleep(_GATHER_SECONDS)
        await self._collect()

    async def _begin(self, version: int) -> bool:
        """Whether a round was due and begins; groups that the file has (Redis may have gone back) make it longer."""
        due = 1 if self._round is None else self._round.version + self._config.every
        if version < due:
            return False
        await self._ledger.advance_cursor(self._nonce, self._log.watermark)
        await self._admitter.locate()
        first = self._admitter.cursor
        begun = EvaluationRound(version, first, self._log.end_of(first, self._config.prompts))
        if not await asyncio.to_thread(self._log.write_round, begun):
            return False
        self._round, self._open = begun, True
        return True

    async def _admit(self) -> bool:
        current = self._current
        if self._admitter.cursor >= current.end:
            return False
        limit = 1 if self._full else BURST  # one prompt is enough to ask for room
        self._full = await self._admitter.admit(current.version, limit=limit, end=current.end) is AdmitOutcome.FULL
        return not self._full

    async def _collect(self) -> bool:
        closed = await self._ledger.closed()
        if not closed:
            return False
        async with asyncio.TaskGroup() as readers:
            tasks = [readers.create_task(self._ledger.read_group(group_id)) for group_id in closed]
        groups = [group for task in tasks if (group := task.result()) is not None]
        for group in groups:
            if group.group_id not in self._log.group_ids:  # a group in the file counts as it was written first
                self._archive.add(group)
        await self._archive.sync()
        lines = [self._evaluate(group) for group in groups]
        if not await asyncio.to_thread(self._log.append, lines):
            return False
        await self._ledger.retire(self._nonce, self._checkpoint, 0, [line.group_id for line in lines])
        self._show()
        return True

    def _evaluate(self, group: ClosedGroup) -> EvaluatedGroup:
        prompt = decode(self._data.prompts[group.group_id % len(self._data)], Prompt)
        scores = [decode(score, SampleScore).value for _, score in group.samples.values()]
        samples = [decode(payload, Sample) for payload, _ in group.samples.values()]
        versions = [version for sample in samples for _, version in sample.runs]
        return EvaluatedGroup(
            group_id=group.group_id,
            line=prompt.line,
            round=group.version,
            version_min=min(versions, default=group.version),
            version_max=max(versions, default=group.version),
            scores=scores,
            right=sum(score > self._config.threshold for score in scores),
            dead=group.size - len(scores),
            source=prompt.source,
        )

    async def _is_complete(self) -> bool:
        current = self._current
        if self._admitter.cursor < current.end:
            return False
        oldest = await self._ledger.oldest_live(1)
        if oldest and oldest[0] < current.end:
            return False
        await self._admitter.locate()  # Redis may have gone back and lost some groups of the round: admit them again
        return self._admitter.cursor >= current.end

    async def _publish(self) -> None:
        self._open = False
        self._show()
        await self._role.beat()  # the learner may end at this accuracy
        version = self._current.version
        tally = self._log.rounds.get(version)
        if tally is None or not tally.scored:
            logger.error("an evaluation round has no scored response", extra={"round": version})
            return
        fields = {"version": version, "accuracy": tally.right / tally.scored, "responses": tally.scored}
        fields |= at_k(tally.prompts, self._config.samples)
        logger.info("evaluated", extra=fields)
        self._role.record({"kind": "evaluation", **fields, "sources": tally.by_source})

    def _show(self) -> None:
        status = self._role.status
        status["evaluated"] = len(self._log.group_ids)
        if self._data.dropped:
            status["held_out_too_long"] = self._data.dropped
        status.update(self._archive.counts)
        unfinished = self._round.version if self._open and self._round is not None else None
        complete = [version for version, tally in self._log.rounds.items() if version != unfinished and tally.scored]
        if complete:
            version = max(complete)
            status["accuracy_version"] = version
            tally = self._log.rounds[version]
            status["accuracy"] = tally.right / tally.scored
            for name in [name for name in status if name.startswith(("avg_at_", "pass_at_"))]:
                del status[name]  # a round in which no prompt has all its samples has none
            status.update(at_k(tally.prompts, self._config.samples))
            if tally.sources:
                status[SOURCE_FIGURES] = orjson.dumps(tally.by_source).decode()

    @property
    def _current(self) -> EvaluationRound:
        assert self._round is not None
        return self._round


# ---- files: a line for each evaluated group, and the round that is under way


class EvaluatedGroup(msgspec.Struct, frozen=True):
    """One line of `evaluation.jsonl`."""

    group_id: int = msgspec.field(name="gid")
    line: int  # of the held-out file, from 0
    round: int  # the version that the round was begun for
    version_min: int
    version_max: int
    scores: list[float]
    right: int  # scores above the threshold
    dead: int = 0  # responses without a score: neither right nor wrong
    source: str = ""


class EvaluationRound(msgspec.Struct, frozen=True):
    """One pass over some held-out prompts: groups `first` to `end - 1`, admitted for `version`."""

    version: int
    first: int
    end: int


@dataclass
class Tally:
    scored: int = 0
    right: int = 0
    prompts: list[tuple[int, int]] = field(default_factory=list)
    sources: dict[str, tuple[int, int]] = field(default_factory=dict)  # scored and right by the name of a source

    @property
    def by_source(self) -> dict[str, dict[str, float]]:
        return {name: {"accuracy": right / n, "responses": n} for name, (n, right) in self.sources.items()}


class EvaluationLog:
    """Appends evaluated groups durably, none twice; `rounds` has a tally for each by its version."""

    def __init__(self, run_dir: Path) -> None:
        self._path, self._round_path = run_dir / LOG_NAME, run_dir / ROUND_NAME
        self.group_ids: set[int] = set()
        self.rounds: dict[int, Tally] = {}
        self._sources: set[str] = set()
        self._complaint: tuple[Path, int | None] | None = None
        self._read()

    @property
    def watermark(self) -> int:
        return next(group_id for group_id in count() if group_id not in self.group_ids)

    def end_of(self, first: int, prompts: int) -> int:
        """The smallest end such that `first` to `end - 1` contain `prompts` groups that are not in the file."""
        new = (group_id for group_id in count(first) if group_id not in self.group_ids)
        return next(islice(new, prompts - 1, None)) + 1

    def append(self, groups: Sequence[EvaluatedGroup]) -> bool:
        """Write groups durably, skipping those that are there; False when the disk is full: nothing was written."""
        new = [group for group in groups if group.group_id not in self.group_ids]
        if not new:
            return True
        try:
            append_durably(self._path, b"".join(msgspec.json.encode(group) + b"\n" for group in new))
        except OSError as error:
            return self._complain(self._path, error)
        self._complaint = None
        for group in new:
            self._count(group)
        return True

    def read_round(self) -> EvaluationRound | None:
        if not self._round_path.exists():
            return None
        return self._decode(self._round_path.read_bytes(), EvaluationRound, str(self._round_path))

    def write_round(self, current: EvaluationRound) -> bool:
        try:
            write_durably(self._round_path, msgspec.json.encode(current))
        except OSError as error:
            return self._complain(self._round_path, error)
        self._complaint = None
        return True

    def _complain(self, path: Path, error: OSError) -> Literal[False]:
        """Once until a write succeeds or fails in another way: it is tried again all the time."""
        if self._complaint != (path, error.errno):
            self._complaint = (path, error.errno)
            hint = "make room, or move the run directory back; it is tried again"
            extra = {"file": str(path), "error": str(error), "hint": hint}
            logger.warning("evaluation cannot be written", extra=extra)
        return False

    def _read(self) -> None:
        data = self._path.read_bytes() if self._path.exists() else b""
        whole = data.rfind(b"\n") + 1
        if whole != len(data):  # a crash cut the last line off
            os.truncate(self._path, whole)
        for number, line in enumerate(data[:whole].splitlines(), start=1):
            if group := self._decode(line, EvaluatedGroup, f"{self._path}:{number}"):
                self._count(group)

    @staticmethod
    def _decode(data: bytes, kind: type[_T], where: str) -> _T | None:
        """None: it is damaged, and left out. A measurement less is no reason to end a run."""
        try:
            return msgspec.json.decode(data, type=kind)
        except msgspec.DecodeError as error:
            logger.warning("evaluation is damaged and left out", extra={"file": where, "error": str(error)})
            return None

    def _count(self, group: EvaluatedGroup) -> None:
        if group.group_id in self.group_ids:
            return
        self.group_ids.add(group.group_id)
        tally = self.rounds.setdefault(group.round, Tally())
        tally.scored += len(group.scores)
        tally.right += group.right
        tally.prompts.append((len(group.scores), group.right))
        if group.source and group.scores:
            name = series_of(group.source, self._sources)
            scored, right = tally.sources.get(name, (0, 0))
            tally.sources[name] = (scored + len(group.scores), right + group.right)
