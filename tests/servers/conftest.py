"""Servers that are toys, and what they share with the tests of the rollout workers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# tests are imported by path (importlib mode); what they share lies next to them
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "producers"))

from producer_kit import Run, save_tokenizer, tiny_model

from streamrl import http


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
def short_pauses(monkeypatch):
    """Between two attempts of a call."""
    monkeypatch.setattr(http, "_FIRST_PAUSE", 0.01)
