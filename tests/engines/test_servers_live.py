"""Real servers and the processes around them: who dies with whom, who goes on, and completions as anyone offers them.

For each kind one server is started, by a process of its own that stands for a replica; the last test kills that process
in the middle of a generation.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from streamrl.engine import Engine
from streamrl.errors import ConfigError
from streamrl.producers.group.server import ServerDied, ServerEngine
from streamrl.servers.kinds import make_dialect
from streamrl.servers.openai import OpenaiDialect
from tests.engines.conformance_kit import INTERVAL, Bench, prompt, run_config

pytestmark = [
    pytest.mark.engines,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]
ROOT = Path(__file__).parents[2]
METRICS = {"vllm": {}, "sglang": {"enable-metrics": True}}
OWNER = """
    import asyncio, sys
    from pathlib import Path
    sys.path.insert(0, {root!r})
    from tests.engines.conformance_kit import run_config
    from streamrl.servers.kinds import make_dialect
    from streamrl.servers.process import ManagedServer, ServerSettings

    async def main():
        folder = Path({folder!r})
        config = run_config({kind!r}, folder, variables={{"STREAMRL_TEST_MARK": {folder!r}}}, flags={flags!r})
        settings = ServerSettings.of_engine(config)
        server = ManagedServer(make_dialect(config), settings, folder, "rollout.0.server0", seed=3)
        print(await server.start(), flush=True)
        await asyncio.sleep(3600)

    asyncio.run(main())
"""
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


@dataclass
class Place:
    """A server that somebody else has started."""

    kind: str
    folder: Path
    url: str
    owner: asyncio.subprocess.Process

    def bench(self, engine: Engine) -> Bench:
        return Bench(self.kind, run_config(self.kind, self.folder), self.folder, engine)

    def processes(self) -> list[str]:
        """What there is of the server."""
        found = []
        for process in psutil.process_iter():
            try:
                ours = process.environ().get("STREAMRL_TEST_MARK") == str(self.folder)
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(f"{process.pid} {process.name()}")
            except psutil.Error:
                continue
        return found


async def spawn(code: str, **values: object) -> asyncio.subprocess.Process:
    text = textwrap.dedent(code).format(root=str(ROOT), **values)
    return await asyncio.create_subprocess_exec(sys.executable, "-c", text, stdout=subprocess.PIPE)


async def line_of(process: asyncio.subprocess.Process) -> str:
    return (await asyncio.wait_for(process.stdout.readline(), 300)).decode().strip()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["vllm", "sglang"])
async def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Place]:
    kind, folder = request.param, tmp_path_factory.mktemp(request.param)
    run_config(kind, folder)
    owner = await spawn(OWNER, kind=kind, folder=str(folder), flags=METRICS[kind])
    try:
        url = await line_of(owner)
        assert url, (folder / "logs" / "rollout.0.server0.log").read_text()[-3000:]
        yield Place(kind, folder, url, owner)
    finally:
        if owner.returncode is None:
            owner.kill()
        await owner.wait()


async def test_an_engine_on_a_server_that_runs_already(place: Place):
    config = run_config(place.kind, place.folder)
    engine = ServerEngine(make_dialect(config), config, url=place.url)
    await engine.start()
    try:
        bench = place.bench(engine)
        await bench.prepare(1)
        begun = bench.begin(prompt(1))
        await begun[1].at_least(2 * INTERVAL)
        await bench.apply()
        done = await bench.end(begun, 8 * INTERVAL)
        assert [number for _, _, number in bench.judge(prompt(1), done)] == [0, 1]
        assert 0 < engine.pause_seconds < 30
    finally:
        await engine.close()


async def test_another_model_is_found_out(place: Place):
    config = run_config(place.kind, place.folder)
    other = config.model_copy(update={"model": config.model.model_copy(update={"context": 1024})})
    engine = ServerEngine(make_dialect(other), other, url=place.url)
    await engine.start()  # the model of the run has no more positions than the server
    await engine.close()
    wrong = {"vllm": "sglang", "sglang": "vllm"}[place.kind]
    config = run_config(wrong, place.folder)
    engine = ServerEngine(make_dialect(config), config, url=place.url)
    with pytest.raises(ConfigError, match=rf"as engine\.kind {wrong} does|cannot take part"):
        await engine.start()


async def test_completions_of_anybody(place: Place):
    config = run_config("openai", place.folder, url=(place.url,))
    engine = ServerEngine(OpenaiDialect(config), config, url=place.url)
    if place.kind == "sglang":  # its completions have no token ids, and fail without a tokenizer
        with pytest.raises(ConfigError, match=r"as engine\.kind openai does"):
            await engine.start()
        return
    await engine.start()
    try:
        bench = place.bench(engine)
        bench.known(1)  # in force since the first test
        tokens = prompt(2)
        done = await bench.generate(tokens, 64)
        assert (done.finish, done.runs) == ("length", [(0, 0)])
        done.runs[:] = [(0, 1)]
        bench.judge(tokens, done)
        task, heard, name = bench.begin(prompt(3))
        await heard.at_least(4)
        assert await engine.abort(name) == 1
        part = await task
        assert part.finish == "abort"
        part.runs[:] = [(0, 1)]
        bench.judge(prompt(3), part)
    finally:
        await engine.close()


async def test_a_server_goes_on_when_the_process_that_paused_it_is_killed(place: Place):
    pauser = await spawn(PAUSER, kind=place.kind, folder=str(place.folder), url=place.url)
    assert await line_of(pauser) == "paused"
    os.kill(pauser.pid, signal.SIGKILL)
    await pauser.wait()
    config = run_config(place.kind, place.folder)
    dialect = make_dialect(config)
    dialect.resume = list  # so that nobody but the watchdog can have resumed it
    engine = ServerEngine(dialect, config, url=place.url)
    await engine.start()
    bench = place.bench(engine)
    bench.known(1)
    bench.judge(prompt(4), await bench.generate(prompt(4), 16))
    await engine.close()


async def test_kill_9_of_the_replica_in_mid_generation(place: Place):
    config = run_config(place.kind, place.folder)
    engine = ServerEngine(make_dialect(config), config, url=place.url)
    await engine.start()
    bench = place.bench(engine)
    bench.known(1)
    begun = [bench.begin(prompt(40 + index)) for index in range(8)]
    for _, heard, _ in begun:
        await heard.at_least(INTERVAL)
    assert len(place.processes()) >= 2
    os.kill(place.owner.pid, signal.SIGKILL)
    for task, heard, _ in begun:
        with pytest.raises(ServerDied) as caught:
            await asyncio.wait_for(task, 30)
        died = caught.value
        assert died.tokens == heard.tokens
        assert died.proved == len(died.tokens) == len(died.logprobs)
        assert died.runs == [(0, 0)]  # this engine has brought no weights
    async with asyncio.timeout(30):
        while place.processes():  # noqa: ASYNC110 - nobody tells when a process has gone
            await asyncio.sleep(0.05)
    await engine.close()
