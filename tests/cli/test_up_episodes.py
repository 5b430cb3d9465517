"""A whole small run of episodes: a model that calls a tool, and a reward of the episode itself."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
import yaml

from .run_kit import cli, data_of, process

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ENVIRONMENT = '''
class Counter:
    """An environment as TRL takes it."""

    def reset(self, answer, **row):
        self.total = 0
        return " Count."

    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        self.total += a + b
        return self.total

    async def get_reward(self):
        return float(self.total)
'''


def test_a_run_of_episodes_with_a_tool_loses_nothing(tmp_path: Path):
    from tests.producers.episodes.episode_kit import save_talker

    save_talker(tmp_path / "model")
    lines = (orjson.dumps({"messages": [{"role": "user", "content": f"{n}?"}], "answer": "3"}) for n in range(64))
    (tmp_path / "train.jsonl").write_bytes(b"\n".join(lines))
    (tmp_path / "held_out.jsonl").write_bytes((tmp_path / "train.jsonl").read_bytes())
    (tmp_path / "counter.py").write_text(ENVIRONMENT)
    settings = {
        "name": "episodes",
        "model": {"path": "model", "context": 512},
        "data": {"train": "train.jsonl", "held_out": "held_out.jsonl", "max_prompt_tokens": 64},
        "sampling": {"group_size": 4, "max_new_tokens": 16},
        "engine": {"slots": 16, "threads": 1},
        "episode": {"environment": "counter:Counter", "max_turns": 4, "concurrent": 24},
        "rewards": [{"use": "episode"}],
        "learner": {"groups_per_step": 4, "steps": 3, "lr": 1e-3, "threads": 1},
        "evaluation": {"every": 1, "prompts": 4, "final_prompts": 8},
        "redis": {"fsync_period": 0.1},
        "weights": {"transport": "directory"},
        "supervisor": {"max_restarts": 0},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    done = process("up", "run.yaml", "--screen", "plain", cwd=tmp_path, seconds=240)
    assert done.returncode == 0, done.stdout + done.stderr
    data = data_of(cli("audit", "--json", cwd=tmp_path).stdout, "streamrl.audit/1")
    assert (data["trained"], data["lost"], data["twice"]) == (12, 0, 0)
    learner, rollout = (
        lines_of(tmp_path / "runs/episodes/metrics" / f"{role}.0.jsonl") for role in ("learner", "rollout")
    )
    assert any(line.get("reward_mean", 0) > 0 for line in learner), learner[-1]
    assert max(line["episodes"] for line in rollout) > 0


def lines_of(file: Path) -> list[dict[str, float]]:
    return [orjson.loads(line) for line in file.read_bytes().splitlines()]
