import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from streamrl.consumers.sandbox import Sandbox
from streamrl.consumers.sandbox.sandbox import own_folder, sweep
from tests.consumers.sandboxes import SPACIOUS

HOLDS = """
import sys, time
from streamrl.consumers.sandbox.sandbox import own_folder
with own_folder("streamrl-test-") as folder:
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def grown_old(folder):
    os.utime(folder, (0, 0))


def test_what_a_killed_process_left_is_swept_and_nothing_else(temporary):
    options = {"env": {**os.environ, "TMPDIR": str(temporary)}, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLDS], **options) as process:
        folder = Path(process.stdout.readline().strip())
        assert folder.parent == temporary
        grown_old(folder)
        sweep("streamrl-test-")
        assert folder.exists(), "its process lives"
        process.send_signal(signal.SIGKILL)
    young, other = temporary / "streamrl-test-young", temporary / "mine"
    young.mkdir()
    other.mkdir()
    (temporary / "streamrl-test-link").symlink_to(other)
    (folder / "deep").mkdir()
    grown_old(folder)
    sweep("streamrl-test-")
    assert sorted(path.name for path in temporary.iterdir()) == ["mine", "streamrl-test-link", "streamrl-test-young"]


def test_a_directory_is_gone_at_the_end(temporary):
    with own_folder("streamrl-test-") as folder:
        (Path(folder) / "file").touch()
    assert list(temporary.iterdir()) == []


async def test_the_sandbox_sweeps_when_it_opens(temporary):
    left = temporary / "streamrl-code-left"
    left.mkdir()
    grown_old(left)
    await Sandbox(SPACIOUS, network=True, isolation="none").open()
    assert list(temporary.iterdir()) == []
