"""Somebody wrote into the Redis of a run what streamrl never writes: commands that look name it, and none crashes.

Every key that a run has is damaged in every way: another type, bytes in the place of each field, a field or the whole
key gone. What there is to damage is read from Redis, so that a new key is damaged too.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from typer.main import get_command

from streamrl import cli as command_line
from streamrl.errors import LedgerDamaged
from streamrl.queues import open_ledgers
from streamrl.runfile import read_saved
from tests.queues import ledger_kit
from tests.redis_kit import Probe, RedisRun

from .run_kit import Done, admit, cli, fill, make_run, process

NOISE = b"\xff\xfe\x00no\nnumber"
COMMANDS = [
    ("status",),
    ("lag",),
    ("audit",),
    ("trace", "0"),
    ("trace", "1"),
    ("trace", "0", "--eval"),
    ("dead", "ls"),
    ("weights", "ls"),
    ("reward", "servers", "ls"),
]
MEANT = {"status": "degraded", "audit": "NOT PROVED", "trace": "unknown"}
"""What a command says when its exit code is 1: the answer, not a failure."""
APP = get_command(command_line.app)
"""Made once: typer makes it for every call, which takes longer than a look."""
NUMBERS = {
    *("cursor", "done", "epochs", "epoch", "base_epoch", "held", "version", "retired", "dropped"),
    *("admitted", "dead", "replayed", "foreign"),
}


@dataclass
class Victim:
    """A run with something behind each of its keys, on a live Redis."""

    run_dir: Path
    probe: Probe
    healthy: dict[bytes, bytes]

    def fields(self, name: str) -> list[str]:
        """Names of the fields of a hash."""
        return [field.decode(errors="replace") for field in self.probe.call("HKEYS", name)]

    def restore(self) -> None:
        """Put everything back as it was."""
        self.probe.call("FLUSHALL")
        self.probe.pipeline([("RESTORE", key, 0, dump) for key, dump in self.healthy.items()])

    def look(self) -> dict[str, Done]:
        """Run every looking command; none may crash."""
        found = {}
        for command in COMMANDS:
            with mock.patch.object(command_line, "app", APP), mock.patch("streamrl.commands.lag._BETWEEN", 0.0):
                done = cli(*command, "--run", str(self.run_dir))
            said = done.stdout + done.stderr
            assert done.returncode in (0, 1, 78), (command, done)
            assert "Traceback (most recent call last)" not in said, (command, done)
            assert done.returncode != 1 or MEANT[command[0]] in said, (command, done)
            found[" ".join(command)] = done
        return found


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    """Groups in every state in both ledgers, roles, versions, servers."""
    redis = RedisRun(tmp_path_factory.mktemp("damaged"))
    redis.start()
    config = make_run(redis.run_dir, f"redis.url={redis.config.url}", "engine.kind=openai", "engine.url=['http://a:1']")

    async def populate() -> None:
        await fill(config, redis.run_dir)
        async with open_ledgers(config, redis.run_dir) as ledgers:
            for ledger, name in ((ledgers.train, "1-1"), (ledgers.evaluation, "eval")):
                start = (await ledger.state()).cursor
                await ledger.fence("nonce", 0)
                for group_id in range(start, start + 3):
                    await admit(ledger, group_id)
                for lease in await ledger_kit.lease(ledger, "prompts", count=10):
                    for k in range(2):
                        await ledger.emit(lease, k, b"payload")
                for lease in await ledger_kit.lease(ledger, "rollouts", count=10):
                    await ledger.score(lease, b"score")
                await ledger.drop("nonce", start, "too stale")
                await ledger.resume("nonce", "1-1", 1)
                await ledger.finish_step("nonce", 1, 4, b"manifest" if ledger is ledgers.train else None)
                await ledger.retire("nonce", name, 0, [start + 1])
            await admit(ledgers.evaluation, 3)
            train = ledgers.train
            await train.queue_replays([letter.group_id for letter in await train.dead_letters()])
            await train.connection.read("HSET", train.keys.state, "replayed", 1, "foreign", 1)

    asyncio.run(populate())
    with Probe(redis.config.url) as probe:
        names = sorted(probe.call("KEYS", "*"))
        probe.pipeline([("PERSIST", name) for name in names])
        yield Victim(redis.run_dir, probe, {name: probe.call("DUMP", name) for name in names})
    redis.kill()


Damage = tuple[str, list[tuple[Any, ...]]]


def damages(probe: Probe, key: bytes) -> Iterator[Damage]:
    """Another type, nothing, and bytes that are no text and no number wherever somebody could put some."""
    kind = probe.call("TYPE", key)
    yield "another type", [("DEL", key), ("RPUSH", key, "x") if kind == b"string" else ("SET", key, "x")]
    yield "gone", [("DEL", key)]
    if kind == b"hash":
        fields = probe.call("HKEYS", key)
        yield "noise", [("HSET", key, field, NOISE) for field in fields]
        yield "empty", [("HSET", key, field, "") for field in fields]
        yield "a field named by noise", [("HSET", key, NOISE, "1"), ("HSET", key, b"s:" + NOISE, "1")]
        if b":group:" in key:
            yield from ((f"without {field.decode()}", [("HDEL", key, field)]) for field in fields)
    elif kind == b"stream":
        for entry in probe.call("XRANGE", key, "-", "+", "COUNT", 1):
            fields = dict(zip(entry[1][::2], entry[1][1::2], strict=True))
            changed = ({**fields, field: NOISE} for field in fields)
            yield "entries with noise", [("XADD", key, "*", *(p for pair in c.items() for p in pair)) for c in changed]
        yield "an entry of noise", [("XADD", key, "*", NOISE, NOISE)]
    elif kind == b"zset":
        yield "a member of noise", [("ZADD", key, 0, NOISE)]
    elif kind == b"set":
        yield "a member of noise", [("SADD", key, NOISE)]
    else:
        yield "noise", [("SET", key, NOISE)]


def check(victim: Victim, name: str, damage: str) -> None:
    """See what the commands say of a damage that was done."""
    try:
        found = victim.look()
    except AssertionError as error:
        raise AssertionError(f"{name}: {damage}") from error
    audit = found["audit"].stdout + found["audit"].stderr
    group = re.fullmatch(r".*:group:(\d+)", name)
    if damage == "another type":
        assert (f"group {group[1]}: its key holds" if group else f"{name} holds") in audit, (name, damage, audit)
    if damage == "noise" and name.endswith(":state"):
        for field in NUMBERS & set(victim.fields(name)):
            assert f"{name}, field {field}: " in audit, (name, damage, audit)
    if damage == "noise" and group:
        assert f"group {group[1]}: damaged: " in audit, (name, damage, audit)


@pytest.mark.slow
def test_commands_that_look_survive_every_damage_of_every_key(victim: Victim):
    for key in victim.healthy:
        victim.restore()
        for damage, commands in list(damages(victim.probe, key)):
            victim.restore()
            victim.probe.pipeline(commands)
            check(victim, key.decode(), damage)


@pytest.mark.parametrize(
    ("key", "damage"),
    [
        ("{sr:demo}:group:0", "noise"),
        ("{sr:demo}:prompts", "another type"),
        ("{sr:demo}:state", "noise"),
        ("{sr:demo}:replays", "another type"),
        ("{sr:demo}:dead", "entries with noise"),
        ("{sr:demo}:eval:scored", "another type"),
    ],
)
def test_commands_that_look_name_a_damage(victim: Victim, key: str, damage: str):
    victim.restore()
    victim.probe.pipeline(dict(damages(victim.probe, key.encode()))[damage])
    check(victim, key, damage)


def test_commands_that_look_find_nothing_wrong_with_a_healthy_run(victim: Victim):
    victim.restore()
    said = {name: done.stdout + done.stderr for name, done in victim.look().items()}
    assert not [name for name, text in said.items() if "damaged" in text or "fault:" in text], said


def test_a_role_says_what_is_damaged_and_ends_the_run(victim: Victim):
    victim.restore()
    victim.probe.call("SET", "{sr:demo}:rollouts", "x")
    done = process("run", "reward", "--run", str(victim.run_dir))
    assert done.returncode == 78, done
    assert "{sr:demo}:rollouts holds a string, not a stream" in done.stderr
    assert "restore RUN_DIR/redis" in done.stderr


async def test_what_trips_over_a_damage_later_is_told_what_it_was(victim: Victim):
    """A role that is at work when it happens: whatever it raises of it becomes the name of the damage."""
    victim.restore()
    config = read_saved(victim.run_dir / "run.json").config
    with pytest.raises(LedgerDamaged, match=r"\{sr:demo\}:state, field cursor: many is no number"):
        async with open_ledgers(config, victim.run_dir) as ledgers, asyncio.TaskGroup():
            victim.probe.call("HSET", "{sr:demo}:state", "cursor", "many")
            await ledgers.train.state()
    victim.restore()
    with pytest.raises(LedgerDamaged, match=r"\{sr:demo\}:group:0, field n: x is no number"):
        async with open_ledgers(config, victim.run_dir) as ledgers:
            victim.probe.call("HSET", "{sr:demo}:group:0", "n", "x")
            await ledgers.train.read_group(0)
    victim.restore()
    with pytest.raises(ZeroDivisionError):
        async with open_ledgers(config, victim.run_dir):
            raise ZeroDivisionError
