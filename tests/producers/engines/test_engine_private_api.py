"""Where transformers may change under us: a failure here names what to look at in `streamrl/producers/engines`."""

from __future__ import annotations

import asyncio
import inspect
from functools import reduce

import pytest
from engine_kit import gated, held, named, random_model, request
from transformers.cache_utils import CacheLayerMixin
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

from streamrl.producers.engines.continuous import PRIVATE_MEMBERS


async def test_members_of_continuous_batching(start):
    engine = await start("continuous")
    await engine.generate(request("a", [3, 4], 2))
    for path in PRIVATE_MEMBERS:
        try:
            reduce(getattr, path.split("."), engine._decoder._manager)
        except AttributeError as error:
            pytest.fail(f"transformers changed: manager.{path} is gone ({error}); continuous.py depends on it")
    for allocator in engine._decoder._manager.batch_processor.cache.cache_allocators.values():
        for name in ("hash_to_block", "block_to_hash"):
            assert isinstance(getattr(allocator.ledger, name, None), dict), (
                f"transformers changed: allocator.ledger.{name} is no dictionary any more; continuous.py clears it"
            )


def test_a_pause_still_takes_effect_between_two_steps():
    """The version spans are exact because the loop parks before it schedules a step."""
    source = inspect.getsource(ContinuousBatchingManager._generation_loop_body)
    order = [source.index(call) for call in ("prepare_next_batch", "_generation_step", "update_batch")]
    assert order == sorted(order), "transformers changed: the order of a continuous-batching step"


async def test_prompts_are_shared_within_a_version_and_not_across(start):
    """Counts the tokens of the forward passes: 64 of 70 prompt tokens are two whole blocks of 32; one step follows."""
    engine = await start("continuous")
    seen: list[int] = []
    engine._model.register_forward_pre_hook(
        lambda _module, _args, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    text = [3 + k % 20 for k in range(70)]

    async def cost(name: str) -> int:
        seen.clear()
        await engine.generate(request(name, text, 2))
        return sum(seen)

    assert await cost("first") == 71
    assert await cost("second") == 7, "transformers changed: prompts with the same beginning share no blocks"
    await engine.apply(held((1, 1), named(random_model("qwen2", 1))))
    assert await cost("third") == 71, "transformers changed: blocks of older weights are served after a swap"
    assert await cost("fourth") == 7


async def test_an_old_request_offers_nothing_to_newer_ones(start):
    """A request that lives through a swap completes further blocks; nobody may find them."""
    engine = await start("continuous")
    async with gated(engine) as gate:
        old = asyncio.create_task(engine.generate(request("old", [3 + k % 20 for k in range(40)], 120)))
        await gate.passed(3)
        await gate.during(engine.apply(held((1, 1), named(random_model("qwen2", 1)))))
    done = await old
    assert len(done.runs) == 2
    for allocator in engine._decoder._manager.batch_processor.cache.cache_allocators.values():
        assert not allocator.ledger.hash_to_block


def test_what_a_cache_layer_has_to_implement():
    ours = {"lazy_initialization", "update", "get_mask_sizes", "get_seq_length", "get_max_length"}
    assert ours == CacheLayerMixin.__abstractmethods__, "transformers changed: the interface of cache layers (kv.py)"
