"""A reward worker with a reward model, on a real Redis: servers fail, die, come and go, and every score is right."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path
from typing import Any

from streamrl.config import RunConfig
from streamrl.consumers.models import client as module
from streamrl.consumers.models import open_models
from streamrl.consumers.models.rendering import Renderer
from streamrl.consumers.worker import run_reward_worker
from streamrl.errors import RewardImpossible, unwrap
from streamrl.queues import Ledger, Role, open_ledgers
from streamrl.queues.reward_servers import RewardServers
from tests.consumers.models.faulty_server import FaultyServer, gone, score_of, servers, serving
from tests.consumers.samples import seen
from tests.consumers.worker_kit import config_of, put, until_closed, values, worker
from tests.queues.ledger_kit import faults, until
from tests.queues.test_reward_servers import beat

SAMPLES = 4


def config_for(redis: Any, urls: list[str], model: Path, **worker: Any) -> RunConfig:
    critic = {"use": "reward_model", "name": "critic", "args": {"model": "critic"}}
    models = {"critic": {"url": urls, "model": str(model)}}
    return config_of(redis, critic, reward_models=models, **{"deadline": 60.0, "attempts": 3, **worker})


def texts(group_id: int) -> list[str]:
    return [f"It is {group_id}, {number}." for number in range(SAMPLES)]


async def check(ledger: Ledger, group_ids: range, model: Path) -> None:
    """Every score is the model's."""
    renderer = Renderer(str(model))
    for group_id in group_ids:
        wanted = {number: score_of(renderer.ids(seen(text))) for number, text in enumerate(texts(group_id))}
        assert await values(ledger, group_id) == wanted
    assert await ledger.dead_letters() == []
    assert not await faults(ledger)


async def test_servers_fail_die_come_and_go_and_no_sample_is_lost(redis_run, tokenizer):
    draw = random.Random(5)
    acts = ["well", "500", "closes", "half", "half json", "nan", "busy", "well"]
    async with contextlib.AsyncExitStack() as stack, contextlib.AsyncExitStack() as mortal:
        moody, added = await stack.enter_async_context(servers([lambda _: draw.choice(acts)], ["well"]))
        dying = await mortal.enter_async_context(serving(FaultyServer()))
        config = config_for(redis_run.config, [moody.url, dying.url], tokenizer)
        ledgers = await stack.enter_async_context(open_ledgers(config, redis_run.run_dir))
        await stack.enter_async_context(worker(config, redis_run.run_dir, ledgers))
        train, listed = ledgers.train, RewardServers(ledgers)
        for group_id in range(8):
            await put(train, group_id, texts(group_id))
        await dying.has(3)
        await mortal.aclose()
        await listed.enlist("critic", added.url, present=True)
        await until_closed(train, range(8), 100)
        await listed.enlist("critic", moody.url, present=False)
        await listed.enlist("critic", dying.url, present=False)
        group_id = 8
        async with asyncio.timeout(100):
            while not added.asked:  # the worker looks at the list every two seconds
                await put(train, group_id, texts(group_id))
                await until_closed(train, [group_id])
                group_id += 1
        await check(train, range(group_id), tokenizer)


async def test_a_run_without_any_server_waits_and_says_so(redis_run, tokenizer, short_looks):
    async with contextlib.AsyncExitStack() as stack:
        one = await stack.enter_async_context(gone())
    config = config_for(redis_run.config, [one.url], tokenizer, deadline=1.0, on_failure="retry")
    async with (
        open_ledgers(config, redis_run.run_dir) as ledgers,
        worker(config, redis_run.run_dir, ledgers) as role,
    ):
        await put(ledgers.train, 0, texts(0))
        await until(lambda: "nobody scores" in str(role.status.get("rewards")))
        assert await ledgers.train.dead_letters() == []
        async with serving(one):
            await until_closed(ledgers.train, [0], 100)
        await check(ledgers.train, range(1), tokenizer)


async def test_servers_that_have_left_redis_are_missed_before_anybody_asks_and_those_that_sleep_are_not(
    redis_run, tokenizer, monkeypatch
):
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.02)
    config = config_for(redis_run.config, [], tokenizer)
    role = "reward_model.critic.0"
    async with (
        open_ledgers(config, redis_run.run_dir) as ledgers,
        servers(["held"]) as (one,),
        open_models(config, ledgers) as models,
    ):
        critic = models["critic"]
        await until(lambda: critic.away == "reward model critic has no server")
        await beat(ledgers, role, ttl=600, url=one.url)
        await until(lambda: not critic.away)
        asking = asyncio.create_task(critic.call("/classify", {"input": [1]}, deadline=60))
        await one.has(1)
        await beat(ledgers, role, ttl=600, url=one.url, server="asleep")
        await until(lambda: all(row.leaving for row in critic.standings()))
        assert critic.away == ""
        await ledgers.connection.read("DEL", ledgers.train.keys.role(role))
        await until(lambda: critic.away == "reward model critic has no server")
        one.let_go.set()
        await asking


async def test_the_first_answer_ends_a_worker_and_no_sample_dies_of_it(redis_run, tokenizer, caplog, short_looks):
    async with gone("several") as one:
        config = config_for(redis_run.config, [one.url], tokenizer, deadline=3.0)
        async with open_ledgers(config, redis_run.run_dir) as ledgers:
            await put(ledgers.train, 0, ["one", "two"])
            role = Role("reward.0", config, redis_run.run_dir, ledgers)
            working = asyncio.create_task(run_reward_worker(role))
            await until(lambda: "reward model does not answer yet" in caplog.text)
            async with serving(one):
                (end,) = await asyncio.gather(asyncio.wait_for(working, 60), return_exceptions=True)
            role.close()
            assert isinstance(unwrap(end), RewardImpossible)
            assert "2 numbers" in str(unwrap(end))
            assert await ledgers.train.dead_letters() == []


async def test_a_worker_that_starts_again_in_mid_run_waits_for_a_proxy_that_refuses(
    redis_run, tokenizer, caplog, short_looks
):
    async with servers(["well"]) as (one,):
        config = config_for(redis_run.config, [one.url], tokenizer, deadline=3.0)
        async with open_ledgers(config, redis_run.run_dir) as ledgers:
            async with worker(config, redis_run.run_dir, ledgers):
                await put(ledgers.train, 0, ["one", "two"])
                await until_closed(ledgers.train, [0])
            one.acts = ["403"]
            async with worker(config, redis_run.run_dir, ledgers):
                await until(lambda: "reward model does not answer yet" in caplog.text)
                one.acts = ["well"]
                await put(ledgers.train, 1, ["one", "two"])
                await until_closed(ledgers.train, [1])
