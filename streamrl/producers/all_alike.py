"""Ends a run early in which no response ever gets a score and all die alike: its rewards, or its engine, are broken."""

from __future__ import annotations

from typing import Final

from streamrl.errors import Refused
from streamrl.queues import Ledger
from streamrl.queues.records import by_cause, same_kind

SAMPLES: Final = 32
"""Responses that died alike, before the run ends."""
GROUPS: Final = 4
"""Groups that they were in: fewer may be broken prompts."""


class AllAlike:
    """Looks at the groups that died since this feeder began, until the first score; then it looks no more.

    A failure is often faster than a score. So a dead group counts only when no older group is live any more: all
    groups admitted before it have had their time.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._after = "-"
        self._seen: tuple[int, list[int]] = (0, [])
        self._over = False

    async def begin(self) -> None:
        """Do not count what died before now: the cause may be fixed."""
        letters = await self._ledger.dead_letters()
        self._after = letters[-1].entry if letters else "-"
        self._seen = (len(letters), [])

    async def check(self) -> None:
        """Raise `Refused`, which names the cause, when all fail alike."""
        if self._over:
            return
        oldest = await self._ledger.oldest_live(1)  # read first: what is older than this is over in all reads below
        state = await self._ledger.state()
        if state.retired or state.dropped or state.unretired:
            self._over = True
            return
        seen = (state.dead, oldest)
        if seen == self._seen:
            return
        self._seen = seen
        letters = await self._ledger.dead_letters(self._after)
        samples = [letter for letter in letters if letter.sample is not None]
        if samples and not same_kind(samples):
            self._over = True
            return
        groups = {one.group_id for one in letters if one.sample is None and (not oldest or one.group_id < oldest[0])}
        samples = [letter for letter in samples if letter.group_id in groups]
        if len(samples) < SAMPLES or len(groups) < GROUPS:
            return
        if any(letter.scored for letter in letters) or await self._ledger.has_scores():
            self._over = True
            return
        [cause, *_] = by_cause(samples)
        raise Refused(
            f"{len(samples)} responses to {len(groups)} prompts died alike, and none has a score: {cause.newest.why}",
            "`streamrl dead ls` shows the traceback; mend the cause, `streamrl dead replay all`, then `streamrl up"
            " --resume`",
        )
