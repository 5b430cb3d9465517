"""The audit against runs whose every group is known, and against runs that were damaged on purpose."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import orjson
import pytest

from streamrl.config import RunConfig
from streamrl.errors import WireError
from streamrl.learner.checkpoint import Checkpoints, Meta
from streamrl.learner.lineage import join
from streamrl.queues.ledger import Lease
from streamrl.queues.ledgers import open_ledgers
from streamrl.runtime.audit import audit

NONCE = "audited"


class Book:
    """A run that the test fills group by group."""

    def __init__(self, config, run_dir, ledgers) -> None:
        self.config, self.run_dir, self.ledgers = config, run_dir, ledgers
        self.epoch = 0

    async def audit(self):
        found = await audit(self.config, self.run_dir, self.ledgers)
        other = found.held_out
        assert found.admitted == found.trained + found.dropped + found.dead + found.live + found.lost - other.lost
        assert other.admitted == found.evaluated + other.dropped + other.dead + other.live + other.lost
        return found

    async def admit(self, count, ledger=None) -> None:
        ledger = ledger or self.ledgers.train
        cursor = (await ledger.state()).cursor
        for group_id in range(cursor, cursor + count):
            await ledger.admit(
                cursor=group_id, fingerprint="x", prompt=b"p", samples=2, min_group=1, budget=1000, hard_cap=1000,
                max_dead=1000, version=0,
            )  # fmt: skip

    async def lease(self, ledger, stage):
        stream = getattr(ledger.keys, stage)
        reply = await ledger.connection.read("XREADGROUP", "GROUP", "g", "me", "COUNT", 100, "STREAMS", stream, ">")
        rows = (reply or {}).get(stream.encode(), [])
        found = []
        for entry, flat in rows:
            fields = dict(zip(flat[::2], flat[1::2], strict=True))
            sample = int(fields[b"k"]) if b"k" in fields else None
            found.append(Lease(ledger, entry.decode(), int(fields[b"g"]), int(fields[b"a"]), sample, 1))
        return found

    async def close(self, ledger=None) -> None:
        ledger = ledger or self.ledgers.train
        for lease in await self.lease(ledger, "prompts"):
            for sample in range(2):
                await ledger.emit(lease, sample, b"s")
        for lease in await self.lease(ledger, "rollouts"):
            await ledger.score(lease, b"r")

    def save(self, group_ids, count=None) -> str:
        self.epoch += 1
        checkpoints = Checkpoints(self.run_dir / "checkpoints")
        checkpoints.begin((self.epoch, 1))
        trained = join((group_id, group_id) for group_id in group_ids)
        count = count or len(group_ids)
        meta = Meta(epoch=self.epoch, step=1, version=1, trained=trained, count=count, world=0)
        checkpoints.finish(meta)
        return meta.name


@pytest.fixture
async def book(redis_run):
    config = RunConfig(name="audited", redis=redis_run.config)
    async with open_ledgers(config, redis_run.run_dir) as ledgers:
        made = Book(config, redis_run.run_dir, ledgers)
        await ledgers.train.fence(NONCE, 0)
        await ledgers.evaluation.fence(NONCE, 0)
        yield made


def counts(found):
    return {
        name: getattr(found, name)
        for name in ("trained", "dropped", "dead", "evaluated", "live", "lost", "twice")
        if getattr(found, name)
    }


async def test_an_empty_run(book):
    found = await book.audit()
    assert counts(found) == {}
    assert found.proved
    assert found.faults == []


async def test_every_group_is_counted_once_where_it_is(book):
    train, held_out = book.ledgers.train, book.ledgers.evaluation
    await book.admit(10)
    await book.close()
    await train.drop(NONCE, 8, "stale")
    await train.fail_group(NONCE, 9, "poison")
    await book.admit(2)
    await book.admit(4, held_out)
    await book.close(held_out)
    (book.run_dir / "evaluation.jsonl").write_bytes(
        b"".join(orjson.dumps({"gid": group_id}) + b"\n" for group_id in (0, 1, 1)) + b'{"gid": 3'
    )
    name = book.save([0, 1, 2])
    await train.retire(NONCE, name, 0, [0, 1])  # 2 is in the chain and still live: trained
    await held_out.retire(NONCE, "eval", 0, [0])
    found = await book.audit()
    assert counts(found) == {"trained": 3, "dropped": 1, "dead": 1, "evaluated": 2, "live": 7}
    assert (found.admitted, found.checkpoint, found.faults) == (12, "1-1", [])
    assert (found.held_out.admitted, found.held_out.live) == (4, 2)


async def test_a_healthy_run_has_no_faults_while_all_its_roles_work(book):
    """Groups go through the whole ledger as fast as Redis lets them, trained and retired, while the audit looks."""
    train, trained, looked = book.ledgers.train, [], 0

    async def work(stage):
        while True:
            for lease in await book.lease(train, stage):
                if stage == "prompts":
                    await asyncio.gather(*(train.emit(lease, sample, b"s") for sample in range(2)))
                else:
                    await train.score(lease, b"r")
            await asyncio.sleep(0)

    async def feed():
        while True:
            await book.admit(max(0, 24 - (await train.state()).live))

    async def learn():
        while True:
            if step := [group_id for group_id in await train.closed() if group_id not in trained]:
                trained.extend(step)
                await train.retire(NONCE, book.save(trained), 0, step)
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        roles = [tasks.create_task(role) for role in (feed(), work("prompts"), work("rollouts"), learn())]
        while looked < 25 or len(trained) < 100:
            found = await book.audit()
            assert (found.faults, found.lost, found.twice, found.unproved) == ([], 0, 0, [])
            looked += 1
        for role in roles:
            role.cancel()


async def test_dead_responses_are_counted_beside_dead_groups(book):
    """A group that goes on without one of its responses is no dead group; one that dies has two dead responses."""
    train, held_out = book.ledgers.train, book.ledgers.evaluation
    await book.admit(3)
    await book.admit(1, held_out)
    first, second, _ = await book.lease(train, "prompts")
    await train.fail_sample(first, 0, "broken")
    await train.fail_prompt(second, "broken")
    (third,) = await book.lease(held_out, "prompts")
    await held_out.fail_sample(third, 1, "broken")
    found = await book.audit()
    assert (found.dead, found.dead_samples, found.held_out.dead_samples) == (1, 1 + 2, 1)


async def test_lost_groups_are_named(book):
    held_out = book.ledgers.evaluation
    await book.admit(5)
    await book.admit(2, held_out)
    await book.close()
    await book.close(held_out)
    await book.ledgers.train.retire(NONCE, "0-0", 0, [1, 3])  # retired without a checkpoint that holds them
    await held_out.retire(NONCE, "eval", 0, [1])
    found = await book.audit()
    assert counts(found) == {"live": 3, "lost": 3}
    assert (found.held_out.live, found.held_out.lost) == (1, 1)
    assert found.lost_ids == ["1", "3", "eval:1"]
    assert not found.proved


async def test_twice_is_seen(book):
    await book.admit(4)
    book.save([0, 1, 0, 2, 0])
    found = await book.audit()
    assert counts(found) == {"trained": 3, "live": 1, "twice": 2}
    assert found.twice_ids == ["0"]
    assert not found.proved


async def test_trained_ids_above_the_cursor_are_legal(book):
    await book.admit(2)
    book.save([0, 5])  # Redis went back: 5 will come again
    found = await book.audit()
    assert counts(found) == {"trained": 2, "live": 1}
    assert found.admitted == 3


async def test_ids_that_do_not_fit_the_weights_prove_nothing(book):
    await book.admit(2)
    book.save([0, 1], count=3)
    found = await book.audit()
    (reason,) = found.unproved
    assert "trained on 3 groups" in reason
    assert (found.lost, found.twice, found.proved) == (0, 0, False)


async def test_trained_and_dropped_at_once_is_told_and_counted_once(book):
    await book.admit(3)
    await book.close()
    assert await book.ledgers.train.drop(NONCE, 1, "stale")
    book.save([0, 1])
    found = await book.audit()
    assert counts(found) == {"trained": 2, "live": 1}
    assert "group 1 is trained, and dropped or dead as well" in found.faults
    assert found.proved


async def test_a_missing_checkpoint_shows_as_loss(book):
    await book.admit(3)
    await book.close()
    name = book.save([0, 1])
    await book.ledgers.train.retire(NONCE, name, 0, [0, 1])
    path = Checkpoints(book.run_dir / "checkpoints").path((1, 1))
    path.rename(book.run_dir / "elsewhere")
    found = await book.audit()
    assert found.lost == 2
    assert "ckpt-1-1" in found.unproved[0]


async def test_a_void_checkpoint_does_not_count(book):
    await book.admit(3)
    book.save([0])
    book.save([0, 1])
    await book.ledgers.train.resume(NONCE, "1-1", 3)
    found = await book.audit()
    assert (found.checkpoint, found.trained) == ("1-1", 1)


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda keys: ("DEL", keys.group(1)), "no hash"),
        (lambda keys: ("ZREM", keys.live, "1"), "has a hash and is not in"),
        (lambda keys: ("HSET", keys.group(0), "left", 5), "left is 5"),
        (lambda keys: ("XADD", keys.scored, "*", "g", "0"), "entries for 0"),
        (lambda keys: ("XADD", keys.scored, "*", "g", "77"), "not live"),
        (lambda keys: ("DEL", keys.scored), "0 entries in scored"),
        (lambda keys: ("HDEL", keys.group(2), "todo"), "incomplete"),
        (lambda keys: ("HSET", keys.group(2), "left", b"\xff\xfe"), r"group 2: damaged: field left is \xff\xfe"),
        (lambda keys: ("HSET", keys.group(2), "n", 10**15), "todo is 2, not 1000000000000000"),
        (lambda keys: ("HSET", keys.group(2), "st", b"\xff"), r"group 2: damaged: field st is \xff"),
        (lambda keys: ("HSET", keys.group(2), b"\xffs:1", "x"), None),
        (lambda keys: ("SET", keys.group(2), "x"), "group 2: its key holds a string, not a hash"),
        (lambda keys: ("ZADD", keys.live, 7, b"\xff"), r"live: \xff is not the id"),
        (lambda keys: ("HSET", keys.group(0)[:-1] + "mine", "n", 1), "group mine: has a hash"),
        (lambda keys: ("XTRIM", keys.prompts, "MAXLEN", 0), "entries in prompts"),
        (lambda keys: ("HSET", keys.group(0), "x:0", "why"), "have a score and are dead"),
        (lambda keys: ("XADD", keys.rollouts, "*", "g", "0", "a", "1", "k", "0"), "['0'] are in rollouts"),
        (lambda keys: ("HSET", keys.group(2), "s:0", "x"), "samples ['0'] wait for a score"),
        (lambda keys: ("HSET", keys.group(2), "whole", "1", "r:0", "x"), "have a score alone"),
        (
            lambda keys: ("HSET", keys.group(2), "whole", "1", "s:0", "x", "s:1", "x", "todo", "0"),
            "samples ['*'] wait for a score",
        ),
        (lambda keys: ("HSET", keys.group(0), "nx", "1"), "nx is 1, not 0"),
        (lambda keys: ("XADD", keys.prompts, "*", "g", "2", "a", "1"), "prompts: 2 entries for 2"),
    ],
)
async def test_broken_structure_is_a_fault(book, damage, word):
    await book.admit(2)
    await book.close()
    await book.admit(1)
    assert (await book.audit()).faults == []
    await book.ledgers.connection.read(*damage(book.ledgers.train.keys))
    faults = (await book.audit()).faults
    assert faults == [] if word is None else any(word in fault for fault in faults), faults


async def test_entries_that_nobody_holds_are_faults(book):
    await book.admit(2)
    (first, second) = await book.lease(book.ledgers.train, "prompts")
    keys, read = book.ledgers.train.keys, book.ledgers.connection.read
    await read("XACK", keys.prompts, "g", first.entry)
    await read("XDEL", keys.prompts, second.entry)
    faults = (await book.audit()).faults
    assert any("no consumer holds it" in fault for fault in faults)
    assert any("is pending and gone" in fault for fault in faults)


async def test_a_line_that_is_none_is_named(book):
    (book.run_dir / "evaluation.jsonl").write_bytes(b'{"gid": 1}\nrubbish\n{"gid": 2}\n')
    with pytest.raises(WireError, match="line 2"):
        await book.audit()


def test_the_audit_needs_no_torch():
    code = "import sys, streamrl.runtime.audit; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"
