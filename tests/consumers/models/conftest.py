"""What the tests of reward models share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.consumers.models.test_rendering import make_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a reward model."""
    folder = tmp_path_factory.mktemp("model")
    make_tokenizer(folder)
    return folder


@pytest.fixture
def short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewards give up their first question soon, and look at their servers often."""
    monkeypatch.setattr("streamrl.consumers.models.reward_model._PROBE_SECONDS", 0.5)
    monkeypatch.setattr("streamrl.consumers.models.client.LOOK_SECONDS", 0.1)
