"""Runs on a file system that cannot be written: commands that look read them, those that change something say why not.

As root the run's directory is mounted read-only in a mount namespace of the command's own; otherwise its permissions
are taken away.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamrl.queues.embedded import socket_path
from tests.needs import missing, need_programs
from tests.redis_kit import RedisRun

from .run_kit import make_run

MOUNT = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'


@pytest.fixture
def frozen(stopped_run: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of a stopped run without its checkpoints folder, that the commands of `read_only` cannot write."""
    run_dir = tmp_path / "frozen"
    shutil.copytree(stopped_run, run_dir, ignore=shutil.ignore_patterns("*.sock", "checkpoints"))
    (run_dir / "logs").mkdir()
    if os.geteuid() != 0:
        for path in [run_dir, *run_dir.rglob("*")]:
            path.chmod(0o500 if path.is_dir() else 0o400)
    yield run_dir
    for path in [run_dir, *run_dir.rglob("*")]:
        path.chmod(0o700 if path.is_dir() else 0o600)


def read_only(run_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """One command that sees the run's directory read-only."""
    command = [sys.executable, "-m", "streamrl", *arguments, "--run", str(run_dir)]
    if os.geteuid() == 0:
        need_programs("unshare", "mount")
        command = ["unshare", "-m", "sh", "-c", MOUNT, str(run_dir), *command]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    if "mount: " in done.stderr or "unshare: " in done.stderr:
        missing(f"cannot mount here: {done.stderr}")
    return done


def contents(run_dir: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in run_dir.rglob("*")}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("audit",), "nothing lost, nothing trained twice"),
        (("trace", "0"), "group 0: closed"),
        (("trace", "0"), "score 1"),
        (("dead", "ls"), "too long for the engine"),
        (("lag",), "admitted 5"),
        (("logs",), ""),
        (("weights", "ls"), ""),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_stopped_run_is_looked_at_and_nothing_is_written(frozen: Path, arguments: tuple[str, ...], says: str):
    before = contents(frozen)
    done = read_only(frozen, *arguments)
    assert (done.returncode, says in done.stdout) == (0, True), done
    assert contents(frozen) == before


def test_a_command_that_changes_something_says_that_it_cannot(frozen: Path):
    done = read_only(frozen, "dead", "replay", "all")
    assert done.returncode == 73
    assert "users.lock: Read-only file system" in done.stderr or "Permission denied" in done.stderr


@pytest.mark.parametrize("command", [("audit",), ("lag",)])
def test_a_server_that_is_running_is_asked(frozen: Path, command: tuple[str, ...]):
    """Its data is newer than what lies in the files."""
    if os.geteuid() != 0:
        missing("another process has to write what this one only sees")
    redis = RedisRun(frozen)
    redis.start()
    try:
        assert socket_path(frozen).exists()
        make_run(frozen)
        assert read_only(frozen, *command).returncode == 0
    finally:
        redis.kill()
