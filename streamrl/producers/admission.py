"""How the feeder fills one ledger with prompts, in order and without a gap, also across restarts of either.

The cursor lives in Redis. What is here only guesses it; each `admit` says where it really is. So a restart neither
skips nor repeats, a lost reply does no harm, and when Redis goes back some seconds the same prompts come again under
the same ids.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Final

from streamrl.errors import Refused
from streamrl.queues import Ledger
from streamrl.queues.ledgers import WeightsStream
from streamrl.queues.records import Admission, AdmitOutcome, by_cause

BURST: Final = 32
_LOOK_SECONDS: Final = 0.5


@dataclass(frozen=True)
class AdmissionTerms:
    """What one ledger is asked to take: fingerprint of the data, and the bounds (see `Ledger.admit`)."""

    fingerprint: str
    samples: int
    min_group: int
    budget: int
    hard_cap: int
    max_dead: int


class Admitter:
    """Admits group after group; the id of a group is the cursor at which it was admitted.

    `prompt` gives the bytes of the prompt of a group, a pure function of its id.
    """

    def __init__(self, ledger: Ledger, terms: AdmissionTerms, prompt: Callable[[int], bytes]) -> None:
        self._ledger = ledger
        self._terms = terms
        self._prompt = prompt
        self.cursor = 0

    async def locate(self) -> None:
        """Ask Redis where the cursor is."""
        self.cursor = (await self._ledger.state()).cursor

    async def admit(self, version: int, *, limit: int, end: int | None = None) -> AdmitOutcome:
        """Try to admit up to `limit` groups, none at or after `end`, in one round trip.

        Returns:
            ADMITTED: all of them. FULL: there was room for some, perhaps for none. MOVED: the cursor was elsewhere,
            call again.

        Raises:
            Refused: the ledger holds groups of other data, or so many dead letters that a person has to look at them;
                the groups in flight are untouched.
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
            raise await self._too_many_dead()
        worst = (AdmitOutcome.FULL, AdmitOutcome.MOVED)
        return next((outcome for outcome in worst if outcome in outcomes), AdmitOutcome.ADMITTED)

    async def _too_many_dead(self) -> Refused:
        letters = await self._ledger.dead_letters()
        causes = by_cause(letters)
        most = f"; most of them: {causes[0].newest.why}" if causes else ""
        kind, option = ("held-out ", " --eval") if self._ledger.evaluation else ("", "")
        return Refused(
            f"{len(letters)} dead {kind}letters, max_dead is {self._terms.max_dead}: nothing more is admitted{most}",
            f"`streamrl dead ls{option}` shows them; mend the cause, `streamrl dead replay all{option}` (or `drop`), or"
            " raise max_dead, then `streamrl up --resume`",
        )

    async def _admit_one(self, group_id: int, version: int) -> Admission:
        prompt = self._prompt(group_id)
        return await self._ledger.admit(cursor=group_id, prompt=prompt, version=version, **asdict(self._terms))


class VersionBell:
    """A doorbell for new versions of the weights: the moment a learner's step makes room for more groups.

    All tasks of a process share one blocking read of the weights stream.
    """

    def __init__(self, stream: WeightsStream) -> None:
        self._stream = stream
        self._rung = asyncio.Condition()
        self.version = 0

    async def look(self) -> None:
        """Learn the newest version there is, without waiting for one."""
        newest = await self._stream.newest()
        if newest is not None:
            self.version = newest[0]

    async def run(self, stop: asyncio.Event) -> None:
        """Watch the stream until `stop` is set; owned by the caller's task group."""
        while not stop.is_set():
            found = await self._stream.after(self.version, _LOOK_SECONDS)
            if found is not None:
                async with self._rung:
                    self.version = found[0]
                    self._rung.notify_all()

    async def wait(self, version: int, seconds: float) -> bool:
        """Return True as soon as a version above `version` is known, False after `seconds`. Cancelling is harmless."""
        try:
            async with asyncio.timeout(seconds), self._rung:
                await self._rung.wait_for(lambda: self.version > version)
        except TimeoutError:
            return False
        return True
