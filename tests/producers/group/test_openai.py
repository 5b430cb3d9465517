"""Completions servers: what is said to them, what is understood, and weights that stay or are reloaded."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web
from test_server import config, request, version
from toy import until

from streamrl.errors import ConfigError, DataError, Refused, WeightsError, WireError
from streamrl.producers.group.server import ServerEngine
from streamrl.servers.dialect import Chunk, ServerMetrics
from streamrl.servers.openai import OpenaiDialect
from streamrl.weight_sync.tensors import Version

FLAGS = {"kind": "openai", "url": ["http://x"], "slots": 8}
MODELS = {"data": [{"id": "policy", "max_model_len": 64}, {"id": "other"}]}


def dialect(**flags):
    return OpenaiDialect(config(engine=FLAGS | {"flags": flags}))


def edited(**more):
    whole = message([3], [-1.0])
    whole["choices"][0] |= more
    return whole


def message(tokens=(), logprobs=(), finish=None):
    shown = {"tokens": [f"token_id:{token}" for token in tokens], "token_logprobs": list(logprobs)}
    choice = {"index": 0, "text": "?", "token_ids": list(tokens), "logprobs": shown, "finish_reason": finish}
    return {"id": "cmpl-1", "choices": [choice], "usage": None}


def test_what_is_asked():
    call = dialect(model="policy").generation(request("a", [5, 6]), version=3)
    assert (call.method, call.path, call.repeatable) == ("POST", "/v1/completions", False)
    wanted = {"prompt": [5, 6], "max_tokens": 6, "temperature": 1.0, "top_p": 1.0, "model": "policy", "stream": True}
    assert wanted.items() <= call.body.items()
    assert call.body["return_token_ids"] is True
    assert "cache_salt" not in call.body
    assert "model" not in dialect().generation(request("a"), version=3).body
    assert dialect(reload="/r").generation(request("a"), version=3).body["cache_salt"].endswith("-w3")
    json.dumps(call.body)
    assert not {"stop", "min_tokens", "seed"} & set(call.body)
    options = {"top_p": 0.9, "top_k": 40, "min_p": 0.1, "min_tokens": 2, "seed": 0}
    asked = dialect().generation(replace(request("a"), stop=("END",), **options), version=3).body
    assert ({**options, "stop": ["END"]}).items() <= asked.items()


def test_what_is_understood():
    speak = dialect()
    assert speak.chunk(message([3, 4], [-0.5, -1]), received=0) == Chunk([3, 4], [-0.5, -1.0])
    assert speak.chunk(message([], [], "length"), received=2).finish == "length"
    assert speak.chunk(edited(token_ids=None, finish_reason="stop"), received=2) == Chunk([3], [-1.0], "stop")
    assert speak.chunk(message(finish="stop") | {"usage": {"prompt_tokens": 7}}, received=1).prompt_tokens == 7
    usage = {"prompt_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
    assert speak.chunk({"choices": [], "usage": usage}, received=9) == Chunk(prompt_tokens=2, cached_tokens=1)
    assert speak.chunk(message(finish="stop") | {"usage": usage}, received=1).cached_tokens == 1


@pytest.mark.parametrize(
    "bad",
    [
        message([3, 4], [-0.5]),
        message([3], [None]),
        message([3], [-9999.0]),
        message([3], [float("nan")]),
        edited(logprobs=None),
        edited(token_ids=["three"]),
        message([3], [-1], "content_filter"),
        edited(token_ids=None, logprobs={"tokens": ["word"], "token_logprobs": [-1]}),
        {"choices": [None]},
        {"choices": 7},
        [],
        None,
        "text",
        {"error": {"message": "overheated", "code": 500}},
    ],
)
def test_what_is_no_answer(bad):
    with pytest.raises(WireError):
        dialect().chunk(bad, received=0)


def test_a_request_that_is_refused():
    with pytest.raises(DataError, match="too long"):
        dialect().chunk({"error": {"message": "too long", "code": 400}}, received=0)


def test_about():
    about = dialect().read_about([MODELS, {"version": "9"}, {"tokens": [1, 2]}])
    assert (about.model, about.version, about.context, about.probe) == ("policy", "9", 64, (1, 2))
    assert (about.can_update, about.missing) == (False, "")
    assert dialect(reload="/r").read_about([MODELS, None, None]).can_update
    assert dialect(model="other").read_about([MODELS, "text", "text"]).context is None
    with pytest.raises(ConfigError, match="no model 'mine'"):
        dialect(model="mine").read_about([MODELS, None, None])
    for bad in (None, {}, {"data": 3}, {"data": [{}]}, "x"):
        with pytest.raises(WireError):
            dialect().read_about([bad, None, None])


def test_flags():
    with pytest.raises(ConfigError, match="max-num-seqs"):
        dialect(**{"max-num-seqs": 3})
    hot = config(engine=FLAGS, sampling={"temperature": 0.7, "max_new_tokens": 8})
    with pytest.raises(ConfigError, match=r"sampling\.temperature 0\.7"):
        OpenaiDialect(hot)
    OpenaiDialect(config(engine=FLAGS | {"flags": {"processed-logprobs": True}}, sampling={"temperature": 0.7}))


def test_what_it_cannot():
    speak = dialect()
    with pytest.raises(ConfigError, match="starts no openai servers"):
        speak.launch(model="m", port=1, seed=1)
    for refused in (
        lambda: speak.update(version(1)),
        lambda: speak.sleep(1),
        lambda: speak.load_adapter("a", Path("x")),
        lambda: speak.unload_adapter("a"),
    ):
        with pytest.raises(Refused):
            refused()


def test_reload():
    speak = dialect(reload="/update_weights_from_disk")
    whole = Version((1, 4), 4, {}, Path("/w/v-1-4"), ("a.safetensors",), {"x": ("a.safetensors",)})
    (call,) = speak.update(whole)
    assert call.path == "/update_weights_from_disk"
    assert call.body == {"model_path": "/w/v-1-4", "weight_version": "4"}
    (call,) = dialect(**{"reload": "/r", "reload-body": {"kwargs": {"path": "{folder}"}, "n": 3}}).update(whole)
    assert call.body == {"kwargs": {"path": "/w/v-1-4"}, "n": 3}
    with pytest.raises(WeightsError, match="no files"):
        speak.update(version(4))
    with pytest.raises(WeightsError, match="several files"):
        speak.update(Version((1, 4), 4, {}, Path("/w"), ("a", "b"), {"x": ("a", "b")}))


def test_figures():
    text = '# HELP x\nvllm:num_requests_running{engine="0"} 3.0\nvllm:generation_tokens_total{a="b"} 1.2e3\nother 4\n'
    assert dialect().read_metrics(text) == ServerMetrics(running=3, tokens_sampled=1200)
    assert dialect().read_metrics(
        "tgi_queue_size 2\ntgi_batch_current_size NaN\nvllm:num_requests_running x"
    ) == ServerMetrics(waiting=2)
    assert dialect().read_metrics(None) == ServerMetrics()


class Completions:
    """A small completions server; each request ends when the test lets it."""

    def __init__(self):
        self.go = asyncio.Event()
        self.go.set()
        self.reloads = []
        self.running = 0
        self.refuse = 0

    def app(self):
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_post("/reload", self.reload)
        return app

    async def models(self, _):
        return web.json_response(MODELS)

    async def reload(self, incoming):
        assert not self.running
        self.reloads.append(await incoming.json())
        return web.json_response({}, status=self.refuse or 200)

    async def complete(self, incoming):
        body = await incoming.json()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(incoming)
        self.running += 1
        try:
            for count in range(body["max_tokens"]):
                if count == 2:
                    await self.go.wait()
                finish = "length" if count == body["max_tokens"] - 1 else None
                await response.write(b"data: " + json.dumps(message([count + 1], [-0.25], finish)).encode() + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
        finally:
            self.running -= 1
        return response


@asynccontextmanager
async def engine_on(site, **flags):
    runner = web.AppRunner(site.app(), handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    tcp = web.TCPSite(runner, "127.0.0.1", 0)
    await tcp.start()
    run = config(engine=FLAGS | {"flags": flags}, weights={"deadline": 10})
    engine = ServerEngine(OpenaiDialect(run), run, url=f"http://127.0.0.1:{runner.addresses[0][1]}")
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()
        await runner.cleanup()


async def test_fixed_weights_carry_the_first_version(caplog):
    async with engine_on(Completions()) as engine:
        await engine.apply(version(5))
        await engine.apply(version(6))
        done = await engine.generate(request("a"))
        assert done.tokens.tolist() == [1, 2, 3, 4, 5, 6]
        assert done.runs == [(0, 5)]
        np.testing.assert_allclose(done.logprobs, -0.25)
    assert "stay as they are" in caplog.text


async def test_it_aborts_by_hanging_up_and_refuses_to_pause():
    site = Completions()
    async with engine_on(site) as engine:
        site.go.clear()
        task = asyncio.create_task(engine.generate(request("a")))
        await until(lambda: engine.load().tokens_sampled == 2)
        with pytest.raises(Refused, match="cannot pause"):
            await engine.pause()
        with pytest.raises(Refused, match="cannot sleep"):
            await engine.sleep()
        assert await engine.abort() == 1
        assert ((await task).finish, (await task).tokens.tolist()) == ("abort", [1, 2])
        site.go.set()
        await engine.pause("abort")
        await engine.resume()
        assert (await engine.generate(request("b"))).finish == "length"


async def test_a_reload_waits_until_nothing_is_in_flight():
    site = Completions()
    files = Version((1, 4), 4, {}, Path("/w"), ("a",), {"x": ("a",)})
    async with engine_on(site, reload="/reload") as engine:
        site.go.clear()
        before = asyncio.create_task(engine.generate(request("a")))
        await until(lambda: engine.load().tokens_sampled == 2)
        applying = asyncio.create_task(engine.apply(files))
        await asyncio.wait([applying], timeout=0.05)
        after = asyncio.create_task(engine.generate(request("b")))
        await asyncio.wait([applying, after], timeout=0.05)
        assert not site.reloads
        assert engine.load().waiting == 1
        site.go.set()
        await applying
        assert (await before).runs == [(0, 0)]
        assert (await after).runs == [(0, 4)]
        assert site.reloads == [{"model_path": "/w", "weight_version": "4"}]
        site.refuse = 400
        with pytest.raises(WeightsError, match="refuses version 5"):
            await engine.apply(Version((1, 5), 5, {}, Path("/w"), ("a",), {"x": ("a",)}))
        assert (await engine.generate(request("c"))).runs == [(0, 4)]
