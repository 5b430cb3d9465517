"""Real servers that run already: another run, a role that dies, other models, completions as anyone offers them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import orjson
import pytest

from streamrl.config import RunConfig
from streamrl.errors import ConfigError
from streamrl.http import BadAnswer
from tests.engines import tiny
from tests.engines.conformance_kit import INTERVAL, KEY, Bench, HeardServer, prompt, run_config

pytestmark = [
    pytest.mark.engines,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.parametrize("running", ["vllm", "sglang"], indirect=True),
]
ROOT = Path(__file__).parents[2]
PAUSER = """
    import asyncio, sys
    from pathlib import Path
    sys.path.insert(0, {root!r})
    from tests.engines.conformance_kit import HeardServer, run_config

    async def main():
        config = run_config({kind!r}, Path({folder!r}), url=[{url!r}])
        async with HeardServer(config, Path({folder!r}), "engine.1", seed=1) as server, server.control._paused():
            print("paused", flush=True)
            await asyncio.sleep(3600)

    asyncio.run(main())
"""


async def spawn(code: str, **values: object) -> asyncio.subprocess.Process:
    text = textwrap.dedent(code).format(root=str(ROOT), **values)
    return await asyncio.create_subprocess_exec(sys.executable, "-c", text, stdout=subprocess.PIPE)


async def line_of(process: asyncio.subprocess.Process) -> str:
    return (await asyncio.wait_for(process.stdout.readline(), 300)).decode().strip()


def attached(bench: Bench, kind: str = "", **engine: Any) -> HeardServer:
    """The server as another run attaches to it, not yet started."""
    config = run_config(kind or bench.kind, bench.folder, url=[bench.url], **engine)
    return HeardServer(config, bench.folder, "engine.1", seed=1)


def bench_of(bench: Bench, server: HeardServer) -> Bench:
    """A bench for a server that calls the weights in force version 0, until it brings some."""
    other = Bench(bench.kind, bench.config, bench.folder, server)
    other.models = {0: bench.models[bench.number], bench.newest: bench.models[bench.newest]}
    return other


async def test_a_server_that_runs_already(bench: Bench):
    before = bench.number
    async with attached(bench) as server:
        other = bench_of(bench, server)
        await other.prepare(1)
        begun = other.begin(prompt(1))
        await begun[1].at_least(2 * INTERVAL)
        bench.known(await other.apply())
        done = await other.end(begun, 8 * INTERVAL)
        assert [number for _, _, number in other.judge(prompt(1), done)] == [before, bench.number]
        assert 0 < server.control.pause_seconds < 30


async def test_two_runs_at_one_server_are_found_out(bench: Bench):
    async with attached(bench) as first, attached(bench) as second:
        ours, theirs = bench_of(bench, first), bench_of(bench, second)
        bench.known(await ours.apply())
        bench.known(await ours.apply())  # its own is no surprise
        theirs.models = {0: bench.models[bench.number], bench.number: bench.models[bench.number]}
        bench.known(await theirs.apply())
        with pytest.raises(ConfigError, match="somebody else changes the weights of the server at"):
            await ours.apply()
        theirs.judge(prompt(5), await theirs.generate(prompt(5), 16))


def other_model(bench: Bench, folder: Path, **values: Any) -> RunConfig:
    """A run whose model is another one than that of the server: with these values in its configuration."""
    shutil.copytree(Path(bench.config.model.path), folder)
    file = folder / "config.json"
    file.write_bytes(orjson.dumps({**orjson.loads(file.read_bytes()), **values}))
    config = run_config(bench.kind, bench.folder, url=[bench.url])
    model = config.model.model_copy(
        update={"path": str(folder), "context": values.get("max_position_embeddings", tiny.CONTEXT)}
    )
    return config.model_copy(update={"model": model})


async def test_another_model_is_found_out(bench: Bench, tmp_path: Path):
    shorter = other_model(bench, tmp_path / "shorter", max_position_embeddings=1024)
    async with HeardServer(shorter, tmp_path, "engine.1", seed=1) as server:
        assert server.limits.context == 1024
    longer = other_model(bench, tmp_path / "longer", max_position_embeddings=2 * tiny.CONTEXT)
    with pytest.raises(ConfigError, match=f"a context of {tiny.CONTEXT} tokens, the run needs {2 * tiny.CONTEXT}"):
        await HeardServer(longer, tmp_path, "engine.1", seed=1).start()
    wrong = {"vllm": "sglang", "sglang": "vllm"}[bench.kind]
    with pytest.raises(ConfigError, match=rf"as engine\.kind {wrong} does|cannot take part"):
        await attached(bench, wrong).start()


async def test_another_tokenizer_is_found_out(bench: Bench, tmp_path: Path):
    config = other_model(bench, tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    about = orjson.loads(file.read_bytes())
    vocabulary = about["model"]["vocab"]
    vocabulary["T"], vocabulary["t"] = vocabulary["t"], vocabulary["T"]
    file.write_bytes(orjson.dumps(about))
    with pytest.raises(ConfigError, match="has another tokenizer"):
        await HeardServer(config, tmp_path, "engine.1", seed=1).start()


@pytest.mark.parametrize("key", [None, "another one"])
async def test_who_has_not_its_key_is_refused(bench: Bench, key: str | None):
    config = run_config(bench.kind, bench.folder, url=[bench.url])
    with pytest.raises(ConfigError, match="wants a key"):
        await HeardServer(config, bench.folder, "engine.1", seed=1, key=key).start()
    assert KEY not in bench.server.process.log.read_text()


async def test_completions_of_anybody(bench: Bench):
    async with attached(bench, "openai") as server:
        other = bench_of(bench, server)
        assert server.dialect.fixed
        tokens = prompt(2)
        done = await other.generate(tokens, 64)
        assert (done.finish, other.judge(tokens, done)) == ("length", [(0, 64, 0)])
        task, heard = other.begin(prompt(3))
        await heard.at_least(4)
        task.cancel()
        await bench.server.idle()


async def test_a_server_goes_on_when_the_process_that_paused_it_is_killed(bench: Bench):
    pauser = await spawn(PAUSER, kind=bench.kind, folder=str(bench.folder), url=bench.url)
    assert await line_of(pauser) == "paused"
    waiting, heard = bench.begin(prompt(4), 16)
    with pytest.raises(BadAnswer) if bench.kind == "sglang" else contextlib.nullcontext():
        await bench.server.client.call(bench.server.dialect.ready, 10, retry=False)
    assert not heard.tokens
    os.kill(pauser.pid, signal.SIGKILL)
    await pauser.wait()
    async with asyncio.timeout(60):  # this run's own role has not paused it, and does not resume it
        bench.judge(prompt(4), await waiting)
