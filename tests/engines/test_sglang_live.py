"""A real SGLang server of two processes, through its dialect alone: weights reach both or neither."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from streamrl.config import RunConfig
from streamrl.http import BadAnswer, BadRequest, Call, HttpClient, Lost
from streamrl.servers.dialect import NOT_FETCHED
from streamrl.servers.kinds import make_dialect
from streamrl.weight_sync.files import TOKEN_VARIABLE
from tests.engines import tiny
from tests.engines.conformance_kit import (
    BF16,
    INTERVAL,
    LONG,
    Bench,
    HeardServer,
    prompt,
    run_config,
    write_version,
)
from tests.engines.lane_kit import both_take, plain_member, sending
from tests.engines.server_kit import Live, Owned, owned

pytestmark = [
    pytest.mark.engines,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

PROMPT = prompt(0, 10)
SLOTS = 16
KEYS = {"tensor_parallel": 2, "slots": SLOTS, "kv_cache": "64MiB"}
MODELS = {seed: tiny.build(tiny.random_weights(seed)) for seed in range(2)}
ABORT_ALL = Call("POST", "/abort_request", {"abort_all": True})
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return run_config("sglang", tmp_path_factory.mktemp("sglang"), **KEYS)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def server(config: RunConfig) -> AsyncIterator[Owned]:
    """The server, started by a process that stands for a role."""
    folder = Path(config.model.path).parent
    keys = {**KEYS, "variables": {TOKEN_VARIABLE: str(folder / "weights.token")}}
    async with owned("server_kit", folder / "logs" / "server.log", "sglang", str(folder), json.dumps(keys)) as server:
        yield server


@pytest.fixture
def run_dir(config: RunConfig) -> Path:
    """Has the token that the server was given."""
    return Path(config.model.path).parent


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def live(config: RunConfig, server: Owned) -> AsyncIterator[Live]:
    client = HttpClient(server.url)
    yield Live(make_dialect(config), client)
    await client.close()


@pytest_asyncio.fixture(loop_scope="module")
async def fresh(live: Live, tmp_path: Path) -> int:
    """Version numbers only grow; each test starts from the weights of seed 0 under a number of its own."""
    number = next(_numbers)
    await live.apply(write_version(tmp_path / "first", number, tiny.random_weights(0)))
    return number


async def matches(live: Live, number: int, seed: int) -> None:
    """A new request is sampled from the weights of this seed under this number."""
    done = await live.generate(PROMPT, 24, number)
    assert done.runs == [(0, number)]
    assert tiny.worst_error({number: MODELS[seed]}, PROMPT, done) < BF16


async def test_it_says_what_it_is(live: Live):
    about = live.dialect.read_about(await live.calls(live.dialect.about()))
    assert about.version.startswith("0.5.")
    assert about.context == tiny.CONTEXT


def spoiled() -> dict[str, dict[str, torch.Tensor]]:
    """Weights that do not fit, by the complaint about them."""
    good = tiny.random_weights(1)
    key = "model.layers.1.self_attn.k_proj.weight"
    up = "model.layers.0.mlp.up_proj.weight"
    return {
        "no model.layers.1.mlp.upper_proj.weight": {
            name.replace("layers.1.mlp.up_proj", "layers.1.mlp.upper_proj"): value for name, value in good.items()
        },
        f"a part only of {up}": {**good, up: torch.cat([good[up], good[up]])},
        "too small: nothing fills model.layers.1.self_attn.qkv_proj.weight": {**good, key: good[key][:16].contiguous()},
        "missing": {name: value for name, value in good.items() if "layers.0.self_attn.v_proj" not in name},
        "layers.7": {**good, "model.layers.7.mlp.up_proj.weight": torch.zeros(96, 64)},
    }


async def test_a_version_that_does_not_fit_changes_nothing_on_any_rank(live: Live, fresh: int, tmp_path: Path):
    for complaint, weights in spoiled().items():
        number = next(_numbers)
        with pytest.raises(BadRequest, match=complaint) as refused:
            await live.apply(write_version(tmp_path, number, weights))
        assert refused.value.status == 400
        await matches(live, fresh, 0)
    torn = write_version(tmp_path, next(_numbers), tiny.random_weights(1))
    assert torn.folder is not None
    file = torn.folder / torn.files[1]
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(BadRequest, match=torn.files[1]):
        await live.apply(torn)
    task, _ = await live.begin(PROMPT, LONG, fresh, name="long")
    await live.apply(write_version(tmp_path, good := next(_numbers), tiny.random_weights(1)))
    await matches(live, good, 1)
    await live.calls(live.dialect.abort("long"))
    done = await task
    assert [number for _, number in done.runs] == [fresh, good]
    assert tiny.worst_error({fresh: MODELS[0], good: MODELS[1]}, PROMPT, done) < BF16


async def test_versions_come_by_the_lane_while_it_generates(live: Live, fresh: int, run_dir: Path):
    """To a server of two processes, of which one receives."""
    task, heard = await live.begin(PROMPT, LONG, fresh, name="meanwhile")
    numbers = [next(_numbers) for _ in range(2)]
    async with sending(run_dir) as sender:
        sender.strikes = dict.fromkeys(range(3), lambda: time.sleep(0.2))
        for number, seed in zip(numbers, (1, 0), strict=True):
            version, before = sender.publish(number, tiny.random_weights(seed)), len(heard.tokens)
            assert not await live.prefetch(version)
            assert len(heard.tokens) > before
            assert (sender.pieces, sender.asked) == (len(version.files), [])
            await live.apply(version)
            await matches(live, number, seed)
    await live.calls(live.dialect.abort("meanwhile"))
    assert [number for _, number in (await task).runs] == [fresh, *numbers]


async def test_a_member_that_dies_in_the_middle_leaves_the_server_the_files(live: Live, fresh: int, run_dir: Path):
    async with sending(run_dir) as sender, plain_member(run_dir) as member:
        for seed, blow in ((1, None), (0, member.process.kill)):
            version = sender.publish(number := next(_numbers), tiny.random_weights(seed))
            await both_take(sender, member, live, version, blow)
            await matches(live, number, seed)
        assert 3 <= sender.pieces <= len(version.files)
        assert sender.asked
        sender.strikes = {}
        await live.apply(sender.publish(number := next(_numbers), tiny.random_weights(1)))
        await matches(live, number, 1)
        assert not sender.asked


async def test_files_that_do_not_come_are_no_fault_of_the_version(live: Live, fresh: int, run_dir: Path):
    async with sending(run_dir) as sender:
        version = replace(sender.publish(next(_numbers), tiny.random_weights(1)), pair=(9, 9), lane=None)
        assert not await live.prefetch(version)
        with pytest.raises(BadRequest, match=f"{NOT_FETCHED}.*404"):
            await live.apply(version)
    await matches(live, fresh, 0)


async def test_an_abort_returns_what_there_is_within_a_second(live: Live, fresh: int):
    task, _ = await live.begin(PROMPT, 4000, fresh, name=f"req{fresh}")
    beside, _ = await live.begin([*PROMPT, 9], 4000, fresh)
    began = time.monotonic()
    await live.calls(live.dialect.abort(f"req{fresh}"))
    done = await task
    assert time.monotonic() - began < 1
    assert done.finish == "abort"
    assert tiny.worst_error({fresh: MODELS[0]}, PROMPT, done) < BF16
    assert not beside.done()
    await live.calls([ABORT_ALL])
    assert (await beside).finish == "abort"


async def test_a_paused_server_is_not_ready(live: Live, fresh: int):
    await live.calls(live.dialect.pause)
    with pytest.raises(BadAnswer) as busy:
        await live.calls([live.dialect.ready])
    assert busy.value.status == 503
    await live.calls(live.dialect.resume)
    await live.calls([live.dialect.ready])
    assert (await live.generate(PROMPT, 5, fresh)).finish == "length"


async def test_figures_are_those_of_the_moment(live: Live, fresh: int):
    [idle] = await live.calls([live.dialect.metrics])
    assert (live.dialect.read_metrics(idle).running, live.dialect.read_metrics(idle).waiting) == (0, 0)
    first, _ = await live.begin(PROMPT, 4000, fresh)
    others = [asyncio.create_task(live.generate([*PROMPT, 9 + more], 4000, fresh)) for more in range(30)]
    async with asyncio.timeout(60):
        while (busy := live.dialect.read_metrics((await live.calls([live.dialect.metrics]))[0])).waiting < 15:
            pass
    assert 0 < busy.running <= SLOTS
    assert busy.running + busy.waiting <= 31
    assert 0 < busy.cache_use <= 1
    await live.calls([ABORT_ALL])
    await asyncio.gather(first, *others)


async def test_memory_is_given_back_and_taken_again_by_repeats_that_do_no_harm(live: Live, fresh: int):
    """Only the server's bookkeeping: a CPU frees nothing."""
    task, _ = await live.begin(PROMPT, 200, fresh, count=4)
    release = Call("POST", "/release_memory_occupation", {"tags": ["kv_cache"]})
    wake = Call("POST", "/resume_memory_occupation", {"tags": ["kv_cache", "weights"]})
    retract = Call("POST", "/pause_generation", {"mode": "retract"})
    flush = Call("POST", "/flush_cache")
    await live.calls([retract, flush, release, release, wake, wake, *live.dialect.resume])
    assert tiny.worst_error({fresh: MODELS[0]}, PROMPT, await task) < BF16


@pytest.mark.usefixtures("fresh")
async def test_kill_9_of_the_role_in_mid_generation(config: RunConfig, server: Owned):
    """The last one: it ends the server."""
    folder = Path(config.model.path).parent
    external = run_config("sglang", folder, **KEYS, url=[server.url])
    async with HeardServer(external, folder, "engine.0", seed=1) as attached:
        bench = Bench("sglang", external, folder, attached)
        begun = [bench.begin(prompt(40 + index)) for index in range(8)]
        for _, heard in begun:
            await heard.at_least(INTERVAL)
        assert len(server.processes()) >= 3
        server.owner.kill()
        for task, _ in begun:
            with pytest.raises(Lost):
                await asyncio.wait_for(task, 30)
        await server.all_gone()
