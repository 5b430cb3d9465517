"""The engine in this process: cancel, sleep, weights that are refused, death."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
import torch
from engine_kit import LONG, gated, hanging, held, named, plain, prompt, random_model, request, until, versions

from streamrl.errors import Unreachable, WeightsError
from streamrl.producers.engines.hf import HfEngine
from streamrl.producers.engines.weights import check_weights

# --- cancel, sleep ---


async def test_cancelling_frees_the_place(start):
    engine = await start(slots=2)
    async with gated(engine) as gate:
        long = [asyncio.create_task(engine.generate(request(f"r{k}", prompt(3, k), 190))) for k in range(2)]
        await gate.passed(3)
        third = asyncio.create_task(engine.generate(request("third", prompt(4), 3)))
        never = asyncio.create_task(engine.generate(request("never", prompt(4), 3)))
        await gate.passed(2)
        never.cancel()
        long[0].cancel()
        done = await gate.running(third)
        assert len(done.tokens) == 3
        assert not long[1].done()
        for task in (long[0], never):
            with pytest.raises(asyncio.CancelledError):
                await task
        again = await gate.running(engine.generate(request("r0", prompt(3), 2)))
        assert len(again.tokens) == 2
    assert len((await long[1]).tokens) == 190
    assert engine.load().running == 0


async def test_a_request_cancelled_in_its_first_turn_is_never_run(start):
    engine = await start()
    task = asyncio.create_task(engine.generate(request("a", prompt(3), LONG)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: engine.load().running + engine.load().waiting == 0)
    assert (await engine.generate(request("a", prompt(3), 3))).finish == "length"


async def test_no_step_runs_while_it_sleeps(start):
    engine = await start()
    async with gated(engine) as gate:
        task = asyncio.create_task(engine.generate(request("a", prompt(3), 20)))
        await gate.passed(3)
        await gate.during(engine.sleep(0))
        await engine.sleep(0)
        entered = gate.entered
        more = asyncio.create_task(engine.generate(request("b", prompt(3), 20)))
        await engine.apply(held((1, 1), named(random_model("qwen2", 1))))
        await engine.sleep(0)
        assert gate.entered == entered
        await engine.wake()
        await engine.wake()
    assert versions(await task)[-1] == 1
    assert (await more).runs == [(0, 1)]


async def test_sleep_and_wake(start):
    engine = await start()
    new = random_model("qwen2", 1)
    await engine.generate(request("before", prompt(3), 4))
    await engine.sleep()
    await engine.sleep()
    tasks = [asyncio.create_task(engine.generate(request(str(k), prompt(3), 6))) for k in range(2)]
    await asyncio.sleep(0)
    assert engine.load().running + engine.load().waiting == 2
    await engine.sleep(0)
    await engine.apply(held((1, 4), named(new)))
    assert not tasks[0].done()
    await engine.wake()
    await engine.wake()
    for task in tasks:
        done = await task
        assert done.runs == [(0, 4)]
        np.testing.assert_allclose(done.logprobs, plain(new, prompt(3), done), atol=1e-5)


# --- weights that must not be applied ---


def broken(how: str) -> dict[str, torch.Tensor]:
    tensors = named(random_model("qwen2", 1))
    name = "model.layers.1.mlp.up_proj.weight"
    match how:
        case "missing":
            del tensors[name]
        case "unknown":
            tensors["model.layers.7.mlp.up_proj.weight"] = tensors[name]
        case "shape":
            tensors[name] = tensors[name].T.contiguous()
        case "integer":
            tensors[name] = tensors[name].to(torch.int32)
        case "tied":
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    return tensors


async def test_weights_are_refused_whole(start):
    engine = await start()
    old = random_model("qwen2", 0)
    task = asyncio.create_task(engine.generate(request("flight", prompt(3), 100)))
    for how, says in {
        "missing": "up_proj",
        "unknown": "layers.7",
        "shape": "shape",
        "integer": "int32",
        "tied": "lm_head",
    }.items():
        with pytest.raises(WeightsError, match=says):
            await engine.apply(held((1, 1), broken(how)))
    assert engine.load().version == 0
    for completion in (await task, await engine.generate(request("next", prompt(3), 30))):
        assert completion.runs == [(0, 0)]
        np.testing.assert_allclose(completion.logprobs, plain(old, prompt(3), completion), atol=1e-5)


async def test_versions_only_grow_and_a_repeat_does_nothing(start):
    engine = await start()
    first, second = random_model("qwen2", 1), random_model("qwen2", 2)
    await engine.apply(held((1, 5), named(first)))
    await engine.apply(held((1, 5), named(second)))
    with pytest.raises(WeightsError, match="older"):
        await engine.apply(held((1, 4), named(second)))
    completion = await engine.generate(request("a", prompt(3), 10))
    assert completion.runs == [(0, 5)]
    np.testing.assert_allclose(completion.logprobs, plain(first, prompt(3), completion), atol=1e-5)
    rounded = {name: tensor.bfloat16() for name, tensor in named(second).items()}
    # the other name of the tied parameter, and a narrower type
    rounded["lm_head.weight"] = rounded.pop("model.embed_tokens.weight")
    await engine.apply(held((1, 6), rounded))
    second.load_state_dict({name: tensor.bfloat16().float() for name, tensor in second.state_dict().items()})
    completion = await engine.generate(request("a", prompt(3), 10))
    np.testing.assert_allclose(completion.logprobs, plain(second, prompt(3), completion), atol=1e-5)


async def test_names_and_shapes_are_compared_once_for_each_structure(start, monkeypatch):
    compared = []

    def counting(model, tensors):
        compared.append(len(tensors))
        check_weights(model, tensors)

    monkeypatch.setattr("streamrl.producers.engines.weights.check_weights", counting)
    engine = await start()
    for number in (1, 2, 3):
        await engine.apply(held((1, number), named(random_model("qwen2", number))))
    assert len(compared) == 1
    fewer = named(random_model("qwen2", 4))
    del fewer["model.norm.weight"]
    with pytest.raises(WeightsError, match="missing"):
        await engine.apply(held((1, 4), fewer))
    await engine.apply(held((1, 5), named(random_model("qwen2", 5))))
    assert len(compared) == 2


# --- death and end ---


@pytest.mark.parametrize("cause", ["forward raises", "logits are NaN"])
async def test_the_death_of_the_decode_loop_surfaces(start, cause):
    engine = await start(slots=2)
    await engine.health()

    def fail(*_args: object) -> None:
        raise RuntimeError("the forward pass broke")

    if cause == "forward raises":
        engine._decoder._batch.model.register_forward_pre_hook(fail)
    else:
        engine._decoder._batch.model.get_input_embeddings().weight.fill_(float("nan"))
    tasks = [asyncio.create_task(engine.generate(request(str(k), prompt(3), 50))) for k in range(5)]
    async with asyncio.timeout(20):
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, Unreachable)
    for call in (
        engine.health(),
        engine.generate(request("late", prompt(3))),
        engine.sleep(0),
        engine.apply(held((1, 1), named(random_model("qwen2", 1)))),
    ):
        with pytest.raises(Unreachable, match="died"):
            await call
    await engine.close()


async def test_close_aborts_what_is_in_flight(start):
    engine = await start()
    async with gated(engine) as gate:
        task = asyncio.create_task(engine.generate(request("a", prompt(3), LONG)))
        await gate.passed(5)
        await gate.running(engine.close())
    done = await task
    assert done.finish == "abort"
    assert 4 <= len(done.tokens) < LONG
    await engine.close()
    for call in (engine.health(), engine.generate(request("b", prompt(3)))):
        with pytest.raises(Unreachable, match="closed"):
            await call


async def test_close_while_it_sleeps(start):
    engine = await start()
    await engine.sleep(0)
    task = asyncio.create_task(engine.generate(request("a", prompt(3), LONG)))
    await asyncio.sleep(0)
    await engine.close()
    assert (await task).finish == "abort"


async def test_nothing_works_before_start(model_dir):
    from engine_kit import engine_config

    engine = HfEngine(engine_config(model_dir("qwen2")), 0)
    with pytest.raises(Unreachable, match="not been started"):
        await engine.health()
    assert engine.load().version == 0
    await engine.close()
    await engine.close()


async def test_a_step_that_hangs_is_reported_within_the_deadline(start):
    engine = await start(deadline=0.1)
    with hanging(engine._decoder._batch.model) as hang:
        task = asyncio.create_task(engine.generate(request("a", prompt(3), 5)))
        await until(hang.entered.is_set)
        with pytest.raises(Unreachable, match=r"within 0\.1 s|longer than 0\.1 s"):
            await engine.sleep(0)
        with pytest.raises(Unreachable):
            await task


async def test_a_decode_loop_that_hangs_is_dead_although_nobody_controls_it(start):
    engine = await start(deadline=0.2)
    with hanging(engine._decoder._batch.model):
        tasks = [asyncio.create_task(engine.generate(request(str(k), prompt(3), 5))) for k in range(3)]
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, Unreachable)
            assert "no decode step ended within 0.2 s" in str(result)
        with pytest.raises(Unreachable, match="no decode step"):
            await engine.health()


async def test_half_of_the_longest_hold_is_too_long_for_a_step(start):
    """Whoever gives up after `lease.max_hold` learns that the engine is to blame, not the prompt."""
    engine = await start(max_hold=0.4)
    engine._watcher.cancel()  # `health` notices by itself as well
    with hanging(engine._decoder._batch.model):
        task = asyncio.create_task(engine.generate(request("a", prompt(3), 5)))
        with pytest.raises(Unreachable, match=r"within 0\.2 s"):
            async with asyncio.timeout(20):
                while True:
                    await engine.health()
                    await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_sleep_of_any_length_is_no_hang(start):
    engine = await start(deadline=0.2)
    await engine.sleep(0)
    task = asyncio.create_task(engine.generate(request("a", prompt(3), 5)))
    await asyncio.sleep(0.8)
    await engine.health()
    await engine.wake()
    assert (await task).finish == "length"


async def test_an_update_that_hangs_is_the_end_of_the_engine_although_its_caller_left(start, monkeypatch):
    engine = await start(deadline=0.2)
    free = threading.Event()
    monkeypatch.setattr("streamrl.producers.engines.weights.check_weights", lambda *_: free.wait(60))
    task = asyncio.create_task(engine.apply(held((1, 1), {})))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    waiting = asyncio.create_task(engine.generate(request("a", prompt(3), 10**6)))
    await until(lambda: engine._failure is not None)
    with pytest.raises(Unreachable, match=r"did not finish apply within 0\.2 s"):
        await engine.health()
    await asyncio.gather(waiting, return_exceptions=True)
    free.set()


async def test_a_control_that_fails_after_its_caller_has_left_is_logged(start, monkeypatch, caplog):
    engine = await start()
    caplog.clear()
    free = threading.Event()

    def refuse(*_: object) -> None:
        free.wait(60)
        raise WeightsError("it does not fit")

    monkeypatch.setattr("streamrl.producers.engines.weights.check_weights", refuse)
    task = asyncio.create_task(engine.apply(held((1, 1), {})))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    free.set()
    await until(lambda: caplog.records)
    [record] = caplog.records
    assert (record.control, record.error) == ("apply", "it does not fit")


async def test_a_version_is_the_pair_of_epoch_and_number(start):
    """Two learners may use one number; what counts is who is newer, and a number never goes down."""
    engine = await start()
    await engine.apply(held((1, 5), named(random_model("qwen2", 1))))
    await engine.apply(held((2, 5), named(random_model("qwen2", 2))))
    completion = await engine.generate(request("a", prompt(3), 10))
    expected = plain(random_model("qwen2", 2), prompt(3), completion)
    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)
    for older in ((1, 5), (1, 6), (3, 4)):
        with pytest.raises(WeightsError, match="older"):
            await engine.apply(held(older, named(random_model("qwen2", 3))))
    assert engine.load().version == 5
