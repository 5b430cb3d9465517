"""A server that runs already goes on when the role that paused it is killed."""

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
import pytest
from toy import Toy, make_dialect, serving, until
from toy_kit import Controlled, control_on, held_at, version

from streamrl.errors import Unreachable
from streamrl.http import HttpClient
from streamrl.isolation.watchdog import Watchdog

HERE = Path(__file__).parent
ROLE = """
    import asyncio, sys
    sys.path.insert(0, {here!r})
    from pathlib import Path
    from toy import make_dialect
    from toy_kit import config, version
    from streamrl.servers import server
    server.make_dialect = lambda _: make_dialect()

    async def started(url):
        run = config(engine={{"url": [url]}})
        return await server.Server(run, Path({folder!r}), "engine.0", seed=1, key="s3cret").__aenter__()

    async def main():
        changing, resuming, resumed = [await started(url) for url in {urls!r}]
        await resumed.control.apply(version(1))
        applying = [asyncio.create_task(one.control.apply(version(1))) for one in (changing, resuming)]
        dogs = [one.control._watchdog._process.pid for one in (changing, resuming, resumed)]
        print(*dogs, flush=True)
        await asyncio.gather(*applying)

    asyncio.run(main())
"""


async def test_kill_9_of_who_paused_some_servers(tmp_path):
    """One is in the middle of an update, one is about to be resumed, one was resumed."""
    toys = [Toy() for _ in range(3)]
    for toy in toys:
        toy.key = "s3cret"
    changing, _ = held_at(toys[0], "/update")
    resuming, _ = held_at(toys[1], "/resume")
    toys[1].faults["/resume"].insert(0, None)  # the one at connect
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serving(toy)) for toy in toys]
        code = textwrap.dedent(ROLE.format(here=str(HERE), urls=urls, folder=str(tmp_path)))
        role = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=subprocess.PIPE)
        try:
            dogs = [int(word) for word in (await asyncio.wait_for(role.stdout.readline(), 60)).split()]
            assert "s3cret" not in " ".join(word for dog in dogs for word in psutil.Process(dog).cmdline())
            await asyncio.wait_for(asyncio.gather(changing.wait(), resuming.wait()), 30)
            assert [toy.paused for toy in toys] == [True, True, False]
            before = [toy.calls["/resume"] for toy in toys]
            for toy in toys:
                toy.faults["/resume"] = [503, "drop"]  # the first two answers of the server are no help
            os.kill(role.pid, signal.SIGKILL)
            for dog in dogs:
                await until(lambda dog=dog: has_ended(dog))
            assert not any(toy.paused for toy in toys)
            assert [toy.calls["/resume"] - count for toy, count in zip(toys, before, strict=True)] == [3, 3, 0]
        finally:
            if role.returncode is None:
                role.kill()
            await role.wait()


def has_ended(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def test_an_orderly_end_wakes_nobody(tmp_path):
    toy = Toy()
    async with control_on(toy, tmp_path, attached=True) as controlled:
        await controlled.control.apply(version(1))
    assert controlled.watchdog._process.returncode == 0
    assert toy.calls["/resume"] == 1


@pytest.mark.usefixtures("short_pauses")
async def test_a_server_that_does_not_resume_at_the_end_is_left_to_the_watchdog(tmp_path):
    toy = Toy()
    toy.faults["/resume"] = [500, 500]
    async with serving(toy) as url:
        client = HttpClient(url)
        dog = await Watchdog.start(url, {}, [("POST", "/resume", {}, {})])
        controlled = Controlled(client, tmp_path / "adapters", dog, make_dialect(), 20)
        with pytest.raises(Unreachable):
            await controlled.control.apply(version(1))
        await controlled.control.close()
        await client.close()
        assert await asyncio.to_thread(dog._process.wait, 30) == 0
        assert not toy.paused
        assert toy.calls["/resume"] == 3


async def test_a_watchdog_that_was_killed_costs_a_warning(tmp_path, caplog):
    toy = Toy()
    async with control_on(toy, tmp_path / "adapters", attached=True) as controlled:
        dog = controlled.watchdog._process
        dog.kill()
        dog.wait()
        for number in range(1, 4):
            await controlled.control.apply(version(number))
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
