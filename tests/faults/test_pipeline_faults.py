"""Faults of Redis and of its contents under a whole run: every role lives, nothing is lost, and the log says it."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from streamrl.producers.dataset import PromptLimits
from streamrl.producers.feeder import train_fingerprint
from streamrl.producers.order import TrainingPrompts
from streamrl.producers.tokenizer import Tokenizer
from streamrl.queues import connection, embedded, replies
from tests.faults.pipeline import Pipeline, errors
from tests.needs import need_programs
from tests.producers.producer_kit import Hands, Run, payload, until
from tests.redis_kit import RedisRun


async def test_redis_runs_full_and_gets_room_again(run, caplog):
    """Feeder and replica wait, the reward worker and the learner drain what is there, and then all goes on."""
    pipeline = Pipeline(run)
    async with pipeline.running(), run.open() as ledgers:
        train, read = ledgers.train, ledgers.connection.read
        await pipeline.until_step(train, 4)
        await read("CONFIG", "SET", "maxmemory", "1")
        full_at = (await train.state()).cursor

        async def drained() -> bool:
            state = await train.state()
            waiting = await read("XLEN", train.keys.rollouts)
            untrained = len(await train.closed()) - state.unretired
            return waiting == 0 and untrained < run.config.learner.groups_per_step and state.live > 0

        await until(lambda: "redis refuses writes for now" in caplog.text)
        await until(drained)
        version = (await train.state()).version
        assert (await train.state()).cursor == full_at  # nothing was admitted without room
        assert pipeline.alive()
        await read("CONFIG", "SET", "maxmemory", "0")
        await pipeline.until_step(train, version + 1)
        found = await pipeline.end()
    assert (found.trained, found.dead, found.dropped) == (pipeline.prompts, 0, 0)
    assert "raise redis.maxmemory" in next(record.hint for record in caplog.records if hasattr(record, "hint"))
    assert not errors(caplog)


async def admit_by_hand(run, ledger, group_id: int, prompt: bytes | None = None) -> None:
    """Admit what the feeder would admit at this cursor, perhaps with other bytes."""
    config = run.config
    data = TrainingPrompts(config, Tokenizer.load(config.model), PromptLimits(16, 64))
    await ledger.admit(
        cursor=group_id, fingerprint=train_fingerprint(config, data), samples=4, min_group=1, budget=100, hard_cap=100,
        max_dead=100, version=0,
        prompt=data.prompt(group_id) if prompt is None else prompt,
    )  # fmt: skip


async def test_bytes_of_others_wherever_bytes_can_be(run, caplog):
    """Prompt, response, score, manifest, and entries of every stream: dead letters or removed, and the run goes on."""
    pipeline = Pipeline(run)
    async with run.open() as ledgers:
        train, read = ledgers.train, ledgers.connection.read
        streams = [getattr(ledgers.train.keys, name) for name in ("prompts", "rollouts", "scored", "dead", "weights")]
        streams += [getattr(ledgers.evaluation.keys, name) for name in ("prompts", "rollouts")]
        await admit_by_hand(run, train, 0, b"\xc1 no prompt")
        for group_id in (1, 2):
            await admit_by_hand(run, train, group_id)
        leases = await Hands(train).lease(train.keys.prompts)
        await train.emit(leases[1], 0, payload(0)[:-3])
        await train.emit(leases[2], 0, payload(0))
        for lease in await Hands(train).lease(train.keys.rollouts):
            if lease.group_id == 2:
                await train.score(lease, b"0.5")
        await read("XADD", ledgers.train.keys.weights, "*", "v", "0", "m", "no manifest")
        for stream in streams:
            await read("XADD", stream, "*", "hello", "\xff")
            await read("XADD", stream, "*", "g", "one", "a", "1", "k", "x", "v", "new", "m", "m", "why", "w")
        async with pipeline.running():
            await pipeline.until_step(train, 3)
            for stream in streams:
                await read("XADD", stream, "*", b"\xff", b"\x00")
            found = await pipeline.end()
        letters = {(letter.group_id, letter.sample): letter for letter in await train.dead_letters()}
        whole = {group_id: letter for (group_id, sample), letter in letters.items() if sample is None}
        assert set(letters) == {(0, None), *((0, k) for k in range(4)), (1, 0), (2, None)}
        assert {letters[0, k].why for k in range(4)} == {"not a prompt"}
        assert "wire: not a sample" in letters[1, 0].why
        assert "group 2 cannot be trained: not a score" in whole[2].why
        left = [entry for stream in streams for entry in replies.entries(await read("XRANGE", stream, "-", "+"))]
        assert not [entry for entry, fields in left if b"\xff" in fields or b"hello" in fields]
    assert (found.trained, found.dead) == (pipeline.prompts - 2, 2)
    assert errors(caplog)["removed a foreign entry"] >= 2 * len(streams)  # and some by the learner


@pytest.fixture
def clock(tmp_path: Path):
    """A Redis whose wall clock can be shifted: yields (server, set the shift in seconds)."""
    need_programs("cc", "redis-server")  # the server of the system is linked dynamically
    program = shutil.which("redis-server")
    library = tmp_path / "clock.so"
    source = Path(__file__).parent / "clock.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    offset = tmp_path / "offset"
    offset.write_bytes(struct.pack("<q", 0))
    server = tmp_path / "redis-server"
    server.write_text(f'#!/bin/sh\nLD_PRELOAD={library} CLOCK_OFFSET_FILE={offset} exec {program} "$@"\n')
    server.chmod(0o755)

    def shift(seconds: int) -> None:
        with offset.open("r+b") as file:
            file.write(struct.pack("<q", seconds))

    return embedded.inspect_server(server), shift


async def test_the_clock_of_redis_jumps(clock, tiny_dir, tmp_path, monkeypatch, caplog):
    """An hour ahead every lease is expired at once; two hours back entries get ids below those that are there."""
    monkeypatch.setattr(connection, "ROUND_TRIP", 2.0)  # a blocking read that began before the jump back ends then
    server, shift = clock
    redis = RedisRun(tmp_path / "run", server)
    redis.start()
    try:
        pipeline = Pipeline(Run(redis, tiny_dir, tmp_path), prompts=32)
        async with pipeline.running(), pipeline.run.open() as ledgers:

            async def seconds() -> int:
                return int((await ledgers.connection.read("TIME"))[0])

            before = await seconds()
            await pipeline.until_step(ledgers.train, 3)
            shift(3600)
            assert await seconds() >= before + 3600
            await pipeline.until_step(ledgers.train, 7)
            shift(-3600)
            assert await seconds() < before
            found = await pipeline.end()
    finally:
        redis.kill()
    assert (found.trained, found.dead, found.dropped) == (32, 0, 0)
    assert not errors(caplog)
