"""The connection: coalescing, and every way in which Redis can fail under a call."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from pathlib import Path

import hiredis
import pytest

from streamrl.config import RedisConfig, RunConfig
from streamrl.errors import ConfigError, Unreachable
from streamrl.queues import Ledgers, connection, embedded, open_ledgers
from streamrl.queues.access import ReplyError, error_code
from streamrl.queues.connection import load_scripts, open_connection
from streamrl.queues.records import AdmitOutcome
from tests.queues.conftest import both_versions
from tests.queues.ledger_kit import admit, close_group, faults, lease, until
from tests.queues.proxy import open_proxy
from tests.redis_kit import RedisRun


def impatient(run: RedisRun, patience: float = 0.3, **changed) -> RedisConfig:
    return run.config.model_copy(update={"patience": patience, **changed})


async def test_concurrent_calls_travel_together(ledgers: Ledgers, monkeypatch):
    trips = 0
    original = connection.Connection._round_trip

    async def counted(self, batch):
        nonlocal trips
        trips += 1
        await original(self, batch)

    monkeypatch.setattr(connection.Connection, "_round_trip", counted)
    replies = await asyncio.gather(*(ledgers.connection.read("ECHO", i) for i in range(1000)))
    assert replies == [b"%d" % i for i in range(1000)]
    assert trips <= 3


async def test_a_cancelled_call_disturbs_no_other(ledgers: Ledgers):
    calls = [asyncio.create_task(ledgers.connection.read("ECHO", i)) for i in range(20)]
    await asyncio.sleep(0)
    for call in calls[::2]:
        call.cancel()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert results[1::2] == [b"%d" % i for i in range(1, 20, 2)]
    assert all(isinstance(result, asyncio.CancelledError) for result in results[::2])
    assert await ledgers.connection.read("ECHO", "still here") == b"still here"


async def test_redis_killed_and_restarted_under_calls(ledgers: Ledgers, run: RedisRun):
    """Every call gets its answer; every sample is there once."""
    train = ledgers.train
    for cursor in range(20):
        await admit(train, cursor, samples=8)
    prompts = await lease(train, "prompts", count=20)

    async def emit(prompt, k):
        await train.emit(prompt, k, b"x" * 500)

    async with asyncio.TaskGroup() as tasks:
        for prompt in prompts[:10]:
            for k in range(8):
                tasks.create_task(emit(prompt, k))
        await asyncio.sleep(0)
        run.kill()
        for prompt in prompts[10:]:
            for k in range(8):
                tasks.create_task(emit(prompt, k))
        await asyncio.to_thread(run.restart)
    assert ledgers.connection.since_error() < 60
    assert await ledgers.connection.read("XLEN", train.keys.rollouts) == 160
    assert await faults(train) == []


async def test_a_redis_that_is_gone_ends_the_patience(run: RedisRun):
    config = RunConfig(name="test", redis=impatient(run))
    async with open_ledgers(config, run.run_dir) as ledgers:
        run.kill()
        with pytest.raises(Unreachable) as caught:
            await asyncio.gather(ledgers.train.state(), ledgers.train.live())
        assert "redis.patience" in caught.value.hint
        with pytest.raises(Unreachable):
            while True:  # a blocking read answers "nothing now" until the patience is over
                assert await ledgers.connection.block("XREAD", "BLOCK", 1, "STREAMS", "s", "0", milliseconds=1) is None
        await asyncio.to_thread(run.restart)
        assert (await ledgers.train.state()).cursor == 0, "it goes on when Redis is back"


async def test_nobody_listens(tmp_path: Path):
    config = RedisConfig(url=f"unix://{tmp_path}/nobody.sock", patience=0.2)
    with pytest.raises(Unreachable, match=r"nobody\.sock"):
        async with open_connection(config, config.url):
            pass


async def test_a_server_that_says_nothing_counts_as_gone(ledgers: Ledgers, run: RedisRun, monkeypatch):
    monkeypatch.setattr(ledgers.connection, "_round_trip_seconds", 0.2)
    run.pause()
    call = asyncio.create_task(ledgers.train.live())
    await until(lambda: ledgers.connection.since_error() < 60)
    run.wake()
    assert await call == []


async def test_all_scripts_are_loaded_in_one_round_trip(run: RedisRun, tmp_path: Path):
    """Redis may be so far away that one after the other they would never be there in time."""
    path = tmp_path / "far.sock"
    config = run.config.model_copy(update={"url": f"unix://{path}", "patience": 0.1})
    async with open_proxy(embedded.socket_path(run.run_dir), path) as proxy:
        proxy.hold(b"LOAD", len(load_scripts()))
        async with open_connection(config, config.url) as found:
            assert await found.read("PING") == b"PONG"


async def test_a_lost_reply_is_asked_for_again(run: RedisRun, tmp_path: Path):
    """The script ran, its reply was lost: the repeat says so, and nothing is there twice."""
    path = tmp_path / "p.sock"
    config = RunConfig(name="test", redis=run.config.model_copy(update={"url": f"unix://{path}"}))
    async with (
        open_proxy(embedded.socket_path(run.run_dir), path) as proxy,
        open_ledgers(config, run.run_dir) as ledgers,
    ):
        train = ledgers.train
        proxy.lose(b"prompt 0")
        found = await admit(train, 0)
        assert (found.outcome, found.cursor) == (AdmitOutcome.MOVED, 1)
        (prompt,) = await lease(train, "prompts")
        proxy.lose(b"payload")
        assert not await train.emit(prompt, 0, b"payload")
        proxy.lose(b"zero-nonce")
        assert (await train.fence("zero-nonce", 0)).epoch == 1
        proxy.lose(b"manifest")
        await train.finish_step("zero-nonce", 3, 1, b"manifest")
        assert proxy.lost == 4
        state = await train.state()
        assert (state.live, state.epoch, state.unretired, state.version) == (1, 1, 3, 1)
        assert await ledgers.connection.read("XLEN", train.keys.weights) == 1
        assert await faults(train) == []


async def test_scripts_are_loaded_again(ledgers: Ledgers):
    await ledgers.connection.read("SCRIPT", "FLUSH")
    results = await asyncio.gather(*(admit(ledgers.train, 0) for _ in range(20)))
    assert [result.outcome for result in results].count(AdmitOutcome.ADMITTED) == 1


async def test_a_command_that_redis_refuses_is_an_error_at_once(ledgers: Ledgers):
    await ledgers.connection.read("SET", ledgers.train.keys.live, "not a sorted set")
    with pytest.raises(ReplyError) as caught:
        await ledgers.train.live()
    assert caught.value.code == "WRONGTYPE"
    with pytest.raises(TypeError):
        await ledgers.connection.read("ECHO", None)
    assert await ledgers.connection.read("ECHO", "on") == b"on"


@both_versions
async def test_a_full_redis_is_back_pressure(run: RedisRun):
    """Growing scripts wait for room, until the patience is over; draining scripts run (hole 15)."""
    config = RunConfig(name="test", redis=impatient(run, 0.5))
    async with open_ledgers(config, run.run_dir) as ledgers:
        train = ledgers.train
        for cursor in range(3):
            await close_group(train, cursor)
        await admit(train, 3, samples=3)
        (prompt,) = await lease(train, "prompts")
        await train.emit(prompt, 0, b"x")
        (sample,) = await lease(train, "rollouts")
        await train.journal(prompt, 1, 0, b"turn", b"state")
        await train.journal(prompt, 2, 0, b"turn")
        await ledgers.connection.read("CONFIG", "SET", "maxmemory", "1")
        with pytest.raises(Unreachable) as caught:
            await asyncio.gather(train.emit(prompt, 1, b"x"), admit(train, 4))
        with pytest.raises(Unreachable):
            await train.journal(prompt, 1, 1, b"turn", b"newer state")
        assert await train.read_journal(prompt, 1) == ([b"turn"], b"state")
        assert await train.forget_journal(prompt, 2)
        assert "redis.maxmemory" in caught.value.hint
        await train.fence("n", 0)
        await train.advance_cursor("n", 3)
        await train.resume("n", "0-0", 1)
        await train.start_step("n", [0])
        await train.finish_step("n", 1, 1, b"manifest", [0])
        assert await train.retire("n", "1-1", 0, [0]) == 1
        assert await train.drop("n", 1, "stale")
        assert await train.fail_group("n", 2, "poison")
        assert await train.fail_sample(prompt, 1, "engine")
        assert await train.fail_prompt(prompt, "prompt")
        assert await train.score(sample, b"s") == 2
        assert await train.finish(4)
        await ledgers.roles.beat("learner", {"state": "ready"}, ttl=60)
        assert await train.drop_dead([(await train.dead_letters())[0].entry]) == 1
        waiting = asyncio.create_task(admit(train, 4))
        await ledgers.connection.read("CONFIG", "SET", "maxmemory", "0")
        assert (await waiting).outcome is AdmitOutcome.ADMITTED
        assert await faults(train) == []


async def test_a_process_that_is_to_end_waits_for_no_redis_that_cannot_write(run: RedisRun, monkeypatch):
    monkeypatch.setattr(connection, "_LAST_PATIENCE", 0.3)
    async with open_connection(impatient(run, 1000.0), run.config.url) as link:
        for key, value in (("stop-writes-on-bgsave-error", "yes"), ("save", "3600 1000000")):
            await link.read("CONFIG", "SET", key, value)
        (run.run_dir / "redis" / "dump.rdb" / "in the way").mkdir(parents=True)  # no file can take its place
        await link.read("BGSAVE", "SCHEDULE")
        async with asyncio.timeout(20):
            while b"rdb_last_bgsave_status:err" not in await link.read("INFO", "persistence"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        waiting = asyncio.create_task(link.read("SET", "key", "value"))
        await until(lambda: any(call.failures > 3 for call in link._paused))  # a process that goes on is patient
        assert not waiting.done()
        link.leave()
        with pytest.raises(Unreachable, match=r"did not serve a call for [0-9]+ s: MISCONF") as caught:
            await asyncio.wait_for(waiting, 20)
        assert "full disk" in caught.value.hint


async def test_a_process_that_is_to_end_waits_for_a_redis_that_comes_back(run: RedisRun, monkeypatch):
    """The supervisor is starting it again: only a disk that stays full is no reason to wait."""
    monkeypatch.setattr(connection, "_LAST_PATIENCE", 0.0)
    async with open_connection(impatient(run, 60.0), run.config.url) as link:
        link.leave()
        run.kill()
        waiting = asyncio.create_task(link.read("SET", "key", "value"))
        await asyncio.wait({waiting}, timeout=0.5)
        await asyncio.to_thread(run.start)
        assert await asyncio.wait_for(waiting, 60) == b"OK"


@both_versions
async def test_a_replica_is_waited_out(ledgers: Ledgers):
    """READONLY during a failover: the call goes through once the server is a master again."""
    await ledgers.connection.read("REPLICAOF", "127.0.0.1", "1")
    call = asyncio.create_task(admit(ledgers.train, 0))
    await until(lambda: ledgers.connection._paused)
    assert not call.done()
    await ledgers.connection.read("REPLICAOF", "NO", "ONE")
    assert (await call).outcome is AdmitOutcome.ADMITTED


async def set_password(run: RedisRun) -> None:
    async with open_connection(run.config, run.config.url) as opened:
        await opened.read("CONFIG", "SET", "requirepass", "the-secret")


async def test_passwords(run: RedisRun, tmp_path: Path, caplog):
    await set_password(run)
    caplog.set_level(logging.DEBUG)
    began = time.monotonic()
    with pytest.raises(ConfigError, match="refuses access") as none:
        async with open_connection(run.config, run.config.url):
            pass
    wrong = run.config.url.replace("unix://", "unix://user:wrong-one@")
    with pytest.raises(ConfigError, match="refuses access") as bad:
        async with open_connection(run.config, wrong):
            pass
    assert time.monotonic() - began < run.config.patience / 2, "waiting does not mend a password"
    assert none.value.exit_code == bad.value.exit_code == 78
    assert "wrong-one" not in str(bad.value) + caplog.text
    file = tmp_path / "password"
    file.write_text("the-secret\n")
    config = run.config.model_copy(update={"password_file": file})
    async with open_connection(config, config.url) as opened:
        assert await opened.read("ECHO", "in") == b"in"
    with pytest.raises(ConfigError, match="password_file"):
        missing = run.config.model_copy(update={"password_file": tmp_path / "missing"})
        async with open_connection(missing, config.url):
            pass


async def test_a_password_that_is_set_while_we_run(ledgers: Ledgers, run: RedisRun):
    """The connection that is open goes on; the blocking one is new, and is told at once."""
    await set_password(run)
    assert await ledgers.train.live() == []
    with pytest.raises(ConfigError):
        await ledgers.train.wait_closed(0.01)


async def test_missing_permissions_are_fatal(ledgers: Ledgers, run: RedisRun):
    setuser = ("ACL", "SETUSER", "weak", "on", ">pw", "~*", "+@connection", "+info", "+script", "+evalsha", "+get")
    await ledgers.connection.read(*setuser)
    url = run.config.url.replace("unix://", "unix://weak:pw@")
    async with open_connection(run.config, url) as weak:
        assert await weak.read("GET", "x") is None
        with pytest.raises(ConfigError, match="refuses access"):
            await weak.read("SET", "x", 1)


async def test_an_evicting_server_is_refused(ledgers: Ledgers, run: RedisRun):
    await ledgers.connection.read("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    with pytest.raises(ConfigError, match="allkeys-lru") as caught:
        async with open_connection(run.config, run.config.url):
            pass
    assert "noeviction" in caught.value.hint


async def test_an_old_server_is_refused(tmp_path: Path):
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        parser = hiredis.Reader()
        while data := await reader.read(1 << 16):
            parser.feed(data)
            while (command := parser.gets()) is not False:
                info = b"# Server\r\nredis_version:6.0.16\r\n"
                answers = {b"HELLO": b"%1\r\n+proto\r\n:3\r\n", b"INFO": b"$%d\r\n%b\r\n" % (len(info), info)}
                writer.write(answers.get(command[0], b"+OK\r\n"))

    server = await asyncio.start_unix_server(serve, tmp_path / "old.sock")
    with contextlib.closing(server):
        config = RedisConfig(url=f"unix://{tmp_path}/old.sock", patience=5)
        with pytest.raises(ConfigError, match=r"6\.0.*6\.2 or later"):
            async with open_connection(config, config.url):
                pass


async def test_calls_at_the_end_of_the_block_are_told(run: RedisRun):
    async with open_connection(run.config, run.config.url) as opened:
        run.pause()
        waiting = asyncio.create_task(opened.read("PING"))
        await asyncio.sleep(0)
    run.wake()
    with pytest.raises(Unreachable, match="closed"):
        await waiting
    with pytest.raises(Unreachable, match="closed"):
        await opened.read("PING")


async def test_blocking_reads_do_not_hold_up_the_others(ledgers: Ledgers):
    blocked = [asyncio.create_task(ledgers.train.wait_closed(30)) for _ in range(10)]
    await ledgers.train.live()
    blocked[0].cancel()
    await close_group(ledgers.train, 0)
    await asyncio.gather(*blocked[1:])
    async with asyncio.timeout(5):
        await ledgers.train.wait_closed(30)  # a group closed since the last look
        assert await ledgers.train.closed() == [0]


async def test_weights_wait_for_a_newer_version(ledgers: Ledgers):
    await ledgers.train.fence("n", 0)
    assert await ledgers.weights.after(0, 0.01) is None
    waiting = asyncio.create_task(ledgers.weights.after(0, 30))
    await ledgers.train.live()
    for number in (1, 2):
        await ledgers.train.finish_step("n", 0, number, b"m%d" % number)
    assert (await waiting)[0] in (1, 2)
    assert await ledgers.weights.after(1, 30) == (2, b"m2")
    assert await ledgers.weights.after(2, 0.01) is None


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("OOM command not allowed when used memory > 'maxmemory'.", "OOM"),
        ("ERR Error running script (call to f_1): @user_script:5: -OOM command not allowed", "OOM"),
        ("ERR Error running script (call to f_1): @user_script:5: @user_script: 5: -NOGROUP No such key", "NOGROUP"),
        ("UNBLOCKED the stream key no longer exists", "UNBLOCKED"),
        ("No such thing", ""),
    ],
)
def test_codes_of_error_replies(message, code):
    assert error_code(message) == code


def test_every_script_says_what_it_does_in_its_header():
    for script in load_scripts().values():
        for word in ("-- KEYS", "-- returns", "-- repeat"):
            assert word in script.text, f"{script.name}.lua lacks {word}"
