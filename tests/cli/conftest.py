"""Two runs for most tests, one that is stopped and one whose Redis is up; and a run file with all that a run needs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import orjson
import pytest
import yaml

from streamrl.queues import embedded

from .run_kit import fill, filled_and_stopped, make_run


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with five groups and nothing running; tests only read it."""
    run_dir = tmp_path_factory.mktemp("stopped")
    asyncio.run(filled_and_stopped(run_dir))
    return run_dir


@pytest.fixture
async def live_run(tmp_path: Path) -> AsyncIterator[Path]:
    """The same with its Redis up for the length of the test."""
    run_dir = tmp_path / "live"
    config = make_run(run_dir)
    async with embedded.running(config.redis, run_dir):
        await fill(config, run_dir)
        yield run_dir


REWARD = """
import asyncio

def spread(sample):
    return float(len(set(sample.tokens.tolist())) % 2)

async def unhurried(sample):
    await asyncio.sleep(0.5)
    return spread(sample)
"""


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a random model of 50 thousand parameters, prompts, a reward and a run file."""
    from tests.producers.producer_kit import save_tokenizer, tiny_model

    folder = tmp_path_factory.mktemp("tiny")
    save_tokenizer(folder / "model")
    model = tiny_model()
    model.config.eos_token_id = model.generation_config.eos_token_id = 1
    model.save_pretrained(folder / "model")
    lines = b"".join(orjson.dumps({"prompt": f"{n}+{n}=", "answer": str(2 * n)}) + b"\n" for n in range(64))
    (folder / "train.jsonl").write_bytes(lines)
    (folder / "held_out.jsonl").write_bytes(lines)
    (folder / "spread_reward.py").write_text(REWARD)
    settings = {
        "name": "tiny",
        "model": {"path": "model", "context": 64},
        "data": {"train": "train.jsonl", "held_out": "held_out.jsonl", "max_prompt_tokens": 16},
        "sampling": {"group_size": 4, "max_new_tokens": 8},
        "engine": {"slots": 16, "threads": 1},
        "rewards": [{"use": "spread_reward:spread"}],
        "learner": {"groups_per_step": 4, "steps": 3, "lr": 1e-3, "threads": 1},
        "checkpoint": {"every": 2},
        "evaluation": {"every": 1, "prompts": 4, "final_prompts": 16},
        "redis": {"fsync_period": 0.1},
        "weights": {"transport": "directory"},
        "supervisor": {"max_restarts": 0},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    return folder
