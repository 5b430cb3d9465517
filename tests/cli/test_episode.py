"""`streamrl episode test`: the turns of one episode, and what the user's code did wrong."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
import yaml

from .run_kit import cli, data_of

CODE = '''
from streamrl.producers.episodes.episode import Episode
from streamrl.producers.episodes.rendering import Reply, ToolCall


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return {}[a] + b


class Agent(Episode):
    async def run(self, task, chat):
        reply = await chat(task.messages, tools=[add])
        chat.reward(0.5)
        calls = ToolCall("1", "add", {"a": 1, "b": 2}, "ok", ""), ToolCall("2", "subtract", {}, "ok", "")
        answers = await chat.answer(Reply("", calls=calls))
        await chat([*task.messages, reply.message, *answers, {"role": "user", "content": "and now?"}])
        return float(task.answer)


def is_one(sample):
    return float(sample.prompt.answer == "1")


class Broken(Episode):
    async def run(self, task, chat):
        await chat(task.messages)
        return task.metadata["absent"]


class Environment:
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    def get_reward(self):
        return 0.25
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run file, tasks, user code, and a model that calls `add` or says that it is three."""
    from tests.producers.episodes.episode_kit import save_talker

    folder = tmp_path_factory.mktemp("episodes")
    save_talker(folder / "model")
    lines = (orjson.dumps({"messages": [{"role": "user", "content": f"{n}?"}], "answer": str(n)}) for n in range(3))
    (folder / "tasks.jsonl").write_bytes(b"\n".join(lines))
    (folder / "my_agent.py").write_text(CODE)
    settings = {
        "model": {"path": "model", "context": 1024},
        "sampling": {"max_new_tokens": 16},
        "engine": {"slots": 4, "threads": 1},
        "rewards": [{"use": "episode"}, {"use": "my_agent:is_one", "weight": 0.5}],
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    return folder


def test_the_turns_of_an_episode_are_shown_with_their_rewards_and_tools(folder: Path):
    asked = ("episode", "test", "my_agent:Agent", "--task", "tasks.jsonl", "--limit", "2")
    done = cli(*asked, "--json", cwd=folder)
    assert done.returncode == 0, done
    data = data_of(done.stdout, "streamrl.episode.test/1")
    assert data["failed"] == 0
    assert [(each["line"], each["score"], each["run_score"], each["stop"]) for each in data["episodes"]] == [
        (0, 0.0, 0.0, "completed"),
        (1, 1.0, 1.5, "completed"),
    ]
    assert [each["run_parts"] for each in data["episodes"]] == [
        {"episode": 0.0, "my_agent:is_one": 0.0},
        {"episode": 1.0, "my_agent:is_one": 1.0},
    ]
    for each in data["episodes"]:
        first, said, answered, last = each["turns"]
        assert (first["parent"], said["parent"], answered["parent"], last["parent"]) == (-2, 0, 1, 2)
        assert [turn["sampled"] for turn in each["turns"]] == [False, True, False, True]
        assert (said["reward"], last["reward"], said["versions"]) == (0.5, None, [0])
        assert "and now?" in answered["text"]
        assert [(use["name"], use["outcome"]) for use in answered["tools"]] == [
            ("add", "error"),
            ("subtract", "unknown"),
        ]
        [error] = each["tool_errors"]
        assert error.splitlines()[-1] == "KeyError: 1"
        assert "my_agent.py" in error
    shown = cli(*asked, cwd=folder)
    assert shown.returncode == 0
    for text in (
        "line 1: played, score 1.5, own score 1",
        "tool add: error",
        "tool subtract: unknown",
        "KeyError: 1",
        "2 played, 0 failed",
    ):
        assert text in shown.stdout


def test_an_error_of_the_users_code_is_shown_with_its_traceback(folder: Path):
    done = cli("episode", "test", "my_agent:Broken", "--task", "tasks.jsonl", cwd=folder)
    assert done.returncode == 1
    assert "line 0: failed: episode Broken failed: KeyError: 'absent'" in done.stdout
    assert 'return task.metadata["absent"]' in done.stdout
    assert "0 played, 1 failed" in done.stdout
    assert "Traceback" not in done.stderr


def test_environments_and_tools_are_played_as_they_are(folder: Path):
    for use, score in (("my_agent:Environment", 0.25), ("my_agent:add", None)):
        done = cli("episode", "test", use, "--task", "tasks.jsonl", "--json", cwd=folder)
        assert ("gave itself no score" in done.stdout) == (score is None)
        [played] = data_of(done.stdout, "streamrl.episode.test/1")["episodes"]
        assert played["score"] == score or played["stop"] != "completed"
        assert played["turns"][1]["role"] == "assistant"


AGENT = """
import json, os, sys, urllib.request
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
body = json.dumps({"messages": json.load(open(os.environ["STREAMRL_TASK"]))["messages"]}).encode()
urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers))
sys.exit("I cannot read this")
"""


def test_an_agent_that_fails_is_shown_with_what_it_printed_and_scored_by_the_rewards(folder: Path):
    (folder / "fails.py").write_text(AGENT)
    agent = ("--set", "episode.agent.command=[python, fails.py]", "--task", "tasks.jsonl")
    done = cli("episode", "test", *agent, "--set", "rewards=[{use: my_agent:is_one}]", cwd=folder)
    assert done.returncode == 1, done
    for text in (
        "line 0: played, score 0",
        "ended: agent_failed",
        "an agent failed: the agent python ended (exit 1)",
    ):
        assert text in done.stdout
    assert "I cannot read this" in done.stdout
    assert "1 played, 0 failed, the agent of 1 failed" in done.stdout
    unscored = cli("episode", "test", *agent, cwd=folder).stdout
    assert "failed: no score: DataError: the agent of line 0 of the data set failed and posted no score" in unscored


def test_rewards_that_cannot_be_opened_here_are_a_warning(folder: Path):
    rewards = ("--set", "rewards=[{use: my_agent:is_two}]")
    done = cli("episode", "test", "my_agent:Agent", "--task", "tasks.jsonl", *rewards, cwd=folder)
    assert "warning: the rewards of the run are not applied: " in done.stderr
    assert "line 0: played, own score 0," in done.stdout


def test_the_built_in_tool_is_played_by_its_name(tmp_path: Path, folder: Path):
    from tests.producers.episodes.episode_kit import save_talker
    from tests.sandbox.sandboxes import need

    need("auto")
    save_talker(tmp_path / "model", calls=['{"name": "run_python", "arguments": {"code": "print(6 * 7)"}}'])
    asked = ("--task", str(folder / "tasks.jsonl"), "--file", str(folder / "run.yaml"), "--limit", "3", "--json")
    model = ("--set", f"model.path={tmp_path / 'model'}")
    done = cli("episode", "test", "run_python", *asked, *model, cwd=folder)
    turns = [turn for each in data_of(done.stdout, "streamrl.episode.test/1")["episodes"] for turn in each["turns"]]
    answers = [turn for turn in turns if turn["role"] == "tool"]
    assert answers
    assert all("42" in turn["text"] and turn["tools"][0]["outcome"] == "ok" for turn in answers)


def test_nothing_to_test_is_a_wrong_command_line(folder: Path):
    assert cli("episode", "test", "--task", "tasks.jsonl", cwd=folder).returncode == 2
    absent = cli("episode", "test", "my_agent:Agnt", "--task", "tasks.jsonl", cwd=folder)
    assert absent.returncode == 78
    assert "did you mean Agent?" in absent.stderr
