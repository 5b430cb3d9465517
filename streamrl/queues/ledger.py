"""The ledger: one hash per prompt group, streams of ids (docs/internals/ledger.md).

A group is `open` until every sample has a score or a cause of death; then, in the same script, it is `closed` (visible
to the learner, immutable) or a dead letter. Its id is the cursor of the data set at its admission. It is put up for
scoring sample by sample, or whole where a reward compares the samples: one lease, once the last sample is generated.

Every method may be repeated: what was written stays, nothing is written twice, and a call for a group that is gone,
closed or on another attempt writes nothing. Every method retries for `redis.patience` and raises what `Connection.call`
raises. On cancellation its effect may or may not have happened; a repeat is always right.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from streamrl import wire
from streamrl.errors import Fenced, Refused
from streamrl.queues.access import Argument
from streamrl.queues.connection import Connection
from streamrl.queues.keys import ALL_SAMPLES, Keys
from streamrl.queues.records import (
    Admission,
    AdmitOutcome,
    Cause,
    ClosedGroup,
    DeadLetter,
    Fence,
    LeasedGroup,
    LeasedSample,
    LedgerState,
    OpenWork,
    RecordedTurns,
    ReplayOutcome,
    ScoreOutcome,
    group_trace,
    queued_replays,
)
from streamrl.queues.replies import pairs, read_ours, text

CHUNK: Final = 500
"""Groups in one script: the Lua stack bounds the number of arguments."""
MAX_SAMPLES: Final = 1000
"""Responses of one recorded group, for the same reason."""
MAX_DETAIL: Final = 4096
"""Bytes of a traceback that a dead letter keeps: its end, where the exception is."""
MAX_WHY: Final = 256
"""Characters of a reason."""
DROPPED_BY_HAND: Final = "dead letter dropped"
ZERO_VARIANCE: Final = "equal rewards"
"""Why a group was dropped that nothing can be learnt from (`learner.advantage.zero_variance`)."""

_ADMISSIONS: Final = {
    1: AdmitOutcome.ADMITTED,
    0: AdmitOutcome.MOVED,
    -1: AdmitOutcome.FULL,
    -3: AdmitOutcome.TOO_MANY_DEAD,
}
_REPLAYS: Final = {
    1: ReplayOutcome.REPLAYED,
    0: ReplayOutcome.GONE,
    2: ReplayOutcome.LIVE,
    3: ReplayOutcome.NO_PROMPT,
    -1: ReplayOutcome.FULL,
}
_QUEUED: Final = {1: ReplayOutcome.QUEUED, 0: ReplayOutcome.GONE, 3: ReplayOutcome.NO_PROMPT}
_OTHER_SAMPLES: Final = -2
_ZERO_IS_FENCED: Final = frozenset({"advance_cursor", "resume", "start_step", "finish_step"})


@dataclass(frozen=True)
class Lease:
    """One piece of work that this process holds: a prompt (`sample` is None), a sample, or a group to score as one.

    `deliveries` counts how often the work was given out, this time included; clean hand-backs and deaths of which it is
    not suspected do not count. `ended`: it may have been taken again since, by this process too.
    """

    ledger: Ledger
    entry: str
    group_id: int
    attempt: int
    sample: int | None
    deliveries: int
    is_group: bool = False
    consumer: str = ""
    ended: asyncio.Event = field(default_factory=asyncio.Event, compare=False, repr=False)


class Ledger:
    """One key space of a run: that of training groups, or of held-out ones.

    A write of Redis is on its disk after `fsync_period` seconds; `retire` waits for it once after `fence`.
    """

    def __init__(self, connection: Connection, keys: Keys, fsync_period: float = 0.0) -> None:
        self.connection = connection
        self.keys = keys
        self.evaluation = keys.evaluation
        self._fsync_period = fsync_period
        self._settled_at = 0.0
        self._last_closed = "0-0"

    async def ensure(self) -> None:
        """Make the streams and their consumer groups, from the first entry on. A repeat changes nothing."""
        for stream in (self.keys.prompts, self.keys.rollouts):
            await self.connection.call("ensure", [stream], [])

    # The feeder.

    async def admit(
        self,
        *,
        cursor: int,
        fingerprint: str,
        prompt: bytes,
        samples: int,
        min_group: int,
        budget: int,
        hard_cap: int,
        max_dead: int,
        version: int,
    ) -> Admission:
        """Admit the group of the prompt at `cursor`, if there is room.

        Args:
            cursor: position in the data set; becomes the id of the group. The prompt must be a pure function of the
                data that `fingerprint` stands for and of this number.
            fingerprint: names data set, seed and group size.
            prompt: encoded prompt.
            samples: responses wanted.
            min_group: scored samples below which the group is dead when it closes.
            budget: groups that may be live and not yet trained.
            hard_cap: groups that may be live in all.
            max_dead: dead letters from which on nothing is admitted.
            version: newest version of the weights.

        Returns:
            The outcome and the cursor to go on with. A repeat after a lost reply answers MOVED with `cursor + 1`.

        Raises:
            Refused: the ledger was filled from other data.
        """
        outcome, now = await self.connection.call(
            "admit",
            [self.keys.group(cursor), self.keys.prompts, self.keys.live, self.keys.state, self.keys.dead],
            [cursor, fingerprint, prompt, samples, min_group, budget, hard_cap, max_dead, version],
        )
        return _admission(outcome, now, fingerprint)

    async def admit_closed(
        self,
        *,
        cursor: int,
        fingerprint: str,
        prompt: bytes,
        samples: Sequence[tuple[bytes, bytes]],
        min_group: int,
        budget: int,
        hard_cap: int,
        max_dead: int,
    ) -> Admission:
        """Admit a whole group that was recorded elsewhere, if there is room: no replica and no reward worker sees it.

        `samples` are payload and score of each response, 1 to `MAX_SAMPLES`; the group is closed also with fewer than
        `min_group`. Everything else is as in `admit`.
        """
        keys = self.keys
        outcome, now = await self.connection.call(
            "admit_closed",
            [keys.group(cursor), keys.scored, keys.live, keys.state, keys.dead],
            [
                *(cursor, fingerprint, prompt, len(samples), min_group, budget, hard_cap, max_dead, 0),
                *(part for sample in samples for part in sample),
            ],
        )
        return _admission(outcome, now, fingerprint)

    async def finish(self, end: int, epochs: int = 1) -> bool:
        """Record that the data ends at `end`, after `epochs` passes. False, without effect: the cursor is elsewhere."""
        return bool(await self.connection.call("finish", [self.keys.state, self.keys.scored], [end, epochs]))

    async def state(self) -> LedgerState:
        """Counters of this key space, read in one instant."""
        reply = await self.connection.call(
            "state", [self.keys.state, self.keys.live, self.keys.dead, self.keys.replays], []
        )
        return LedgerState.of(reply)

    # Rollout replicas: the lease of a prompt.

    async def open_work(self, lease: Lease) -> OpenWork | None:
        """Prompt and missing samples of a leased group; None (and the entry is removed) when there is nothing to do."""
        reply = await self.connection.call(
            "open_work", [self.keys.group(lease.group_id), self.keys.prompts], [lease.entry, lease.attempt]
        )
        return None if reply is None else OpenWork(prompt=reply[0], missing=tuple(reply[2]))

    async def emit(self, lease: Lease, sample: int, payload: bytes) -> bool:
        """Write one response and put it up for scoring; a full Redis refuses before anything changes.

        False: there was one already (also from a repeat), the sample is dead, or the group is gone.
        """
        reply = await self.connection.call(
            "emit",
            [self.keys.group(lease.group_id), self.keys.prompts, self.keys.rollouts],
            [lease.group_id, sample, lease.attempt, payload, lease.entry],
        )
        return bool(reply == 1)

    async def journal(self, lease: Lease, sample: int, number: int, payload: bytes, state: bytes | None = None) -> bool:
        """Write one finished turn of a sample that is not emitted yet; a full Redis refuses before anything changes.

        `number` is its place in the journal of the sample, from 0. `state` replaces the one that was written with an
        earlier turn. The journal ends with the sample. False, without effect: it is there already (also from a repeat),
        the turn before it is not, the sample has a payload or is dead, the group is gone, or the lease has ended.
        """
        more = (number, payload) if state is None else (number, payload, state)
        arguments = self._journal(lease, sample, *more)
        return not lease.ended.is_set() and bool(await self.connection.call("journal", *arguments))

    async def read_journal(self, lease: Lease, sample: int) -> RecordedTurns:
        """What `journal` wrote, also for an earlier holder of the lease; nothing if the group is gone."""
        group = self.keys.group(lease.group_id)
        return RecordedTurns(*await self.connection.call("read_journal", [group], [lease.attempt, sample]))

    async def forget_journal(self, lease: Lease, sample: int) -> bool:
        """Empty the journal of a sample, whose episode begins again. False, without effect: as in `journal`."""
        arguments = self._journal(lease, sample)
        return not lease.ended.is_set() and bool(await self.connection.call("forget_journal", *arguments))

    def _journal(self, lease: Lease, sample: int, *more: Argument) -> tuple[list[str], list[Argument]]:
        names = [self.keys.group(lease.group_id), self.keys.prompts]
        return names, [lease.entry, lease.attempt, lease.consumer, sample, *more]

    async def fail_sample(self, lease: Lease, sample: int, why: str, detail: str = "") -> bool:
        """One response cannot be generated: the sample dies. False: it has a payload or is dead already."""
        return await self._fail("generate", lease, sample, why, detail)

    async def fail_prompt(self, lease: Lease, why: str, detail: str = "") -> bool:
        """Nothing can be generated for this prompt: every sample without a payload dies. False: lease lost, or gone."""
        return await self._fail("prompt", lease, -1, why, detail)

    # Reward workers: the lease of a sample.

    async def leased_sample(self, lease: Lease) -> LeasedSample | None:
        """Prompt and payload of a leased sample; None (and the entry is removed) when there is nothing to score."""
        sample = _sample(lease)
        group = self.keys.group(lease.group_id)
        fields = ("st", "a", "prompt", f"s:{sample}", f"r:{sample}", f"x:{sample}", "whole")
        state, attempt, prompt, payload, *over = await self.connection.read("HMGET", group, *fields)
        if state == b"open" and int(attempt) == lease.attempt and payload is not None and over == [None] * 3:
            return LeasedSample(prompt, payload, sample)
        # Read and removal are two steps: the script looks again, and removes nothing that waits for its score.
        await self.connection.call("forget", [self.keys.rollouts, group], [lease.entry, sample, lease.attempt])
        return None

    async def score(self, lease: Lease, score: bytes) -> ScoreOutcome:
        """Write the score of a leased sample. The first to commit the entry wins; a repeat answers LOST."""
        reply = await self.connection.call(
            "score",
            self._closing(self.keys.rollouts, lease.group_id),
            [lease.entry, lease.group_id, _sample(lease), lease.attempt, score],
        )
        return ScoreOutcome(reply)

    async def fail_score(self, lease: Lease, why: str, detail: str = "", *, fail_group: bool = False) -> bool:
        """What was leased cannot be scored: the sample dies, or all samples of a group that was leased whole.

        With `fail_group` the whole group dies of it, to be replayed: as soon as its other samples are scored or dead.
        False: another worker committed the entry, or the group is gone.
        """
        what = ALL_SAMPLES if lease.is_group else _sample(lease)
        return await self._fail("reward", lease, what, why, detail, fail_group=fail_group)

    # Reward workers: the lease of a whole group.

    async def set_group_scored(self, group_scored: bool) -> None:
        """Set how groups that are admitted from now on are put up for scoring: as one, or sample by sample.

        Every worker sets it when it starts; the last one counts. An open group changes only by `make_group_scored`.
        """
        await self.connection.call("set_group_scored", [self.keys.state, self.keys.scored], [int(group_scored)])

    async def make_group_scored(self, lease: Lease) -> None:
        """Turn a group, of which one sample is leased, into one piece of work; this ends the lease.

        It is needed for groups that were admitted before their rewards compared samples: in the first seconds of a run,
        after `up --resume` with other rewards, and when Redis went back. Scores of single samples are dropped: all are
        scored again, together. For a group that is gone, closed or on another attempt only the
        entry is removed.
        """
        names = [self.keys.rollouts, self.keys.group(lease.group_id), self.keys.state]
        await self.connection.call("make_group_scored", names, [lease.entry, lease.group_id, lease.attempt])

    async def leased_group(self, lease: Lease) -> LeasedGroup | None:
        """Prompt and payloads of a leased group; None (and the entry is removed) when there is nothing to score."""
        if not lease.is_group:
            raise TypeError(
                f"the lease of group {lease.group_id} is one of sample {lease.sample}, not of the whole group"
            )
        group = self.keys.group(lease.group_id)
        found = LeasedGroup.of(await self.connection.read("HGETALL", group), lease.attempt)
        if found is None:
            await self.connection.call("forget", [self.keys.rollouts, group], [lease.entry, ALL_SAMPLES, lease.attempt])
        return found

    async def score_group(
        self, lease: Lease, scores: Mapping[int, bytes], causes: Mapping[int, Cause], *, fail_group: str = ""
    ) -> ScoreOutcome:
        """Write a score or a cause of death for every sample of a leased group, all at once; that closes the group.

        `ValueError`, and nothing is written, unless both together name exactly the samples of `leased_group`. With
        `fail_group`, the reason, the whole group dies, to be replayed. Answers CLOSED, DEAD, LOST or GONE.
        """
        fates: list[Argument] = []
        for sample, score in scores.items():
            fates += [sample, score]
        for sample, cause in causes.items():
            fates += [sample, wire.utf8(cause.why[:MAX_WHY]), cause.detail.encode(errors="replace")[-MAX_DETAIL:]]
        reply = await self.connection.call(
            "score_group",
            self._closing(self.keys.rollouts, lease.group_id),
            [
                lease.entry,
                lease.group_id,
                lease.attempt,
                lease.deliveries,
                wire.utf8(fail_group[:MAX_WHY]),
                len(scores),
                *fates,
            ],
        )
        if reply == _OTHER_SAMPLES:
            raise ValueError(f"group {lease.group_id}: {sorted([*scores, *causes])} are not the samples that wait")
        return ScoreOutcome(reply)

    async def _fail(
        self, stage: str, lease: Lease, sample: int | str, why: str, detail: str, *, fail_group: bool = False
    ) -> bool:
        stream = self.keys.rollouts if stage == "reward" else self.keys.prompts
        tail, why = detail.encode(errors="replace")[-MAX_DETAIL:], wire.utf8(why[:MAX_WHY])
        reply: int = await self.connection.call(
            "fail",
            [*self._closing(stream, lease.group_id), self.keys.rollouts],
            [stage, lease.entry, lease.group_id, sample, lease.attempt, why, lease.deliveries, tail, int(fail_group)],
        )
        return reply > 0

    def _closing(self, stream: str, group_id: int) -> list[str]:
        keys = self.keys
        return [stream, keys.group(group_id), keys.scored, keys.dead, keys.live, keys.state]

    # The learner (for held-out groups: the feeder). All but reads are fenced by a nonce.

    async def fence(self, nonce: str, floor: int) -> Fence:
        """Take over: every call with another nonce is refused from now on. A repeat answers the same.

        `nonce` is random and new for each process; the new epoch is above `floor`, the greatest one that is on disk.
        """
        reply = await self.connection.call("fence", [self.keys.state, self.keys.scored], [nonce, floor])
        epoch, checkpoint, version, base, base_epoch = reply
        self._settled_at = asyncio.get_running_loop().time() + self._fsync_period
        return Fence(epoch, checkpoint.decode() or None, version, base.decode() or None, base_epoch)

    async def advance_cursor(self, nonce: str, cursor: int) -> None:
        """Advance the cursor of a Redis that lost its data; all groups below `cursor` must be trained or evaluated."""
        await self._fenced("advance_cursor", [self.keys.state, self.keys.scored], [nonce, cursor])

    async def resume(self, nonce: str, checkpoint: str, epoch: int) -> None:
        """Declare the checkpoint this learner goes on from; files of older epochs other than it are void."""
        await self._fenced("resume", [self.keys.state, self.keys.scored], [nonce, checkpoint, epoch])

    async def closed(self) -> list[int]:
        """Ids of all closed groups, ascending. All are read each time: positions in a stream go back with Redis."""
        rows = await read_ours(self.connection.read, self.keys.scored, "-", (b"g",))
        self._last_closed = rows[-1][0] if rows else "0-0"
        return sorted({int(fields[b"g"]) for _, fields in rows})

    async def oldest_live(self, count: int) -> list[int]:
        """Ids of the oldest live groups, ascending, at most `count`."""
        return _ids(await self.connection.read("ZRANGE", self.keys.live, 0, count - 1))

    async def read_group(self, group_id: int) -> ClosedGroup | None:
        """A whole closed group; None when it is not closed (any more)."""
        return ClosedGroup.of(group_id, await self.connection.read("HGETALL", self.keys.group(group_id)))

    async def start_step(self, nonce: str, group_ids: Sequence[int]) -> None:
        """Note that a step with these groups begins; `ClosedGroup.crashes` counts it until `finish_step` clears it.

        A group counts once per nonce, so a repeat changes nothing, and a learner that skips a step counts once.
        """
        await self._fenced("start_step", [self.keys.state, self.keys.scored, *map(self.keys.group, group_ids)], [nonce])

    async def finish_step(
        self, nonce: str, unretired: int | None, version: int, manifest: bytes | None, trained: Sequence[int] = ()
    ) -> None:
        """A step is done: free its places in the budget and publish its version.

        Args:
            nonce: of `fence`.
            unretired: closed groups in Redis that this learner has trained and not retired; absolute, so that a repeat
                changes nothing. None: the number in Redis stays.
            version: number of the new version.
            manifest: of the new version; None publishes nothing. A version is published once.
            trained: groups of the step, whose crash counters are cleared.
        """
        keys = [self.keys.state, self.keys.scored, self.keys.weights, *map(self.keys.group, trained)]
        count = "" if unretired is None else unretired
        await self._fenced("finish_step", keys, [nonce, count, version, manifest or b""])

    async def drop(self, nonce: str, group_id: int, why: str) -> bool:
        """Drop a closed group untrained (too stale); False when it is not closed (any more)."""
        keys = self.keys
        why = why[:MAX_WHY]
        names = [keys.state, keys.scored, keys.live, keys.dropped, keys.dropped_for(why), keys.group(group_id)]
        return bool(await self._fenced("drop", names, [nonce, group_id, why]))

    async def fail_group(self, nonce: str, group_id: int, why: str) -> bool:
        """Make a whole group a dead letter: a closed one, or one that is no longer in Redis (lost with a checkpoint).

        False: it is open, dropped or dead already, or was never admitted.
        """
        keys = self.keys
        names = [keys.state, keys.scored, keys.live, keys.dead, keys.dropped, keys.group(group_id)]
        return bool(await self._fenced("fail_group", names, [nonce, group_id, why[:MAX_WHY], b""]))

    async def retire(self, nonce: str, checkpoint: str, unretired: int, group_ids: Sequence[int]) -> int:
        """Delete groups whose update is in a durable checkpoint; only closed ones go.

        The first call after `fence` waits until the fence itself is on the disk of Redis: else a crash of Redis could
        bring back an older learner's fence together with groups that are retired here.

        Redis remembers `checkpoint` (`EPOCH-STEP`) before the first group goes; `unretired` trained groups stay.
        Returns the number of groups deleted now; a repeat deletes none.
        """
        await asyncio.sleep(max(0.0, self._settled_at - asyncio.get_running_loop().time()))
        keys = self.keys
        retired = 0
        for start in range(0, max(1, len(group_ids)), CHUNK):
            chunk = group_ids[start : start + CHUNK]
            names = [keys.state, keys.scored, keys.live, *map(keys.group, chunk)]
            retired += await self._fenced("retire", names, [nonce, checkpoint, unretired, *chunk])
        return retired

    async def wait_closed(self, seconds: float) -> None:
        """Return when a group closed after the last `closed`, or after `seconds`; then read `closed` again."""
        milliseconds = max(1, int(seconds * 1000))
        command = ("XREAD", "COUNT", 1, "BLOCK", milliseconds, "STREAMS", self.keys.scored, self._last_closed)
        await self.connection.block(*command, milliseconds=milliseconds)

    async def _fenced(self, script: str, keys: Sequence[str], arguments: Sequence[Any]) -> int:
        reply: int = await self.connection.call(script, keys, arguments)
        if reply == -1 or (reply == 0 and script in _ZERO_IS_FENCED):
            raise Fenced(f"{script}: a newer learner has taken over")
        return reply

    async def prompts(self, group_ids: Sequence[int]) -> dict[int, bytes]:  # of those groups that are live
        async with asyncio.TaskGroup() as tasks:
            reads = [tasks.create_task(self.connection.read("HGET", self.keys.group(n), "prompt")) for n in group_ids]
        return {n: read.result() for n, read in zip(group_ids, reads, strict=True) if read.result() is not None}

    # People.

    async def trace(self, group_id: int) -> dict[str, Any] | None:
        """What is known of one group: its hash when it is live, else `state` dead, dropped or retired.

        `retired` means trained (the learner's log says by which step) or evaluated. None: it was never admitted.
        """
        reply = await self.connection.read("HGETALL", self.keys.group(group_id))
        if reply:
            return group_trace(group_id, reply)
        letters = [letter for letter in await self.dead_letters() if letter.group_id == group_id]
        if any(letter.sample is None for letter in letters):
            return {"gid": group_id, "state": "dead", "letters": letters}
        known = pairs(await self.connection.read("HGETALL", self.keys.state))
        for name in sorted(known):
            why = text(name.removeprefix(b"dropped:"))
            if name.startswith(b"dropped:") and await self.connection.read(
                "GETBIT", self.keys.dropped_for(why), group_id
            ):
                return {"gid": group_id, "state": "dropped", "why": why, "letters": letters}
        if group_id >= int(known.get(b"cursor", b"0")):
            return None
        return {"gid": group_id, "state": "retired", "letters": letters}

    async def live(self) -> list[int]:
        """Ids of all live groups, ascending."""
        return _ids(await self.connection.read("ZRANGE", self.keys.live, 0, -1))

    async def has_scores(self) -> bool:
        """Whether a sample of a live group has a score."""
        async with asyncio.TaskGroup() as tasks:
            hashes = map(self.keys.group, await self.live())
            reads = [tasks.create_task(self.connection.read("HKEYS", name)) for name in hashes]
        return any(field.startswith(b"r:") for read in reads for field in read.result())

    async def dropped(self) -> list[int]:
        """Ids of all dropped groups, ascending."""
        bitmap: bytes = await self.connection.read("GET", self.keys.dropped) or b""
        return [8 * i + bit for i, byte in enumerate(bitmap) if byte for bit in range(8) if byte & (128 >> bit)]

    async def note_outcome(self, group_id: int, outcome: bytes) -> None:
        """Tell the curriculum what a group scored. A repeat changes nothing."""
        await self.connection.read("HSET", self.keys.outcomes, group_id, outcome)

    async def outcomes(self) -> dict[int, bytes]:
        found = pairs(await self.connection.read("HGETALL", self.keys.outcomes))
        return {int(group_id): outcome for group_id, outcome in found.items()}

    async def forget_outcomes(self, group_ids: Collection[int]) -> None:
        if group_ids:
            await self.connection.read("HDEL", self.keys.outcomes, *group_ids)

    async def dead_letters(self, after: str = "-") -> list[DeadLetter]:
        """Dead letters of samples and of whole groups, oldest first, after an entry's id.

        They are bounded by `max_dead` and the live groups.
        """
        start = after if after == "-" else f"({after}"
        rows = await read_ours(self.connection.read, self.keys.dead, start, (b"g", b"k"), (b"why", b"stage"))
        return [DeadLetter.of(entry, fields) for entry, fields in rows]

    async def queue_replays(self, group_ids: Sequence[int]) -> dict[int, ReplayOutcome]:
        """Queue dead groups to be admitted again; the feeder takes them with `replay_queued` when there is room.

        The queue lives in Redis, and a group leaves it in the script that admits it: a repeat changes nothing.
        """
        letters = _letters_of(group_ids, await self.dead_letters())
        found: dict[int, ReplayOutcome] = dict.fromkeys(group_ids, ReplayOutcome.GONE)
        dead = [group_id for group_id in group_ids if letters[group_id]]
        for start in range(0, len(dead), CHUNK):
            chunk = dead[start : start + CHUNK]
            arguments = [
                part for group_id in chunk for part in (group_id, letters[group_id][0], ",".join(letters[group_id][1:]))
            ]
            answers = await self.connection.call("queue_replay", [self.keys.dead, self.keys.replays], arguments)
            found.update(zip(chunk, map(_QUEUED.__getitem__, answers), strict=True))
        return found

    async def queued_replays(self) -> dict[int, list[str]]:
        """The queue of replays: letters by group, ascending, that of the group first."""
        return queued_replays(await self.connection.read("HGETALL", self.keys.replays))

    async def replay_queued(
        self, group_id: int, letters: Sequence[str], *, budget: int, hard_cap: int
    ) -> ReplayOutcome:
        """Admit a group of the queue again under a new attempt, and remove its letters. A repeat answers GONE.

        `budget` and `hard_cap` are those of `admit`: FULL when there is no room; then it stays queued.
        """
        keys = self.keys
        names = [keys.dead, keys.group(group_id), keys.prompts, keys.live, keys.state, keys.replays]
        return _REPLAYS[
            await self.connection.call("replay", names, [letters[0], group_id, budget, hard_cap, *letters[1:]])
        ]

    async def replay_each(self, group_ids: Sequence[int], *, budget: int, hard_cap: int) -> dict[int, ReplayOutcome]:
        """As `replay_queued`, of any dead groups. What finds no room, or is cut off, stays dead and is not queued."""
        found: dict[int, ReplayOutcome] = {}
        for group_id, letters in _letters_of(group_ids, await self.dead_letters()).items():
            found[group_id] = ReplayOutcome.GONE
            if letters:
                found[group_id] = await self.replay_queued(group_id, letters, budget=budget, hard_cap=hard_cap)
        return found

    async def drop_dead(self, entries: Sequence[str]) -> int:
        """Delete dead letters; whole groups count as dropped from then on. Returns how many were removed now."""
        keys, why = self.keys, DROPPED_BY_HAND
        removed = 0
        for start in range(0, len(entries), CHUNK):
            names = [keys.dead, keys.dropped, keys.dropped_for(why), keys.state]
            removed += await self.connection.call("drop_dead", names, [why, *entries[start : start + CHUNK]])
        return removed


def _ids(members: Sequence[bytes]) -> list[int]:
    """Without foreign members, which `streamrl audit` names."""
    return [int(member) for member in members if member.isdigit()]


def _letters_of(group_ids: Sequence[int], letters: Sequence[DeadLetter]) -> dict[int, list[str]]:
    """The letters of each group, that of the whole group first; groups that are not dead are left out."""
    found: dict[int, list[str]] = {group_id: [] for group_id in group_ids}
    whole = {letter.group_id: letter.entry for letter in letters if letter.sample is None}
    for letter in letters:
        if letter.group_id in found and letter.group_id in whole:
            ours = found[letter.group_id] = found[letter.group_id] or [whole[letter.group_id]]
            if letter.entry != whole[letter.group_id]:
                ours.append(letter.entry)
    return found


def _admission(outcome: int, cursor: int, fingerprint: str) -> Admission:
    if outcome == -2:
        raise Refused(
            f"the ledger of this run was filled from other data than {fingerprint}",
            "data set, seed or group size changed: start another run, or put them back",
        )
    return Admission(_ADMISSIONS[outcome], cursor)


def _sample(lease: Lease) -> int:
    if lease.sample is None:
        what = "a whole group" if lease.is_group else "a prompt"
        raise TypeError(f"the lease of group {lease.group_id} is one of {what}, not of a sample")
    return lease.sample
