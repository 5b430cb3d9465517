"""How the feeder fills one ledger with prompts, in order and without a gap, also across restarts; and when it stops.

The cursor lives in Redis. This module only guesses it, and each `admit` corrects the guess. So a restart neither skips
nor repeats a group, a lost reply does no harm, and when Redis goes back the same prompts come again under the same ids.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Final

from streamrl.errors import Refused
from streamrl.queues import Ledger
from streamrl.queues.ledger import DROPPED_BY_HAND, ZERO_VARIANCE
from streamrl.queues.ledgers import WeightsStream
from streamrl.queues.records import Admission, AdmitOutcome, by_cause, same_kind

BURST: Final = 32
_LOOK_SECONDS: Final = 0.5
_SAMPLES: Final = 32  # responses that failed with the same error, before the run ends
_GROUPS: Final = 4  # that they were in: fewer may be broken prompts
TRIAL_PAUSE: Final = 300.0
_WANTED: Final = frozenset({DROPPED_BY_HAND, ZERO_VARIANCE})


@dataclass(frozen=True)
class AdmissionTerms:
    """Fingerprint of the data and the bounds of one ledger (see `Ledger.admit`)."""

    fingerprint: str
    samples: int
    min_group: int
    budget: int
    hard_cap: int
    max_dead: int


class Admitter:
    """Admits group after group; a group's id is its cursor, and `prompt` is a pure function of the id."""

    def __init__(self, ledger: Ledger, terms: AdmissionTerms, prompt: Callable[[int], bytes]) -> None:
        self._ledger, self._terms, self._prompt = ledger, terms, prompt
        self.cursor = 0

    async def locate(self) -> None:
        """Read the cursor. `Refused`: the ledger holds groups of other data."""
        state = await self._ledger.state()
        if state.fingerprint is not None and state.fingerprint != self._terms.fingerprint:
            held_out = "held-out prompts or evaluation.samples"
            what = held_out if self._ledger.evaluation else "prompts, another seed or another group size"
            if state.fingerprint.partition(" ")[2] != self._terms.fingerprint.partition(" ")[2]:
                what = "images, or another image processor (model.path, model.image_processor, transformers)"
            hint = "restore them, or start a new run (--fresh, or another name)"
            raise Refused(f"this run was started with other {what}", hint)
        self.cursor = state.cursor

    async def admit(self, version: int, *, limit: int, end: int | None = None) -> AdmitOutcome:
        """Try to admit up to `limit` groups, none at or after `end`. MOVED: the cursor was elsewhere, call again.

        `Refused`: the ledger holds groups of other data, or `max_dead` dead letters; groups in flight are untouched.
        """
        last = self.cursor + min(limit, BURST)
        group_ids = range(self.cursor, last if end is None else min(last, end))
        if not group_ids:
            return AdmitOutcome.ADMITTED
        async with asyncio.TaskGroup() as group:
            # Tasks start in this order and their commands share a pipeline, so each finds the cursor at its own id.
            tasks = [group.create_task(self._admit_one(group_id, version)) for group_id in group_ids]
        answers = [task.result() for task in tasks]
        self.cursor = answers[-1].cursor
        outcomes = {answer.outcome for answer in answers}
        if AdmitOutcome.TOO_MANY_DEAD in outcomes:
            raise await too_many_dead(self._ledger, self._terms.max_dead)
        worst = (AdmitOutcome.FULL, AdmitOutcome.MOVED)
        return next((outcome for outcome in worst if outcome in outcomes), AdmitOutcome.ADMITTED)

    async def _admit_one(self, group_id: int, version: int) -> Admission:
        prompt = self._prompt(group_id)
        return await self._ledger.admit(cursor=group_id, prompt=prompt, version=version, **asdict(self._terms))


async def too_many_dead(ledger: Ledger, max_dead: int, *, recorded: bool = False) -> Refused:
    """What to say; of a recording nothing can be generated anew, so letters can only be dropped."""
    letters = await ledger.dead_letters()
    causes = by_cause(letters)
    most = f"; most of them: {causes[0].newest.why}" if causes else ""
    kind, option = ("held-out ", " --eval") if ledger.evaluation else ("", "")
    mend = "`streamrl dead drop all`" if recorded else f"fix the cause, `streamrl dead replay all{option}` (or `drop`)"
    return Refused(
        f"{len(letters)} dead {kind}letters, max_dead is {max_dead}: nothing more is admitted{most}",
        f"`streamrl dead ls{option}` shows them; {mend}, or raise max_dead, then `streamrl up --resume`",
    )


class VersionWatcher:
    """Learns new versions of the weights; all tasks of a process share one blocking read of the stream."""

    def __init__(self, stream: WeightsStream) -> None:
        self._stream = stream
        self._changed = asyncio.Condition()
        self.version = 0

    async def read(self) -> None:
        newest = await self._stream.newest()
        if newest is not None:
            self.version = newest[0]

    async def run(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            found = await self._stream.after(self.version, _LOOK_SECONDS)
            if found is not None:
                async with self._changed:
                    self.version = found[0]
                    self._changed.notify_all()

    async def wait(self, version: int, seconds: float) -> bool:
        """Whether a version above `version` becomes known within `seconds`."""
        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(lambda: self.version > version)
        except TimeoutError:
            return False
        return True


class SameFailureGuard:
    """Ends a run in which no response gets a score and all fail with the same error: rewards or engine are broken.

    It looks at the groups that died since this feeder began, and stops at the first score. A failure is often faster
    than a score, so a dead group counts only when no older group is live any more.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._after = "-"
        self._seen: tuple[int, list[int]] = (0, [])
        self._over = False

    async def begin(self) -> None:
        letters = await self._ledger.dead_letters()  # groups that died before now do not count: the cause may be fixed
        self._after = letters[-1].entry if letters else "-"
        self._seen = (len(letters), [])

    async def check(self) -> None:
        if self._over:
            return
        oldest = await self._ledger.oldest_live(1)  # read first: older groups are finished in all reads below
        state = await self._ledger.state()
        self._over = bool(state.retired or state.dropped or state.unretired)
        before, self._seen = self._seen, (state.dead, oldest)
        if self._over or before == self._seen:
            return
        letters = await self._ledger.dead_letters(self._after)
        samples = [letter for letter in letters if letter.sample is not None]
        self._over = bool(samples) and not same_kind(samples)
        groups = {one.group_id for one in letters if one.sample is None and (not oldest or one.group_id < oldest[0])}
        samples = [letter for letter in samples if letter.group_id in groups]
        if self._over or len(samples) < _SAMPLES or len(groups) < _GROUPS:
            return
        self._over = any(letter.scored for letter in letters) or await self._ledger.has_scores()
        if self._over:
            return
        what = f"{len(samples)} responses to {len(groups)} prompts failed with the same error, and none has a score"
        hint = "`streamrl dead ls` shows the traceback; fix the cause, `streamrl dead replay all`"
        raise Refused(f"{what}: {by_cause(samples)[0].newest.why}", f"{hint}, then `streamrl up --resume`")


class DropGuard:
    """Stops admission while groups are dropped and none is trained, so that the data is not used up in vain. Pure.

    It stops when more in a row were dropped than may be in flight: stale groups after a pause stay below that. Until
    one is trained, the groups of one step are tried every five minutes. What people or `zero_variance` drop is wanted.
    """

    def __init__(self, budget: int, step: int) -> None:
        self.allowed: int | None = None  # groups that may be admitted now; None: as many as there is room for
        self.dropped = 0  # in a row
        self.why = ""  # most groups were dropped for this, ever
        self.retry_at = 0.0  # when the next step is tried, by the clock of `look`
        self._budget, self._step = budget, step
        self._counts: tuple[int, int] | None = None

    def look(self, now: float, dropped_for: Mapping[str, int], trained: int) -> None:
        """Take in how many groups were ever dropped, by reason, and trained. Both may go back with Redis."""
        unwanted = {why: count for why, count in dropped_for.items() if why not in _WANTED}
        dropped, self.why = sum(unwanted.values()), max(unwanted, key=lambda why: unwanted[why], default="")
        dropped_before, trained_before = self._counts or (dropped, trained)
        self._counts = (dropped, trained)
        if trained > trained_before:
            self.dropped, self.allowed = 0, None
            return
        self.dropped += max(0, dropped - dropped_before)
        stops = self.allowed is None and self.dropped > self._budget
        if stops or (self.allowed is not None and now >= self.retry_at):
            self.allowed, self.retry_at = 0 if stops else self._step, now + TRIAL_PAUSE

    def admitted(self, count: int) -> None:
        if self.allowed is not None:
            self.allowed = max(0, self.allowed - count)
