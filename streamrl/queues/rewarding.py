"""The part of the ledger that reward workers use: leased samples, leased groups, and how they are settled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from streamrl import wire
from streamrl.queues import replies
from streamrl.queues.access import Argument
from streamrl.queues.connection import Connection
from streamrl.queues.keys import WHOLE, Keys
from streamrl.queues.records import Cause, Lease, LeasedGroup, LeasedSample, ScoreOutcome

MAX_DETAIL: Final = 4096
"""Bytes of a traceback that a dead letter keeps: its end, where the exception is."""
MAX_WHY: Final = 256
"""Characters of a reason."""
_OTHER_SAMPLES: Final = -2


class Rewarding:
    """What a reward worker does with one key space of a run.

    A group is put up sample by sample, or whole: as one lease, when its last sample was generated. A worker says with
    `say_whole` what it wants; groups that were admitted before it said so it makes whole with `gather`. Every method
    may be repeated, as all of the ledger's.

    Args:
        connection: the connection of this process.
        keys: names of the keys.
    """

    def __init__(self, connection: Connection, keys: Keys) -> None:
        self.connection = connection
        self.keys = keys

    # The lease of a sample.

    async def leased_sample(self, lease: Lease) -> LeasedSample | None:
        """Prompt and payload of a leased sample; None (and the entry is removed) when there is nothing to score."""
        sample = _sample(lease)
        group = self.keys.group(lease.gid)
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
            self._closing(self.keys.rollouts, lease.gid),
            [lease.entry, lease.gid, _sample(lease), lease.attempt, score],
        )
        return ScoreOutcome(reply)

    async def fail_score(self, lease: Lease, why: str, detail: str = "", *, doom: bool = False) -> bool:
        """What was leased cannot be scored: the sample dies, or all samples of a group that was leased whole.

        With `doom` the whole group dies of it, to be replayed: as soon as its other samples have their fates.

        Returns:
            False: somebody else committed the entry, or the group is gone.
        """
        what = WHOLE if lease.whole else _sample(lease)
        return await self._bury("reward", lease, what, why, detail, doom=doom)

    # The lease of a whole group.

    async def say_whole(self, whole: bool) -> None:
        """Say how groups that are admitted from now on are put up for scoring: whole, or sample by sample.

        Every worker says it when it starts; the last one counts. A group that is open keeps its way until `gather`.
        """
        await self.connection.call("whole", [self.keys.state, self.keys.scored], [int(whole)])

    async def gather(self, lease: Lease) -> None:
        """Put up a group whole of which one sample is leased; the lease is over with this.

        Scores that other samples of the group have so far are dropped: all of them are scored again, together. For a
        group that is gone, closed or on another attempt only the entry is removed.
        """
        names = [self.keys.rollouts, self.keys.group(lease.gid), self.keys.state]
        await self.connection.call("gather", names, [lease.entry, lease.gid, lease.attempt])

    async def leased_group(self, lease: Lease) -> LeasedGroup | None:
        """Prompt and payloads of a leased group; None (and the entry is removed) when there is nothing to score."""
        if not lease.whole:
            raise TypeError(f"the lease of group {lease.gid} is one of sample {lease.sample}, not of the whole group")
        group = self.keys.group(lease.gid)
        found = replies.waiting_group(await self.connection.read("HGETALL", group), lease.attempt)
        if found is None:
            await self.connection.call("forget", [self.keys.rollouts, group], [lease.entry, WHOLE, lease.attempt])
        return found

    async def score_group(
        self, lease: Lease, scores: Mapping[int, bytes], causes: Mapping[int, Cause], *, doom: str = ""
    ) -> ScoreOutcome:
        """Write a score or a cause of death for every sample of a leased group, all at once; that closes the group.

        Args:
            lease: of the group.
            scores: score of each sample that has one.
            causes: why the others died; together they are the samples of `leased_group`.
            doom: why the whole group dies of it, to be replayed; empty: it goes on with the samples that have a score.

        Returns:
            CLOSED or DEAD; LOST and GONE as of `score`.

        Raises:
            ValueError: the samples named are not those that wait; nothing was written.
        """
        fates: list[Argument] = []
        for sample, score in scores.items():
            fates += [sample, score]
        for sample, cause in causes.items():
            fates += [sample, wire.utf8(cause.why[:MAX_WHY]), cause.detail.encode(errors="replace")[-MAX_DETAIL:]]
        reply = await self.connection.call(
            "score_group",
            self._closing(self.keys.rollouts, lease.gid),
            [lease.entry, lease.gid, lease.attempt, lease.deliveries, wire.utf8(doom[:MAX_WHY]), len(scores), *fates],
        )
        if reply == _OTHER_SAMPLES:
            raise ValueError(f"group {lease.gid}: {sorted([*scores, *causes])} are not the samples that wait")
        return ScoreOutcome(reply)

    async def _bury(
        self, stage: str, lease: Lease, sample: int | str, why: str, detail: str, *, doom: bool = False
    ) -> bool:
        stream = self.keys.rollouts if stage == "reward" else self.keys.prompts
        tail, why = detail.encode(errors="replace")[-MAX_DETAIL:], wire.utf8(why[:MAX_WHY])
        reply: int = await self.connection.call(
            "bury",
            [*self._closing(stream, lease.gid), self.keys.rollouts],
            [stage, lease.entry, lease.gid, sample, lease.attempt, why, lease.deliveries, tail, int(doom)],
        )
        return reply > 0

    def _closing(self, stream: str, gid: int) -> list[str]:
        keys = self.keys
        return [stream, keys.group(gid), keys.scored, keys.dead, keys.live, keys.state]


def _sample(lease: Lease) -> int:
    if lease.sample is None:
        what = "a whole group" if lease.whole else "a prompt"
        raise TypeError(f"the lease of group {lease.gid} is one of {what}, not of a sample")
    return lease.sample
