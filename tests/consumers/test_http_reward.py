"""The reward `http`: real servers, in this process and in node; what is sent, what is read, and what a failure is."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import orjson
import pytest
from aiohttp import web

from streamrl.config import RunConfig
from streamrl.consumers import RewardBusy, RewardContext, RewardUnavailable, Score
from streamrl.consumers.http_reward import HttpReward
from streamrl.consumers.plugins import load_rewards
from streamrl.consumers.samples import read_samples
from streamrl.errors import ConfigError, DataError, PluginError, WireError
from streamrl.http import BadAnswer
from streamrl.listening import listen
from streamrl.queues import open_ledgers
from tests.consumers.samples import episode, seen
from tests.consumers.worker_kit import put, put_whole, scores, until_closed, values, worker
from tests.needs import need_programs
from tests.queues.ledger_kit import until

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "http-reward.md").read_text()
Answer = Callable[[Any], Awaitable[Any]]


@contextlib.asynccontextmanager
async def served(answer: Answer, port: int = 0) -> AsyncIterator[str]:
    """A server; `answer` makes what it answers to a body: JSON, a status, or a response."""

    async def handle(request: web.Request) -> web.Response:
        found = await answer(orjson.loads(await request.read()))
        if isinstance(found, web.Response):
            return found
        return web.Response(status=found.value) if isinstance(found, Status) else web.json_response(found)

    app = web.Application()
    app.router.add_post("/score", handle)
    async with listen(app, "127.0.0.1", port, what="scores", hint="") as url:
        yield f"{url}/score"


class Status:
    def __init__(self, value: int) -> None:
        self.value = value


def always(found: Any) -> Answer:
    async def answer(_: Any) -> Any:
        return found

    return answer


@contextlib.asynccontextmanager
async def opened(url: str, deadline: float = 30.0, **args: Any) -> AsyncIterator[HttpReward]:
    """The reward, loaded and opened as a worker does it."""
    config = RunConfig.model_validate({"rewards": [{"use": "http", "args": {"url": url, **args}}]})
    (loaded,) = load_rewards(config)
    reward = loaded.life
    assert isinstance(reward, HttpReward)
    assert loaded.group == (args.get("send") == "group")
    try:
        await reward.open(RewardContext(config, Path(), deadline=deadline))
        yield reward
    finally:
        await reward.close()


# --- what is sent and read --------------------------------------------------------------------------------------------


async def test_a_sample_is_sent_in_the_form_that_reward_test_reads(tmp_path):
    bodies = []

    async def keep(body):
        bodies.append(body)
        return {"score": 0.5, "parts": {"a": 1}, "tokens": 7, "detail": "half right"}

    sample = episode(metadata={"level": 2}, group=5, index=3, line=17)
    async with served(keep) as url, opened(url) as reward:
        assert await reward.score(sample) == Score(0.5, {"a": 1.0}, 7, "half right")
    (tmp_path / "one.json").write_bytes(orjson.dumps(bodies[0]))
    assert bodies[0]["messages"] == [{"role": "user", "content": "2+2="}, *sample.completion], "all of it"
    (read,) = read_samples(tmp_path / "one.json")
    assert (read.messages, read.text, read.tokens.tolist()) == (sample.messages, sample.text, sample.tokens.tolist())
    assert (read.group_id, read.index, read.prompt.line, read.prompt.answer) == (5, 3, 17, "4")
    assert read.prompt.metadata == {"level": 2}


async def test_what_waits_while_a_batch_is_scored_goes_into_the_next_one():
    sizes, go = [], asyncio.Event()

    async def lengths(body):
        sizes.append(len(body["samples"]))
        await go.wait()
        return [float(len(sample["response"])) for sample in body["samples"]]

    async with served(lengths) as url, opened(url, send="batch", batch=3) as reward:
        tasks = [asyncio.create_task(reward.score(seen("x" * size))) for size in range(8)]
        await until(lambda: sizes)
        tasks[7].cancel()
        go.set()
        assert [(await task).value for task in tasks[:7]] == [0, 1, 2, 3, 4, 5, 6]
    assert sizes == [3, 3, 1]
    assert reward.slots() == 6


async def test_an_error_of_one_sample_of_a_batch_is_its_own():
    async def some(body):
        return {"scores": [1 if one["response"] == "4" else {"error": "no parse"} for one in body["samples"]]}

    async with served(some) as url, opened(url, send="batch") as reward:
        good, bad, also = await asyncio.gather(
            *(reward.score(seen(text)) for text in ("4", "5", "4")), return_exceptions=True
        )
    assert (good, also) == (Score(1.0), Score(1.0))
    assert str(bad) == "no parse"


async def test_a_group_is_sent_whole():
    async def ranks(body):
        texts = [sample["response"] for sample in body["samples"]]
        return {"scores": [sorted(texts).index(text) for text in texts]}

    async with served(ranks) as url, opened(url, send="group") as reward:
        assert await reward.score_group([seen("b"), seen("a")]) == [Score(1.0), Score(0.0)]


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "error", "why"),
    [
        ({}, RuntimeError, "neither `score` nor `error`"),
        ({"error": "no parse"}, RuntimeError, "no parse"),
        ({"score": "1"}, WireError, "got `str`"),
        (True, WireError, "answered 'True'"),
        ([1, 2], WireError, "answered"),
        (web.Response(text="1.0"), WireError, "answered"),
        (
            web.Response(body=b'{"score": 1e999}', content_type="application/json"),
            ValueError,
            "of a score is inf|did not answer with JSON",
        ),
        (Status(422), DataError, "answered 422"),
        (Status(404), BadAnswer, "answered 404"),
        (Status(405), BadAnswer, "answered 405"),
        (Status(409), BadAnswer, "answered 409"),
        (Status(500), BadAnswer, "answered 500"),
        (Status(302), BadAnswer, "answered 302"),
        (Status(503), RewardBusy, "answered 503"),
        (Status(429), RewardBusy, "answered 429"),
    ],
)
async def test_what_is_no_score_is_an_error_and_never_zero(found, error, why):
    async with served(always(found)) as url, opened(url) as reward:
        with pytest.raises(error, match=why) as caught:
            await reward.score(seen())
        assert type(caught.value) is not RewardUnavailable


@pytest.mark.parametrize("found", [[1.0], [1.0, 2.0, 3.0], {"scores": [1.0]}])
async def test_another_number_of_scores_fails_the_group(found):
    async with served(always(found)) as url, opened(url, send="group") as reward:
        with pytest.raises(WireError, match=r"answered \d scores for 2 samples"):
            await reward.score_group([seen(), seen()])


async def test_an_error_at_the_start_that_is_not_of_the_key_is_no_reason_to_end():
    async def handle(request):
        return web.json_response(1.0) if request.method == "POST" else web.Response(status=500)

    app = web.Application()
    app.router.add_route("*", "/score", handle)
    async with listen(app, "127.0.0.1", 0, what="scores", hint="") as url, opened(f"{url}/score") as reward:
        assert await reward.score(seen()) == Score(1.0)


@pytest.mark.parametrize("status", [413, 422])
async def test_one_sample_that_is_refused_takes_no_others_with_it(status):
    async def picky(body):
        texts = [one["response"] for one in body["samples"]]
        return Status(status) if "bad" in texts else [float(text) for text in texts]

    async with served(picky) as url, opened(url, send="batch") as reward:
        texts = ["1", "2", "bad", "4", "5"]
        found = await asyncio.gather(*(reward.score(seen(text)) for text in texts), return_exceptions=True)
    assert isinstance(found.pop(2), DataError)
    assert found == [Score(1.0), Score(2.0), Score(4.0), Score(5.0)]


async def test_a_batch_that_waited_too_long_is_busy_and_the_one_after_it_has_its_whole_time(monkeypatch):
    sizes, hang, now = [], asyncio.Event(), [0.0]
    monkeypatch.setattr("streamrl.consumers.http_reward.time", SimpleNamespace(monotonic=lambda: now[0]))

    async def slow(body):
        sizes.append(len(body["samples"]))
        await hang.wait()
        return [1.0] * sizes[-1]

    async with served(slow) as url, opened(url, deadline=100.0, send="batch", batch=2) as reward:
        tasks = [asyncio.create_task(reward.score(seen())) for _ in range(4)]
        await until(lambda: sizes)
        now[0] = 60.0
        tasks.append(asyncio.create_task(reward.score(seen())))
        await asyncio.sleep(0)
        hang.set()
        found = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(one) for one in found] == [Score, Score, RewardBusy, RewardBusy, Score]
    assert sizes == [2, 1]


async def test_a_request_that_nobody_waits_for_any_more_holds_up_no_other():
    sizes, hang = [], asyncio.Event()

    async def first_hangs(body):
        sizes.append(len(body["samples"]))
        if len(sizes) == 1:
            await hang.wait()
        return [1.0] * len(body["samples"])

    async with served(first_hangs) as url, opened(url, send="batch", batch=2) as reward:
        tasks = [asyncio.create_task(reward.score(seen())) for _ in range(3)]
        await until(lambda: sizes)
        for task in tasks[:2]:
            task.cancel()
        assert await asyncio.wait_for(tasks[2], 20.0) == Score(1.0)
        hang.set()
    assert sizes == [2, 1]


async def test_a_server_that_is_away_is_no_fault_of_the_sample():
    async with contextlib.AsyncExitStack() as serving:
        url = await serving.enter_async_context(served(always(1.0)))
        async with opened(url) as reward:
            assert await reward.score(seen()) == Score(1.0)
            await serving.aclose()
            with pytest.raises(RewardUnavailable, match="Connection refused"):
                await reward.score(seen())


async def test_a_hanging_server_is_named_before_the_deadline_of_the_attempt():
    hang = asyncio.Event()

    async def never(_):
        await hang.wait()

    async with served(never) as url, opened(url, deadline=0.5) as reward:
        with pytest.raises(Exception, match=r"POST http://127.0.0.1:\d+/score: no answer within 0\.4\d s"):
            await reward.score(seen())
        hang.set()


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({"url": "localhost:8900"}, "is no address"),
        ({"url": "http://user:secret@host/score"}, "is no address"),
        ({"url": "http://a/", "send": "all"}, "send is 'all'"),
        ({"url": "http://a/", "batch": 0}, "batch is 0"),
        ({}, "args do not fit"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_when_the_reward_is_loaded(args, why):
    with pytest.raises(PluginError, match=why):
        load_rewards(RunConfig.model_validate({"rewards": [{"use": "http", "args": args}]}))


@pytest.mark.parametrize("wrong", [401, 403])
async def test_a_wrong_key_ends_the_start(tmp_path, wrong):
    (tmp_path / "key").write_text("mine")

    async def handle(request):
        return web.json_response(1.0, status=200 if request.headers["Authorization"] == "Bearer right" else wrong)

    app = web.Application()
    app.router.add_route("*", "/score", handle)
    async with listen(app, "127.0.0.1", 0, what="scores", hint="") as url:
        with pytest.raises(ConfigError, match=f"answered {wrong}") as caught:
            async with opened(f"{url}/score", api_key_file=str(tmp_path / "key")):
                pass
        assert caught.value.hint == "set args.api_key_file to the key of the server"
        (tmp_path / "key").write_text("right")
        async with opened(f"{url}/score", api_key_file=str(tmp_path / "key")) as reward:
            assert await reward.score(seen()) == Score(1.0)


@pytest.mark.parametrize(
    "keys", [{"rewards": [{"use": "gateway"}]}, {"reward_worker": {"gateway_port": 0}}], ids=["reward", "key"]
)
def test_the_gateway_is_refused_with_what_replaces_it(keys):
    with pytest.raises(ValueError, match=r"the gateway is gone(\n.*|:) `use: http`"):
        load_rewards(RunConfig.model_validate(keys))


# --- in a worker ------------------------------------------------------------------------------------------------------


async def test_its_score_is_one_part_of_the_scores_of_a_run(redis_run, make_config):
    async def answer(body):
        if body["response"] == "bad":
            return {"error": "no parse"}
        return {"score": float(body["response"] == "4"), "parts": {"length": 3}}

    async with served(answer) as url:
        config = make_config({"use": "exact_match"}, {"use": "http", "weight": 2.0, "args": {"url": url}})
        async with open_ledgers(config, redis_run.run_dir) as ledgers:
            await put(ledgers.train, 0, ["4", "5", "bad"])
            async with worker(config, redis_run.run_dir, ledgers):
                await until_closed(ledgers.train, [0])
            found, causes = await scores(ledgers.train, 0)
        assert {index: one.value for index, one in found.items()} == {0: 3.0, 1: 0.0}
        assert found[0].parts == {"exact_match": 1.0, "http": 1.0, "http/length": 3.0}
        assert "no parse" in causes[2]


async def test_samples_wait_while_the_server_is_away_and_none_of_them_dies(redis_run, make_config):
    async with contextlib.AsyncExitStack() as serving:
        url = await serving.enter_async_context(served(always(1.0)))
        config = make_config({"use": "http", "args": {"url": url}}, attempts=1)
        async with open_ledgers(config, redis_run.run_dir) as ledgers:
            await put(ledgers.train, 0, ["4"])
            async with worker(config, redis_run.run_dir, ledgers) as role:
                await until_closed(ledgers.train, [0])
                await serving.aclose()
                await put(ledgers.train, 1, ["4", "4"])
                await until(lambda: "Connection refused" in str(role.status.get("rewards")))
                await serving.enter_async_context(served(always(1.0), urlsplit(url).port or 0))
                await until_closed(ledgers.train, [1])
            assert await values(ledgers.train, 1) == {0: 1.0, 1: 1.0}


@contextlib.contextmanager
def in_node(tmp_path: Path) -> Iterator[str]:
    """The server of the guide."""
    need_programs("node")
    (program,) = re.findall(r"```js\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "score.mjs").write_text(program)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen(["node", str(tmp_path / "score.mjs"), str(port)]) as running:
        try:
            yield f"http://127.0.0.1:{port}/score"
        finally:
            running.kill()


@pytest.mark.parametrize(("send", "fill"), [("sample", put), ("batch", put), ("group", put_whole)])
async def test_the_server_of_the_guide_scores_a_run(redis_run, make_config, tmp_path, send, fill):
    """It starts while the worker opens the reward, which waits for it."""
    with in_node(tmp_path) as url:
        config = make_config({"use": "http", "args": {"url": url, "send": send}})
        async with open_ledgers(config, redis_run.run_dir) as ledgers:
            await fill(ledgers.train, 0, ["4", " 4 ", "5"])
            async with worker(config, redis_run.run_dir, ledgers):
                await until_closed(ledgers.train, [0])
            found, causes = await scores(ledgers.train, 0)
    assert not causes
    assert {number: one.value for number, one in found.items()} == {0: 1.0, 1: 1.0, 2: 0.0}
    assert found[1].parts == {"http": 1.0, "http/length": 3.0}
