import sys
from pathlib import Path

import pytest

from streamrl.producers.group import pool

# tests are imported by path (importlib mode); what they share lies next to them
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def often_looked_at(monkeypatch):
    """A server that died with nothing to do is found by its health."""
    monkeypatch.setattr(pool, "_LOOK_SECONDS", 0.02)
    monkeypatch.setattr(pool, "_GRACE_SECONDS", 0.2)
