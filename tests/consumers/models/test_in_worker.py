"""A reward worker with a reward model, on a real Redis: servers fail, die, come and go, and every score is right."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from streamrl import wire
from streamrl.config import RunConfig
from streamrl.consumers.models.rendering import Renderer
from streamrl.consumers.worker import run_reward_worker
from streamrl.queues import Ledger, Ledgers, Role, open_ledgers
from tests.consumers.models.faulty_server import FaultyServer, score_of, servers, serving
from tests.consumers.models.test_rendering import make_tokenizer
from tests.consumers.samples import prompt, response, seen
from tests.queues.ledger_kit import admit, faults, lease, until_async

SAMPLES = 4


def config_of(redis: Any, urls: list[str], model: Path, **worker: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "t",
            "redis": redis.model_dump(),
            "rewards": [{"use": "reward_model", "name": "critic", "args": {"model": "critic"}}],
            "reward_models": {"critic": {"url": urls, "model": str(model)}},
            "reward_worker": {"deadline": 60.0, "backoff": 0.01, "concurrency": 8, **worker},
        }
    )


@contextlib.asynccontextmanager
async def working(config: RunConfig, run_dir: Path) -> AsyncIterator[Ledgers]:
    """A worker in this process."""
    async with open_ledgers(config, run_dir) as ledgers:
        role = Role("reward.0", config, run_dir, ledgers)
        task = asyncio.create_task(run_reward_worker(role))
        try:
            yield ledgers
            role.stop.set()
            await asyncio.wait_for(task, 60)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            role.close()


async def put(ledger: Ledger, gid: int) -> None:
    await admit(ledger, gid, samples=SAMPLES, prompt=wire.encode(prompt()))
    (held,) = await lease(ledger, "prompts")
    for number in range(SAMPLES):
        assert await ledger.emit(held, number, wire.encode(response(f"It is {gid}, {number}.")))


async def closed(ledger: Ledger, gids: range) -> None:
    async def all_are() -> bool:
        return set(gids) <= set(await ledger.closed())

    await until_async(all_are, 100)


async def said(words: str, caplog: pytest.LogCaptureFixture) -> bool:
    return words in caplog.text


async def check(ledger: Ledger, gids: range, model: Path) -> None:
    """Every score is the model's."""
    renderer = Renderer.load(str(model))
    for gid in gids:
        group = await ledger.read_group(gid)
        assert group is not None
        assert not group.causes
        found = {number: wire.decode(score, wire.Score).value for number, (_, score) in group.samples.items()}
        texts = [f"It is {gid}, {number}." for number in range(SAMPLES)]
        assert found == {number: score_of(renderer.ids(seen(text))) for number, text in enumerate(texts)}
    assert await ledger.dead_letters() == []
    assert not await faults(ledger)


async def test_servers_fail_die_come_and_go_and_no_sample_is_lost(redis_run, tmp_path):
    make_tokenizer(tmp_path / "model")
    draw = random.Random(5)
    acts = ["well", "500", "closes", "half", "half json", "nan", "busy", "well"]
    async with contextlib.AsyncExitStack() as stack, contextlib.AsyncExitStack() as mortal:
        moody, added = await stack.enter_async_context(servers([lambda _: draw.choice(acts)], ["well"]))
        dying = await mortal.enter_async_context(serving(FaultyServer()))
        config = config_of(redis_run.config, [moody.url, dying.url], tmp_path / "model")
        ledgers = await stack.enter_async_context(working(config, redis_run.run_dir))
        train, listed = ledgers.train, ledgers.reward_servers
        for gid in range(8):
            await put(train, gid)
        await dying.has(3)
        await mortal.aclose()
        await listed.enlist("critic", added.url, present=True)
        await closed(train, range(8))
        await listed.enlist("critic", moody.url, present=False)
        await listed.enlist("critic", dying.url, present=False)
        gid = 8
        async with asyncio.timeout(100):
            while not added.asked:  # the worker looks at the list every two seconds
                await put(train, gid)
                await closed(train, range(gid, gid + 1))
                gid += 1
        await check(train, range(gid), tmp_path / "model")


async def test_a_run_without_any_server_waits_and_says_so(redis_run, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("streamrl.consumers.models.reward._PROBE_SECONDS", 0.2)
    make_tokenizer(tmp_path / "model")
    one = FaultyServer()
    async with serving(one):
        pass
    config = config_of(redis_run.config, [one.url], tmp_path / "model", deadline=1.0, on_failure="retry")
    async with working(config, redis_run.run_dir) as ledgers:
        await put(ledgers.train, 0)
        await until_async(lambda: said("circuit open: samples wait for this reward", caplog), 60)
        assert await ledgers.train.dead_letters() == []
        async with serving(one):
            await closed(ledgers.train, range(1))
        await check(ledgers.train, range(1), tmp_path / "model")
