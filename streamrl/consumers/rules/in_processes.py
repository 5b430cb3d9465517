"""Rules that run in processes that can be killed, because a response may make them expensive; one is `regex`."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, get_args

from typing_extensions import override

from streamrl.consumers import isolated
from streamrl.consumers.processes import START_SECONDS, CallLimits, ProcessDied, ProcessPool, usual_processes
from streamrl.consumers.reward import Reward, RewardContext, RewardSample, Score
from streamrl.consumers.rules.text import answer_of
from streamrl.errors import DataError, PluginError
from streamrl.plugin_import import one_of

Verdict = Literal["wrong", "fail"]
VERDICTS: Final = get_args(Verdict)

_SCRIPTS: Final = Path(isolated.__file__).parent


class Processed(Reward):
    """A rule whose work is done by a pool of processes.

    By default, one worker calls it for as many samples at once as there are processes.

    Args:
        rule: its name, for messages.
        script: stem of its module in `streamrl/consumers/isolated`.
        settings: for `prepare` of that module.
        seconds: of CPU time for one response, and as much for the prompt's part; by the clock, 30 s plus 10 times it.
        memory_mib: MiB of address space of one process, with its libraries.
        processes: most processes in one reward worker; None: one per CPU, at most 4.
        expensive: verdict on a response that uses up `seconds` or the memory: `wrong`, and the rule gives a 0, or
            `fail`, an error that is not retried (`on_failure` decides).
    """

    def __init__(
        self,
        rule: str,
        script: str,
        settings: Mapping[str, Any],
        *,
        seconds: float,
        memory_mib: int,
        processes: int | None,
        expensive: Verdict,
    ) -> None:
        if seconds <= 0 or memory_mib < 64 or (processes is not None and processes < 1):
            raise ValueError("seconds must be above 0, memory_mib at least 64 and processes at least 1")
        self.expensive = one_of("expensive", expensive, VERDICTS)
        limits = CallLimits(cpu=seconds, wall=30 + 10 * seconds, memory=memory_mib << 20)
        self.concurrency = processes or usual_processes()
        self.deadline = START_SECONDS + limits.wall
        self._pool = ProcessPool(f"rule {rule}", _SCRIPTS / f"{script}.py", dict(settings), self.concurrency, limits)

    @override
    async def open(self, context: RewardContext) -> None:
        del context
        await self._pool.open()

    @override
    async def close(self) -> None:
        await self._pool.close()

    @override
    def counts(self) -> Mapping[str, int]:
        counts = self._pool.counts
        return {
            "started": counts.started,
            "too_long": counts.too_long,
            "too_large": counts.too_large,
            "lost": counts.lost,
        }

    async def ask(self, request: Any, sample: RewardSample) -> Any:
        """The answer of the process; None: the response is too expensive, and `expensive` is `wrong`.

        If the prompt's part is too expensive (before the phase `response`), it raises `DataError`.
        """
        try:
            return await self._pool.call(request)
        except ProcessDied as died:
            if not died.too_expensive:
                raise
            if died.phase != "response":
                where = f"line {sample.prompt.line} of the data set"
                message = f"what comes with {where} is too expensive itself: {died.message}"
                raise DataError(message, "correct that line, or raise seconds or memory_mib of the rule") from died
            if self.expensive == "fail":
                raise DataError(died.message, "raise seconds or memory_mib, or say `expensive: wrong`") from died
            return None


def require(package: str, extra: str, rule: str) -> None:
    """Raise `PluginError` unless a package is installed. Does not import it."""
    if importlib.util.find_spec(package) is None:
        raise PluginError(f"rule {rule} needs the package {package}", f"pip install 'streamrl[{extra}]'")


class Regex(Processed):
    """1 if the pattern matches, or, with a `group`, if that group of the last match is the answer of the prompt.

    Patterns of Python's `re`; flags are written into the pattern, `(?si)`. Some patterns take exponential time on some
    texts, so they run in processes that are then killed. Response or pattern may be the cause, so this is an error
    unless `expensive` says otherwise.

    Args:
        pattern: the regular expression.
        match: `search`: it matches somewhere; `whole`: it matches all of the response.
        group: name or number of a group whose text must be the answer, ignoring white space at both ends.
        absent: inverts the rule: 1 if the pattern does not match. Not with `group`.
        expensive: verdict on a response for which the pattern uses up `seconds` or the memory: `fail`, an error, or
            `wrong`, a 0 with the part `expensive` at 1.
        seconds: of CPU time for one response.
        memory_mib: MiB of address space of one process.
        processes: most processes in one reward worker; None: one per CPU, at most 4.
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

    @override
    async def score(self, sample: RewardSample) -> Score:
        wanted = None if self.group is None else answer_of(sample).strip()
        found = await self.ask(sample.text, sample)
        if found is None:
            return Score(0.0, {"expensive": 1.0})
        right = found["found"] != self.absent
        if wanted is not None:
            right = found["group"] is not None and found["group"].strip() == wanted
        return Score(float(right), {"expensive": 0.0})
