"""Servers that streamrl starts: real processes, real signals, nothing of them left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
from contextlib import asynccontextmanager
from pathlib import Path

import producer_kit
import psutil
import pytest
from toy import Toy, make_dialect, serving, until
from toy_kit import config, request, version

from streamrl.errors import ConfigError, Unreachable
from streamrl.http import Lost
from streamrl.servers import process as managed
from streamrl.servers import server as servers
from streamrl.servers.process import ManagedServer, ServerSettings, take_port
from streamrl.servers.server import Server

HERE = Path(__file__).parent
PORTS = range(20_000, 20_100)
LOGS_AN_ERROR = "import os, traceback\ntry: int('x')\nexcept ValueError: traceback.print_exc()\n"
ORPHANS = {"TOY_FREE": "1", "TOY_ORPHANS": "1"}


def settings(**engine):
    return config(
        engine={"slots": 8, "start_deadline": 30, **engine}, supervisor={"term_grace": 5, "log_bytes": 100_000}
    )


@asynccontextmanager
async def managed_toy(tmp_path, dialect=None, run=None, key=None, **environ):
    dialect = dialect or make_dialect()
    dialect.environ |= environ
    asked = ServerSettings.of_engine(run or settings(), key)
    server = ManagedServer(dialect, asked, tmp_path, "engine.0.server", "2,3", seed=7 + (1 << 40))
    try:
        yield server
    finally:
        await server.stop()


def descendants(pid):
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def orphans_of(folder):
    """Processes with the test's own folder in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TOY_MARK") == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.name())
        except psutil.Error:
            continue
    return found


async def test_start_talk_stop_and_start_again(tmp_path):
    async with managed_toy(tmp_path) as server:
        assert not server.alive
        for _ in range(2):
            url = await server.start()
            assert server.alive
            assert url == server.url
            environ = psutil.Process(server.pid).environ()
            assert (environ["TOY_FREE"], environ["CUDA_VISIBLE_DEVICES"]) == ("1", "2,3")
            assert os.getpgid(server.pid) == server.pid != os.getpgid(0)
            await server.stop()
            await server.stop()
            assert not server.alive
            assert not psutil.pid_exists(server.pid)
        assert server.log == tmp_path / "logs" / "engine.0.server.log"
        assert server.log.read_text().count("toy at") == 2


@pytest.fixture
def dialect(monkeypatch):
    """That of every `Server`."""
    dialect = make_dialect()
    monkeypatch.setattr(servers, "make_dialect", lambda _: dialect)
    return dialect


@pytest.mark.usefixtures("dialect")
async def test_a_whole_server_with_its_controls(tmp_path):
    async with Server(settings(), tmp_path, "engine.0", seed=7) as server:
        await server.control.apply(version(2))
        done = await server.generate(request("a", range(20), limit=500))
        assert (done.runs, done.finish, len(done.tokens)) == ([(0, 2)], "length", 44)
        assert (await server.metrics()).tokens_sampled == 45, "one was tried out"
    assert not server.process.alive


async def test_kill_9_of_the_server_is_noticed_at_once(tmp_path, dialect):
    dialect.environ = {"TOY_FREE": "0", "TOY_STEPS": "1"}
    async with Server(settings(), tmp_path, "engine.0", seed=7) as server:
        task = asyncio.create_task(server.generate(request("a")))

        async def running():
            return (await server.metrics()).running

        await producer_kit.until(running)
        os.kill(server.process.pid, signal.SIGKILL)
        with pytest.raises(Lost):
            await asyncio.wait_for(task, 10)
        assert "killed by SIGKILL" in await server.process.wait_death()


def test_a_server_without_a_url_of_its_own(tmp_path):
    with pytest.raises(ConfigError, match=r"engine\.2 has no server: engine\.url names 2"):
        Server(settings(url=["http://a", "http://b"]), tmp_path, "engine.2", 2, seed=7)


@pytest.mark.parametrize("end", ["stopped", "killed"])
async def test_the_end_of_the_server_takes_all_that_it_has_started(tmp_path, end):
    async with managed_toy(tmp_path, **ORPHANS, TOY_MARK=str(tmp_path)) as server:
        await server.start()
        await until(lambda: len(orphans_of(tmp_path)) >= 4)
        if end == "stopped":
            await server.stop()
        else:
            os.kill(server.pid, signal.SIGKILL)
            await server.wait_death()
        assert orphans_of(tmp_path) == []


async def test_a_server_that_ignores_sigterm_is_killed_after_the_grace(tmp_path):
    run = config(engine={"slots": 8}, supervisor={"term_grace": 0.3})
    async with managed_toy(tmp_path, run=run, TOY_STUBBORN="1") as server:
        await server.start()
        await server.stop()
        assert not psutil.pid_exists(server.pid)
        assert "SIGKILL" in await server.wait_death() or not server.alive


PARENT = """
    import asyncio, sys
    from pathlib import Path
    sys.path.insert(0, {here!r})
    from toy import make_dialect
    from toy_kit import config
    from streamrl.servers.process import ManagedServer, ServerSettings

    async def main():
        dialect = make_dialect()
        dialect.environ = {environ}
        asked = ServerSettings.of_engine(config(engine={{"start_deadline": 30}}, supervisor={{"term_grace": 5}}))
        server = ManagedServer(dialect, asked, Path({folder!r}), "engine.0.server", seed=1)
        await server.start()
        print(server.pid, server._process._guard.pid, flush=True)
        await asyncio.sleep(3600)

    asyncio.run(main())
"""


@pytest.mark.parametrize("whom", ["parent", "guard"])
async def test_kill_9_of_the_role_or_of_the_guard_leaves_nothing_of_the_server(tmp_path, whom):
    code = textwrap.dedent(
        PARENT.format(here=str(HERE), folder=str(tmp_path), environ=ORPHANS | {"TOY_MARK": str(tmp_path)})
    )
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=subprocess.PIPE)
    try:
        server, guard = map(int, (await asyncio.wait_for(parent.stdout.readline(), 60)).split())
        await until(lambda: len(orphans_of(tmp_path)) >= 4)
        os.kill(parent.pid if whom == "parent" else guard, signal.SIGKILL)
        if whom == "parent":
            await until(lambda: orphans_of(tmp_path) == [])
        await until(lambda: not psutil.pid_exists(server) and not psutil.pid_exists(guard))
    finally:
        parent.kill() if parent.returncode is None else None
        await parent.wait()
        for process in psutil.process_iter(["environ"]):
            if (process.info["environ"] or {}).get("TOY_MARK") == str(tmp_path):
                process.kill()


@pytest.mark.parametrize(
    ("argv", "error", "says", "hint"),
    [
        (
            ["-c", "print('loading'); raise SystemExit('no such model: xyz')"],
            Unreachable,
            r"did not start: exit 1; its log ends with:\n  loading\n.*xyz",
            "engine.0.server.log",
        ),
        # no reason to try again
        (
            ["-c", "import argparse; argparse.ArgumentParser('toy').parse_args()", "--nonsense", "3"],
            ConfigError,
            r"command line: unrecognized arguments: --nonsense 3\b",
            "engine.flags",
        ),
        (
            ["-c", "import time; print('still', flush=True); time.sleep(1000)"],
            Unreachable,
            r"not ready within 2 s",
            "log",
        ),
        (None, ConfigError, "/no/such/python", "streamrl engines install toy"),
        # an error that the server went on after
        (
            ["-c", f"{LOGS_AN_ERROR}os.kill(os.getpid(), 9)"],
            Unreachable,
            r"did not start: killed by SIGKILL; its log ends with:\n",
            "engine.0.server.log",
        ),
        (
            ["-c", "raise SystemExit('[Errno 98] address already in use')"],
            Unreachable,
            r"did not start: exit 1; its log ends with:\n.*address already in use",
            "engine.0.server.log",
        ),
    ],
)
async def test_a_server_that_does_not_start_is_quoted(tmp_path, argv, error, says, hint):
    dialect = make_dialect()
    dialect.argv = ["/no/such/python"] if argv is None else [sys.executable, *argv]
    slow = error is Unreachable and "ready" in says
    async with managed_toy(tmp_path, dialect, settings(start_deadline=2) if slow else None) as server:
        with pytest.raises(error, match=says) as caught:
            await server.start()
        assert hint in caught.value.hint
        assert not server.alive
        assert server.pid is None or not psutil.pid_exists(server.pid)


async def test_a_server_that_points_to_its_log_is_quoted_with_the_cause(tmp_path, dialect):
    dialect.environ["TOY_LOG"] = str(HERE.parent / "data" / "server_logs" / "vllm_request.log")
    cause = r"engine\.0\.server fails: RuntimeError: Unsupported CPU attention configuration: head_dim=24"
    server = Server(settings(), tmp_path, "engine.0", seed=7)
    with pytest.raises(ConfigError, match=cause) as caught:
        await server.__aenter__()
    assert str(server.process.log) in caught.value.hint
    assert not server.process.alive


async def test_a_server_that_is_slow_to_start_says_so_with_seconds(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(managed, "_SAY_SECONDS", 0.4)
    dialect = make_dialect()
    dialect.argv = [sys.executable, "-c", "import time; time.sleep(1000)"]
    async with managed_toy(tmp_path, dialect, settings(start_deadline=2)) as server:
        with pytest.raises(Unreachable, match="not ready within 2 s"):
            await server.start()
    said = [(record.message, record.server, record.why) for record in caplog.records]
    assert ("server is starting", "engine.0.server", "1 s of at most 2 s") in said
    assert len(said) <= 5


async def test_a_start_that_is_cancelled_leaves_nothing(tmp_path):
    dialect = make_dialect()
    dialect.argv = [sys.executable, "-c", "import time; time.sleep(1000)"]
    async with managed_toy(tmp_path, dialect) as server:
        task = asyncio.create_task(server.start())
        await until(lambda: server.pid is not None)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        assert not psutil.pid_exists(server.pid)


async def test_a_stranger_on_the_port_is_not_taken_for_the_server(tmp_path, monkeypatch):
    """He listens there already, and answers as ours would."""
    dialect = make_dialect()
    async with serving(Toy()) as url:
        stranger = int(url.rpartition(":")[2])
        monkeypatch.setattr(managed.random, "sample", lambda *_: [stranger, *PORTS])
        async with managed_toy(tmp_path, dialect) as server:
            await server.start()
            assert server.url != url
            assert dialect.ports != [stranger]


async def test_servers_that_start_at_the_same_time_take_different_ports(tmp_path, monkeypatch):
    """Also when both look at the same ports in the same order, before either listens."""
    monkeypatch.setattr(managed.random, "sample", lambda *_: PORTS)
    dialects = [make_dialect(), make_dialect()]
    async with managed_toy(tmp_path / "a", dialects[0]) as one, managed_toy(tmp_path / "b", dialects[1]) as other:
        await asyncio.gather(one.start(), other.start())
    assert dialects[0].ports != dialects[1].ports


async def test_no_port_at_all(tmp_path, monkeypatch):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        monkeypatch.setattr(managed.random, "sample", lambda *_: [other.getsockname()[1]])
        async with managed_toy(tmp_path) as server:
            with pytest.raises(Unreachable, match="no free port"):
                await server.start()


async def test_the_key_is_blotted_out_of_the_log_and_variables_get_through(tmp_path, monkeypatch):
    monkeypatch.setenv("STREAMRL_REDIS__PASSWORD", "hidden")
    run = settings(variables={"TOY_KEY": "s3cret-value"})
    async with managed_toy(tmp_path, run=run, key="s3cret-value") as server:
        await server.start()
        assert "STREAMRL_REDIS__PASSWORD" not in psutil.Process(server.pid).environ()
        await server.stop()
        text = server.log.read_text()
        assert "key ***" in text
        assert "s3cret" not in text


async def test_a_log_is_rotated_and_never_blocks_the_server(tmp_path):
    dialect = make_dialect()
    dialect.argv = [sys.executable, "-c", "for n in range(20000): print('line', n, 'x' * 50)"]
    async with managed_toy(tmp_path, dialect) as server:
        with pytest.raises(Unreachable, match="line 19999"):
            await server.start()
        old = server.log.with_name(server.log.name + ".1")
        assert server.log.stat().st_size < 200_000
        assert old.stat().st_size < 200_000
        lines = (old.read_text() + server.log.read_text()).splitlines()
        assert all(line.startswith("line ") and line.endswith("x" * 50) for line in lines)


async def test_the_last_words_are_told_when_the_log_was_rotated_after_them(tmp_path):
    dialect = make_dialect()
    dialect.argv = [sys.executable, "-c", "import sys; sys.stderr.write('no room here\\n')"]
    run = settings()
    run = run.model_copy(update={"supervisor": run.supervisor.model_copy(update={"log_bytes": 1})})
    async with managed_toy(tmp_path, dialect, run) as server:
        server.log.parent.mkdir()
        server.log.write_text("words of an earlier life\n")
        with pytest.raises(Unreachable, match="no room here") as caught:
            await server.start()
        assert "earlier" not in str(caught.value)
        assert not server.log.read_text()


async def test_shared_memory_of_a_killed_server_does_not_stay(tmp_path):
    dialect = make_dialect()
    code = f"""
import runpy, sys
from multiprocessing.shared_memory import SharedMemory
kept = SharedMemory(create=True, size=4096)
print("segment", kept.name, flush=True)
sys.argv = ["toy", "PORT"]
runpy.run_path({str(HERE / "toy.py")!r}, run_name="__main__")
"""
    dialect.argv = [sys.executable, "-c", code]
    async with managed_toy(tmp_path, dialect, TOY_MARK=str(tmp_path), **ORPHANS) as server:
        await server.start()
        segment = Path("/dev/shm", server.log.read_text().split("segment ")[1].split()[0])
        assert segment.exists()
        os.kill(server.pid, signal.SIGKILL)
        assert "killed by SIGKILL" in await server.wait_death()
        assert not segment.exists()
        assert not orphans_of(tmp_path)


async def test_a_log_that_cannot_be_written_ends_nothing_and_leaves_nothing(tmp_path, dialect):
    async with managed_toy(tmp_path, dialect, TOY_MARK=str(tmp_path), **ORPHANS) as server:
        server.log = Path("/dev/full")
        await server.start()  # which prints a line
        async with Server(settings(url=[server.url]), tmp_path, "engine.0", seed=7) as client:
            assert (await client.generate(request("a"))).finish == "length"
        await server.stop()
    await until(lambda: not orphans_of(tmp_path))


def test_a_port_that_is_taken_is_left_to_one_listener():
    with take_port() as taken, socket.create_server(taken.getsockname()), socket.socket() as second:
        second.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="in use"):
            second.bind(taken.getsockname())
