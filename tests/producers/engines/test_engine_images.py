"""transformers in process with images: log-probabilities are those of a plain forward pass."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from streamrl.config import RunConfig
from streamrl.engine import Request
from streamrl.producers.engines.hf import HfEngine
from streamrl.weight_sync.tensors import Version
from tests.shown_kit import IMAGES, SHOWN, Seeing
from tests.vision_kit import KINDS, make_vision_model

CLOSE = 1e-5


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def seeing(folder: Path) -> Seeing:
    return Seeing(folder)


@asynccontextmanager
async def started(folder: Path, slots: int = 4):
    config = RunConfig.model_validate(
        {"name": "t", "model": {"path": str(folder), "context": 512}, "engine": {"slots": slots, "threads": 1}}
    )
    engine = HfEngine(config, seed=1)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def test_log_probabilities_are_those_of_a_forward_pass(folder, seeing):
    """Requests with and without images in one batch, the same images in another order, and equal ones."""
    requests = seeing.requests()
    async with started(folder) as engine:
        done = await asyncio.gather(*map(engine.generate, requests))
        assert engine._vision.processed == 1 + len(IMAGES), "each image once, and the one of the trial"
    assert seeing.worst_error(requests, done) < CLOSE
    other = [requests[1], *requests[1:]]
    assert seeing.worst_error(other, [done[0], *done[1:]]) > CLOSE, "the order of two images makes no difference"
    assert len(requests) == len(SHOWN)


async def test_two_turns_see_the_images_of_both(folder, seeing):
    """A turn that adds an image goes on where the first one stood, and no image is processed a second time."""
    first = seeing.request("first", "a", IMAGES[:1])
    async with started(folder) as engine:
        said = await engine.generate(first)
        opened = seeing.request("", "b", IMAGES[1:2]).tokens
        both = Request("second", np.concatenate([first.tokens, said.tokens, opened]), 8)
        second = seeing.with_images(both, IMAGES[:2])
        before = engine._vision.processed
        done = await engine.generate(second)
        assert engine._vision.processed == before + 1
    assert seeing.worst_error([first, second], [said, done]) < CLOSE


async def test_weights_change_and_the_engine_sleeps_while_images_are_described(folder, seeing):
    """Responses in flight go on, and are computed again from their images after a sleep."""
    requests = seeing.requests(most=40)
    weights = {name: weight.detach().clone() for name, weight in seeing.model.named_parameters()}
    async with started(folder, slots=8) as engine:
        waiting = [asyncio.create_task(engine.generate(request)) for request in requests]
        while not engine.load().tokens_sampled:  # noqa: ASYNC110  (the engine tells nobody)
            await asyncio.sleep(0)
        await engine.sleep(1)
        await engine.wake()
        await engine.apply(Version((1, 1), 1, weights))  # the same weights under another number
        done = await asyncio.gather(*waiting)
    assert any(len(each.runs) == 2 for each in done)
    assert seeing.worst_error(requests, done) < CLOSE


async def test_no_token_that_stands_for_an_image_is_ever_sampled(folder, seeing):
    weights = {name: weight.detach().clone() for name, weight in seeing.model.named_parameters()}
    head = weights["lm_head.weight"]
    head[list(seeing.vision.forbidden)] = 50 * head[list(seeing.vision.forbidden)]
    with torch.no_grad():
        dict(seeing.model.named_parameters())["lm_head.weight"].copy_(head)
    requests = seeing.requests(most=24)
    async with started(folder) as engine:
        await engine.apply(Version((1, 1), 1, weights))
        done = await asyncio.gather(*map(engine.generate, requests))
    assert not {token for each in done for token in each.tokens.tolist()} & set(seeing.vision.forbidden)
    assert seeing.worst_error(requests, done) < CLOSE
