"""A server that runs already goes on when the replica that paused it is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
from test_server import engine_on
from toy import Toy, serving, until

from streamrl.errors import Unreachable
from streamrl.isolation.watchdog import Watchdog

HERE = Path(__file__).parent
REPLICA = """
    import asyncio, sys
    sys.path.insert(0, {here!r})
    from test_server import config, request, version
    from toy import make_dialect
    from streamrl.producers.group.server import ServerEngine

    async def main():
        engine = ServerEngine(make_dialect(), config(engine={{"api_key_file": {key!r}}}), url={url!r})
        await engine.start()
        dog = engine._controls._watchdog._process.pid
        if {what!r} == "pause":
            await engine.pause()
        elif {what!r} == "resumed":
            await engine.pause()
            await engine.resume()
        elif {what!r} == "update":
            asyncio.create_task(engine.apply(version(1)))
        print(dog, flush=True)
        await asyncio.sleep(3600)

    asyncio.run(main())
"""


@pytest.mark.parametrize("what", ["pause", "update", "resumed"])
async def test_kill_9_of_who_paused_it(tmp_path, what):
    toy = Toy()
    toy.key = "s3cret"
    key = tmp_path / "key"
    key.write_text("s3cret")
    updating = asyncio.Event()

    async def stuck():
        updating.set()
        await asyncio.sleep(3600)

    toy.faults["/update"] = [stuck]
    async with serving(toy) as url:
        code = textwrap.dedent(REPLICA.format(here=str(HERE), url=url, what=what, key=str(key)))
        replica = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=subprocess.PIPE)
        try:
            dog = int(await asyncio.wait_for(replica.stdout.readline(), 60))
            assert "s3cret" not in " ".join(psutil.Process(dog).cmdline())
            if what == "update":
                await asyncio.wait_for(updating.wait(), 30)
            assert toy.paused == (what != "resumed")
            before = toy.calls["/resume"]
            # the first two answers of the server are no help
            toy.faults["/resume"] = [503, "drop"]
            os.kill(replica.pid, signal.SIGKILL)
            await until(lambda: not psutil.pid_exists(dog) or psutil.Process(dog).status() == psutil.STATUS_ZOMBIE)
            assert not toy.paused
            assert toy.calls["/resume"] == before + (0 if what == "resumed" else 3)
        finally:
            if replica.returncode is None:
                replica.kill()
            await replica.wait()


async def test_an_orderly_end_wakes_nobody():
    toy = Toy()
    async with engine_on(toy) as engine:
        dog = engine._controls._watchdog._process
        await engine.pause()
        await engine.close()
        assert dog.returncode == 0
        assert toy.calls["/resume"] == 2  # at connect, and by the engine itself


async def test_a_server_that_counts_as_dead_while_paused_is_left_to_the_watchdog():
    toy = Toy()
    async with engine_on(toy) as engine:
        dog = engine._controls._watchdog._process
        await engine.pause()
        engine.die(Unreachable("for the test"))
        await engine.close()
        assert await asyncio.to_thread(dog.wait, 30) == 0
        assert not toy.paused


async def test_a_watchdog_that_was_killed_costs_a_warning(caplog):
    toy = Toy()
    async with engine_on(toy) as engine:
        dog = engine._controls._watchdog._process
        dog.kill()
        dog.wait()
        for _ in range(3):
            await engine.pause()
            await engine.resume()
        assert sum("watchdog of the server is gone" in record.message for record in caplog.records) == 1


async def test_a_repeat_of_arming_and_of_the_end_does_nothing():
    async with serving(Toy()) as url:
        dog = await Watchdog.start(url, {}, [("POST", "/resume", {}, None)])
        dog.arm()
        dog.arm()
        dog.disarm()
        dog.disarm()
    await dog.close()
    await dog.close()
    assert dog._process.returncode == 0
