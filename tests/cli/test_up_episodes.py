"""A whole small run of episodes: a model that calls a tool, and a reward of the episode itself."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import orjson
import pytest

from tests.waits import until

from .episodes_kit import audited, write_prompts
from .run_kit import data_of, process

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ENVIRONMENT = '''
import asyncio
import re
from pathlib import Path

METRICS = Path(__file__).parent / "runs/episodes/metrics/rollout.0.jsonl"


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
        # the replica counts its episodes once a second: the first ones go on until it has
        while not (METRICS.exists() and re.search(r'"episodes":[1-9]', METRICS.read_text())):
            await asyncio.sleep(0.05)
        return float(self.total)
'''


def test_a_run_of_episodes_with_a_tool_loses_nothing(tmp_path: Path):
    write_prompts(tmp_path / "held_out.jsonl")
    (tmp_path / "counter.py").write_text(ENVIRONMENT)
    settings = {
        "data": {"held_out": "held_out.jsonl"},
        "sampling": {"group_size": 4, "max_new_tokens": 16},
        "episode": {"environment": "counter:Counter", "max_turns": 4, "concurrent": 24},
        "learner": {"groups_per_step": 4, "steps": 3},
        "evaluation": {"every": 1, "prompts": 4, "final_prompts": 8},
    }
    data = audited(tmp_path, settings, "episodes")
    assert (data["trained"], data["lost"], data["twice"]) == (12, 0, 0)
    learner, rollout = (
        lines_of(tmp_path / "runs/episodes/metrics" / f"{role}.0.jsonl") for role in ("learner", "rollout")
    )
    assert any(line.get("reward_mean", 0) > 0 for line in learner), learner[-1]
    assert max(line["episodes"] for line in rollout) > 0


BLOCKING = '''
import time
from pathlib import Path


class Counter:
    def reset(self, **row):
        return ""

    async def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        while not (Path(__file__).parent / "gate").exists():
            time.sleep(0.01)
        return a + b

    def get_reward(self):
        return 1.0
'''


def test_a_tool_that_holds_its_replica_is_named_by_status_and_the_run_goes_on(tmp_path: Path):
    from tests.producers.episodes.episode_kit import ADD

    (tmp_path / "counter.py").write_text(BLOCKING)
    settings = {
        "sampling": {"group_size": 2, "max_new_tokens": 16},
        "episode": {"environment": "counter:Counter", "max_turns": 4},
        "learner": {"groups_per_step": 2, "steps": 2},
        "lease": {"seconds": 3},
    }

    def shown() -> dict[str, str]:
        done = process("status", "--run", str(tmp_path / "runs/held"), "--json")
        roles = data_of(done.stdout, "streamrl.status/1")["roles"] if done.stdout else []
        return next((role for role in roles if role["name"] == "rollout.0" and role["state"] == "blocked"), {})

    with ThreadPoolExecutor(1) as runs:
        ending = runs.submit(audited, tmp_path, settings, "held", calls=[ADD], ends=False)
        try:
            held = until(lambda: shown() or ending.done(), "a replica that is held", 120)
        finally:
            (tmp_path / "gate").touch()
        data = ending.result()
    assert re.search(r"counter\.py:1[23] in add$", held["trouble"])
    assert (data["trained"], data["lost"], data["twice"]) == (4, 0, 0)


def lines_of(file: Path) -> list[dict[str, float]]:
    return [orjson.loads(line) for line in file.read_bytes().splitlines()]
