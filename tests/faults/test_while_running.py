"""Faults of a running role: weights that are not finite, and a disk that is full."""

from __future__ import annotations

import asyncio
import subprocess

import orjson
import pytest
import torch

from streamrl.producers.replica import run_rollout
from streamrl.queues import open_role
from streamrl.weight_sync import Publisher
from tests.producers.producer_kit import Hands, tiny_model, until


async def test_a_version_that_is_not_finite_is_refused_and_the_old_one_samples_on(run):
    run.set("engine", decode="slots", slots=4, threads=1)
    async with run.open() as ledgers:
        hands = await Hands(ledgers.train).fence()
        publisher = Publisher(run.config.weights, run.config.name, run.run_dir)

        async def publish(version: int, model: torch.nn.Module) -> None:
            tensors = dict(model.named_parameters()).items()
            data = await asyncio.to_thread(publisher.publish, epoch=1, version=version, step=version, tensors=tensors)
            await ledgers.train.consume(hands.nonce, 0, version, data)

        await publish(1, tiny_model())
        broken = tiny_model()
        with torch.no_grad():
            broken.model.norm.weight[0] = float("nan")
        async with run.running(run_rollout, "rollout.0", ledgers) as (role, task):
            await until(lambda: role.is_ready)
            await publish(2, broken)
            await until(lambda: role.status.get("weights_refused") == 1)
            assert (role.status["version"], task.done()) == (1, False)
            await publish(3, tiny_model(3))
            await until(lambda: role.status["version"] == 3)


def command(*words) -> bool:
    return subprocess.run(words, check=False, capture_output=True).returncode == 0


async def test_a_full_disk_costs_figures_and_no_role(run, caplog):
    folder = run.run_dir / "metrics"
    folder.mkdir()
    if not command("mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", folder):
        pytest.skip("mount is not allowed here; tests/queues/test_role.py plays a file that cannot be made")
    try:
        async with open_role("rollout.0", run.config, run.run_dir) as role:
            written = 0
            while "metrics cannot be written" not in caplog.text:
                role.record({"number": written, "filler": "x" * 700})
                written += 1
            role.record({"number": -1})
            assert command("mount", "-o", "remount,size=1m", folder)
            role.record({"number": -2})
        rows = (folder / "rollout.0.jsonl").read_bytes().splitlines()
    finally:
        assert command("umount", "-l", folder)
    found = []
    for row in rows:
        try:
            found.append(orjson.loads(row)["number"])
        except orjson.JSONDecodeError:
            assert row.startswith(b'{"at"')  # the one line that the end of the disk cut off
    assert found[-1] == -2
    assert found[: len(found) - 1] == list(range(len(found) - 1))
    assert len(rows) - len(found) <= 1
