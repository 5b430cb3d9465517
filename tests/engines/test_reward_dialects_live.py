"""What real servers of reward models answer, asked as `reward_model` asks them: the numbers of a plain forward pass.

The SGLang servers belong to a run, which goes on when one of them is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
import torch

from streamrl import wire
from streamrl.config import RewardModelConfig, RunConfig
from streamrl.consumers import RewardContext
from streamrl.consumers.models import ModelClient, open_models
from streamrl.consumers.models.reward_model import RewardModel
from streamrl.errors import ConfigError, RewardUnavailable
from streamrl.http import BadRequest
from streamrl.queues import Ledger, Ledgers
from streamrl.queues.reward_servers import RewardServers
from streamrl.runtime.instance import RoleState
from tests.consumers.samples import seen
from tests.engines.critic_kit import (
    CONTEXT,
    SAMPLES,
    START,
    Judge,
    answer,
    make_critic,
    put,
    question,
    scoring,
    write_run,
)
from tests.engines.server_kit import Owned, owned
from tests.queues.ledger_kit import faults, until_async
from tests.runtime.test_supervisor import Run

pytestmark = [
    pytest.mark.engines,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.asyncio(loop_scope="module"),
]

LABELS = 3
LABEL = 1
"""Of the run."""
CLOSE = 1e-4
GROUPS = 40
NAMES = ["reward_model.critic.0", "reward_model.critic.1"]
RESPONSES = ["4", "It is four.", "I do not know yet.", "2 + 2 = 4, naïve 🙂 " * 8]


@dataclass(frozen=True)
class Live:
    """One real server with a model of three labels."""

    kind: str
    url: str
    model: Path
    judge: Judge
    server: Owned | None = None
    run: Run | None = None
    ledgers: Ledgers | None = None

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
    """A vLLM server of a process that stands for a role; the second of two SGLang servers of a run."""
    torch.set_num_threads(1)
    kind, folder = request.param, tmp_path_factory.mktemp(request.param)
    model = make_critic(folder / "critic", labels=LABELS)
    if kind == "vllm":
        async with owned("critic_kit", folder / "logs" / "server.log", kind, str(folder)) as server:
            yield Live(kind, server.url, model, Judge(model), server=server)
        return
    reward = {"use": "reward_model", "name": "critic", "args": {"label": LABEL}}
    config = write_run(folder, reward, {"kind": kind, "servers": 2})
    async with scoring(config, folder / "run") as (run, ledgers):
        urls = {server.name: server.url for server in await RewardServers(ledgers).present("critic")}
        assert sorted(urls) == NAMES
        yield Live(kind, urls[NAMES[1]], model, Judge(model), run=run, ledgers=ledgers)


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


@pytest.mark.parametrize("live", ["vllm"], indirect=True)
async def test_a_server_ends_with_the_process_that_started_it(live):
    """The last one: it ends the server."""
    assert len(live.server.processes()) >= 2
    live.server.owner.kill()
    await live.server.all_gone()


async def scores(ledger: Ledger, group_id: int) -> dict[int, float]:
    group = await ledger.read_group(group_id)
    assert group is not None
    assert not group.causes
    return {number: wire.decode(score, wire.SampleScore).value for number, (_, score) in group.samples.items()}


def server_of(role: int) -> psutil.Process:
    """The server process below a role and its keeper."""
    (keeper,) = psutil.Process(role).children()
    return max(keeper.children(), key=lambda process: process.create_time())


@pytest.mark.parametrize("live", ["sglang"], indirect=True)
async def test_one_of_two_servers_is_killed_in_mid_run_and_every_score_is_that_of_a_forward_pass(live):
    run, train = live.run, live.ledgers.train

    async def closed(count: int) -> bool:
        return len(await train.closed()) >= count

    before = {server.name: server.url for server in await RewardServers(live.ledgers).present("critic")}
    for group_id in range(GROUPS // 4):
        await put(train, group_id)
    await until_async(lambda: closed(GROUPS // 4), 120)
    role = run.pid(NAMES[0])
    server = server_of(role)
    os.kill(server.pid, signal.SIGSTOP)  # what it is asked from now on, it dies with
    for group_id in range(GROUPS // 4, GROUPS):
        await put(train, group_id)
    await until_async(lambda: closed(GROUPS // 2), 120)
    assert not await closed(GROUPS), "samples wait for the one that is to die"
    os.kill(server.pid, signal.SIGKILL)
    await until_async(lambda: closed(GROUPS), 240)
    found = {group_id: await scores(train, group_id) for group_id in range(GROUPS)}
    wanted = {
        group_id: {k: live.judge.numbers(question(group_id), answer(group_id, k))[LABEL] for k in range(SAMPLES)}
        for group_id in found
    }
    for group_id, group in found.items():
        assert group == pytest.approx(wanted[group_id], abs=CLOSE)
        assert 0.0 not in group.values()
    spread = [score for group in wanted.values() for score in group.values()]
    assert max(spread) - min(spread) > 100 * CLOSE, "the model tells responses apart"
    assert await train.dead_letters() == []
    assert not await faults(train)
    await run.until(lambda: run.pid(NAMES[0]) != role, START)
    after = {server.name: server.url for server in await RewardServers(live.ledgers).present("critic")}
    assert after[NAMES[1]] == before[NAMES[1]]
    assert all(run.states(name).count(RoleState.READY) == 1 for name in (*NAMES, "reward.0"))
    assert not psutil.pid_exists(server.pid)
