import pytest

from streamrl.consumers.rules.math_answer import MathAnswer, last_boxed
from streamrl.errors import DataError
from tests.consumers.rule_kit import TOWER, opened
from tests.consumers.samples import seen

PARTS = {"unparsable": 0.0, "expensive": 0.0}
CASES = [
    (r"\frac{1}{2}", "The answer is $0.5$.", 1),
    ("1/2", r"so it is \boxed{\frac{2}{4}}", 1),
    ("72", "6 * 12 makes 72.", 1),
    (72, "6 * 12 makes 72.", 1),
    ("72", "6 * 12 makes 27.", 0),
    ("(x+1)^2", "$x^2 + 2x + 1$", 1),
    ("(x+1)^2", "$x^2 + x + 1$", 0),
    (r"\{1,2,3\}", r"$\{3,2,1\}$", 1),
    (r"\sqrt{12}", r"\boxed{2\sqrt{3}}", 1),
    (r"$\frac{\pi}{4}$", r"\[ \arctan(1) \]", 1),
    ("x = 4", "$4$", 1),
    ("1,000", "the final answer is $1000$", 1),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"$\begin{bmatrix}1&2\\3&4\end{bmatrix}$", 1),
    (r"\{41, 42\}", r"first \boxed{41}, then \boxed{42}", 1),
    ("42", r"first \boxed{41}, then \boxed{42}", 0),
    ("0.333333", r"\boxed{\frac{1}{3}}", 1),
    ("0.33", r"\boxed{\frac{1}{3}}", 0),
]


def like(rule, **args):
    """A rule with other arguments and the processes of this one: to start one takes seconds."""
    other = MathAnswer(processes=1, **args)
    other._pool = rule._pool
    return other


async def test_equal_is_what_is_equal_however_it_is_written_in_the_part_that_counts():
    async with opened(MathAnswer(processes=1)) as rule:
        for answer, text, value in CASES:
            score = await rule.score(seen(text, answer))
            assert (score.value, score.parts) == (value, PARTS), (answer, text)
        score = await rule.score(seen("I do not know", "42"))
        assert (score.value, score.parts) == (0.0, {"unparsable": 1.0, "expensive": 0.0})
        with pytest.raises(DataError, match="nothing mathematical"):
            await like(rule, unparsable="fail").score(seen("I do not know", "42"))
        tagged, boxed = like(rule, tag="answer"), like(rule, boxed=True)
        assert (await tagged.score(seen("41 <answer>42</answer> 43", "42"))).value == 1.0
        assert (await boxed.score(seen(r"\boxed{41}, no, \boxed{42}, or 43", "42"))).value == 1.0
        for other in (tagged, boxed):
            assert (await other.score(seen("42", "42"))).parts["unparsable"] == 1.0
        short = like(rule, require_stop=True, longest=20)
        assert (await short.score(seen("42", "42", "length"))).value == 0.0
        assert (await short.score(seen("42" + " and so on" * 10, "42"))).parts["unparsable"] == 1.0
        assert rule.counts() == {"started": 1, "too_long": 0, "too_large": 0, "lost": 0}


async def test_what_is_too_expensive_is_wrong_or_an_error_and_never_a_zero_if_it_came_with_the_prompt():
    async with opened(MathAnswer(processes=1, seconds=0.5)) as rule:
        score = await rule.score(seen(TOWER, "42"))
        assert (score.value, score.parts) == (0.0, {"unparsable": 0.0, "expensive": 1.0})
        assert (await rule.score(seen("42", "42"))).value == 1.0
        assert rule.counts()["too_long"] + rule.counts()["too_large"] == 1
        with pytest.raises(DataError, match="in phase response") as caught:
            await like(rule, seconds=0.5, expensive="fail").score(seen(TOWER, "42"))
        assert "expensive: wrong" in caught.value.hint
        for answer, why in [(None, "has no answer"), ("$ $", "cannot be read: nothing mathematical")]:
            with pytest.raises(DataError, match=f"line 7 of the data set {why}"):
                await rule.score(seen("42", answer))
        with pytest.raises(DataError, match="what comes with line 7 of the data set is too expensive itself"):
            await rule.score(seen("42", TOWER))


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"a \boxed{1} b \boxed{\frac{1}{2}} c", r"\boxed{\frac{1}{2}}"),
        (r"\boxed{1} \boxed{2", None),
        (r"\boxed 3", None),
        ("", None),
    ],
)
def test_the_last_box_of_a_text(text, boxed):
    assert last_boxed(text) == boxed


@pytest.mark.parametrize(
    "args", [{"seconds": 0}, {"memory_mib": 1}, {"processes": 0}, {"expensive": "zero"}, {"tag": "<a>"}]
)
def test_args_that_make_no_sense_are_refused(args):
    with pytest.raises(ValueError):
        MathAnswer(**args)
