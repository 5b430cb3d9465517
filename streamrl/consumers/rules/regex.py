"""A regular expression finds something in the response."""

from __future__ import annotations

import re
from typing import Literal

from streamrl.consumers.reward import RewardSample, Score
from streamrl.consumers.rules.answers import answer_of, one_of
from streamrl.consumers.rules.processed import Processed, Verdict


class Regex(Processed):
    """1 when the pattern matches, or, with a `group`, when that group of the last match is the answer of the prompt.

    Patterns of Python's `re`; flags are written into the pattern, `(?si)`. Some patterns take exponential time on some
    texts, so they run in processes that are killed then. Whether the response or the pattern is to blame nobody can
    say, so that is an error unless `expensive` says otherwise.

    Args:
        pattern: the regular expression.
        match: `search`: it matches somewhere; `whole`: it matches all of the response.
        group: name or number of a group, whose text must be the answer (white space at both ends apart).
        absent: turned round: 1 when the pattern does not match. Not with `group`.
        expensive: what a response is on which the pattern uses up `seconds` or the memory: `fail`, an error, or
            `wrong`, a 0 with the part `expensive` at 1.
        seconds: of CPU time for one response.
        memory_mib: MiB of address space of one process.
        processes: at most so many in one reward worker; None: one per CPU, at most 4.
    """

    def __init__(
        self,
        pattern: str,
        *,
        match: Literal["search", "whole"] = "search",
        group: str | int | None = None,
        absent: bool = False,
        expensive: Verdict = "fail",
        seconds: float = 1.0,
        memory_mib: int = 256,
        processes: int | None = None,
    ) -> None:
        try:
            compiled = re.compile(pattern)
        except re.error as error:
            raise ValueError(f"pattern {pattern!r}: {error}") from error
        one_of("match", match, ("search", "whole"))
        if group is not None and group not in {*range(compiled.groups + 1), *compiled.groupindex}:
            raise ValueError(f"the pattern has no group {group!r}")
        if absent and group is not None:
            raise ValueError("absent and group exclude each other")
        super().__init__(
            "regex",
            "patterns",
            {"pattern": pattern, "whole": match == "whole", "group": group},
            seconds=seconds,
            memory_mib=memory_mib,
            processes=processes,
            expensive=expensive,
        )
        self.group = group
        self.absent = absent

    async def score(self, sample: RewardSample) -> Score:
        """Return 1 or 0.

        Raises:
            DataError: a group is compared, and the prompt has no answer; or the pattern is too expensive here, and
                `expensive` is `fail`.
            ProcessDied: a process died of something that is not the fault of the sample.
            RewardUnavailable: no process can be started now.
        """
        wanted = None if self.group is None else answer_of(sample).strip()
        found = await self.ask(sample.text, sample, theirs="response")
        if found is None:
            return Score(0.0, {"expensive": 1.0})
        right = found["found"] != self.absent
        if wanted is not None:
            right = found["group"] is not None and found["group"].strip() == wanted
        return Score(float(right), {"expensive": 0.0})
