"""Real servers that others use too: a second engine, a client that dies, completions as anyone offers them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from streamrl.producers.group.server import ServerEngine

from streamrl.config import RunConfig
from streamrl.errors import ConfigError
from streamrl.servers.dialect import Dialect
from streamrl.servers.kinds import make_dialect
from streamrl.servers.openai import OpenaiDialect
from tests.engines.conformance_kit import INTERVAL, Bench, prompt, run_config

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
    from tests.engines.conformance_kit import run_config
    from streamrl.servers.kinds import make_dialect
    from streamrl.producers.group.server import ServerEngine

    async def main():
        config = run_config({kind!r}, Path({folder!r}))
        engine = ServerEngine(make_dialect(config), config, url={url!r})
        await engine.start()
        await engine.pause()
        print("paused", flush=True)
        await asyncio.sleep(3600)

    asyncio.run(main())
"""


async def spawn(code: str, **values: object) -> asyncio.subprocess.Process:
    text = textwrap.dedent(code).format(root=str(ROOT), **values)
    return await asyncio.create_subprocess_exec(sys.executable, "-c", text, stdout=subprocess.PIPE)


async def line_of(process: asyncio.subprocess.Process) -> str:
    return (await asyncio.wait_for(process.stdout.readline(), 300)).decode().strip()


@contextlib.asynccontextmanager
async def second(bench: Bench, config: RunConfig, dialect: Dialect) -> AsyncIterator[Bench]:
    """Another engine at the server. One that does not ask calls the weights in force version 0."""
    engine = ServerEngine(dialect, config, url=bench.url)
    await engine.start()
    other = Bench(bench.kind, config, bench.folder, engine)
    other.models = {0: bench.models[bench.number], bench.newest: bench.models[bench.newest]}
    try:
        yield other
    finally:
        await engine.close()


async def test_an_engine_on_a_server_that_runs_already(bench: Bench):
    before, config = bench.number, run_config(bench.kind, bench.folder)
    async with second(bench, config, make_dialect(config)) as other:
        await other.prepare(1)
        begun = other.begin(prompt(1))
        await begun[1].at_least(2 * INTERVAL)
        bench.known(await other.apply())
        done = await other.end(begun, 8 * INTERVAL)
        assert [number for _, _, number in other.judge(prompt(1), done)] == [before, bench.number]
        assert 0 < other.engine.pause_seconds < 30


async def test_another_model_is_found_out(bench: Bench):
    config = run_config(bench.kind, bench.folder)
    other = config.model_copy(update={"model": config.model.model_copy(update={"context": 1024})})
    engine = ServerEngine(make_dialect(other), other, url=bench.url)
    await engine.start()  # the model of the run has no more positions than the server
    await engine.close()
    wrong = {"vllm": "sglang", "sglang": "vllm"}[bench.kind]
    config = run_config(wrong, bench.folder)
    engine = ServerEngine(make_dialect(config), config, url=bench.url)
    with pytest.raises(ConfigError, match=rf"as engine\.kind {wrong} does|cannot take part"):
        await engine.start()


async def test_completions_of_anybody(bench: Bench):
    config = run_config("openai", bench.folder, url=(bench.url,))
    if bench.kind == "sglang":  # its completions have no token ids, and fail without a tokenizer
        with pytest.raises(ConfigError, match=r"as engine\.kind openai does"):
            async with second(bench, config, OpenaiDialect(config)):
                pass
        return
    async with second(bench, config, OpenaiDialect(config)) as other:
        tokens = prompt(2)
        done = await other.generate(tokens, 64)
        assert (done.finish, other.judge(tokens, done)) == ("length", [(0, 64, 0)])
        task, heard, name = other.begin(prompt(3))
        await heard.at_least(4)
        assert await other.engine.abort(name) == 1
        part = await task
        assert part.finish == "abort"
        other.judge(prompt(3), part)


async def test_a_server_goes_on_when_the_process_that_paused_it_is_killed(bench: Bench):
    pauser = await spawn(PAUSER, kind=bench.kind, folder=str(bench.folder), url=bench.url)
    assert await line_of(pauser) == "paused"
    os.kill(pauser.pid, signal.SIGKILL)
    await pauser.wait()
    config = run_config(bench.kind, bench.folder)
    dialect = make_dialect(config)
    dialect.resume = list  # so that nobody but the watchdog can have resumed it
    async with second(bench, config, dialect) as other:
        other.judge(prompt(4), await other.generate(prompt(4), 16))
