import orjson
import pytest

from streamrl.consumers.rules.code_tests import judge, read_tests, same_output, same_value
from streamrl.errors import DataError
from streamrl.sandbox import Execution


def execution(outcome="ended", code=0, stdout="", result=""):
    return Execution(outcome=outcome, code=code, stdout=stdout, stderr="", result=result, cpu=0.0, wall=0.0, delay=0.0)


def forms(value):
    return [(test.kind, test.wanted) for test in read_tests(value, "metadata tests of line 7")]


def test_programs_that_read_and_print():
    tests = read_tests([{"input": "1 2\n", "output": "3"}, {"input": ["1", "2"], "output": ["3"]}], "here")
    assert [(test.kind, test.stdin, test.wanted) for test in tests] == [
        ("stdin", "1 2\n", ("3",)),
        ("stdin", "1\n2", ("3",)),
    ]
    assert forms({"inputs": ["1", "2"], "outputs": ["a", "b"]}) == [("stdin", ("a",)), ("stdin", ("b",))]
    assert forms('{"inputs": ["1"], "outputs": ["a"]}') == [("stdin", ("a",))]


def test_calls_carry_what_goes_in_and_not_what_is_expected():
    (test,) = read_tests([{"call": "Solution.add", "args": [1], "kwargs": {"b": 2}, "output": 31337}], "here")
    assert orjson.loads(test.stdin) == {"call": "Solution.add", "args": [1], "kwargs": {"b": 2}}
    assert (test.kind, test.wanted) == ("call", (31337,))
    (test,) = read_tests({"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]}, "here")
    assert orjson.loads(test.stdin)["args"] == [1, 2]
    assert test.wanted == ([3], 3)


def test_code_gets_a_token_of_its_own():
    one, other = read_tests(["assert f(1) == 2", {"code": "def test_f(): assert f(2) == 3"}], "here")
    assert one.kind == other.kind == "code"
    assert one.wanted != other.wanted
    assert forms("assert f(1) == 2")[0][0] == "code"


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ([], "is empty"),
        ({}, "without lists"),
        (7, "is a int"),
        (None, "is a NoneType"),
        ("[7]", "has a int among its tests"),
        ([{"in": "1"}], "keys in"),
        ([{}], "keys none"),
        ([{"input": 1, "output": "1"}], "not text"),
        ([{"call": "f(1)", "output": 1}], "not a function name"),
        ([{"call": "f", "args": [1]}], "without `output`"),
        ([{"call": "f", "args": 1, "output": 1}], "`args` are not a list"),
        ([" "], "empty"),
        ({"inputs": ["1"], "outputs": []}, "of the same length"),
    ],
)
def test_tests_that_are_none_are_named_with_their_line(value, why):
    with pytest.raises(DataError, match="metadata tests of line 7") as caught:
        read_tests(value, "metadata tests of line 7")
    assert why in str(caught.value)


@pytest.mark.parametrize(
    ("found", "wanted", "same"),
    [
        ("3\n", "3", True),
        ("  3  \n\n", "3", True),
        ("1\n2", "1 2", False),
        ("1  2", "1 2", True),
        ("0.3333333", "0.33333333", True),
        ("0.3334", "0.33333333", False),
        ("1000000007", "1000000008", False),
        ("1e3", "1000", True),
        ("-.5", "-0.50", True),
        ("1_000", "1000", False),
        ("\u0663", "3", False),
        ("inf", "1e999", False),
        ("nan", "0", False),
        ("yes", "Yes", False),
        ("", "", True),
        ("9" * 5000, "8" * 5000, False),
    ],
)
def test_outputs_are_compared_by_lines_words_and_numbers(found, wanted, same):
    assert same_output(found, wanted, 1e-6) is same


@pytest.mark.parametrize(
    ("found", "wanted", "same"),
    [
        (3, 3.0, True),
        (1, True, False),
        (None, 0, False),
        ([1, [2, {"a": 0.1}]], [1, [2, {"a": 0.1 + 1e-12}]], True),
        ([1, 2], [1, 2, 3], False),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ("1", 1, False),
        (10**9 + 7, 10**9 + 8, False),
        ([], {}, False),
    ],
)
def test_values_are_compared_as_json(found, wanted, same):
    assert same_value(found, wanted, 1e-6) is same


def test_a_tolerance_of_nothing_compares_exactly():
    assert not same_output("0.1", "0.10", 0)
    assert not same_value(0.1, 0.1 + 1e-15, 0)


def test_verdicts():
    (program,) = read_tests([{"input": "", "output": "3"}], "here")
    (call,) = read_tests([{"call": "f", "output": [3]}], "here")
    (code,) = read_tests(["assert True"], "here")
    assert judge(program, execution(stdout="3"), 0) == "passed"
    assert judge(program, execution(stdout="3", code=1), 0) == "crashed"
    assert judge(program, execution("signal", code=-11, stdout="3"), 0) == "crashed"
    assert judge(program, execution("time", code=None, stdout="3"), 0) == "time"
    assert judge(call, execution(result="[3]"), 0) == "passed"
    assert judge(call, execution(result="[3][3]"), 0) == "wrong"
    assert judge(call, execution(result=""), 0) == "wrong"
    assert judge(call, execution(result="[" * 100_000), 0) == "wrong"
    assert judge(code, execution(result=code.wanted[0]), 0) == "passed"
    assert judge(code, execution(result="passed"), 0) == "wrong"
