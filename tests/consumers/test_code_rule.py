import sys

import pytest

from streamrl.config import RunConfig
from streamrl.consumers.plugins import load_rewards
from streamrl.consumers.rules.code import Code, _Tally
from streamrl.errors import ConfigError, DataError, PluginError
from streamrl.sandbox import Execution, SandboxError
from tests.consumers.samples import seen
from tests.sandbox.sandboxes import need

ADD = [{"input": f"{n} {n + 1}\n", "output": str(2 * n + 1)} for n in range(3)]
CALL = [{"call": "add", "args": [n, 1], "output": n + 1} for n in range(3)]


@pytest.fixture
def code():
    need("auto")
    return lambda **args: Code(wall=60, seconds=20, **args)


def response(text, tests, fence="```python"):
    return seen(f"I think so:\n{fence}\n{text}\n```\n", metadata={"tests": tests})


async def parts(rule, text, tests):
    score = await rule.score(response(text, tests))
    return score.value, {name: part for name, part in score.parts.items() if part and name != "tests"}


async def test_the_share_of_programs_that_print_what_is_expected(code):
    assert await parts(code(), "print(sum(map(int, input().split())))", ADD) == (1.0, {"passed": 3})
    value, found = await parts(code(), "a, b = map(int, input().split())\nprint(a + b if a else 7 / 0)", ADD)
    assert value == pytest.approx(2 / 3)
    assert found == {"passed": 2, "crashed": 1}


async def test_all_or_nothing_ends_at_the_first_failure(code):
    text = "a, b = map(int, input().split())\nprint(a + b if a != 1 else 0)"
    assert await parts(code(credit="all"), text, ADD) == (0.0, {"passed": 1, "wrong": 1, "unrun": 1})
    assert (await parts(code(credit="all"), "print(sum(map(int, input().split())))", ADD))[0] == 1.0
    assert (await parts(code(max_tests=1), text, ADD)) == (1.0, {"passed": 1})


async def test_functions_are_called_and_methods_of_a_solution(code):
    assert await parts(code(), "def add(a, b): return a + b", CALL) == (1.0, {"passed": 3})
    assert await parts(code(), "class Solution:\n  def add(self, a, b): return a + b", CALL) == (1.0, {"passed": 3})
    assert await parts(code(), "def sub(a, b): return a + b", CALL) == (0.0, {"crashed": 3})
    text = "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass P:\n  x: int\n"
    assert (await parts(code(), text + "def add(a, b): return P(a).x + b", CALL))[0] == 1.0


async def test_code_of_tests_asserts_and_has_functions(code):
    tests = ["assert add(1, 2) == 3", {"code": "def test_add():\n  assert add(2, 2) == 4\n\ndef test_not(): pass"}]
    assert await parts(code(), "def add(a, b): return a + b", tests) == (1.0, {"passed": 2})
    assert await parts(code(), "def add(a, b): return a * b", tests) == (0.5, {"passed": 1, "crashed": 1})


@pytest.mark.parametrize(
    "text",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "class Same:\n  def __eq__(self, other): return True\ndef add(a, b): return Same()",
        "import os; os.write(3, b'passed'); os._exit(0)",
        "def add(a, b):\n  print('1')\n  print('passed')",
        "import json; json.dumps = lambda value: '[1, 2, 3]'\ndef add(a, b): return 0",
        "import atexit, os\natexit.register(os._exit, 0)\n1 / 0",
        "def add(a, b): return {1, 2, 3}",
        "def add(a, b): return float('nan')",
        "def add(",
        "\x00",
    ],
)
async def test_a_call_cannot_be_passed_without_its_result(code, text):
    value, found = await parts(code(credit="all"), text, CALL)
    assert value == 0.0
    assert "passed" not in found


async def test_a_response_without_a_program_scores_nothing_and_starts_nothing():
    rule = Code()
    score = await rule.score(seen("I do not know.", metadata={"tests": ADD}))
    assert score.value == 0.0
    assert (score.parts["no_code"], score.parts["unrun"], score.parts["tests"]) == (1, 3, 3)


async def test_time_for_all_tests_ends_a_slow_program(code):
    score = await code(total=0.5).score(response("import time; time.sleep(0.6); print(1)", ADD * 3))
    assert score.parts["unrun"] >= 6
    assert score.value < 1


async def test_a_prompt_without_tests_is_an_error_and_no_score():
    with pytest.raises(DataError, match="metadata tests of line 7 is missing"):
        await Code().score(seen("```\nx\n```"))
    with pytest.raises(DataError, match="metadata unit of line 7 is empty"):
        await Code(tests="unit").score(seen("", metadata={"unit": []}))


async def test_a_sandbox_that_does_not_work_is_an_error_and_no_score(code, monkeypatch):
    rule = code()
    await rule.open(None)
    monkeypatch.setattr("streamrl.sandbox.sandbox._START", "import os; os._exit(1)")
    with pytest.raises(SandboxError, match="keeper"):
        await rule.score(response("print(1)", ADD))


async def test_a_command_runs_programs_that_are_not_python(code):
    rule = code(command=["sh", "{file}"], file="solution.sh", languages=["sh"])
    sample = response("read a b; echo $((a + b))", ADD, "```sh")
    await rule.open(None)
    assert (await rule.score(sample)).value == 1.0
    with pytest.raises(DataError, match="calls functions"):
        await rule.score(response("x", CALL, "```sh"))


async def test_an_interpreter_that_the_sandbox_does_not_see_is_refused(code, tmp_path):
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "mine"
    script.write_text("#!/bin/sh\necho 7\n")
    script.chmod(0o755)
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="cannot be executed in the sandbox") as caught:
        await code(command=[str(script)]).open(None)
    assert "visible" in caught.value.hint
    rule = code(command=[str(script)], visible=[str(tmp_path / "bin")])
    await rule.open(None)
    assert (await rule.score(response("", [{"input": "", "output": "7"}]))).value == 1.0


async def test_the_interpreter_of_an_environment_brings_its_packages(code):
    text = "import msgspec\ndef add(a, b): return msgspec.json.decode(f'{a + b}')"
    assert (await parts(code(python=sys.executable), text, CALL[:1]))[0] == 1.0
    assert (await parts(code(), text, CALL[:1]))[0] == 0.0


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({"credit": "some"}, "credit is 'some'"),
        ({"network": "maybe"}, "network is 'maybe'"),
        ({"isolation": "docker"}, "isolation is 'docker'"),
        ({"isolation": "bubblewrap"}, "isolation: bubblewrap is gone\n  hint: leave isolation out, or say strict"),
        ({"isolation": "none"}, "cannot keep programs from the network"),
        ({"command": ["no-such-program"]}, "no-such-program is not installed"),
        ({"command": []}, "list of words"),
        ({"max_tests": 0}, "max_tests"),
        ({"seconds": 0}, "cpu is 0"),
        ({"tolerance": 2}, "tolerance"),
        ({"sekonds": 3}, "sekonds"),
    ],
)
def test_args_that_cannot_work_are_refused_at_the_start(args, why):
    with pytest.raises(PluginError) as caught:
        load_rewards(RunConfig.model_validate({"rewards": [{"use": "code", "args": args}]}))
    assert why in str(caught.value)


async def test_a_program_that_crashed_says_why_in_the_detail(code):
    text = "import os, sys\nsys.stderr.write('\\x1b[31mred\\x1b[0m \\x07 bell\\n' * 50)\na, b = input().split()\n{}[a]"
    score = await code().score(response(text, ADD))
    assert score.value == 0.0
    lines = score.detail.splitlines()
    assert lines[0] == "test 1 ended with code 1:"
    assert lines[-1] == "KeyError: '0'"
    assert "red  bell" in lines
    assert len(lines) <= 11
    assert all(line.isprintable() for line in lines)
    killed = await code().score(response("import os\nos.kill(os.getpid(), 9)", ADD))
    assert killed.detail == "test 1 ended by signal 9"
    failed = await code().score(response("def add(a, b): return 0", ["assert add(1, 2) == 3, 'not three'"]))
    assert failed.detail.splitlines()[-2:] == ["    assert add(1, 2) == 3, 'not three'", "AssertionError: not three"]
    assert (await code().score(response("print(sum(map(int, input().split())))", ADD))).detail == ""


def scored(count, **figures):
    tally = _Tally(30.0)
    for _ in range(count):
        tally.add("time", Execution(outcome="time", code=None, stdout="", stderr="", result="", **figures))
        if tally.ends(at_failure=False):
            break
    return tally


def test_the_time_for_all_tests_does_not_count_what_others_had():
    assert scored(20, cpu=1.0, wall=11.0, delay=10.0).counts["time"] == 20
    assert scored(20, cpu=1.0, wall=11.0, delay=1.0).counts["time"] == 3


def test_a_program_that_has_used_its_time_cannot_wait_for_ever():
    assert scored(100, cpu=1.5, wall=11.0, delay=10.9).counts["time"] == 28


def test_tests_that_wait_for_ever_on_a_busy_host_are_an_error_and_no_verdict():
    with pytest.raises(SandboxError, match="the host is too busy: its tests took 308 s for 3 s of work"):
        scored(100, cpu=0.1, wall=11.0, delay=10.9)
