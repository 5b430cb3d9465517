"""A whole small run whose episodes are played by a program with nothing but HTTP."""

from __future__ import annotations

import sys
from pathlib import Path

import orjson
import pytest

from .episodes_kit import audited

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
    from tests.producers.episodes.episode_kit import ADD

    (tmp_path / "agent.py").write_text(AGENT)
    settings = {
        "sampling": {"group_size": 2, "max_new_tokens": 16},
        "episode": {"agent": {"command": [sys.executable, "agent.py"]}, "max_turns": 4, "concurrent": 4},
        "learner": {"groups_per_step": 2, "steps": 2},
    }
    data = audited(tmp_path, settings, "agents", calls=[ADD])
    assert (data["trained"], data["lost"], data["twice"]) == (4, 0, 0)
    learner = (tmp_path / "runs/agents/metrics/learner.0.jsonl").read_bytes().splitlines()
    assert any(orjson.loads(line).get("reward_mean", 0) > 0 for line in learner)
    assert "sk-streamrl" not in "".join(file.read_text() for file in (tmp_path / "runs/agents").rglob("*.log"))
