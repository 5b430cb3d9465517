"""Runs with a real Redis, a real tokenizer and a real tiny model."""

import sys
from pathlib import Path

import pytest
import torch

# tests are imported by path (importlib mode); what they share lies next to them
sys.path.insert(0, str(Path(__file__).parent))

from producer_kit import Run, save_tokenizer, tiny_model


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    save_tokenizer(folder)
    tiny_model().save_pretrained(folder)
    return folder


@pytest.fixture
def run(redis_run, tiny_dir, tmp_path):
    return Run(redis_run, tiny_dir, tmp_path)


@pytest.fixture
def small(run):
    """Small enough to be quick, slow enough to be caught in the middle."""
    torch.set_num_threads(1)
    return (
        run.set("engine", slots=4, threads=1).set("sampling", group_size=4, max_new_tokens=12).set("lease", seconds=0.6)
    )
