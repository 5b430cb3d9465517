"""Runs with a real Redis, a real tokenizer and a real tiny model."""

import sys
from pathlib import Path

import pytest

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
