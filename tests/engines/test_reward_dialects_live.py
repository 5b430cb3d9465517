"""What real servers of reward models answer, asked as `reward_model` asks them: the numbers of a plain forward pass."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from streamrl.config import RewardModelConfig, RunConfig
from streamrl.consumers import RewardContext
from streamrl.consumers.models import ModelClient, open_models
from streamrl.consumers.models.reward_model import RewardModel
from streamrl.errors import ConfigError, RewardUnavailable
from streamrl.http import BadRequest
from streamrl.servers.process import ManagedServer, ServerSettings
from streamrl.servers.reward_models import model_server
from tests.consumers.samples import seen
from tests.engines.critic_kit import CONTEXT, FLAGS, START, Judge, make_critic

pytestmark = [
    pytest.mark.engines,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.asyncio(loop_scope="module"),
]

LABELS = 3
CLOSE = 1e-4
RESPONSES = ["4", "It is four.", "I do not know yet.", "2 + 2 = 4, naïve 🙂 " * 8]


@dataclass(frozen=True)
class Live:
    """One real server with a model of three labels."""

    kind: str
    url: str
    model: Path
    judge: Judge

    def keys(self, **more: Any) -> dict[str, Any]:
        return {"kind": self.kind, "model": str(self.model), "url": [self.url], **more}

    @contextlib.asynccontextmanager
    async def reward(self, keys: dict[str, Any] | None = None, **args: Any) -> AsyncIterator[RewardModel]:
        """The reward, opened as a worker does it."""
        config = RunConfig.model_validate(
            {
                "name": "t",
                "rewards": [{"use": "reward_model", "args": {"model": "critic", **args}}],
                "reward_models": {"critic": keys or self.keys()},
            }
        )
        reward = RewardModel("critic", **args)
        async with open_models(config) as models:
            await reward.open(RewardContext(config, self.model, models, deadline=120.0))
            yield reward


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["vllm", "sglang"])
async def live(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Live]:
    torch.set_num_threads(1)
    kind, folder = request.param, tmp_path_factory.mktemp(request.param)
    model = make_critic(folder / "critic", labels=LABELS)
    config = RewardModelConfig(kind=kind, model=str(model), flags=FLAGS[kind], variables={"OMP_NUM_THREADS": "1"})
    settings = ServerSettings("reward_models", str(model), START, RunConfig().supervisor, config.variables)
    server = ManagedServer(model_server("critic", config), settings, folder, "server", seed=7)
    try:
        yield Live(kind, await server.start(), model, Judge(model))
    finally:
        await server.stop()


@pytest.mark.parametrize("task", ["classify", "pooling"])
@pytest.mark.parametrize("label", [0, 2, -1])
async def test_scores_are_those_of_a_forward_pass(live, task, label):
    async with live.reward(live.keys(task=task), label=label) as reward:
        scores = await asyncio.gather(*(reward.score(seen(text)) for text in RESPONSES))
    wanted = [live.judge.numbers("2 + 2 =", text)[label] for text in RESPONSES]
    assert [score.value for score in scores] == pytest.approx(wanted, abs=CLOSE)
    assert max(wanted) - min(wanted) > 100 * CLOSE


async def test_messages_are_rendered_and_the_first_token_is_not_doubled(live):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    async with live.reward(label=1, text="plain") as plain, live.reward(label=1) as chat:
        one = await chat.score(seen("4", messages=[{"role": "user", "content": "2 + 2 ="}]))
        other = await chat.score(seen("4", messages=messages))
        text = await plain.score(seen("4"))
    assert one.value == pytest.approx(live.judge.numbers("2 + 2 =", "4")[1], abs=CLOSE)
    assert len({round(score.value, 3) for score in (one, other, text)}) == 3


async def test_a_vllm_server_renders_messages_itself(live):
    if live.kind != "vllm":
        with pytest.raises(ConfigError, match="take no messages"):
            async with live.reward(label=1, text="server"):
                pass
        return
    for task in ("classify", "pooling"):
        async with live.reward(live.keys(task=task), label=1, text="server") as reward:
            score = await reward.score(seen("It is four."))
        assert score.value == pytest.approx(live.judge.numbers("2 + 2 =", "It is four.")[1], abs=CLOSE)


async def test_three_labels_without_a_choice_end_the_start(live):
    with pytest.raises(ConfigError, match="3 numbers"):
        async with live.reward():
            pass


async def test_a_text_that_is_too_long_is_refused_and_the_server_goes_on(live):
    async with live.reward(label=0) as reward:
        with pytest.raises(BadRequest):
            await reward.score(seen("x" * 2 * CONTEXT))
        assert (await reward.score(seen("4"))).value == pytest.approx(live.judge.numbers("2 + 2 =", "4")[0], abs=CLOSE)


@pytest.mark.parametrize("live", ["vllm"], indirect=True)  # SGLang serves one model under any name
async def test_a_model_of_another_name_is_refused_at_the_start(live, monkeypatch):
    monkeypatch.setattr("streamrl.consumers.models.reward_model._PROBE_SECONDS", 3.0)
    with pytest.raises(ConfigError, match="answered 404"):
        async with live.reward(live.keys(model="another"), label=0, tokenizer=str(live.model)):
            pass


async def test_a_route_that_a_server_lacks_makes_it_unavailable(live):
    client = ModelClient("critic", RewardModelConfig(kind=live.kind, url=(live.url,)))
    try:
        await client.follow([live.url])
        await client.check()
        with pytest.raises(RewardUnavailable, match="answered 404"):
            await client.call("/no/such/route", {}, deadline=2.0)
    finally:
        await client.close()
