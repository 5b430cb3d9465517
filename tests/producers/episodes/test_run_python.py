"""The tool `run_python`: what the model reads of each program, hostile ones too, and whose fault a failure is."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator
from textwrap import dedent
from typing import Any

import orjson
import pytest

from streamrl import wire
from streamrl.errors import ConfigError, PluginError
from streamrl.producers.episodes import Episode, python_tool
from streamrl.producers.episodes.environment import ToolEpisode
from streamrl.producers.episodes.rendering import ToolCall
from streamrl.producers.episodes.sampler import EpisodeSampler, episode_of
from streamrl.producers.episodes.tools import Tool, Toolbox
from streamrl.runtime.preflight import check_episode
from streamrl.sandbox import Program, Sandbox, SandboxSettings
from tests.queues.ledger_kit import until
from tests.sandbox import hostile_programs as hostile
from tests.sandbox.sandboxes import keepers, need, running, together

from .chat_kit import HERMES, make_tokenizer
from .episode_kit import DONE, Script, call, config_of, order_of

TOKENIZER = make_tokenizer(HERMES)
LONG: dict[str, Any] = {"sampling": {"max_new_tokens": 200}, "model": {"context": 2048}}


def program(code):
    return call(orjson.dumps({"name": "run_python", "arguments": {"code": code}}).decode())


def tool(**settings):
    need("auto")
    return python_tool(SandboxSettings(**{"seconds": 20, "wall": 60} | settings))


async def asked(found, code, deadline=120.0, longest=16384):
    """How a call went, and what the model reads."""
    asking = ToolCall("call_1", "run_python", {"code": code}, "ok", "raw")
    result = await Toolbox([found]).call(asking, deadline=deadline, longest=longest)
    return result.use.outcome, result.message["content"]


def test_the_model_reads_what_the_tool_does():
    function = python_tool().schema["function"]
    assert function["name"] == "run_python"
    assert "Each call starts a new program" in function["description"]
    assert function["parameters"]["properties"] == {
        "code": {"type": "string", "description": "the whole program. Use print to see a result."}
    }
    assert function["parameters"]["required"] == ["code"]


TRACEBACK = """before
Traceback (most recent call last):
  File "/tmp/program.py", line 2, in <module>
    {}['key']
    ~~^^^^^^^
KeyError: 'key'
error: it ended with code 1"""
ANSWERS = {
    "prints": ("print(6 * 7)", {}, "42"),
    "prints-nothing": ("x = 6 * 7", {}, "(the program printed nothing)"),
    "warns": ("import sys; print('a'); print('b', file=sys.stderr)", {}, "a\nb"),
    "fails": (
        "print('before')\n{}['key']",
        {},
        TRACEBACK,
    ),
    "is-no-python": ("print(", {}, "SyntaxError: '(' was never closed\nerror: it ended with code 1"),
    "holds-what-no-text-holds": ("print('\ud83d')", {}, "?"),
    "exits": ("import sys; sys.exit(3)", {}, "error: it ended with code 3"),
    "kills-itself": ("import os; os.kill(os.getpid(), 9)", {}, "error: killed by signal 9"),
    "kills-its-parent": (
        """
        import os
        for pid in (os.getppid(), -1):
            try: os.kill(pid, 9)
            except OSError: pass
        print("alive")
        """,
        {},
        "alive",
    ),
    "sleeps": (
        "import time; print('so far', flush=True); time.sleep(600)",
        {"wall": 2},
        "so far\nerror: killed: no answer within 2 s",
    ),
    "computes": ("while True: pass", {"seconds": 1}, "error: killed: no answer within 1 s of processor time"),
    "forks-for-ever": ("import os\nwhile True: os.fork()", {}, "BlockingIOError: [Errno 11]"),
    "leaves-a-child": (
        "import os, time\nif os.fork() == 0:\n  os.setsid(); time.sleep(600)\nprint('parent', flush=True)",
        {},
        "parent",
    ),
    "takes-memory": (
        hostile.ENDED_BY_A_LIMIT["memory-of-many-processes"][0],
        {"memory_mib": 256},
        "out of memory (256",
    ),
    "prints-10-MB": ("print('x' * 10_000_000)", {}, "error: killed: it printed more than 1024 KiB"),
    "needs-the-network": (
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1:80')",
        {},
        "urllib.error.URLError: <urlopen error [Errno 101] Network is unreachable>\nerror: it ended with code 1",
    ),
    "reads-its-input": ("print(repr(input()))", {}, "EOFError: EOF when reading a line\nerror: it ended with code 1"),
}
"""By name: the program, settings, and the end of what the model reads, or the whole of it."""


async def test_what_a_program_does_is_its_answer_and_no_failure_of_the_tool():
    found = await together({name: asked(tool(**given), dedent(code)) for name, (code, given, _) in ANSWERS.items()})
    assert {outcome for outcome, _ in found.values()} == {"ok"}
    for name, (_, text) in found.items():
        wanted = ANSWERS[name][2]
        assert wanted in text if name in {"forks-for-ever", "takes-memory"} else text.endswith(wanted), (name, text)
        assert len(text) < 20_000
    for name in (
        "prints",
        "prints-nothing",
        "warns",
        "fails",
        "exits",
        "kills-itself",
        "sleeps",
        "computes",
        "leaves-a-child",
    ):
        assert found[name][1] == ANSWERS[name][2], name
    assert "characters left out" in found["prints-10-MB"][1]


async def test_each_call_is_a_fresh_program():
    box = tool()
    text = "import os; print(sorted(os.listdir('.'))); open('left', 'w').close()"
    assert [await asked(box, text) for _ in range(2)] == [("ok", "['program.py']")] * 2


async def test_an_episode_that_ends_kills_its_program_with_all_it_started():
    mark = f"sandboxed-{uuid.uuid4().hex}"
    task = asyncio.create_task(asked(tool(), hostile.spawning("spawn(); time.sleep(600)", mark)))
    await until(lambda: running(mark))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not running(mark)
    assert not keepers()


class Counting:
    """Counts the programs that run at the same time, and all of them."""

    def __init__(self, monkeypatch):
        self.now = self.most = self.all = 0
        start = Sandbox.start

        @contextlib.asynccontextmanager
        async def counted(box: Sandbox, program: Program) -> AsyncIterator[Any]:
            self.now += 1
            self.all += 1
            self.most = max(self.most, self.now)
            try:
                async with start(box, program) as session:
                    yield session
            finally:
                self.now -= 1

        monkeypatch.setattr(Sandbox, "start", counted)


async def test_no_more_programs_run_at_once_than_there_are_processors(monkeypatch):
    monkeypatch.setattr("streamrl.producers.episodes.run_python.most_at_once", lambda: 2)
    box = tool()
    await box.open()
    counting = Counting(monkeypatch)
    assert await asyncio.gather(*(asked(box, "print('ran')") for _ in range(6))) == [("ok", "ran")] * 6
    assert (counting.most, counting.all) == (2, 6)


async def test_a_sandbox_that_fails_is_an_error_of_the_tool_and_is_logged(monkeypatch, caplog):
    box = tool()
    await box.open()
    monkeypatch.setattr("streamrl.sandbox.sandbox._START", "import os; os._exit(1)")
    with caplog.at_level(logging.WARNING):
        outcome, text = await asked(box, "print(1)")
    assert outcome == "error"
    assert "the sandbox failed, and the program is not to blame" in text
    [record] = [record for record in caplog.records if record.message == "a sandbox failed"]
    assert (record.levelname, record.tool) == ("WARNING", "run_python")


# --- named in a run file ----------------------------------------------------------------------------------------------


def configured(**episode):
    return config_of({"tools": ["run_python"], **episode}, **LONG)


async def played(episode, config, *texts):
    async with EpisodeSampler(config, Script(TOKENIZER, texts), TOKENIZER, episode, "rollout.0") as sampler:
        sample = await sampler.sample(order_of(TOKENIZER))
    return sample, [TOKENIZER.backend.decode(turn.observed_ids) for turn in sample.turns if turn.observed]


async def test_a_run_file_names_it_beside_functions_and_sets_its_limits():
    need("auto")
    config = config_of(
        {
            "tools": ["tests.producers.episodes.episode_kit:add", "run_python"],
            "run_python": {"seconds": 15, "output_kib": 1},
            "max_tool_response": 100,
        },
        **LONG,
    )
    texts = program("print(6 * 7)"), program("print('x' * 5000)"), DONE
    sample, heard = await played(episode_of(config), config, *texts)
    assert [use.outcome for turn in sample.turns for use in turn.tools] == ["ok", "ok"]
    assert "<tool_response>\n42\n</tool_response>" in heard[1]
    assert "printed more than 1 KiB" in heard[2]
    assert (sample.stop, sample.text) == ("completed", DONE)
    assert isinstance(sample, wire.Sample)


class Solver(Episode):
    """As the guide says: the tool in code of a user."""

    def __init__(self, python: Tool) -> None:
        self._python = python

    async def open(self):
        await self._python.open()

    async def run(self, task, chat):
        reply = await chat(task.messages, tools=[self._python])
        [answer] = await chat.answer(reply)
        return float(answer["content"])


async def test_an_episode_of_a_user_has_it_as_a_tool():
    config = config_of({"run": "m:Solver"}, **LONG)
    sample, _ = await played(Solver(tool()), config, program("print(0.5)"))
    assert sample.score is not None
    assert sample.score.value == 0.5


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"sekonds": 3}, "unexpected keyword argument 'sekonds'.*it takes: python, visible, seconds"),
        ({"seconds": 0}, "tool run_python cannot be built: ValueError: cpu is 0"),
        ({"memory_mib": 1}, "no program starts in less"),
        ({"network": "maybe"}, "network is 'maybe'; it is one of deny, allow"),
        ({"isolation": "docker"}, "isolation is 'docker'"),
        ({"isolation": "none"}, "cannot keep programs from the network"),
        ({"seconds": 40}, "a program may take 81 s, and a call 60 s.*raise episode.tool_deadline"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_arguments_that_cannot_work_are_refused_before_the_start(settings, why):
    with pytest.raises(ConfigError, match=f"(?s){why}"):
        episode_of(configured(run_python=settings))


@pytest.mark.parametrize(
    ("episode", "why"),
    [
        ({"tools": ["run_pithon"]}, "'run_pithon' is no tool: write run_python, which is built in, or module:function"),
        ({"tools": ["a:b"], "run_python": {"seconds": 3}}, "add run_python to episode.tools"),
        ({"run": "a:b", "run_python": {"seconds": 3}}, "add run_python to episode.tools"),
    ],
)
def test_words_that_mean_no_tool_are_refused_in_the_run_file(episode, why):
    with pytest.raises(ValueError, match=why):
        config_of(episode)


def test_the_word_and_a_function_of_the_same_name_are_refused():
    with pytest.raises(PluginError, match="same name"):
        ToolEpisode([python_tool(), python_tool()])


async def test_a_host_that_cannot_isolate_is_refused_at_the_start(monkeypatch, tmp_path):
    """By the check before the start, and by the process that would play the episodes."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("streamrl.sandbox.sandbox._START", 'print(\'{"error": "not permitted"}\')')
    with pytest.raises(ConfigError, match="programs cannot be isolated here") as caught:
        await asyncio.to_thread(check_episode, configured())
    assert caught.value.exit_code == 78
    assert "not permitted" in caught.value.message
    with pytest.raises(ConfigError, match="programs cannot be isolated here"):
        await played(episode_of(configured()), configured())


async def test_an_interpreter_that_does_not_run_is_refused_at_the_start(tmp_path):
    settings = {"python": str(tmp_path / "no" / "bin" / "python")}
    with pytest.raises(ConfigError, match="does not run"):
        await asyncio.to_thread(check_episode, configured(run_python=settings))
