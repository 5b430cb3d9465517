"""`streamrl clean`, and what a start of the run removes by itself."""

import asyncio
import os
from pathlib import Path

import pytest

from streamrl.queues import open_ledgers
from streamrl.runfile import read_saved
from streamrl.runtime.launch import supervisor_lock
from streamrl.weight_sync.files import release_memory, shm_store
from tests.cli.run_kit import cli, data_of, make_run
from tests.runtime.test_supervisor import Run, unit


@pytest.fixture
def littered(tmp_path: Path):
    """A stopped run whose processes were killed in the middle of everything, and what is left of them."""
    run_dir = tmp_path / "run"
    make_run(run_dir)
    memory = shm_store(run_dir).root
    left = [
        run_dir / "redis" / "temp-rewriteaof-4711.aof",
        run_dir / "redis" / "temp-rewriteaof-bg-4711.aof",
        run_dir / "redis" / "temp-4711.rdb",
        run_dir / "redis" / "appendonlydir" / "temp-appendonly.aof.manifest.aof",
        run_dir / "rendezvous" / "0123456789abcdef",
        memory / "e1-v7" / "model.safetensors",
        memory.with_name(f"{memory.name}-spool-rollout.3") / "model.safetensors",
    ]
    kept = [run_dir / "redis" / "appendonly.aof", run_dir / "checkpoints" / "ckpt-1-2" / "meta.json"]
    for file in (*left, *kept):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"bytes")
    yield run_dir, left, kept
    release_memory(run_dir)


def test_what_killed_processes_left_is_removed_and_listed(littered):
    run_dir, left, kept = littered
    removed = data_of(cli("clean", "--run", str(run_dir), "--json").stdout, "streamrl.clean/1")["removed"]
    assert len(removed) == len(left)
    assert not any(file.exists() for file in left)
    assert all(file.exists() for file in kept)
    again = cli("clean", "--run", str(run_dir))
    assert (again.returncode, again.stdout) == (0, f"nothing to remove in {run_dir}\n")


def test_a_running_run_is_left_alone(littered):
    run_dir, left, _ = littered
    with supervisor_lock(run_dir):
        done = cli("clean", "--run", str(run_dir))
    assert done.returncode == 78
    assert f"supervised by process {os.getpid()}" in done.stderr
    assert all(file.exists() for file in left)


async def test_roles_that_nobody_supervises_here_keep_what_they_use(live_run: Path):
    weights = shm_store(live_run).root / "e1-v7" / "model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"bytes")
    try:
        async with open_ledgers(read_saved(live_run / "run.json").config, live_run) as ledgers:
            await ledgers.roles.beat("rollout.0", {"state": "ready"}, 60)
            done = await asyncio.to_thread(cli, "clean", "--run", str(live_run))
        assert done.returncode == 78
        assert "roles of the run are alive: reward.0, rollout.0" in done.stderr
        assert weights.exists()
    finally:
        release_memory(live_run)


async def test_a_start_sweeps_first(littered):
    run_dir, left, kept = littered
    async with Run(run_dir, unit(run_dir, "reward.0", "ready", "serve")) as run:
        await run.until(run.all_ready)
        assert not any(file.exists() for file in left)
        assert all(file.exists() for file in kept)
