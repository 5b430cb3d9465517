"""A real vLLM server through `VllmDialect` and our plug-in: what was sampled is compared with plain forward passes."""

from __future__ import annotations

import asyncio
import copy
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import pytest_asyncio
import torch

sys.path.insert(0, str(Path(__file__).parent))
from vllm_kit import (
    CONTEXT,
    Failed,
    Live,
    forward,
    named,
    random_model,
    replay,
    request,
    save_model,
    served,
    write_version,
)

from streamrl.servers.launch import PLUGIN

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]

CLOSE = 0.04  # of log-probabilities in bfloat16; one of a thousand is off by 0.02, other weights move most by 0.5
PROMPT = [5, 6, 7, 8, 9] * 8
FAULT = """
import os
import torch
import streamrl_engine.files as files
whole = files.tensors
def tensors(source):
    for index, pair in enumerate(whole(source)):
        if index == 5 and os.path.exists(os.environ["FAULT"] + str(torch.distributed.get_rank())):
            raise OSError("the disk is gone")
        yield pair
files.tensors = tensors
"""


def exact(model: Any) -> Any:
    """The same values computed with in fp32, so that only the server's own rounding is seen."""
    return copy.deepcopy(model).float()


class World:
    """One server, the models that its versions were made of, and the newest version's number."""

    def __init__(self, live: Live, folder: Path, first: Any) -> None:
        self.live, self.folder = live, folder
        self.number, self.models = 0, {0: exact(first)}
        self.fault = folder / "fault0"

    def write(self, change: Callable[[dict[str, torch.Tensor]], Any] = lambda _: None) -> Any:
        """The next version, not yet applied."""
        model = random_model(self.number + 1, tied=True)
        tensors = named(model)
        change(tensors)
        self.models[self.number + 1] = exact(model)
        name = f"v-{self.number + 1}-{len(list(self.folder.iterdir()))}"
        return write_version(tensors, self.folder / name, self.number + 1)

    async def publish(self, mode: Any = "keep", version: Any = None) -> int:
        await self.live.update(self.write() if version is None else version, mode)
        self.number += 1
        return self.number

    async def matches(self, prompt: list[int] = PROMPT) -> None:
        """A new request is sampled from the newest version, and says so."""
        done = await self.live.generate(request("m", prompt, 24), self.number)
        assert done.runs == [(0, self.number)]
        assert np.abs(forward(self.models[self.number], prompt, done.tokens.tolist()) - done.logprobs).max() < CLOSE


def breakable(folder: Path, fault: Path) -> dict[str, str]:
    """Environment of a server whose loading breaks off on rank N while the file `fault`N is there."""
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(FAULT)
    return {"PYTHONPATH": f"{folder / 'site'}:{PLUGIN}", "FAULT": str(fault)}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    folder = tmp_path_factory.mktemp("vllm")
    model = random_model(0, tied=True)
    (folder / "versions").mkdir()
    flags = {"enable-lora": True, "max-lora-rank": 8, "max-loras": 2}
    variables = breakable(folder, folder / "versions" / "fault")
    async with served(save_model(model, folder / "model"), folder / "log", variables=variables, flags=flags) as live:
        yield World(live, folder / "versions", model)


async def during(world: World, limit: int, heard: int) -> asyncio.Task[Any]:
    """A request that has been heard of so many tokens of."""
    reached = asyncio.Event()
    task = asyncio.create_task(
        world.live.generate(
            request("flight", PROMPT, limit), world.number, lambda count: count >= heard and reached.set()
        )
    )
    await asyncio.wait_for(reached.wait(), 60)
    return task


async def test_it_says_what_it_is(world: World) -> None:
    about = world.live.dialect.read_about(await world.live.calls(world.live.dialect.about()))
    assert about.version.startswith("0.32")
    assert about.context == CONTEXT
    assert about.can_update
    assert about.probe is not None


LAYER = "model.layers.1.self_attn.k_proj"
BAD: dict[str, Callable[[dict[str, torch.Tensor]], Any]] = {
    "unknown": lambda held: held.update(foo=torch.ones(3)),
    "missing": lambda held: held.pop("model.norm.weight"),
    "part of a fused weight": lambda held: held.pop(f"{LAYER}.weight"),
    "part of a fused bias": lambda held: held.pop(f"{LAYER}.bias"),
    "too many rows": lambda held: held.update({"model.layers.0.mlp.up_proj.weight": torch.ones(300, 128)}),
    "too few rows": lambda held: held.update({"model.layers.0.mlp.up_proj.weight": torch.ones(100, 128)}),
    "too wide": lambda held: held.update({"model.layers.0.mlp.down_proj.weight": torch.ones(128, 193)}),
    "vocabulary": lambda held: held.update({"model.embed_tokens.weight": torch.ones(401, 128)}),
    "not a number": lambda held: held["model.norm.weight"].__setitem__(7, float("nan")),
    "infinite": lambda held: held["model.layers.1.mlp.up_proj.weight"].__setitem__((3, 4), float("inf")),
}


async def test_a_cut_file_is_refused_before_anything_is_changed(world: World) -> None:
    version = world.write()
    await world.live.calls(world.live.dialect.prefetch(version))
    file = version.folder / "rank1.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    await world.live.calls(world.live.dialect.pause("keep"))
    with pytest.raises(Failed, match="its header speaks of"):
        await world.live.calls(world.live.dialect.update(version))
    await world.live.calls(world.live.dialect.resume())
    await world.matches()


async def test_a_failed_update_is_mended_by_a_whole_one_while_still_paused(world: World) -> None:
    before, version = world.number, world.write()
    await world.live.calls(world.live.dialect.prefetch(version))
    task = await during(world, 4000, 40)
    await world.live.calls(world.live.dialect.pause("keep"))
    world.fault.touch()
    for _ in range(2):
        with pytest.raises(Failed, match="the disk is gone"):
            await world.live.calls(world.live.dialect.update(version))
    world.fault.unlink()
    await world.live.calls(world.live.dialect.update(version))
    await world.live.calls(world.live.dialect.resume())
    world.number += 1
    done = await task
    assert [run for _, run in done.runs] == [before, world.number]
    assert np.abs(replay(world.models, PROMPT, done) - done.logprobs).max() < CLOSE
    await world.matches()


async def test_a_client_that_left_within_an_update_does_not_stand_in_the_way(world: World) -> None:
    await world.live.calls(world.live.dialect.pause("keep"))
    await world.live.calls(world.live.dialect.update(world.write())[:2])
    await world.publish()
    await world.matches()


async def test_a_pause_that_aborts_ends_what_there_is_and_holds_what_comes(world: World) -> None:
    task = await during(world, 4000, 40)
    await world.live.calls(world.live.dialect.pause("abort"))
    assert (await task).finish == "abort"
    held = asyncio.create_task(world.live.generate(request("held", PROMPT, 5), world.number))
    gone = asyncio.create_task(world.live.generate(request("gone", PROMPT, 5), world.number))
    paused = await world.live.http.get(world.live.url + "/is_paused")
    assert await paused.json() == {"is_paused": True}
    while not gone.done():  # it may be on its way to the server still
        await world.live.calls(world.live.dialect.abort("gone", paused=True))
        await asyncio.wait([gone], timeout=0.05)
    assert (await gone).finish == "abort"
    assert not held.done()
    await world.live.calls(world.live.dialect.resume())
    assert len((await held).tokens) == 5


async def test_a_server_resumed_after_a_failed_update_dies_and_samples_nothing(world: World) -> None:
    """The last one: it ends the server."""
    version = world.write()
    await world.live.calls(world.live.dialect.prefetch(version))
    await world.live.calls(world.live.dialect.pause("keep"))
    world.fault.touch()
    with pytest.raises(Failed, match="the disk is gone"):
        await world.live.calls(world.live.dialect.update(version))
    await world.live.calls(world.live.dialect.resume())
    with pytest.raises((Failed, aiohttp.ClientError, Exception), match=r"EngineCore|disconnected|refused|reset"):
        await world.live.generate(request("z", PROMPT, 8), world.number)


async def test_two_ranks_refuse_and_apply_together(tmp_path: Path) -> None:
    models = {number: random_model(number, tied=False) for number in range(3)}
    folder, fault = save_model(models[0], tmp_path / "model"), tmp_path / "fault"
    variables = breakable(tmp_path, fault)
    async with served(folder, tmp_path / "log", tensor_parallel=2, variables=variables) as live:
        for number in (1, 2):
            for index, change in enumerate(BAD.values()):
                held = named(models[number])
                change(held)
                with pytest.raises(Failed, match="500"):
                    bad = write_version(held, tmp_path / f"b{number}-{index}", number)
                    await live.calls(live.dialect.prefetch(bad))
            version = write_version(named(models[number]), tmp_path / f"v{number}", number)
            await live.calls(live.dialect.prefetch(version))
            await live.calls(live.dialect.pause("keep"))
            for rank in (0, 1):  # one half is new then, and both ranks must know
                Path(f"{fault}{rank}").touch()
                with pytest.raises(Failed, match="the disk is gone"):
                    await live.calls(live.dialect.update(version))
                Path(f"{fault}{rank}").unlink()
            await live.calls(live.dialect.prefetch(version))
            await live.calls(live.dialect.update(version))
            await live.calls(live.dialect.resume())
            done = await live.generate(request("a", PROMPT, 32), number)
            assert done.runs == [(0, number)]
            assert np.abs(forward(exact(models[number]), PROMPT, done.tokens.tolist()) - done.logprobs).max() < CLOSE
