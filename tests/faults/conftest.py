"""A run on a real Redis with a real tiny model, as in tests/producers."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.producers.producer_kit import Run, save_tokenizer, tiny_model


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    save_tokenizer(folder)
    tiny_model().save_pretrained(folder)
    return folder


@pytest.fixture
def run(redis_run, tiny_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    torch.set_num_threads(1)
    return Run(redis_run, tiny_dir, tmp_path)
