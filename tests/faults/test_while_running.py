"""Faults of a running role: a version of nobody, and a disk that is full."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess

import orjson
import pytest
import torch

from streamrl.archive.reader import read_archive
from streamrl.archive.writer import Archive
from streamrl.errors import Unreachable
from streamrl.producers.feeder import run_feeder
from streamrl.producers.worker import run_rollout
from streamrl.queues import open_role
from streamrl.queues.connection import open_connection
from streamrl.weight_sync.publisher import Publisher
from tests.archive_kit import closed, configured
from tests.producers.producer_kit import Hands, tiny_model, until
from tests.redis_kit import RedisRun


def publishing(run, ledgers, hands):
    """A function that publishes a model as a version."""
    publisher = Publisher(run.config.weights, run.config.name, run.run_dir)

    async def publish(version: int, model: torch.nn.Module) -> None:
        tensors = dict(model.named_parameters()).items()
        data = await asyncio.to_thread(publisher.publish, epoch=1, version=version, step=version, tensors=tensors)
        await ledgers.train.finish_step(hands.nonce, 0, version, data)

    return publish


async def test_a_version_that_the_learner_did_not_publish_is_none(run):
    """A replica that took it for the newest would never look at one of the learner's again."""
    run.set("engine", slots=4, threads=1)
    async with run.open() as ledgers:
        hands = await Hands(ledgers.train).fence()
        publish = publishing(run, ledgers, hands)
        await publish(1, tiny_model())
        async with run.running(run_rollout, "rollout.0", ledgers) as (role, _):
            await until(lambda: role.is_ready)
            await ledgers.connection.read("XADD", ledgers.train.keys.weights, "*", "v", 100_000, "m", "x")

            async def seen() -> bool:
                return await ledgers.connection.read("HGET", ledgers.train.keys.state, "foreign") == b"1"

            await until(seen)
            await publish(2, tiny_model(3))
            await until(lambda: role.status["version"] == 2)
            assert role.status["weights_refused"] == 0


@pytest.fixture
def disk(tmp_path):
    """A file system of 16 KiB, and a way to make it larger."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if not command("mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", folder):
        pytest.skip(
            "mount is not allowed here; test_role, test_chain and test_record play files that cannot be written"
        )
    yield folder
    assert command("umount", "-l", folder)


def command(*words) -> bool:
    return subprocess.run(words, check=False, capture_output=True).returncode == 0


def fill(folder) -> None:
    with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 512)


async def test_a_full_disk_costs_figures_and_no_role(run, disk, caplog):
    async with open_role("rollout.0", run.config, disk) as role:
        number = 0
        while "metrics cannot be written" not in caplog.text:
            role.record({"number": number, "filler": "x" * 700})
            number += 1
        role.record({"number": -1})
        assert command("mount", "-o", "remount,size=1m", disk)
        role.record({"number": -2})
    found = []
    rows = (disk / "metrics" / "rollout.0.jsonl").read_bytes().splitlines()
    for row in rows:
        with contextlib.suppress(orjson.JSONDecodeError):  # the one line that the end of the disk cut off
            found.append(orjson.loads(row)["number"])
    assert found == [*range(len(found) - 1), -2]
    assert number - 1 <= len(rows) <= number + 1


async def test_a_full_disk_is_called_so_by_those_who_read_and_write(disk, caplog):
    assert command("mount", "-o", "remount,size=1m", disk)
    redis = RedisRun(disk)
    redis.start()
    try:
        config = redis.config.model_copy(update={"patience": 0.5})
        async with open_connection(config, config.url) as link, open_connection(config, config.url) as reader:
            await link.read("XGROUP", "CREATE", "stream", "group", "0", "MKSTREAM")
            await link.read("XADD", "stream", "*", "field", "x")
            fill(disk)
            with pytest.raises(Unreachable, match=r"did not serve a call for \d+ s: disk is full") as caught:
                while True:
                    await link.read("SET", "key", "x" * 4096)
            assert "make room" in caught.value.hint
            read = ("XREADGROUP", "GROUP", "group", "me", "BLOCK", "10", "STREAMS", "stream", ">")
            assert await reader.block(*read, milliseconds=10) is None
        assert [record.message for record in caplog.records] == ["disk is full: redis refuses writes for now"] * 2
    finally:
        redis.kill()


async def test_a_full_disk_delays_the_evaluation_and_loses_no_group(run, disk, caplog):
    run.evaluate(every=1, prompts=4)
    async with run.open() as ledgers:
        learner, hands = await Hands(ledgers.train).fence(), Hands(ledgers.evaluation)
        role = run.role("feeder.0", ledgers)
        role.run_dir = disk
        fill(disk)
        task = asyncio.create_task(run_feeder(role))
        await ledgers.train.finish_step(learner.nonce, 0, 1, b"{}")
        await until(lambda: "evaluation-round.json" in complaints(caplog))
        assert (await ledgers.evaluation.state()).cursor == 0  # no round begins that nobody would remember
        (disk / "filler").unlink()
        await until(lambda: held_out(ledgers, cursor=4))
        fill(disk)
        await hands.answer()
        await hands.score()
        await until(lambda: "evaluation.jsonl" in complaints(caplog))
        assert (await ledgers.evaluation.state()).live == 4  # they wait in Redis
        assert not task.done()
        (disk / "filler").unlink()
        await until(lambda: held_out(ledgers, cursor=4, live=0))
        role.stop.set()
        await asyncio.wait_for(task, 30)
    lines = [orjson.loads(line) for line in (disk / "evaluation.jsonl").read_bytes().splitlines()]
    assert [line["gid"] for line in lines] == [0, 1, 2, 3]


async def test_a_full_disk_costs_the_archive_groups_that_are_counted(disk, caplog):
    archive = Archive(configured(), disk)
    group_id = 0
    while "the archive cannot be written" not in caplog.text:
        archive.add(closed(group_id))
        await archive.sync()
        group_id += 1
    reading = read_archive(disk)
    assert [group.group_id for group in reading] == list(range(group_id - 1))
    assert command("mount", "-o", "remount,size=1m", disk)
    archive.add(closed(group_id))
    await archive.close()
    assert [group.group_id for group in reading] == [*range(group_id - 1), group_id]
    assert (reading.problems, archive.lost) == ([], 1)


def complaints(caplog) -> str:
    return " ".join(record.file for record in caplog.records if record.msg == "evaluation cannot be written")


async def held_out(ledgers, **expected) -> bool:
    state = await ledgers.evaluation.state()
    return all(getattr(state, name) == value for name, value in expected.items())
