"""A server that runs already goes on when the replica that paused it is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from contextlib import AsyncExitStack
from pathlib import Path

import psutil
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

    async def started(url):
        engine = ServerEngine(make_dialect(), config(engine={{"api_key_file": {key!r}}}), url=url)
        await engine.start()
        return engine

    async def main():
        paused, updated, resumed = [await started(url) for url in {urls!r}]
        await paused.pause()
        updating = asyncio.create_task(updated.apply(version(1)))
        await resumed.pause()
        await resumed.resume()
        print(*(one._controls._watchdog._process.pid for one in (paused, updated, resumed)), flush=True)
        await asyncio.sleep(3600)

    asyncio.run(main())
"""


async def test_kill_9_of_who_paused_some_servers(tmp_path):
    """One is paused, one in the middle of an update, one was resumed."""
    toys = [Toy() for _ in range(3)]
    key = tmp_path / "key"
    key.write_text("s3cret")
    updating = asyncio.Event()

    async def stuck():
        updating.set()
        await asyncio.sleep(3600)

    for toy in toys:
        toy.key, toy.faults["/update"] = "s3cret", [stuck]
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serving(toy)) for toy in toys]
        code = textwrap.dedent(REPLICA.format(here=str(HERE), urls=urls, key=str(key)))
        replica = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=subprocess.PIPE)
        try:
            dogs = [int(word) for word in (await asyncio.wait_for(replica.stdout.readline(), 60)).split()]
            assert "s3cret" not in " ".join(word for dog in dogs for word in psutil.Process(dog).cmdline())
            await asyncio.wait_for(updating.wait(), 30)
            assert [toy.paused for toy in toys] == [True, True, False]
            before = [toy.calls["/resume"] for toy in toys]
            for toy in toys:
                toy.faults["/resume"] = [503, "drop"]  # the first two answers of the server are no help
            os.kill(replica.pid, signal.SIGKILL)
            for dog in dogs:
                await until(lambda dog=dog: has_ended(dog))
            assert not any(toy.paused for toy in toys)
            assert [toy.calls["/resume"] - count for toy, count in zip(toys, before, strict=True)] == [3, 3, 0]
        finally:
            if replica.returncode is None:
                replica.kill()
            await replica.wait()


def has_ended(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


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
