"""Completions servers: what is said to them, what is understood, and weights that stay as they are."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager

import numpy as np
import pytest
from aiohttp import web
from toy_kit import config, request, version

from streamrl.engine import RequestImage
from streamrl.errors import ConfigError, DataError, WireError
from streamrl.servers.dialect import Chunk, ServerMetrics
from streamrl.servers.openai import OpenaiDialect
from streamrl.servers.server import Server

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
    json.dumps(call.body)


def test_images_are_refused():
    shown = request("a", [5, 6], images=(RequestImage("ab", b"", 1, 1, 6),))
    with pytest.raises(ConfigError, match="sent tokens alone, and the model of this run sees images") as caught:
        dialect().generation(shown, version=3)
    assert "engine.kind" in caught.value.hint


def test_what_is_understood():
    speak = dialect()
    assert speak.chunk(message([3, 4], [-0.5, -1]), received=0) == Chunk([3, 4], [-0.5, -1.0])
    assert speak.chunk(message([], [], "length"), received=2).finish == "length"
    assert speak.chunk(edited(token_ids=None, finish_reason="stop"), received=2) == Chunk([3], [-1.0], "stop")
    usage = {"prompt_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
    assert speak.chunk({"choices": [], "usage": usage}, received=9) == Chunk(cached_tokens=1)
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
    assert dialect(model="other").read_about([MODELS, "text", "text"]).context is None
    with pytest.raises(ConfigError, match="no model 'mine'"):
        dialect(model="mine").read_about([MODELS, None, None])
    for bad in (None, {}, {"data": 3}, {"data": [{}]}, "x"):
        with pytest.raises(WireError):
            dialect().read_about([bad, None, None])


def test_flags():
    for unknown in ("max-num-seqs", "reload"):
        with pytest.raises(ConfigError, match=f"{unknown} is not known"):
            dialect(**{unknown: 3})


def test_figures():
    text = '# HELP x\nvllm:num_requests_running{engine="0"} 3.0\nvllm:generation_tokens_total{a="b"} 1.2e3\nother 4\n'
    assert dialect().read_metrics(text) == ServerMetrics(running=3, tokens_sampled=1200)
    assert dialect().read_metrics(
        "sglang:num_queue_reqs 2\nsglang:num_running_reqs NaN\nvllm:num_requests_running x"
    ) == ServerMetrics(waiting=2)
    assert dialect().read_metrics("vllm:kv_cache_usage_perc 0.25\n") == ServerMetrics(cache_use=0.25)
    assert dialect().read_metrics(None) == ServerMetrics()


async def models(_):
    return web.json_response(MODELS)


async def complete(incoming):
    body = await incoming.json()
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(incoming)
    for count in range(body["max_tokens"]):
        finish = "length" if count == body["max_tokens"] - 1 else None
        await response.write(b"data: " + json.dumps(message([count + 1], [-0.25], finish)).encode() + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


@asynccontextmanager
async def completions():
    """The URL of a small completions server."""
    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_a_server_carries_the_first_version_for_ever(tmp_path):
    async with completions() as url, Server(config(engine=FLAGS | {"url": [url]}), tmp_path, "engine.0", seed=1) as one:
        assert one.dialect.fixed
        await one.control.keep(version(5))
        await one.control.keep(version(6))
        done = await one.generate(request("a"))
        assert done.tokens.tolist() == [1, 2, 3, 4, 5, 6]
        assert done.runs == [(0, 5)]
        np.testing.assert_allclose(done.logprobs, -0.25)
