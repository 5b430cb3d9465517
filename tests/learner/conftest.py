"""Fixtures of the learner: one rank in this process, and tiny models on disk."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def one_rank() -> Iterator[object]:
    """A learner of a single rank: a real process group of gloo."""
    from streamrl.learner.ranks import Ranks

    ranks = Ranks(rank=0, world=1, device=torch.device("cpu"), deadline=30)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directory of the tiny model of a kind, made once."""
    from tiny_policy import make_model

    folder = tmp_path_factory.mktemp("models")
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            made[kind] = make_model(kind, folder)
        return made[kind]

    return get


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the tiny model of whole runs."""
    from playing import make_model

    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def run(redis_run: object, model: Path) -> Iterator[object]:
    """A run with a player; the test starts its learners, and none of them outlives it."""
    from leader_kit import Run

    made = Run(redis_run, model)
    yield made
    made.kill()
