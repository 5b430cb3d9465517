import sys
from pathlib import Path

import pytest
import pytest_asyncio

# tests are imported by path (importlib mode); what they share lies next to them
sys.path.insert(0, str(Path(__file__).parent))
from serve_kit import Versions, serving


@pytest.fixture(scope="module")
def versions():
    return Versions()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory):
    """The server that the tests of a file share; each test brings newer weights than the one before."""
    async with serving(tmp_path_factory.mktemp("served")) as server:
        yield server


@pytest.fixture
def version(versions, tmp_path):
    return lambda seed: versions.make(tmp_path, seed)
