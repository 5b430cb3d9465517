"""A server behind `redis.url` that is not ours: TCP, passwords, broken URLs, and its append-only file."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamrl.config import RedisConfig, RunConfig
from streamrl.errors import ConfigError
from streamrl.queues import embedded, open_ledgers
from streamrl.queues.access import connection_options, redact
from streamrl.queues.connection import open_connection, open_to_look
from tests.queues.conftest import both_versions
from tests.queues.ledger_kit import admit, close_group, until, until_async
from tests.redis_kit import ForeignRedis, Probe, tear_script

BROKEN = [
    "redis://[::1",
    "redis://host:secret",
    "redis://:secret#of@host/0",
    "redis://:secret/of@host/0",
    "http://me:secret@host/",
    "me:secret@host",
    "redis://host/0?db=secret",
]


@pytest.fixture
def foreign(server: embedded.ServerProgram, tmp_path: Path) -> Iterator[ForeignRedis]:
    redis = ForeignRedis(tmp_path / "foreign", server.executable)
    redis.start()
    yield redis
    redis.kill()


async def test_a_run_over_tcp_with_a_password_file(foreign: ForeignRedis, tmp_path: Path):
    async with open_ledgers(RunConfig(name="test", redis=foreign.config), tmp_path) as ledgers:
        await close_group(ledgers.train, 0)
        assert await ledgers.train.closed() == [0]
        await ledgers.train.wait_closed(0.01)
    with foreign.probe() as probe:
        assert probe.call("XLEN", "{sr:test}:scored") == 1


@pytest.mark.parametrize("place", ["default:{}@", ":{}@", "?password={}", "?username=default&password={}"])
async def test_passwords_in_the_url(foreign: ForeignRedis, place: str):
    secret = "a%20%22secret%22%20%5C%20of%20theirs"
    words, host = place.format(secret), foreign.url.removeprefix("redis://")
    url = f"redis://{host}{words}" if words.startswith("?") else f"redis://{words}{host}"
    async with open_connection(RedisConfig(url=url, patience=5), url) as opened:
        assert await opened.read("ECHO", "in") == b"in"
    assert "theirs" not in redact(url)


async def test_the_database_of_the_url(foreign: ForeignRedis):
    for url in (foreign.url.replace("/0", "/3"), f"{foreign.url}?db=3"):
        config = foreign.config.model_copy(update={"url": url})
        async with open_connection(config, url) as opened:
            await opened.read("SET", "a", 1)
        with Probe(url, foreign.password_file) as probe:
            assert probe.call("GET", "a") == b"1"
            assert probe.call("DEL", "a") == 1


@pytest.mark.parametrize("url", BROKEN)
async def test_a_broken_url_is_78_and_shows_no_secret(url: str):
    shown = redact(url)
    with pytest.raises(ConfigError, match=r"redis\.url") as caught:
        async with open_connection(RedisConfig(url=url), url):
            pass
    error = caught.value
    assert (error.exit_code, bool(error.hint)) == (78, True)
    chain = [error, error.__cause__, *([] if error.__suppress_context__ else [error.__context__])]
    assert "secret" not in shown + "".join(map(str, chain))


def test_an_option_that_is_none_is_78():
    url = "redis://host/0?passwort=secret"
    with pytest.raises(ConfigError, match="passwort") as caught:
        connection_options(RedisConfig(url=url), url)
    assert "secret" not in str(caught.value)


def test_urls_are_shown_without_their_secrets():
    assert redact("redis://me:secret@host:6379/1") == "redis://me:***@host:6379/1"
    assert redact("rediss://:secret@host") == "rediss://:***@host"
    assert redact("redis://token@host") == "redis://***@host"
    assert redact("redis://h/0?password=secret") == "redis://h/0?***"
    assert redact("redis://me:secret@[::1]:6379/0#secret") == "redis://me:***@[::1]:6379/0"
    assert redact("unix:///run/redis.sock") == "unix:///run/redis.sock"
    assert redact("unix:///home/me@work/redis.sock?password=secret") == "unix:///home/me@work/redis.sock?***"
    assert redact("unix://me:secret@/run/redis.sock") == "unix://me:***@/run/redis.sock"
    assert redact("") == "***"


def test_every_scheme_has_a_connection():
    for url in ("redis://host", "rediss://host", "unix:///run/redis.sock"):
        options, kind = connection_options(RedisConfig(url=url), url)
        assert kind(**options) is not None


# Its append-only file: nobody checks it before a start (hole 7).


def info(redis: ForeignRedis) -> dict[str, str]:
    with redis.probe() as probe:
        lines = probe.call("INFO", "persistence").decode().splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def rewritten(redis: ForeignRedis) -> bool:
    found = info(redis)
    return found["aof_rewrite_in_progress"] == "0" and found["aof_last_rewrite_time_sec"] != "-1"


async def restart_twice(redis: ForeignRedis) -> list[bytes]:
    """Two restarts with a script in between; what is there then."""
    await asyncio.to_thread(redis.start)
    await until(lambda: rewritten(redis))
    with redis.probe() as probe:
        probe.call("EVAL", "redis.call('SET','d',1) redis.call('SET','e',1)", 0)
        assert sorted(probe.call("KEYS", "*")) == [b"before", b"d", b"e"]
    redis.kill()
    await asyncio.to_thread(redis.start)
    with redis.probe() as probe:
        return sorted(probe.call("KEYS", "*"))


@both_versions
async def test_a_restarted_server_writes_its_file_anew_while_we_run(foreign: ForeignRedis, caplog):
    """Hole 7: the connection comes back to another server, whose file may hold half a script."""
    caplog.set_level(logging.INFO)
    async with open_connection(foreign.config, foreign.url) as opened:
        await until(lambda: rewritten(foreign))
        tear_script(foreign.probe(), foreign.folder, foreign.kill)
        reading = asyncio.create_task(until_async(lambda: opened.read("PING")))
        assert await restart_twice(foreign) == [b"before", b"d", b"e"]
        await reading
    assert "redis rewrites its append-only file" in caplog.text


@both_versions
async def test_a_server_that_was_restarted_before_we_came_writes_its_file_anew(foreign: ForeignRedis):
    """After a loss of power everybody is new, and nobody remembers the server of before."""
    tear_script(foreign.probe(), foreign.folder, foreign.kill)

    async def come() -> None:
        async with open_connection(foreign.config, foreign.url):
            pass

    coming = asyncio.create_task(come())
    assert await restart_twice(foreign) == [b"before", b"d", b"e"]
    await coming


async def test_one_rewrite_for_each_start_of_the_server(foreign: ForeignRedis, caplog):
    caplog.set_level(logging.INFO)
    for _ in range(3):
        async with open_connection(foreign.config, foreign.url):
            await until(lambda: rewritten(foreign))
    assert caplog.text.count("redis rewrites its append-only file") == 1


async def test_a_look_asks_for_no_rewrite(foreign: ForeignRedis, caplog):
    caplog.set_level(logging.INFO)
    foreign.kill()
    await asyncio.to_thread(foreign.start)
    async with open_to_look(foreign.config, foreign.url) as connection:
        assert await connection.read("PING") == b"PONG"
    assert "anew" not in caplog.text
    assert info(foreign)["aof_last_rewrite_time_sec"] == "-1"


async def test_what_cannot_be_rewritten_is_left(foreign: ForeignRedis, caplog, tmp_path: Path):
    """No append-only file; no right to rewrite it."""
    caplog.set_level(logging.INFO)
    foreign.kill()
    await asyncio.to_thread(foreign.start, appendonly="no")
    async with open_ledgers(RunConfig(name="test", redis=foreign.config), tmp_path) as ledgers:
        await admit(ledgers.train, 0)
    assert info(foreign)["aof_rewrite_in_progress"] == "0"
    assert "anew" not in caplog.text
    foreign.kill()
    await asyncio.to_thread(foreign.start)
    with foreign.probe() as probe:
        probe.call("ACL", "SETUSER", "weak", "on", ">pw", "~*", "+@all", "-bgrewriteaof")
    url = foreign.url.replace("redis://", "redis://weak:pw@")
    async with open_connection(RedisConfig(url=url), url) as weak:
        assert await weak.read("GET", "x") is None
    assert "cannot rewrite its append-only file" in caplog.text
