"""A whole small run whose episodes are played by a program with nothing but HTTP."""

from __future__ import annotations

import sys
from pathlib import Path

import orjson
import pytest
import yaml

from .run_kit import cli, data_of, process

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
AGENT = """
import json, os, urllib.request

def post(path, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request, timeout=60))

number = {"type": "integer"}
parameters = {"type": "object", "properties": {"a": number, "b": number}}
tools = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": parameters}}]
messages, total = json.load(open(os.environ["STREAMRL_TASK"]))["messages"], 0
for _ in range(3):
    message = post("/chat/completions", {"messages": messages, "tools": tools})["choices"][0]["message"]
    messages.append(message)
    if not message.get("tool_calls"):
        break
    for call in message["tool_calls"]:
        arguments = json.loads(call["function"]["arguments"])
        total += arguments["a"] + arguments["b"]
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(total)})
post("/streamrl/reward", {"reward": total})
"""


def test_a_run_of_an_agent_loses_nothing(tmp_path: Path):
    from tests.producers.episodes.episode_kit import ADD, save_talker

    save_talker(tmp_path / "model", calls=[ADD])
    lines = (orjson.dumps({"messages": [{"role": "user", "content": f"{n}?"}], "answer": "3"}) for n in range(64))
    (tmp_path / "train.jsonl").write_bytes(b"\n".join(lines))
    (tmp_path / "agent.py").write_text(AGENT)
    settings = {
        "name": "agents",
        "model": {"path": "model", "context": 512},
        "data": {"train": "train.jsonl", "max_prompt_tokens": 64},
        "sampling": {"group_size": 2, "max_new_tokens": 16},
        "engine": {"slots": 16, "threads": 1},
        "episode": {
            "agent": {"command": [sys.executable, "agent.py"]},
            "max_turns": 4,
            "concurrent": 4,
            "processes": 1,
        },
        "rewards": [{"use": "episode"}],
        "learner": {"groups_per_step": 2, "steps": 2, "lr": 1e-3, "threads": 1},
        "redis": {"fsync_period": 0.1},
        "weights": {"transport": "directory"},
        "supervisor": {"max_restarts": 0},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    done = process("up", "run.yaml", "--screen", "plain", cwd=tmp_path, seconds=240)
    assert done.returncode == 0, done.stdout + done.stderr
    data = data_of(cli("audit", "--json", cwd=tmp_path).stdout, "streamrl.audit/1")
    assert (data["trained"], data["lost"], data["twice"]) == (4, 0, 0)
    learner = (tmp_path / "runs/agents/metrics/learner.0.jsonl").read_bytes().splitlines()
    assert any(orjson.loads(line).get("reward_mean", 0) > 0 for line in learner)
    assert "sk-streamrl" not in "".join(file.read_text() for file in (tmp_path / "runs/agents").rglob("*.log"))
