"""The response is mathematically equal to the answer, however both are written."""

from __future__ import annotations

from typing import Final

from typing_extensions import override

from streamrl.consumers.reward import RewardSample, Score
from streamrl.consumers.rules.in_processes import VERDICTS, Processed, Verdict, require
from streamrl.consumers.rules.text import answer_of, check_tag, inside
from streamrl.errors import DataError
from streamrl.plugin_import import one_of

_BOXED: Final = "\\boxed{"
_DELIMITERS: Final = ("$", "\\(", "\\[", _BOXED)


class MathAnswer(Processed):
    r"""1 if math-verify finds the response equal to the answer: `\frac{1}{2}`, `0.5` and `50\%` are the same.

    The response may be prose: math-verify compares the value after "final answer is", in `\boxed{}`, in LaTeX
    delimiters, or the last number (see its documentation). An answer without delimiters is read as LaTeX.

    Parts: `unparsable`, 1 if nothing mathematical is found or sympy cannot handle it; `expensive`, 1 if the comparison
    would take more than `seconds` or `memory_mib`. Both are a **0 by decision, not by failure**: the response cannot be
    compared with the answer on any host. A time limit exceeded on a busy host, a crash, and an answer of the data set
    that cannot be read or computed are failures, never a 0.

    Args:
        boxed: only the last `\boxed{}` counts; a response without one is unparsable.
        tag: only the text between the last `<tag>` and `</tag>` counts; a response without them is unparsable.
        digits: decimals that must agree if one of the two is a decimal number.
        strict: names of variables and kinds of brackets matter.
        require_stop: a response that did not end by itself gets 0 even if it is right.
        unparsable: verdict on an unparsable response: `wrong`, a 0, or `fail`, an error (`on_failure` decides).
        expensive: the same for a response that is too expensive.
        seconds: of CPU time for one response.
        memory_mib: MiB of address space of one process, of which sympy takes about 60.
        longest: characters at the end of the response that are read.
        processes: most processes in one reward worker; None: one per CPU, at most 4.
    """

    def __init__(
        self,
        *,
        boxed: bool = False,
        tag: str | None = None,
        digits: int = 6,
        strict: bool = True,
        require_stop: bool = False,
        unparsable: Verdict = "wrong",
        expensive: Verdict = "wrong",
        seconds: float = 5.0,
        memory_mib: int = 512,
        longest: int = 10_000,
        processes: int | None = None,
    ) -> None:
        require("math_verify", "math", "math")
        if digits < 0 or longest < 1:
            raise ValueError("digits must be at least 0 and longest at least 1")
        super().__init__(
            "math",
            "math_answers",
            {"digits": digits, "strict": strict},
            seconds=seconds,
            memory_mib=memory_mib,
            processes=processes,
            expensive=expensive,
        )
        self.boxed = boxed
        self.tag = check_tag(tag)
        self.require_stop = require_stop
        self.unparsable = one_of("unparsable", unparsable, VERDICTS)
        self.longest = longest

    @override
    async def score(self, sample: RewardSample) -> Score:
        gold = answer_of(sample)
        if self.require_stop and sample.finish != "stop":
            return _score(0.0)
        text = self._part(sample.text)
        if text is None:
            return self._unparsable("it lacks its tag or its box")
        request = {"gold": gold if any(mark in gold for mark in _DELIMITERS) else f"{_BOXED}{gold}}}", "response": text}
        verdict = await self.ask(request, sample)
        if verdict is None:
            return _score(0.0, expensive=1.0)
        if verdict["gold"]:
            where = f"the answer {gold[:100]!r} of line {sample.prompt.line} of the data set"
            raise DataError(f"{where} cannot be read: {verdict['gold']}")
        return self._unparsable(verdict["response"]) if verdict["response"] else _score(float(verdict["equal"]))

    def _part(self, text: str) -> str | None:
        part = inside(text, self.tag)
        if part is None or not self.boxed:
            return part if part is None else part[-self.longest :]
        return last_boxed(part[-self.longest :])

    def _unparsable(self, why: str) -> Score:
        if self.unparsable == "fail":
            raise DataError(f"no mathematical value in the response: {why}")
        return _score(0.0, unparsable=1.0)


def last_boxed(text: str) -> str | None:
    r"""The last `\boxed{...}` of `text` with balanced braces; None if it is incomplete or missing."""
    start = text.rfind(_BOXED)
    depth = 0
    for at in range(start + len(_BOXED) - 1, len(text) if start >= 0 else 0):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start : at + 1]
    return None


def _score(value: float, *, unparsable: float = 0.0, expensive: float = 0.0) -> Score:
    return Score(value, {"unparsable": unparsable, "expensive": expensive})
