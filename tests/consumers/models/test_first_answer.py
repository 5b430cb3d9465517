"""The first answer that a reward gets from its model decides whether it can be asked at all, whenever that is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from streamrl.config import RunConfig
from streamrl.consumers import RewardContext
from streamrl.consumers.models import ModelClient, open_models
from streamrl.consumers.models.dialects import UnclearScore
from streamrl.consumers.models.reward_model import RewardModel
from streamrl.consumers.models.router import PoolServerState
from streamrl.consumers.plugins import load_rewards
from streamrl.consumers.worker import run_reward_worker
from streamrl.errors import ConfigError, RewardImpossible, RewardUnavailable, Unreachable, unwrap
from streamrl.queues import Role, open_ledgers
from tests.consumers.models.faulty_server import FaultyServer, gone, servers, serving
from tests.consumers.models.test_rendering import make_tokenizer
from tests.consumers.samples import seen
from tests.consumers.worker_kit import config_of, put, until_closed, worker
from tests.queues.ledger_kit import until

NEVER = [("several", "2 numbers"), ("401", "answered 401"), ("403", "answered 403"), ("404", "answered 404")]


@pytest.fixture(autouse=True)
def short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.consumers.models.reward_model._PROBE_SECONDS", 0.5)
    monkeypatch.setattr("streamrl.consumers.models.client.LOOK_SECONDS", 0.1)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    make_tokenizer(tmp_path / "model")
    return tmp_path / "model"


async def yes() -> bool:
    return True


@contextlib.asynccontextmanager
async def opened(
    url: str | list[str], tokenizer: Path, deadline: float = 2.0, **context: Any
) -> AsyncIterator[RewardModel]:
    spec = {"use": "reward_model", "args": {"model": "critic"}}
    models = {"critic": {"url": url if isinstance(url, list) else [url], "model": str(tokenizer)}}
    config = RunConfig.model_validate({"name": "t", "rewards": [spec], "reward_models": models})
    (loaded,) = load_rewards(config)
    reward = loaded.life
    assert isinstance(reward, RewardModel)
    async with open_models(config) as clients:
        await reward.open(RewardContext(config, tokenizer, clients, deadline=deadline, **context))
        yield reward


@contextlib.asynccontextmanager
async def back(one: FaultyServer, reward: RewardModel) -> AsyncIterator[None]:
    """The server is there, and the reward knows."""
    client = reward._model
    assert isinstance(client, ModelClient)
    async with serving(one):
        await until(lambda: any(row.state is PoolServerState.SERVING for row in client.standings()))
        yield


@pytest.mark.parametrize(("act", "says"), NEVER)
async def test_servers_that_were_away_at_the_start_end_the_run_with_their_first_answer(tokenizer, act, says):
    async with gone(act) as one, opened(one.url, tokenizer) as reward, back(one, reward):
        with pytest.raises(RewardImpossible, match=f"critic cannot be asked: .*{says}"):
            await reward.score(seen())


@pytest.mark.parametrize("act", ["several", "403"])
async def test_after_a_score_the_same_answer_is_a_bad_moment(tokenizer, act):
    async with servers(["well", act]) as (one,), opened(one.url, tokenizer) as reward:
        with pytest.raises((UnclearScore, RewardUnavailable)):
            await reward.score(seen())


@pytest.mark.parametrize("act", ["several", "400", "401", "403", "404"])
async def test_a_worker_that_starts_in_a_run_that_has_scored_waits(tokenizer, act, caplog):
    async with servers([act]) as (one,), opened(one.url, tokenizer, 60.0, scored=yes) as reward:
        assert "reward model does not answer yet" in caplog.text
        one.acts = ["well"]
        assert isinstance((await reward.score(seen())).value, float)


async def test_one_server_that_refuses_says_nothing_of_another_that_is_loading(tokenizer):
    async with (
        servers(["401"]) as (one,),
        gone("well") as two,
        opened([one.url, two.url], tokenizer, 60.0) as reward,
        back(two, reward),
    ):
        assert one.asked
        assert isinstance((await reward.score(seen())).value, float)


async def test_while_nobody_knows_whether_the_run_has_scores_nothing_is_decided(tokenizer):
    async def silent() -> bool:
        raise Unreachable("redis is away")

    async with servers(["401", "well"]) as (one,), opened(one.url, tokenizer, 60.0, scored=silent) as reward:
        assert one.asked
        one.acts = ["well"]
        assert isinstance((await reward.score(seen())).value, float)


async def test_a_text_that_is_refused_is_the_end_of_its_sample_and_decides_nothing(tokenizer):
    async with gone("400") as one, opened(one.url, tokenizer) as reward, back(one, reward):
        with pytest.raises(ConfigError, match="400") as caught:
            await reward.score(seen())
        assert not isinstance(caught.value, RewardImpossible)


def config_for(redis: Any, url: str, tokenizer: Path) -> RunConfig:
    critic = {"use": "reward_model", "name": "critic", "args": {"model": "critic"}}
    models = {"critic": {"url": [url], "model": str(tokenizer)}}
    return config_of(redis, critic, reward_models=models, deadline=3.0)


async def test_the_first_answer_ends_a_worker_and_no_sample_dies_of_it(redis_run, tokenizer, caplog):
    async with gone("several") as one:
        config = config_for(redis_run.config, one.url, tokenizer)
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


async def test_a_worker_that_starts_again_in_mid_run_waits_for_a_proxy_that_refuses(redis_run, tokenizer, caplog):
    async with servers(["well"]) as (one,):
        config = config_for(redis_run.config, one.url, tokenizer)
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
