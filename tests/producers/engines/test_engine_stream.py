"""Both decode loops: listeners, the three modes of a pause, keys and values computed anew, levels and tags of sleep."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_kit import LONG, MODES, gated, held, named, plain, prompt, random_model, replay, request, versions

from streamrl.errors import DataError, Refused, WeightsError
from streamrl.producers.engines import slots
from streamrl.producers.engines.control import Residence, copy_weights, match_weights
from streamrl.producers.engines.decoder import Job, JobProgress
from streamrl.producers.engines.slots import SlotBatch


class Ear:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.calls = 0

    def __call__(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        assert len(tokens) == len(logprobs) > 0
        self.tokens += tokens
        self.logprobs += logprobs
        self.calls += 1

    def equals(self, done) -> bool:
        return self.tokens == done.tokens.tolist() and np.array_equal(np.float32(self.logprobs), done.logprobs)


# --- listeners ---


@MODES
async def test_a_listener_hears_every_token_once_and_before_the_result(start, decode):
    engine = await start(decode, slots=4)
    ears = [Ear() for _ in range(12)]
    async with gated(engine) as gate:
        tasks = [
            asyncio.create_task(engine.generate(request(str(k), prompt(3 + k % 3, k), 5 + k), ear if k % 2 else None))
            for k, ear in enumerate(ears)
        ]
        await gate.passed(5)
        assert not tasks[1].done()
        assert 3 <= len(ears[1].tokens) <= 5
    for k, (ear, task) in enumerate(zip(ears, tasks, strict=True)):
        done = await task
        assert len(done.tokens) == 5 + k
        if k % 2:
            assert ear.equals(done)
            assert ear.calls >= len(done.tokens) - 1
        else:
            assert not ear.calls


@MODES
async def test_who_does_not_listen_costs_nothing(start, decode):
    engine = await start(decode)
    told: list[JobProgress] = []
    engine._hear = told.append
    await asyncio.gather(*(engine.generate(request(str(k), prompt(3), 20)) for k in range(5)))
    assert not told


@MODES
async def test_a_listener_hears_what_an_aborted_request_has(start, decode):
    engine = await start(decode)
    ear, deaf = Ear(), Ear()
    async with gated(engine) as gate:
        task = asyncio.create_task(engine.generate(request("a", prompt(3), LONG), ear))
        cancelled = asyncio.create_task(engine.generate(request("b", prompt(3), LONG), deaf))
        await gate.passed(4)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        heard = len(deaf.tokens)
        await gate.passed(2)
        await gate.during(engine.abort("a"))
        done = await task
    assert done.finish == "abort"
    assert ear.equals(done)
    assert len(deaf.tokens) == heard


@MODES
async def test_a_listener_that_fails_ends_its_own_request_only(start, decode):
    engine = await start(decode, slots=2)

    def fail(*_: object) -> None:
        raise RuntimeError("a bug of the caller")

    good, bad, later = await asyncio.gather(
        engine.generate(request("good", prompt(3), 30)),
        engine.generate(request("bad", prompt(3), LONG), fail),
        engine.generate(request("later", prompt(3), 3)),
        return_exceptions=True,
    )
    assert isinstance(bad, RuntimeError)
    assert len(good.tokens) == 30
    assert len(later.tokens) == 3
    assert len((await engine.generate(request("bad", prompt(3), 3))).tokens) == 3


async def test_a_listener_hears_on_when_its_request_was_thrown_out_for_want_of_memory(start):
    engine = await start("continuous", kv_cache="1KiB")
    model = random_model("qwen2", 0)
    ears = [Ear() for _ in range(6)]
    asked = [request(str(k), prompt(40, k), 120) for k in range(6)]
    done = await asyncio.gather(*(engine.generate(one, ear) for one, ear in zip(asked, ears, strict=True)))
    for one, ear, completion in zip(asked, ears, done, strict=True):
        assert ear.equals(completion)
        np.testing.assert_allclose(completion.logprobs, plain(model, one.tokens.tolist(), completion), atol=1e-5)
    load = engine.load()
    assert load.preemptions > 0
    await engine.pause("recompute")
    await engine.resume()
    assert engine.load().preemptions == load.preemptions


# --- pause ---


@MODES
async def test_after_recompute_later_tokens_are_those_of_a_plain_forward_pass(start, decode):
    """Prefixes of two versions, their keys and values all of the last one; also a prompt that others share."""
    engine = await start(decode, slots=4)
    models = {version: random_model("qwen2", version) for version in (0, 1, 2)}
    prompts = [prompt(3, 1), prompt(3, 1), prompt(70, 2), prompt(70, 2)]
    async with gated(engine) as gate:
        early = [asyncio.create_task(engine.generate(request(str(k), p, 60))) for k, p in enumerate(prompts)]
        await gate.passed(5)
        await gate.during(engine.apply(held((1, 1), named(models[1]))))
        await gate.passed(4)
        await gate.during(engine.pause("recompute"))
        await engine.apply(held((1, 2), named(models[2])))
        late = asyncio.create_task(engine.generate(request("late", prompts[2], 20)))
        await asyncio.sleep(0)
        await gate.running(engine.resume())
    for p, task in zip([*prompts, prompts[2]], [*early, late], strict=True):
        completion = await task
        seen = np.asarray(versions(completion))
        assert set(seen) == ({2} if task is late else {0, 1, 2})
        assert len(seen) == (20 if task is late else 60)
        first = int(np.argmax(seen == 2))
        expected = plain(models[2], p, completion)
        np.testing.assert_allclose(completion.logprobs[first:], expected[first:], atol=1e-5)
        kept = replay(models, p, completion)
        np.testing.assert_allclose(completion.logprobs[:first], kept[:first], atol=1e-5)
        if task is not late:
            # with the old keys and values they would be others
            assert np.abs(completion.logprobs[first:] - kept[first:]).max() > 1e-3
    # what was generated is a prefix too, and all of its blocks are of the present weights by now
    grown = [*prompts[2], *(await early[2]).tokens.tolist()]
    last = await engine.generate(request("grown", grown, 6))
    np.testing.assert_allclose(last.logprobs, plain(models[2], grown, last), atol=1e-5)


@MODES
async def test_a_pause_without_recompute_keeps_keys_and_values(start, decode):
    engine = await start(decode)
    models = {version: random_model("qwen2", version) for version in (0, 1)}
    async with gated(engine) as gate:
        task = asyncio.create_task(engine.generate(request("a", prompt(9), 40)))
        await gate.passed(5)
        await gate.during(engine.pause("keep"))
        await engine.apply(held((1, 1), named(models[1])))
        await gate.running(engine.resume())
    done = await task
    np.testing.assert_allclose(done.logprobs, replay(models, prompt(9), done), atol=1e-5)
    assert set(versions(done)) == {0, 1}


@MODES
async def test_a_repeated_pause_adds_what_its_mode_adds(start, decode):
    engine = await start(decode)
    async with gated(engine) as gate:
        task = asyncio.create_task(engine.generate(request("a", prompt(3), LONG)))
        await gate.passed(4)
        await gate.during(engine.pause())
        await engine.pause("recompute")
        await engine.pause("keep")
        assert not task.done()
        await engine.pause("abort")
        done = await task
        assert (done.finish, len(done.tokens) >= 3) == ("abort", True)
        after = asyncio.create_task(engine.generate(request("b", prompt(3), 4)))
        await asyncio.sleep(0)
        assert await engine.abort("nobody") == 0
        assert not after.done()
        await engine.resume()
    assert len((await after).tokens) == 4


@MODES
async def test_many_requests_through_random_pauses_and_swaps(start, decode):
    """After the last recompute no stale key is left; before that, versions only grow and nothing is lost."""
    engine = await start(decode, slots=6)
    source = random.Random(5)
    models = {version: random_model("qwen2", version) for version in range(6)}
    asked = [request(str(k), prompt(source.choice([1, 4, 33, 66]), k % 7), 60 + k) for k in range(10)]
    ears = [Ear() for _ in asked]
    async with gated(engine) as gate:
        tasks = [asyncio.create_task(engine.generate(one, ear)) for one, ear in zip(asked, ears, strict=True)]
        for version in range(1, 6):
            await gate.passed(source.randint(1, 6))
            mode = source.choice(["keep", "recompute"]) if version < 5 else "recompute"
            await gate.during(engine.pause(mode))
            await engine.apply(held((1, version), named(models[version])))
            await gate.running(engine.resume())
    for one, ear, task in zip(asked, ears, tasks, strict=True):
        done = await task
        assert len(done.tokens) == one.max_new_tokens
        assert ear.equals(done)
        seen = versions(done)
        assert seen == sorted(seen)
        assert seen[-1] == 5
        first = seen.index(5)
        expected = plain(models[5], one.tokens.tolist(), done)
        np.testing.assert_allclose(done.logprobs[first:], expected[first:], atol=1e-5)


@pytest.mark.parametrize("kind", ["qwen2", "llama", "gpt2"])
@pytest.mark.parametrize("seed", range(3))
def test_recompute_in_random_schedules_of_slots(kind, seed, monkeypatch):
    """Gaps, growth, parts of a few prompts; a recompute after each swap makes all of it a plain forward pass."""
    monkeypatch.setattr(slots, "PREFILL_TOKENS", 40)
    source = random.Random(seed)
    model = random_model(kind, 0)
    batch = SlotBatch(
        model, slots=5, context=200, stop_tokens=frozenset(), generator=torch.Generator().manual_seed(seed)
    )
    jobs: dict[int, Job] = {}
    heard: dict[int, list[int]] = {}
    ended = []
    while len(jobs) < 25 or batch.active:
        free = batch.slots - batch.active
        if len(jobs) < 25 and free and (source.random() < 0.3 or not batch.active):
            new = Job(len(jobs), tuple(prompt(source.choice([1, 9, 70]), len(jobs))), source.choice([1, 20, 60]), 1.0)
            jobs[new.ticket] = replace(new, streams=bool(new.ticket % 2))
            ended += batch.admit([jobs[new.ticket]])
        if batch.active:
            ended += batch.step()
        for news in batch.news():
            heard.setdefault(news.ticket, []).extend(news.tokens)
        if source.random() < 0.1 and batch.version < 3:
            version = batch.version + 1
            copy_weights(match_weights(model, named(random_model(kind, version))))
            batch.swapped(version)
            batch.recompute()
        assert 0 <= batch.cache_use <= 1
    assert batch.version
    assert batch.cache_use == 0
    for outcome in ended:
        text, sampled = jobs[outcome.ticket].prompt, outcome.tokens
        assert len(sampled) == jobs[outcome.ticket].limit
        assert heard.get(outcome.ticket, []) == (sampled[: len(heard.get(outcome.ticket, []))])
        assert (outcome.ticket in heard) <= bool(outcome.ticket % 2)
        for (first, version), (last, _) in zip(outcome.runs, [*outcome.runs[1:], (len(sampled), 0)], strict=True):
            with torch.no_grad():
                logits = random_model(kind, version)(input_ids=torch.tensor([[*text, *sampled]])).logits[0]
            expected = torch.log_softmax(logits, -1)[len(text) - 1 : -1].gather(1, torch.tensor(sampled)[:, None])[:, 0]
            np.testing.assert_allclose(outcome.logprobs[first:last], expected[first:last], atol=2e-5)


# --- sleep ---


@MODES
async def test_level_0_stops_decoding_and_keeps_all(start, decode):
    engine = await start(decode)
    async with gated(engine) as gate:
        task = asyncio.create_task(engine.generate(request("a", prompt(3), 30)))
        await gate.passed(4)
        await gate.during(engine.sleep(0))
        entered = gate.entered
        with pytest.raises(Refused, match="being decoded"):
            await engine.sleep(1)
        await engine.wake(["weights"])
        assert await engine.abort("nobody") == 0
        assert gate.entered == entered
        await engine.wake(["kv_cache"])
    np.testing.assert_allclose((await task).logprobs, plain(random_model("qwen2", 0), prompt(3), await task), atol=1e-5)


@MODES
@pytest.mark.parametrize("level", [1, 2])
async def test_waking_in_parts(start, decode, level):
    engine = await start(decode)
    await engine.generate(request("before", prompt(40), 4))
    await engine.sleep(level)
    await engine.sleep(level)
    task = asyncio.create_task(engine.generate(request("a", prompt(40), 6)))
    await engine.wake(["kv_cache"])
    assert await engine.abort("nobody") == 0
    assert not task.done()
    await engine.apply(held((1, 1), named(random_model("qwen2", 1))))
    await engine.wake(["weights"])
    done = await task
    assert done.runs == [(0, 1)]
    np.testing.assert_allclose(done.logprobs, plain(random_model("qwen2", 1), prompt(40), done), atol=1e-5)


@MODES
async def test_a_sleep_or_an_adapter_that_there_is_not(start, decode):
    engine = await start(decode)
    with pytest.raises(Refused, match="level 3"):
        await engine.sleep(3)
    with pytest.raises(Refused, match="nonsense"):
        await engine.wake(["nonsense"])
    with pytest.raises(Refused, match="no LoRA"):
        await engine.load_adapter("tuned", Path("/nowhere"))
    await engine.unload_adapter("tuned")
    with pytest.raises(DataError, match="tuned"):
        await engine.generate(replace(request("a", prompt(3), 3), adapter="tuned"))
    assert len((await engine.generate(request("a", prompt(3), 3))).tokens) == 3


@MODES
async def test_forgotten_weights_come_with_the_next_version(start, decode):
    """On a CPU nothing is forgotten unless the residence is told to; what an accelerator does, it does here."""
    engine = await start(decode)
    residence = engine._control._residence
    assert not residence.leaves_something
    await engine.sleep(1)
    await engine._run(5, residence.forget)
    await engine.wake()
    task = asyncio.create_task(engine.generate(request("a", prompt(5), 8)))
    assert await engine.abort("nobody") == 0
    assert not task.done()
    with pytest.raises(WeightsError, match="missing"):
        await engine.apply(held((1, 1), {}))
    assert residence.forgotten
    await engine.apply(held((1, 1), named(random_model("qwen2", 3))))
    done = await task
    np.testing.assert_allclose(done.logprobs, plain(random_model("qwen2", 3), prompt(5), done), atol=1e-5)


def test_a_model_that_forgets_keeps_its_shapes_and_ties():
    model = random_model("qwen2", 0)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    buffers = {name: tensor.clone() for name, tensor in model.named_buffers()}
    residence = Residence(model)
    residence.forget()
    assert sum(parameter.untyped_storage().nbytes() for parameter in model.parameters()) < 200
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == shapes
    pairs = match_weights(model, named(random_model("qwen2", 4)))
    residence.remember()
    residence.remember()
    copy_weights(pairs)
    residence.come_home()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, tensor in random_model("qwen2", 4).state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])
    for name, tensor in model.named_buffers():
        assert torch.equal(tensor, buffers[name])


# --- load, readers ---


@MODES
async def test_figures_of_a_loaded_engine(start, decode):
    engine = await start(decode, slots=2)
    idle = engine.load()
    assert (idle.capacity, idle.servers, idle.preemptions) == (2, 1, 0)
    assert idle.cache_use < 0.01
    async with gated(engine) as gate:
        tasks = [asyncio.create_task(engine.generate(request(str(k), prompt(60, k), 30))) for k in range(3)]
        await gate.passed(4)
        load = engine.load()
        assert (load.running, load.waiting) == (2, 1)
        assert 0.1 < load.cache_use <= 1
    await asyncio.gather(*tasks)
    # blocks that later prompts may share count as free
    assert engine.load().cache_use < 0.01


@MODES
async def test_a_version_is_being_read_until_it_is_copied_also_without_its_caller(start, decode):
    engine = await start(decode)
    version = held((1, 1), named(random_model("qwen2", 1)))
    async with gated(engine) as gate:
        running = asyncio.create_task(engine.generate(request("a", prompt(3), 20)))
        await gate.passed(3)
        task = asyncio.create_task(engine.apply(version))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert version.readers.count == 1
    await running
    await engine.abort("nobody")
    await asyncio.sleep(0)
    assert version.readers.count == 0
    assert engine.load().version == 1
