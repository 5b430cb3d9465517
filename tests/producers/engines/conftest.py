"""Model directories and started engines."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

# tests are imported by path (importlib mode); what they share lies next to them
sys.path.insert(0, str(Path(__file__).parent))

from engine_kit import engine_config, random_model

from streamrl.producers.engines.hf import HfEngine


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Directory of a model with random weights; `stops=False` leaves it without an end-of-sequence token."""
    made: dict[tuple[str, bool], Path] = {}

    def make(kind: str, stops: bool = True) -> Path:
        if (kind, stops) not in made:
            folder = tmp_path_factory.mktemp(kind)
            model = random_model(kind, 0)
            if not stops:
                model.config.eos_token_id = model.generation_config.eos_token_id = None
            model.save_pretrained(folder)
            made[kind, stops] = folder
        return made[kind, stops]

    return make


@pytest.fixture
async def start(model_dir: Callable[..., Path]) -> AsyncIterator[Callable[..., Any]]:
    """Start engines; they are closed after the test."""
    engines: list[HfEngine] = []

    async def start_engine(kind: str = "qwen2", stops: bool = False, **engine: Any) -> HfEngine:
        made = HfEngine(engine_config(model_dir(kind, stops), **engine), seed=7)
        engines.append(made)
        await made.start()
        return made

    yield start_engine
    for engine in engines:
        await engine.close()
