"""Versions of a learner of two processes: rank 0 gathers the weights and writes them."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest
import torch
from leader_kit import DEADLINE

from streamrl.learner.checkpoint_files import open_shards
from streamrl.queues.ledgers import open_ledgers
from streamrl.weight_sync.files import make_token
from streamrl.weight_sync.follower import Follower
from streamrl.weight_sync.manifest import versions
from streamrl.weight_sync.tensors import map_version
from tests.weight_sync.sync_kit import rebuilt


def start(run, meeting, faults=(None, None)):
    environ = {"WORLD_SIZE": "2", "STREAMRL_RENDEZVOUS": f"file://{meeting}"}
    return [
        run.start(fault, name=f"learner.{rank}", environ={**environ, "RANK": str(rank)})
        for rank, fault in enumerate(faults)
    ]


def trained(run) -> dict[str, torch.Tensor]:
    """The weights of the newest checkpoint, put together from the shards of both ranks."""
    folder = run.run_dir / "checkpoints" / f"ckpt-{run.newest().name}"
    prefix = "actor/weight/"
    with open_shards(folder, 2) as shards:
        return {name.removeprefix(prefix): shards.read(name) for name in shards.names if name.startswith(prefix)}


@pytest.mark.parametrize("delta", [False, True])
async def test_the_newest_version_is_what_the_checkpoint_holds(run, tmp_path, delta):
    weights = {"dtype": "bfloat16", "delta": {"enabled": delta, "every": 3, "max_density": 1.0}}
    run.configure(ranks=2, steps=4, lr=1e-5, weights=weights)
    async with run.play():
        for pid in start(run, tmp_path / "meet"):
            assert await run.wait(pid) == 0, run.log() + run.log("learner.1")
    root = run.run_dir / "weights"
    found = versions(root)
    assert max(found) == (1, 5)
    kinds = {pair[1]: manifest.base for pair, manifest in found.items()}
    assert kinds == ({4: None, 5: (1, 4)} if delta else {4: None, 5: None})
    tensors = await rebuilt(root, tmp_path, (1, 5))
    expected = trained(run)
    assert set(tensors) == set(expected)
    assert all(torch.equal(tensors[name], tensor.bfloat16()) for name, tensor in expected.items())
    last = run.steps()[-1]
    assert last["published"] in {4, 5}
    assert last["publish_bytes"] > 0
    assert 0 <= last["snapshot_seconds"] < last["publish_seconds"] + 1
    assert last["publish_kind"] in {"full", "delta"}
    assert not delta or any((line["publish_density"] or 0) > 0 for line in run.steps())


@pytest.mark.parametrize(
    "faults",
    [
        (None, "streamrl.learner.weight_copy:_gather:before:2"),
        ("streamrl.weight_sync.publisher:write_tensors:after:2", None),
    ],
    ids=["gathers", "writes"],
)
async def test_a_rank_that_dies_while_a_version_is_made_ends_the_learner_and_leaves_no_half_version(
    run, tmp_path, faults
):
    run.configure(ranks=2, steps=4)
    async with run.play():
        pids = start(run, tmp_path / "meet-0", faults)
        first, second = pids if faults[0] is None else pids[::-1]
        assert await run.wait(second) == -signal.SIGKILL
        began = time.monotonic()
        assert await run.wait(first) in {69, 75}, run.log()
        assert time.monotonic() - began < run.config.weights.deadline / 2
        for manifest in versions(run.run_dir / "weights").values():
            map_version(run.run_dir / "weights" / manifest.folder, manifest)
        for pid in start(run, tmp_path / "meet-1"):
            assert await run.wait(pid) == 0, run.log() + run.log("learner.1")
    assert (await run.audit()).trained == 16
    assert [entry.name for entry in (run.run_dir / "weights").iterdir() if entry.name.startswith(".")] == []


async def test_weights_that_are_not_finite_end_the_run_and_no_engine_gets_them(run):
    run.configure(steps=4, lr=1e39)
    async with run.play():
        assert await run.wait(run.start()) == 78
    assert "not finite: the training has diverged" in run.log()
    assert set(versions(run.run_dir / "weights")) == {(1, 1)}


async def test_weights_that_no_engine_takes_are_published_whole_again(run):
    """Their files may be damaged, and engines that stay behind generate nothing that would make another version."""
    config = run.configure(steps=None, weights={"deadline": 0.5, "delta": {"enabled": True}})
    root = run.run_dir / "weights"
    async with open_ledgers(config, run.run_dir) as ledgers:
        pid = run.start()
        async with asyncio.timeout(DEADLINE):
            while max(versions(root), default=(0, 0)) < (1, 2):
                await ledgers.roles.beat("rollout.0", {"version": 0}, 5.0)
                await asyncio.sleep(0.05)
        assert [manifest.base for manifest in versions(root).values()] == [None, None]
        os.kill(pid, signal.SIGTERM)
        assert await run.wait(pid) == 0, run.log()


async def test_a_learner_serves_its_versions_over_http(run):
    """From the learner's process to a follower that sees nothing of its files."""
    config = run.configure(steps=None, weights={"transport": "http"})
    make_token(run.run_dir)  # as `streamrl up` does before any role starts
    applied: dict[int, set[str]] = {}

    async def apply(version) -> None:
        applied[version.number] = set(version.tensors)

    async with run.play(), open_ledgers(config, run.run_dir) as ledgers:
        pid = run.start()
        follower = Follower(ledgers.weights, config.weights, apply, run=config.name, run_dir=run.run_dir)
        stop = asyncio.Event()
        following = asyncio.create_task(follower.run(stop))
        await run.until(lambda: max(applied, default=0) >= 2)  # one that was trained; some are skipped
        stop.set()
        await asyncio.wait_for(following, 30)
        os.kill(pid, signal.SIGTERM)
        assert await run.wait(pid) == 0, run.log()
    assert follower.traffic.bytes > 0
    assert len({frozenset(names) for names in applied.values()}) == 1
