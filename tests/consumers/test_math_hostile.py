"""Responses that want all of the time or the memory of the host, or whatever breaks a parser."""

import asyncio

import pytest

from streamrl.consumers.rules.math_answer import MathAnswer
from tests.consumers.rule_kit import opened
from tests.consumers.samples import seen

MEMORY = 400 << 20
HOSTILE = {
    "tower": r"$9^{9^{9^{9}}}$",
    "tower without LaTeX": "the answer is 9^9^9^9^9",
    "tower in a box": r"\boxed{9^{9^{9^{9^{9}}}}}",
    "tower modulo ten": r"\boxed{7^{7^{7^{7}}} \mod 10}",
    "negative tower": r"\boxed{10^{-10^{10^{10}}}}",
    "power of powers": r"\boxed{(10^{10})^{10^{10}}}",
    "many digits to the power of many": r"\boxed{" + "9" * 4000 + "^{" + "9" * 4000 + "}}",
    "factorial": r"\boxed{(99999999!)!}",
    "factorials of factorials": r"\boxed{((((9!)!)!)!)!}",
    "binomial": r"\boxed{\binom{10^{12}}{5 \cdot 10^{11}}}",
    "sum": r"\boxed{\sum_{k=1}^{10^{9}} \frac{1}{k^{k}}}",
    "product": r"\boxed{\prod_{k=1}^{10^{12}} k}",
    "integral": r"\boxed{\int_0^1 x^{x^{x^{x}}} e^{\sin(x^{x})}\,dx}",
    "limit": r"\boxed{\lim_{x \to \infty} \frac{x^{x^{x^{x}}}}{x^{x^{x}}}}",
    "loop of simplify": r"\boxed{\sin(\tan(-4x^2-3)^3)}",
    "exponentials": r"\boxed{e^{e^{e^{e^{e}-\ln(1)}-\ln(1)}-\ln(1)}-\ln(1)}",
    "expansion": r"\boxed{(a+b+c+d+e+f+g+h)^{300} - (h+g+f+e+d+c+b+a)^{299}}",
    "equation": r"\boxed{x^{x^{x}} + x^{99} - \sin(x)^{x} = 10^{10^{10}}}",
    "inequality": r"\boxed{x^{100} - 3x^{99} + 7x^{50} - \tan(x) > 10^{99}}",
    "interval": r"\boxed{[-10^{10^{10^{10}}}, 10^{10^{10^{10}}}]}",
    "large set": r"\boxed{\{" + ",".join(str(number) for number in range(2000)) + r"\}}",
    "large matrix": r"\boxed{\det\begin{pmatrix}"
    + r"\\".join("&".join(f"x_{{{row}{column}}}" for column in range(9)) for row in range(9))
    + r"\end{pmatrix}}",
    "deep parentheses": "$" + "(" * 3000 + "1" + ")" * 3000 + "$",
    "deep fractions": "$" + r"\frac{1}{1+" * 400 + "1" + "}" * 400 + "$",
    "deep roots": "$" + r"\sqrt{" * 1200 + "2" + "}" * 1200 + "$",
    "deep absolute values": "$" + "|" * 3000 + "1" + "|" * 3000 + "$",
    "boxes that never close": r"\boxed{" * 1200,
    "very many boxes": r"\boxed{1} " * 1000,
    "dollars": "$" * 10_000,
    "almost answers": "the answer is " * 700,
    "almost final answers": "final answer is $1" * 500,
    "minus signs": "$" + "-" * 9000 + "1$",
    "plus and minus": "$" + "1+-" * 3000 + "1$",
    "digits": "9" * 10_000,
    "tiny number": "0." + "0" * 9000 + "1",
    "exponent of a float": "1e999999999999",
    "control characters": "\x00\x01\x1b[2J $1\x00$ \u202e\ufeff",
    "unfinished LaTeX": r"$\frac{\sqrt{\begin{pmatrix}\left( \int \sum_{ \lim \operatorname{",
}


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_hostile_responses_are_wrong_and_nothing_else_happens(monkeypatch: pytest.MonkeyPatch):
    """No input gets more than 0 or spoils the next one, and all ends are counted.

    How much processor time and memory a call can take at most is seen in `test_processes.py`.
    """
    assert len(HOSTILE) > 30
    monkeypatch.setattr("streamrl.consumers.processes.random.random", lambda: 0.0)  # no pause after a death
    async with opened(MathAnswer(seconds=0.25, memory_mib=MEMORY >> 20, processes=2)) as rule, asyncio.timeout(350):
        scores = await asyncio.gather(*(rule.score(seen(text, "42")) for text in HOSTILE.values()))
        assert (await rule.score(seen("$42$", "42"))).value == 1.0
        counts = rule.counts()
    found = dict(zip(HOSTILE, scores, strict=True))
    assert {name: score.value for name, score in found.items() if score.value} == {}
    expensive = [name for name, score in found.items() if score.parts["expensive"]]
    assert {"tower in a box", "factorials of factorials"} <= set(expensive), expensive
    assert counts["too_long"] + counts["too_large"] == len(expensive)
    assert counts["lost"] == 0


async def test_a_hostile_response_does_not_spoil_the_next():
    async with opened(MathAnswer(seconds=0.5, processes=1)) as rule:
        for name in ("tower", "deep parentheses", "control characters", "unfinished LaTeX"):
            assert (await rule.score(seen(HOSTILE[name], "42"))).value == 0.0
            assert (await rule.score(seen("42", "42"))).value == 1.0
        assert rule.counts()["lost"] == 0
