"""A broadcast reaches all that live; when one is killed or stopped in its middle, or too slow, the others pull once."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import orjson
import pytest
import torch
from fetch_kit import following, open_learner
from sync_kit import same, tensors, until

from streamrl.config import WeightsConfig
from streamrl.errors import Unreachable, WireError
from streamrl.weight_sync import broadcast
from streamrl.weight_sync.broadcast import (
    FROM_HOST,
    FROM_MEMBER,
    Broadcaster,
    BroadcastGroup,
    Done,
    Go,
    Got,
    GroupPlace,
    Hello,
    Rendezvous,
    _Member,
    pack,
    unpack,
)
from streamrl.weight_sync.manifest import encode

DEADLINE = 20.0


class Process:
    """A member in a process of its own."""

    def __init__(self, process, name):
        self.process, self.name = process, name

    @classmethod
    @contextlib.asynccontextmanager
    async def start(cls, run_dir, name):
        program = Path(__file__).with_name("member_process.py")
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *(str(program), str(run_dir), name, str(DEADLINE)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            yield cls(process, name)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.kill()
            await process.wait()

    def want(self, manifest):
        self.process.stdin.write(encode(manifest) + b"\n")

    async def answer(self):
        async with asyncio.timeout(90):
            return orjson.loads(await self.process.stdout.readline())

    def signal(self, number):
        self.process.send_signal(number)


def config(**changes):
    return WeightsConfig(transport="collective", shard_bytes=32 << 20, deadline=DEADLINE, **changes)


def some(seed, count=4):
    return {f"t{index}": torch.full((4 << 20,), float(seed + index)) for index in range(count)}


@contextlib.asynccontextmanager
async def members(learner, count):
    """So many processes, all of them members: each has pulled version 1."""
    async with contextlib.AsyncExitStack() as stack:
        found = [
            await stack.enter_async_context(Process.start(learner.run_dir, f"rollout.{index}"))
            for index in range(count)
        ]
        first = await learner.publish(1, tensors=some(1))
        for member in found:
            member.want(first)
        for member in found:
            assert (await member.answer())["version"] == 1
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_member_struck_in_the_middle_of_a_broadcast(tmp_path, blow, monkeypatch):
    """The others get this version and the next, and the learner's loop has never waited."""
    async with open_learner(config(), tmp_path) as learner, members(learner, 3) as found:
        victim, *others = found
        broadcaster = learner.server._broadcaster
        before, struck = broadcast._Gloo.broadcast, []

        def strike(group, piece):
            if not struck and broadcaster._group[1].progress >= 32 << 20:
                struck.append(blow)
                victim.signal(blow)
            before(group, piece)

        monkeypatch.setattr(broadcast._Gloo, "broadcast", strike)
        longest, manifest = 0.0, await learner.publish(2, tensors=some(2))
        for member in others:
            member.want(manifest)
        answering = asyncio.gather(*(member.answer() for member in others))
        while not answering.done():
            began = time.monotonic()
            await asyncio.sleep(0.01)
            longest = max(longest, time.monotonic() - began)
        answers = await answering
        assert struck == [blow]
        assert [answer["version"] for answer in answers] == [2, 2]
        assert [answer["broadcasts"] for answer in answers] == [0, 0]  # pulled
        assert longest < 5  # nothing waits in the event loop; the group waits for 2 s
        await take(learner, 3, others, broadcasts=[1, 1])
        assert len(broadcaster._members) == 2
        if blow == signal.SIGSTOP:
            victim.signal(signal.SIGCONT)
            await until(lambda: len(broadcaster._members) == 3)  # it comes back by itself
            for version in (4, 5, 6):  # and pulls for a while
                await take(learner, version, found, broadcasts=[0, version - 2, version - 2])
            await take(learner, 7, found, broadcasts=[1, 5, 5])


@pytest.mark.slow
async def test_a_member_that_is_always_too_slow_delays_only_itself(tmp_path, caplog, monkeypatch):
    """After one version that all pull, the others get the next ones by broadcast; it comes back when it is faster."""
    monkeypatch.setattr(broadcast, "_FIRST_ABSENCE", 2)
    async with open_learner(config(), tmp_path) as learner, members(learner, 3) as found:
        name = next(iter(learner.server._broadcaster._members.values())).hello.name
        flag = tmp_path / f"slow-{name}"
        flag.touch()

        async def expect(version, of_slow, of_others):
            broadcasts = [of_slow if member.name == name else of_others for member in found]
            await take(learner, version, found, broadcasts=broadcasts)

        await expect(2, 0, 0)
        assert [entry.member for entry in caplog.records if "too slow" in entry.message] == [name]
        for version in (3, 4):
            await expect(version, 0, version - 2)
        await expect(5, 0, 2)  # it is tried again
        await expect(6, 0, 3)
        assert learner.server._broadcaster._absences[name].versions == 4
        flag.unlink()
        for version in (7, 8, 9):
            await expect(version, 0, version - 3)
        await expect(10, 1, 7)
        assert not learner.server._broadcaster._absences


async def take(learner, version, found, broadcasts):
    """Have a version taken, and see how many each member got by broadcast so far."""
    manifest = await learner.publish(version, tensors=some(version))
    for member in found:
        member.want(manifest)
    answers = [await member.answer() for member in found]
    assert [answer["version"] for answer in answers] == [version] * len(found)
    assert [answer["broadcasts"] for answer in answers] == broadcasts


async def test_of_equally_slow_members_one_is_left_out(tmp_path):
    """A member that waits for a slow one looks as slow: the second failure shows who it was, and a death shows none."""
    broadcaster = Broadcaster(tmp_path, "127.0.0.1", DEADLINE)
    first, second, third = (_Member(number, Hello(f"m{number}"), None, None) for number in range(3))

    def settle(**received):
        taking = [member for member in (first, second, third) if member.hello.name in received]
        answers = {member: received[member.hello.name] for member in taking if received[member.hello.name] is not None}
        broadcaster._settle(taking, {member: Got(1, size == 9, size) for member, size in answers.items()})
        return {name: absence.versions for name, absence in broadcaster._absences.items()}

    assert settle(m0=9, m1=9, m2=9) == {}
    assert settle(m0=6, m1=None, m2=4) == {}  # one has died
    assert settle(m0=6, m1=4, m2=4) == {"m1": 4}
    assert settle(m0=6, m2=4) == {"m1": 4, "m2": 4}
    assert settle(m0=9, m1=9) == {"m2": 4}
    assert settle(m0=6, m1=4, m2=4) == {"m2": 8}
    for versions in (16, 32, 64, 64):
        assert settle(m2=0) == {"m2": versions}


async def test_followers_by_broadcast_and_by_pull(tmp_path):
    """In one process: the first version is pulled, what comes after is broadcast, a late one pulls."""
    async with open_learner(config(), tmp_path) as learner, contextlib.AsyncExitStack() as stack:
        broadcaster = learner.server._broadcaster
        replicas = [await stack.enter_async_context(following(learner, f"rollout.{index}")) for index in range(2)]
        size = 0
        for version in (1, 2, 3):
            size += (await learner.publish(version)).total_bytes
            await asyncio.gather(*(replica.until(version) for replica in replicas))
            await until(lambda: len(broadcaster._members) == 2)
        late = await stack.enter_async_context(following(learner, "rollout.9"))
        await late.until(1)
        for replica in [*replicas, late]:
            assert same(replica.applied[-1][1], tensors(3))
            assert replica.follower.refused == 0
        assert [replica.follower.traffic.bytes for replica in replicas] == [size, size]
        await until(lambda: broadcaster._done == (1, 3))
        assert [replica.follower._staging._source.broadcasts for replica in [*replicas, late]] == [2, 2, 0]


async def test_the_learner_announces_and_goes_on(tmp_path, monkeypatch):
    """While a broadcast hangs, announcements return at once and only the newest of them is sent."""
    async with open_learner(config(), tmp_path) as learner:
        sent, free = [], asyncio.Event()

        async def spread(manifest):
            sent.append(manifest.version)
            await free.wait()

        monkeypatch.setattr(learner.server._broadcaster, "_spread", spread)
        for version in (1, 2, 3, 4):
            await learner.publish(version)
            await until(lambda: sent)
        assert sent == [1]
        free.set()
        await until(lambda: len(sent) == 2)
        assert sent == [1, 4]


async def test_a_group_that_nobody_joins_fails_in_time():
    rendezvous = Rendezvous("127.0.0.1")
    group = BroadcastGroup(GroupPlace("g1", 0, 2, "gloo", 0.5, "127.0.0.1"), rendezvous.store)
    with pytest.raises(Unreachable, match="g1"):
        await asyncio.wait_for(group.send([Path(__file__)]), 30)
    group.leave()


async def test_bytes_and_edges_in_one_group(tmp_path, monkeypatch):
    """Files of no byte, one byte, one piece and one more; three groups in one process, the trainer's none of them."""
    monkeypatch.setattr(broadcast, "PIECE_BYTES", 4096)
    default_group = torch.distributed.group.WORLD
    rendezvous = Rendezvous("127.0.0.1")
    sizes = [0, 1, 4095, 4096, 4097, 3 * 4096]
    sent, got = [], []
    for index, size in enumerate(sizes):
        sent.append(tmp_path / f"s{index}")
        sent[-1].write_bytes(os.urandom(size))
    groups = [BroadcastGroup(GroupPlace("g1", 0, 3, "gloo", 20, "127.0.0.1"), rendezvous.store)]
    receiving = []
    for rank in (1, 2):
        got.append([tmp_path / f"r{rank}-{index}" for index in range(len(sizes))])
        for path, size in zip(got[-1], sizes, strict=True):
            path.write_bytes(bytes(size))
        groups.append(
            BroadcastGroup(GroupPlace("g1", rank, 3, "gloo", 20, "127.0.0.1"), ("127.0.0.1", rendezvous.port))
        )
        receiving.append(groups[-1].receive(got[-1]))
    await asyncio.wait_for(asyncio.gather(groups[0].send(sent), *receiving), 60)
    for group in groups:
        assert group.progress == sum(sizes)
        group.leave()
    for files in got:
        assert [path.read_bytes() for path in files] == [path.read_bytes() for path in sent]
    assert torch.distributed.group.WORLD is default_group


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"type":"hello"}', '{"type":"go","number":-1}', '{"type":"x"}', "\x00"]
)
def test_nonsense_is_no_message(text):
    for decoder in (FROM_HOST, FROM_MEMBER):
        with pytest.raises(WireError):
            unpack(decoder, text)


def test_messages_survive():
    go = Go(1, "g1", 1, 2, "h", 5, "gloo", 2.0)
    for message in (go, Done((1, 2))):
        assert unpack(FROM_HOST, pack(message)) == message
    assert unpack(FROM_MEMBER, pack(Hello("rollout.0"))) == Hello("rollout.0")
    with pytest.raises(WireError):
        unpack(FROM_MEMBER, pack(go))
