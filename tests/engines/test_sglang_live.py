"""A real SGLang server through its dialect: every token's log-probability and version, weights, aborts, pauses."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest
import torch

from tests.engines.sglang_kit import (
    CONTEXT,
    Answer,
    config,
    heard_at_least,
    plain,
    request,
    save_model,
    serve,
    tiny,
    version,
    weights,
)

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(600)]

PROMPT = [5, 9, 33, 70, 12, 8, 101, 64, 77, 20]
BF16 = 0.02


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_model(tiny(0), folder)
    return folder


@pytest.fixture(scope="module")
def live(folder, tmp_path_factory):
    with serve(config(folder), folder, tmp_path_factory.mktemp("log") / "server.log") as live:
        yield live


@pytest.fixture
async def fresh(live, tmp_path):
    """Version numbers only grow; each test starts from the weights of `tiny(0)` under a number of its own."""
    first = next(_numbers)
    await live.apply(version(first, weights(tiny(0)), tmp_path / "first"))
    return first


_numbers = iter(range(1, 100000, 100))


def spans(done):
    ends = [start for start, _ in done.runs[1:]] + [len(done.tokens)]
    return [(start, end, number) for (start, number), end in zip(done.runs, ends, strict=True)]


async def test_it_says_what_it_is(live):
    about = live.dialect.read_about(await live.call(*live.dialect.about()))
    assert about.version.startswith("0.5.")
    assert about.context == CONTEXT
    assert about.can_update, about.missing


def _renamed(tensors):
    return {name.replace("layers.1.mlp.up_proj", "layers.1.mlp.upper_proj"): value for name, value in tensors.items()}


def _halved(tensors):
    name = "model.layers.1.self_attn.k_proj.weight"
    return {**tensors, name: tensors[name][:16].contiguous()}


def _doubled(tensors):
    name = "model.layers.1.mlp.up_proj.weight"
    return {**tensors, name: torch.cat([tensors[name], tensors[name]])}


def _without(tensors):
    return {name: value for name, value in tensors.items() if "layers.0.self_attn.v_proj" not in name}


def _infinite(tensors):
    name = "model.norm.weight"
    return {**tensors, name: tensors[name].clone().fill_(float("inf"))}


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (_renamed, "no model.layers.1.mlp.upper_proj.weight"),
        (_halved, "too small: nothing fills model.layers.1.self_attn.qkv_proj.weight"),
        (_doubled, "model.layers.1.mlp.up_proj.weight"),
        (_without, "missing"),
        (_infinite, "model.norm.weight holds values that are not finite"),
        (lambda tensors: {**tensors, "model.layers.7.mlp.up_proj.weight": torch.zeros(96, 64)}, "layers.7"),
    ],
)
async def test_a_version_that_does_not_fit_changes_nothing(live, fresh, tmp_path, spoil, complaint):
    bad = version(fresh + 1, spoil(weights(tiny(1))), tmp_path / "bad")
    with pytest.raises(Answer, match=complaint) as refused:
        await live.apply(bad)
    assert refused.value.status == 400
    done = await live.generate(request(f"still{fresh}", [*PROMPT, 3]), fresh)
    assert done.runs == [(0, fresh)]
    assert np.abs(done.logprobs - plain(tiny(0), [*PROMPT, 3], done.tokens.tolist())).max() < BF16
    await live.apply(version(fresh + 2, weights(tiny(1)), tmp_path / "good"))
    done = await live.generate(request(f"good{fresh}", [*PROMPT, 3]), fresh + 2)
    assert done.runs == [(0, fresh + 2)]
    assert np.abs(done.logprobs - plain(tiny(1), [*PROMPT, 3], done.tokens.tolist())).max() < BF16


async def test_a_torn_file_changes_nothing(live, fresh, tmp_path):
    bad = version(fresh + 1, weights(tiny(1)), tmp_path / "bad")
    path = bad.folder / "b.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(Answer, match=r"b\.safetensors"):
        await live.apply(bad)
    assert (await live.generate(request("torn", PROMPT), fresh)).runs == [(0, fresh)]


async def test_an_abort_returns_what_there_is_within_a_second(live, fresh):
    heard: list[int] = []
    other: list[int] = []
    task = asyncio.create_task(live.generate(request("req1", PROMPT, 480), fresh, heard))
    beside = asyncio.create_task(live.generate(request("req12", [*PROMPT, 4], 480), fresh, other))
    await heard_at_least(heard, 4)
    await heard_at_least(other, 4)
    began = time.monotonic()
    await live.call(*live.dialect.abort("req1"))
    done = await task
    assert time.monotonic() - began < 1
    assert done.finish == "abort"
    assert len(done.tokens) >= 4
    assert np.abs(done.logprobs - plain(tiny(0), PROMPT, done.tokens.tolist())).max() < BF16
    assert spans(done) == [(0, len(done.tokens), fresh)]
    assert not beside.done()
    await live.call(*live.dialect.abort(None))
    assert (await beside).finish == "abort"


@pytest.mark.parametrize("mode", ["keep", "recompute"])
async def test_a_pause_holds_and_what_ran_goes_on(live, fresh, mode):
    heard: list[int] = []
    task = asyncio.create_task(live.generate(request(f"held-{mode}", PROMPT, 300), fresh, heard))
    await heard_at_least(heard, 4)
    await live.call(*live.dialect.pause(mode))
    await live.call(*live.dialect.pause(mode))
    await asyncio.sleep(0.3)
    count = len(heard)
    late = asyncio.create_task(live.generate(request(f"late-{mode}", PROMPT, 5), fresh))
    await asyncio.sleep(0.5)
    assert len(heard) == count
    assert not late.done()
    with pytest.raises(Answer) as busy:
        await live.call(live.dialect.ready())
    assert busy.value.status == 503
    await live.call(*live.dialect.resume())
    await live.call(*live.dialect.resume())
    done = await task
    assert (done.finish, len(done.tokens)) == ("length", 300)
    assert np.abs(done.logprobs - plain(tiny(0), PROMPT, done.tokens.tolist())).max() < BF16
    assert len((await late).tokens) > 0
    await live.call(live.dialect.ready())


@pytest.mark.parametrize("before", [None, "keep"])
async def test_pause_abort_ends_all_with_what_they_have(live, fresh, before):
    heard: list[int] = []
    tasks = [asyncio.create_task(live.generate(request(f"one{fresh}", PROMPT, 480), fresh, heard))]
    tasks += [
        asyncio.create_task(live.generate(request(f"x{fresh}-{i}", [*PROMPT, i], 480), fresh)) for i in range(3, 8)
    ]
    await heard_at_least(heard, 8)
    if before is not None:
        await live.call(*live.dialect.pause(before))
    began = time.monotonic()
    await live.call(*live.dialect.pause("abort"))
    done = await asyncio.gather(*tasks)
    assert time.monotonic() - began < 1
    for one in done:
        assert one.finish == "abort"
    assert len(done[0].tokens) >= 8
    assert np.abs(done[0].logprobs - plain(tiny(0), PROMPT, done[0].tokens.tolist())).max() < BF16
    await live.call(*live.dialect.resume())
    assert (await live.generate(request(f"then{fresh}", PROMPT, 5), fresh)).finish == "length"


async def test_figures_are_those_of_the_moment(live, fresh):
    idle = live.dialect.read_metrics((await live.call(live.dialect.metrics()))[0])
    assert (idle.running, idle.waiting) == (0, 0)
    heard: list[int] = []
    tasks = [asyncio.create_task(live.generate(request("first", PROMPT, 480), fresh, heard))]
    tasks += [asyncio.create_task(live.generate(request(f"q{i}", [*PROMPT, i], 480), fresh)) for i in range(30)]
    await heard_at_least(heard, 20)
    busy = live.dialect.read_metrics((await live.call(live.dialect.metrics()))[0])
    assert busy.running + busy.waiting > 10
    assert 0 < busy.running <= 16
    assert 0 < busy.cache_use <= 1
    await live.call(*live.dialect.abort(None))
    await asyncio.gather(*tasks)


async def test_memory_is_given_back_and_taken_again_by_repeats_that_do_no_harm(live, fresh):
    """Only the server's bookkeeping: a CPU frees nothing, and the dialect would refuse to ask."""
    call = live.dialect.ready()  # its class, without an import of the test's own
    send = type(call)
    heard: list[int] = []
    task = asyncio.create_task(live.generate(request("asleep", PROMPT, 200), fresh, heard))
    await heard_at_least(heard, 4)
    release = send("POST", "/release_memory_occupation", {"tags": ["kv_cache"]})
    wake = send("POST", "/resume_memory_occupation", {"tags": ["kv_cache", "weights"]})
    await live.call(*live.dialect.pause("recompute"), release, release, wake, wake, *live.dialect.resume())
    done = await task
    assert np.abs(done.logprobs - plain(tiny(0), PROMPT, done.tokens.tolist())).max() < BF16
