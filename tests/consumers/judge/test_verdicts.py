"""From what a judge writes to a number, and from several numbers to one. What cannot be read is never a number."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.consumers.isolated import patterns
from streamrl.consumers.models.judge import BOUNDS, REGEX
from streamrl.consumers.models.verdicts import Parser, Unreadable, Vote, combined, votes_of
from streamrl.consumers.processes import CallLimits, ProcessPool
from streamrl.errors import PluginError, WireError
from tests.consumers.judge.chat_server import choice

OWN = {"regex": REGEX, "bounds": BOUNDS}
WORD = {"regex": r"\[\[(\w)\]\]", "choices": {"A": 1, "B": 0, "C": 0.5}}
LINE = {"choices": {"Yes": 1, "no": 0, "not sure": 0.5}}
JSON = {"json_path": "verdict.score", "bounds": [-1, 1]}

READ = [
    (OWN, "It is right.\nScore: 7", 7),
    (OWN, "**Score: 10**", 10),
    (OWN, "Score: 3\nOn second thoughts:\nscore : 4.5/10.", 4.5),
    (OWN, "### Score: *0*", 0),
    (OWN, "Score: **4** / 10. _", 4),
    (OWN, "score: 6 .. *", 6),
    ({"regex": r"(?P<unit>\w+): (?P<score>\d+)", "bounds": [1, 5]}, "a: 1 b: 5", 5),
    ({"regex": "([0-9.e+-]+)", "bounds": [-10, 10]}, "-2.5", -2.5),
    (WORD, "first [[B]], no: [[a]]", 1),
    (WORD, "[[C]]", 0.5),
    (LINE, "Let me think.\n\n**YES.**\n", 1),
    (LINE, '"Not sure"', 0.5),
    (JSON, '{"verdict": {"score": 0.5}}', 0.5),
    (JSON, '<think>{"verdict": {"score": 1}} {x}</think>```json\n{"verdict": {"score": -1, "why": "{}"}}\n```', -1),
    ({"json_path": "marks.1", "bounds": [0, 9]}, 'so: {"marks": [1, 8]}', 8),
]


@pytest.mark.parametrize(("args", "text", "value"), READ)
def test_verdicts_are_read(args, text, value):
    assert Parser(**args).read(Vote(text)) == value


N = 300_000
LONG = [
    "Score: 5" + " " * N + "x",
    "Score: 5" + "*" * N + "x",
    "Score: 5" + "." * N + "x",
    "Score: 5 /" + " " * N + "x",
    "Score: 5 / 10" + "_" * N + "x",
    "Score: " + "1" * N + "x",
    "Score: 1." + "1" * N + "x",
    "Score" + " " * N + "x",
    "#" * N + "x",
    "Score: 5 x\n" * (N // 11),
]


async def test_the_pattern_that_comes_along_takes_time_in_proportion_to_the_text():
    """The tenth of a second that it takes is far from the limit, and so are the minutes of a pattern that does not."""
    settings = {"pattern": REGEX, "whole": False, "group": 1}
    pool = ProcessPool("pattern", Path(patterns.__file__), settings, 1, CallLimits(cpu=10, wall=300, memory=256 << 20))
    try:
        for text in LONG:
            assert await pool.call(text) == {"found": False, "group": None}
        assert (await pool.call(LONG[0] + "\nScore: 5" + " " * N))["group"] == "5"
    finally:
        await pool.close()


UNREADABLE = [
    (OWN, "It is right.", "does not match"),
    (OWN, "Score: 11", "not within 0 to 10"),
    (OWN, "Score: -1", "does not match"),
    (OWN, "Score: seven", "does not match"),
    (OWN, "Score: 7. / 10", "does not match"),
    (OWN, "My score: 7 is what I would say if", "does not match"),
    ({"regex": "(.*)!", "bounds": [0, 9]}, "nan!", "not within"),
    ({"regex": "(.*)!", "bounds": [0, 9]}, "inf!", "not within"),
    ({"regex": "(.*)!", "bounds": [0, 9]}, "1e999!", "not within"),
    ({"regex": "(.*)!", "bounds": [0, 9]}, "!", "not a number"),
    ({"regex": "(x)?y", "bounds": [0, 9]}, "y", "does not match"),
    (WORD, "[[D]]", "none of a, b, c"),
    (WORD, "A", "does not match"),
    (LINE, "Yes, but\nit depends", "none of"),
    (LINE, "yes or no", "none of"),
    (LINE, "   ", "none of"),
    (JSON, "0.5", "no JSON object"),
    (JSON, '{"score": 0.5}', "no JSON object with verdict.score"),
    (JSON, '{"verdict": {"score": "0.5"}}', "not a number"),
    (JSON, '{"verdict": {"score": true}}', "not a number"),
    (JSON, '{"verdict": {"score": null}}', "not a number"),
    (JSON, '{"verdict": {"score": NaN}}', "not within"),
    (JSON, '{"verdict": {"score": 1e999}}', "not within"),
    (JSON, '{"verdict": {"score": 1' + "0" * 400 + "}}", "not a finite number"),
    (JSON, '{"verdict": {"score": 0.5}', "no JSON object"),
    (JSON, '{"a":' * 5000, "no JSON object"),
]


@pytest.mark.parametrize(("args", "text", "why"), UNREADABLE)
def test_what_is_no_verdict_is_no_number(args, text, why):
    with pytest.raises(Unreadable, match=why):
        Parser(**args).read(Vote(text))


def test_a_vote_that_was_cut_off_is_unreadable_unless_the_run_says_otherwise():
    """`Score: 1` may have been on its way to `Score: 10`."""
    with pytest.raises(Unreadable, match="cut off"):
        Parser(**OWN).read(Vote("Score: 1", cut=True))
    assert Parser(**OWN, cut_off="read").read(Vote("Score: 1", cut=True)) == 1


def test_votes_are_found_in_an_answer():
    answer = {"choices": [choice("one"), choice(None, "length"), choice("cut", "length"), choice(None, refusal="no")]}
    one, empty, cut, refused = votes_of(answer, 9)
    assert (one.text, one.cut, cut.text, cut.cut) == ("one", False, "cut", True)
    for vote, why in ((empty, "finish_reason length"), (refused, "refuses: no")):
        with pytest.raises(Unreadable, match=why):
            Parser(**OWN).read(vote)
    assert len(votes_of(answer, 2)) == 2


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"choices": []},
        {"choices": "Score: 7"},
        {"choices": [1]},
        {"choices": [{"message": None}]},
        {"choices": [choice("one"), {"message": {"content": 7}}]},
    ],
)
def test_an_answer_without_votes_is_a_fault_of_the_server(answer):
    with pytest.raises(WireError):
        votes_of(answer, 9)


BAD = [
    ({}, "nothing says how"),
    ({"regex": "("}, "regex '\\('"),
    ({"regex": "x", "bounds": [0, 1]}, "has 0 groups"),
    ({"regex": "(x)(y)", "bounds": [0, 1]}, "has 2 groups"),
    ({"regex": "(x)"}, "bounds are missing"),
    ({"json_path": "a"}, "bounds are missing"),
    ({"json_path": "a..b", "bounds": [0, 1]}, "has an empty step"),
    ({"json_path": "a", "regex": "(x)"}, "excludes regex"),
    ({"regex": "(x)", "bounds": [1, 0]}, "bounds are"),
    ({"regex": "(x)", "bounds": [0, math.inf]}, "bounds are"),
    ({"regex": "(x)", "bounds": ["0", "1"]}, "bounds are"),
    ({"regex": "(x)", "bounds": "01"}, "bounds are"),
    ({"choices": {}}, "empty"),
    ({"choices": {True: 1, False: 0}}, "is not text"),
    ({"choices": {"yes": "1"}}, "is worth '1'"),
    ({"choices": {"yes": True}}, "is worth True"),
    ({"choices": {"yes": 1, "Yes.": 0}}, "cannot be told"),
    ({"choices": {"yes": 1}, "cut_off": "keep"}, "cut_off is 'keep'"),
]


@pytest.mark.parametrize(("args", "says"), BAD)
def test_parsers_that_cannot_work_are_refused(args, says):
    with pytest.raises(PluginError, match=says):
        Parser(**args)


def test_several_votes_make_one_number():
    assert combined([1, 2, 6], "mean") == 3
    assert combined([1, 2, 6], "median") == 2
    assert combined([1, 2, 6, 7], "median") == 4
    assert combined([1, 6, 6], "majority") == 6
    with pytest.raises(Unreadable, match="split: 1, 6"):
        combined([1, 6], "majority")


PIECES = ["Score: ", "7", "-3", "99", "1e999", "[[", "A", "D", "]]", "Yes", "not sure", "\n"]
PIECES += ['{"verdict":', '{"score":', "}", "}"]
ALLOWED = [(Parser(**OWN), lambda value: 0 <= value <= 10), (Parser(**JSON), lambda value: -1 <= value <= 1)]
ALLOWED += [(Parser(**args), list(args["choices"].values()).__contains__) for args in (WORD, LINE)]


@settings(deadline=None)
@given(st.one_of(st.text(), st.lists(st.sampled_from(PIECES), max_size=12).map("".join)))
def test_any_text_gives_a_number_that_its_parser_allows_or_none(text):
    for parser, allowed in ALLOWED:
        try:
            value = parser.read(Vote(text))
        except Unreadable:
            continue
        assert allowed(value)
