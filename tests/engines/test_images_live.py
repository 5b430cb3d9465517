"""Real servers with images: log-probabilities are those of a plain forward pass, whatever the weights become."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch

from streamrl.config import RunConfig
from streamrl.engine import Completion, Request, first_tokens
from streamrl.errors import ConfigError
from streamrl.http import Call
from streamrl.images.vision import vision_of
from streamrl.servers.check import connect
from streamrl.servers.kinds import make_dialect
from streamrl.servers.server import Server
from tests.engines.conformance_kit import KEY, write_version
from tests.shown_kit import IMAGES, Seeing
from tests.vision_kit import make_vision_model

pytestmark = [
    pytest.mark.engines,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

CLOSE = 2e-5
"""The order of two images makes 0.001 and more."""


def run_config(kind: str, folder: Path, **processor: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "images",
            "model": {"path": str(folder / "model"), "context": 512, "image_processor": processor},
            "engine": {
                "kind": kind,
                "device": "cpu",
                "dtype": "float32",
                "slots": 8,
                "kv_cache": "64MiB",
                "threads": 1,
            },
            "learner": {"train_vision": True},
            "weights": {"deadline": 60, "dtype": "float32"},
        }
    )


@dataclass
class World:
    """One server, the model that its newest version was made of, and that version's number."""

    kind: str
    folder: Path
    server: Server
    seeing: Seeing
    number: int = 0

    async def ask(self, *requests: Request) -> list[Completion]:
        async with asyncio.timeout(120):
            return await asyncio.gather(*map(self.server.generate, requests))

    async def change(self, change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
        """Replace the weights, here and there."""
        torch.manual_seed(self.number)
        parameters = dict(self.seeing.model.named_parameters())
        tensors = {name: change(name, parameter.detach().clone()) for name, parameter in parameters.items()}
        self.number += 1
        await self.server.apply(write_version(self.folder, self.number, tensors))
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(tensors[name])

    async def processed(self) -> int:
        """Images that vLLM has processed, which is what its cache did not have."""
        text = await self.server.client.call(Call("GET", "/metrics", repeatable=True), 30)
        asked, hits = (
            int(float(re.search(rf"^vllm:mm_cache_{name}_total\{{.*\}} (\S+)$", text, re.MULTILINE)[1]))
            for name in ("queries", "hits")
        )
        return asked - hits


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=["vllm", "sglang"])
async def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    folder = tmp_path_factory.mktemp(request.param)
    make_vision_model(folder / "model", "qwen2_vl")
    async with Server(run_config(request.param, folder), folder, "engine.0", seed=1, key=KEY) as server:
        yield World(request.param, folder, server, Seeing(folder / "model"))


async def test_log_probabilities_are_those_of_a_forward_pass(world: World):
    """With and without images, the same in another order, equal requests, and words that mean an image elsewhere."""
    requests = [*world.seeing.requests(), world.seeing.request("words", "an <image> or <img>", IMAGES[:2])]
    done = await world.ask(*requests)
    assert world.seeing.worst_error(requests, done) < CLOSE
    other = [requests[1], *requests[1:]]
    assert world.seeing.worst_error(other, [done[0], *done[1:]]) > 10 * CLOSE


async def test_a_turn_that_adds_an_image_goes_on_from_the_tokens_before(world: World):
    """Tokens that no text becomes stay as they are, and only the new image is processed."""
    before = world.seeing.request("first", "abc", IMAGES[2:3], 60)
    (said,) = await world.ask(before)
    text = world.seeing.tokenizer.decode(said.tokens.tolist())
    assert world.seeing.tokenizer.plain_ids(text) != said.tokens.tolist(), "these tokens would come back from a text"
    opened = world.seeing.request("", "more", IMAGES[3:]).tokens
    both = Request("second", np.concatenate([before.tokens, said.tokens, opened]), 12, forbidden=before.forbidden)
    both = world.seeing.with_images(both, IMAGES[2:])
    processed = await world.processed() if world.kind == "vllm" else 0
    (done,) = await world.ask(both)
    assert world.seeing.error(both, done) < CLOSE
    if world.kind == "sglang":
        assert done.cached_tokens >= len(before.tokens)
    else:  # its blocks on a CPU are longer than the prompt
        assert await world.processed() - processed <= 1, "the first image was processed again"


async def test_the_whole_model_changes_while_images_are_described(world: World):
    requests = world.seeing.requests(most=300)
    short = [replace(request, max_new_tokens=12) for request in requests]
    await world.ask(*short)
    for part in ("", "visual", "language_model"):
        waiting = asyncio.gather(*map(world.server.generate, requests))
        await asyncio.sleep(0.3)
        old, number = Seeing(world.folder / "model"), world.number
        old.model.load_state_dict(world.seeing.model.state_dict())

        def moved(name: str, weight: torch.Tensor, part: str = part) -> torch.Tensor:
            return weight + 0.05 * torch.randn_like(weight) if part in name else weight

        await world.change(moved)
        done = await waiting
        assert all([version for _, version in each.runs] in ([number], [number, number + 1]) for each in done)
        assert any(len(each.runs) == 2 for each in done)
        parts = [first_tokens(each, each.runs[1][0] if each.runs[1:] else len(each.tokens)) for each in done]
        assert old.worst_error(requests, parts) < CLOSE
        done = await world.ask(*short)
        assert all(each.runs == [(0, number + 1)] for each in done)
        assert world.seeing.worst_error(short, done) < CLOSE, part


async def test_no_token_that_stands_for_an_image_is_ever_sampled(world: World):
    forbidden = list(world.seeing.vision.forbidden)

    def louder(name: str, weight: torch.Tensor) -> torch.Tensor:
        if name == "lm_head.weight":
            weight[forbidden] *= 30
        return weight

    await world.change(louder)
    requests = world.seeing.requests(most=30)
    done = await world.ask(*requests)
    assert not {token for each in done for token in each.tokens.tolist()} & set(forbidden)
    assert world.seeing.worst_error(requests, done) < CLOSE


async def test_another_image_processor_is_found_before_the_first_request(world: World):
    config = run_config(world.kind, world.folder, size={"shortest_edge": 28 * 28, "longest_edge": 224 * 224})
    assert vision_of(config.model).tokens_of((512, 512)) != world.seeing.vision.tokens_of((512, 512))
    with pytest.raises(ConfigError, match="does not take images: the server counts") as caught:
        await connect(world.server.client, make_dialect(config), config, external=False)
    assert "model.image_processor" in caught.value.hint
