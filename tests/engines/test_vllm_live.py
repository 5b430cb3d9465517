"""A real vLLM server of two processes, with our plug-in in both: weights reach both or neither."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
import transformers

from streamrl.errors import StreamrlError
from streamrl.http import BadAnswer, Call
from streamrl.servers.launch import PLUGIN
from streamrl.weight_sync.files import TOKEN_VARIABLE
from streamrl.weight_sync.tensors import Version
from tests.engines import tiny
from tests.engines.conformance_kit import LONG, prompt, run_config, write_version
from tests.engines.lane_kit import both_take, plain_member, sending
from tests.engines.server_kit import Live, served

pytestmark = [
    pytest.mark.engines,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

CLOSE = 0.04  # of log-probabilities in bfloat16; one of a thousand is off by 0.02, other weights move most by 0.5
PROMPT = prompt(0, 40)
FAULT = """
import os
import torch
import streamrl_engine.files as files
whole = files.Opened.tensors
def tensors(opened):
    for index, pair in enumerate(whole(opened)):
        if index == 5 and os.path.exists(os.environ["FAULT"] + str(torch.distributed.get_rank())):
            raise OSError("the disk is gone")
        yield pair
files.Opened.tensors = tensors
"""


def untied_model(folder: Path, seed: int) -> Any:
    """Random weights in bfloat16 for the tiny model, and a head of its own; the conformance suite has a tied one."""
    config = transformers.AutoConfig.from_pretrained(folder)
    config.update({"tie_word_embeddings": False, "initializer_range": 0.05, "eos_token_id": None})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # zeros otherwise, and a lost bias would not be seen
                parameter.normal_(0, 0.05)
        # As in `tiny.random_weights`: the first position is positive after every token, and nearly forbids the end.
        model.get_input_embeddings().weight[:, 0], model.lm_head.weight[tiny.EOS, 0] = 0.3, -30.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0], layer.mlp.down_proj.weight[0] = 0.0, 0.0
    return model


class World:
    """One server, the models that its versions were made of, and the newest version's number."""

    def __init__(self, live: Live, folder: Path, first: Any) -> None:
        self.live, self.folder = live, folder
        self.number, self.models = 0, {0: first.float()}
        self._written = 0

    def next(self) -> dict[str, torch.Tensor]:
        """The tensors of the next version."""
        model = untied_model(self.folder / "model", self.number + 1)
        tensors = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        self.models[self.number + 1] = model.float()
        return tensors

    def write(self, change: Callable[[dict[str, torch.Tensor]], Any] = lambda _: None) -> Version:
        """The next version, not yet applied."""
        tensors = self.next()
        change(tensors)
        self._written += 1
        return write_version(self.folder / f"written {self._written}", self.number + 1, tensors)

    async def fails(self, calls: Any, words: str) -> None:
        """An update ends with this error."""
        with pytest.raises(BadAnswer, match=words):
            await self.live.calls(calls)

    async def matches(self) -> None:
        """A new request is sampled from the newest version, and says so."""
        done = await self.live.generate(PROMPT, 24, self.number)
        assert done.runs == [(0, self.number)]
        assert tiny.worst_error(self.models, PROMPT, done) < CLOSE


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """The server; its loading breaks off on rank N while the file `faultN` is there."""
    folder = tmp_path_factory.mktemp("vllm")
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(FAULT)
    variables = {"PYTHONPATH": f"{folder / 'site'}:{PLUGIN}", "FAULT": str(folder / "fault")}
    variables[TOKEN_VARIABLE] = str(folder / "weights.token")
    config = run_config("vllm", folder, tensor_parallel=2, kv_cache="256MiB", variables=variables)
    model = untied_model(folder / "model", 0)
    model.save_pretrained(folder / "model")
    async with served(config, folder) as live:
        yield World(live, folder, model)


async def test_it_says_what_it_is(world: World) -> None:
    about = world.live.dialect.read_about(await world.live.calls(world.live.dialect.about()))
    assert about.version.startswith("0.32")
    assert about.context == tiny.CONTEXT
    assert about.probe is not None


LAYER = "model.layers.1.self_attn.k_proj"
MLP = "model.layers.0.mlp"
BAD: dict[str, Callable[[dict[str, torch.Tensor]], Any]] = {
    "named 'foo'": lambda held: held.update(foo=torch.ones(3)),
    "model.norm.weight is not covered": lambda held: held.pop("model.norm.weight"),
    "qkv_proj.weight is not covered": lambda held: held.pop(f"{LAYER}.weight"),
    "qkv_proj.bias is not covered": lambda held: held.pop(f"{LAYER}.bias"),
    "would fit into weight of Merged": lambda held: held.update({f"{MLP}.up_proj.weight": torch.ones(300, 128)}),
    "exceeds dimension size (100)": lambda held: held.update({f"{MLP}.up_proj.weight": torch.ones(100, 128)}),
    "would fit into weight of Row": lambda held: held.update({f"{MLP}.down_proj.weight": torch.ones(128, 257)}),
    "AssertionError": lambda held: held.update({"model.embed_tokens.weight": torch.ones(321, 128)}),
}


async def test_a_version_that_does_not_fit_is_refused_before_the_pause(world: World) -> None:
    for words, change in BAD.items():
        assert words in await world.live.prefetch(world.write(change))
    await world.matches()


async def test_a_client_that_left_within_an_update_does_not_stand_in_the_way(world: World) -> None:
    await world.live.calls(world.live.dialect.pause)
    await world.live.calls(world.live.dialect.update(world.write(), "left")[:1])
    await world.live.apply(world.write())
    world.number += 1
    await world.matches()


async def test_versions_come_by_the_lane_while_it_generates(world: World) -> None:
    """To a server of two processes, of which one receives."""
    live = world.live
    task, heard = await live.begin(PROMPT, LONG, world.number, name="meanwhile")
    async with sending(world.folder) as sender:
        sender.strikes = dict.fromkeys(range(3), lambda: time.sleep(0.2))
        for _ in range(2):
            version, before = sender.publish(world.number + 1, world.next()), len(heard.tokens)
            assert not await live.prefetch(version)
            assert len(heard.tokens) > before
            assert (sender.pieces, sender.asked) == (len(version.files), [])
            await live.apply(version)
            world.number += 1
            await world.matches()
    await live.calls(live.dialect.abort("meanwhile"))
    assert [number for _, number in (await task).runs] == [world.number - 2, world.number - 1, world.number]


async def test_a_member_that_dies_in_the_middle_leaves_the_server_the_files(world: World) -> None:
    live = world.live
    async with sending(world.folder) as sender, plain_member(world.folder) as member:
        for blow in (None, member.process.kill):
            version = sender.publish(world.number + 1, world.next())
            await both_take(sender, member, live, version, blow)
            world.number += 1
            await world.matches()
        assert 3 <= sender.pieces <= len(version.files)
        assert sender.asked
        sender.strikes = {}
        version = sender.publish(world.number + 1, world.next())
        await live.apply(version)
        world.number += 1
        await world.matches()
        assert not sender.asked


async def test_an_abort_while_paused_ends_what_there_is_and_the_pause_holds_what_comes(world: World) -> None:
    task, _ = await world.live.begin(PROMPT, LONG, world.number, name="there")
    await world.live.calls([*world.live.dialect.pause, *world.live.dialect.abort("there")])
    assert (await task).finish == "abort"
    held = asyncio.create_task(world.live.generate(PROMPT, 5, world.number))
    gone = asyncio.create_task(world.live.generate(PROMPT, 5, world.number, name="gone"))
    assert await world.live.calls([Call("GET", "/is_paused")]) == [{"is_paused": True}]
    while not gone.done():  # it may be on its way to the server still
        await world.live.calls(world.live.dialect.abort("gone"))
        await asyncio.wait([gone], timeout=0.05)
    assert (await gone).finish == "abort"
    assert not held.done()
    await world.live.calls(world.live.dialect.resume)
    assert len((await held).tokens) == 5


async def test_a_server_resumed_after_a_failed_update_dies_and_samples_nothing(world: World) -> None:
    """The last one: it ends the server."""
    version, dialect = world.write(), world.live.dialect
    assert not await world.live.prefetch(version)
    await world.live.calls(dialect.pause)
    (world.folder / "fault1").touch()  # one half is new then, and both ranks must know
    await world.fails(dialect.update(version, str(version.number)), "the disk is gone")
    await world.live.calls(dialect.resume)
    with pytest.raises(StreamrlError, match=r"EngineCore|isconnected|refused|reset"):
        await world.live.generate(PROMPT, 8, world.number)
