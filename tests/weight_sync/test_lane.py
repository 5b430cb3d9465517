"""A broadcast reaches all servers that wait for it; whoever is stopped, late or lied to has the files all the same."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
from fetch_kit import open_learner
from sync_kit import until

from streamrl.config import WeightsConfig
from streamrl.servers.dialect import describe_version
from streamrl.servers.plugin.streamrl_engine import files, lane
from streamrl.weight_sync.files import TOKEN_VARIABLE, file_checksum, token_path
from streamrl.weight_sync.manifest import decode
from streamrl.weight_sync.tensors import announced_version

DEADLINE = 20.0  # 2 s for a piece
KILL_ITSELF = """
import os, signal, sys, time
from pathlib import Path
import msgspec
import torch
from streamrl.servers.plugin.streamrl_engine.lane import Group
from streamrl.weight_sync.lane import Lane
from streamrl.weight_sync.manifest import decode
before, pieces = Group._broadcast, []
def broadcast(group, piece):
    pieces.append(piece)
    if len(pieces) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    before(group, piece)
Group._broadcast = broadcast
lane = Lane(Path(sys.argv[1]), "127.0.0.1", 20, sys.argv[2], torch.device("cpu"))
print(msgspec.json.encode(lane.place).decode(), flush=True)
lane.announce(decode(sys.stdin.readline().encode()))
time.sleep(60)
"""


class Process:
    """A member in a process of its own."""

    def __init__(self, process):
        self.process = process

    @classmethod
    @contextlib.asynccontextmanager
    async def start(cls, run_dir, *arguments):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(Path(__file__).with_name("lane_member.py")), *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {TOKEN_VARIABLE: str(token_path(run_dir))},
        )
        try:
            yield cls(process)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.kill()
            await process.wait()

    def want(self, manifest):
        self.process.stdin.write(json.dumps(describe_version(announced_version(manifest))).encode() + b"\n")

    async def answer(self):
        async with asyncio.timeout(90):
            return json.loads(await self.process.stdout.readline())


def config(**changes):
    return WeightsConfig(transport="collective", **{"shard_bytes": 32 << 20, "deadline": DEADLINE, **changes})


def some(seed, count=4):
    return {f"t{index}": torch.full((4 << 20,), float(seed + index)) for index in range(count)}


async def take(learner, version, found, *, http):
    """Have a version taken, and see how many of its two files each member got over HTTP."""
    manifest = await learner.publish(version, tensors=some(version))
    for member in found:
        member.want(manifest)
    answers = [await member.answer() for member in found]
    assert [answer["values"] for answer in answers] == [[version + index for index in range(4)]] * len(found), answers
    assert [answer["http"] for answer in answers] == http, answers
    return {answer["group"] for answer in answers}


@contextlib.asynccontextmanager
async def members(learner, count):
    """So many processes, which have got version 1 by the lane."""
    async with contextlib.AsyncExitStack() as stack:
        starting = [stack.enter_async_context(Process.start(learner.run_dir)) for _ in range(count)]
        found = [await each for each in starting]
        early = await learner.publish(0, tensors={"t": torch.zeros(1)})
        for member in found:
            member.want(early)
        for member in found:
            assert (await member.answer())["values"] == [0]
        await take(learner, 1, found, http=[0] * count)
        yield found


@pytest.mark.slow
async def test_members_keep_their_group_and_a_late_one_takes_the_files(tmp_path):
    async with open_learner(config(), tmp_path) as learner, members(learner, 2) as found:
        group = await take(learner, 2, found, http=[0, 0])
        assert await take(learner, 3, found, http=[0, 0]) == group
        async with Process.start(tmp_path) as late:
            manifest = decode(learner.stream.entry[1])
            late.want(manifest)
            assert (await late.answer())["http"] == 2
            assert await take(learner, 4, found, http=[0, 0]) == group  # that did not disturb the others
            late.want(decode(learner.stream.entry[1]))
            assert (await late.answer())["http"] == 2
            another = await take(learner, 5, [*found, late], http=[0, 0, 0])
            assert another != group
            assert await take(learner, 6, [*found, late], http=[0, 0, 0]) == another


@pytest.mark.slow
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_member_struck_in_the_middle_of_a_broadcast(tmp_path, blow, monkeypatch):
    """The others get this version and the next, and the learner's loop has never waited."""
    async with open_learner(config(), tmp_path) as learner, members(learner, 3) as found:
        victim, *others = found
        before, pieces = lane.Group._broadcast, []

        def strike(group, piece):
            pieces.append(piece)
            if len(pieces) == 3:
                victim.process.send_signal(blow)
            before(group, piece)

        monkeypatch.setattr(lane.Group, "_broadcast", strike)
        longest, manifest = 0.0, await learner.publish(2, tensors=some(2))
        for member in found:
            member.want(manifest)
        answering = asyncio.gather(*(member.answer() for member in others))
        while not answering.done():
            began = time.monotonic()
            await asyncio.sleep(0.01)
            longest = max(longest, time.monotonic() - began)
        assert [(answer["values"][0], answer["http"]) for answer in await answering] == [(2, 2)] * 2
        assert 3 <= len(pieces) < 8
        assert longest < 1.5  # nothing waits in the event loop; the group waits for 2 s
        await take(learner, 3, others, http=[0, 0])
        if blow == signal.SIGSTOP:
            victim.process.send_signal(blow := signal.SIGCONT)
            assert (await victim.answer())["http"] == 2
            await take(learner, 4, found, http=[0, 0, 0])


async def bring(landing, source):
    return await asyncio.to_thread(landing.bring, source, lambda mine: [mine])


def described(manifest):
    return files.Source(**describe_version(announced_version(manifest)))


@pytest.fixture
def landing(tmp_path, monkeypatch):
    (tmp_path / "landing").mkdir()
    monkeypatch.setenv("STREAMRL_LANDING", str(tmp_path / "landing"))
    monkeypatch.setenv(TOKEN_VARIABLE, str(tmp_path / "weights.token"))
    return files.Landing()


@pytest.fixture
def downloaded(monkeypatch):
    """Names of files that came over HTTP."""
    names, before = [], files._download

    def download(url, target, *more):
        if not target.exists():
            names.append(target.name)
        before(url, target, *more)

    monkeypatch.setattr(files, "_download", download)
    return names


async def test_bytes_and_edges(tmp_path, landing, downloaded, monkeypatch):
    """Tensors of no byte, one byte, one piece, one less and one more."""
    monkeypatch.setattr(lane, "PIECE_BYTES", 4096)
    monkeypatch.setattr("streamrl.weight_sync.lane.GRACE", 0.5)
    before = torch.distributed.group.WORLD
    async with open_learner(config(shard_bytes=5000), tmp_path) as learner:
        given = {f"t{size}": torch.randint(0, 255, (size,), dtype=torch.uint8) for size in (0, 1, 4095, 4097, 30000)}
        for version in (1, 2):
            source = described(await learner.publish(version, tensors=given))
            found = dict(files.Opened(await bring(landing, source)).tensors())
            assert found.keys() == given.keys()
            assert all(torch.equal(found[name], given[name]) for name in given)
        assert downloaded == []
    assert torch.distributed.group.WORLD is before


async def test_wrong_bytes_are_not_used(tmp_path, landing, downloaded, monkeypatch, caplog):
    before = lane.Group._broadcast

    def lie(group, piece):
        if group._sends:
            piece[-1] ^= 1  # the mapping is private
        before(group, piece)

    monkeypatch.setattr(lane.Group, "_broadcast", lie)
    async with open_learner(config(), tmp_path) as learner:
        source = described(await learner.publish(1, tensors=some(1, 1)))
        found = dict(files.Opened(await bring(landing, source)).tensors())
        assert torch.equal(found["t0"], some(1)["t0"])
        assert downloaded == ["00000.safetensors"]
        assert "other bytes than announced" in caplog.text


@pytest.mark.slow
async def test_a_sender_that_dies_in_the_middle(tmp_path, landing, downloaded, caplog):
    """The server has the files all the same, and a new learner's lane next."""
    async with open_learner(config(shard_bytes=64 << 20), tmp_path) as learner:
        learner.server._lane, idle = None, learner.server._lane  # another process sends
        token = (tmp_path / "weights.token").read_text().strip()
        command = [sys.executable, "-c", textwrap.dedent(KILL_ITSELF), str(learner.publisher.root), token]
        with subprocess.Popen(  # noqa: ASYNC220  (it is waited for in threads)
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as sender:
            place = json.loads(await asyncio.to_thread(sender.stdout.readline))
            data = learner.write(1, tensors=some(1)).decode()
            data = data.replace('"lane":null', f'"lane":{json.dumps(place)}')
            sender.stdin.write(data + "\n")
            sender.stdin.flush()
            began = time.monotonic()
            found = dict(files.Opened(await bring(landing, described(decode(data.encode())))).tensors())
            assert time.monotonic() - began < 15
            assert await asyncio.to_thread(sender.wait) == -signal.SIGKILL
        assert torch.equal(found["t3"], some(1)["t3"])
        assert downloaded == ["00000.safetensors"]
        assert "lane missed" in caplog.text
        learner.server._lane = idle
        await bring(landing, described(await learner.publish(2, tensors=some(2))))
        assert len(downloaded) == 1


async def test_a_newer_version_takes_the_place_of_one_that_waits(tmp_path, monkeypatch):
    """And the learner waits for none of them."""
    async with open_learner(config(), tmp_path) as learner:
        sent, free = [], threading.Event()

        def send(manifest):
            sent.append(manifest.version)
            free.wait(30)

        monkeypatch.setattr(learner.server._lane, "_send", send)
        for version in (1, 2, 3, 4):
            await learner.publish(version)
            await until(lambda: sent)
        assert sent == [1]
        free.set()
        await until(lambda: len(sent) == 2)
        assert sent == [1, 4]


async def test_a_version_that_is_given_up_does_not_stand_in_the_way(tmp_path, landing, downloaded, monkeypatch):
    """A look returns at once, whatever the thread waits for; the next version comes when that has ended."""
    monkeypatch.setattr(lane, "GRACE", 1.0)
    async with open_learner(config(), tmp_path) as learner:
        monkeypatch.setattr(learner.server._lane, "_send", lambda *_: None)  # there is never a decision
        first, second = [described(await learner.publish(version, tensors=some(version))) for version in (1, 2)]
        for source in (first, second):
            for _ in range(3):
                began = time.monotonic()
                assert not landing.begin(source, lambda mine: [mine])
                assert time.monotonic() - began < 0.5
        found = dict(files.Opened(await bring(landing, second)).tensors())
        assert torch.equal(found["t0"], some(2)["t0"])
        assert set(downloaded) == {"00000.safetensors", "00001.safetensors"}
        assert not landing._thread._work_queue.qsize()


async def test_a_learner_without_its_lane_is_passed_by(tmp_path, landing, downloaded):
    async with open_learner(config(), tmp_path) as learner:
        manifest = await learner.publish(1)
        taken = described(manifest)
        gone = files.Source(**{**vars(taken), "lane": {"host": "127.0.0.1", "port": 9, "stall": 1.0}})
        assert await bring(landing, gone)
        assert downloaded == [shard.file for shard in manifest.shards]


async def test_one_rank_of_a_host_fetches_for_all(tmp_path, landing, downloaded):
    """Ranks of another host have one of their own."""
    async with open_learner(config(), tmp_path) as learner:
        source = described(await learner.publish(1))
        said = []

        def everyone(mine):
            """We are rank 2; rank 0 is on another host, rank 1 on ours."""
            said.append(mine)
            if isinstance(mine, bool):
                return [True, len(said) > 2, mine]
            if isinstance(mine[-1], int):
                return [["other", "boot", 1], [*mine[:2], -1], mine]
            return [["/theirs", ""], ["/ours", ""], mine]

        assert not landing.begin(source, everyone)
        assert (await asyncio.to_thread(landing.bring, source, everyone)).folder == "/ours"
        assert downloaded == []

        def fails(mine):
            return everyone(mine) if mine != ["", ""] else [["/theirs", ""], ["", "not fetched: no room"], mine]

        with pytest.raises(files.BadVersion, match="no room"):
            await asyncio.to_thread(landing.bring, source, fails)


async def test_a_connection_that_breaks_costs_one_version(tmp_path, landing, downloaded, monkeypatch):
    """The lane is joined anew with the next one; a repeat joins no broadcast that is over."""
    monkeypatch.setattr("streamrl.weight_sync.lane.GRACE", 0.5)
    async with open_learner(config(), tmp_path) as learner:
        assert await bring(landing, described(await learner.publish(1)))
        assert downloaded == []

        class Broken:
            def add(self, *_):
                raise RuntimeError("Broken pipe")

        landing._member._store = Broken()
        assert await bring(landing, described(await learner.publish(2)))
        assert downloaded == ["00000.safetensors"]
        here = await bring(landing, described(await learner.publish(3)))
        assert len(downloaded) == 1
        (Path(here.folder) / "00000.safetensors").unlink()
        began = time.monotonic()
        assert await bring(landing, described(decode(learner.stream.entry[1])))
        assert time.monotonic() - began < 1
        assert len(downloaded) == 2


async def test_who_does_not_know_the_token_gets_no_rank(tmp_path, landing, downloaded, monkeypatch):
    monkeypatch.setattr("streamrl.weight_sync.lane.GRACE", 0.5)
    async with open_learner(config(), tmp_path) as learner:
        monkeypatch.setattr(files, "_token", lambda: "another token")
        manifest = await learner.publish(1)
        store, folder = learner.server._lane._store, manifest.folder
        store.set(f"{folder}/{store.add(f'{folder}/joined', 1)}", "no JSON")
        with pytest.raises(files.BadVersion, match="401"):
            await bring(landing, described(manifest))
        assert json.loads(store.get(f"{folder}/decision"))["ranks"] == {}


async def test_a_member_joins_before_it_takes_room(tmp_path, landing, monkeypatch):
    """The room for a large version takes longer than the learner waits."""
    async with open_learner(config(), tmp_path) as learner:
        there = []

        def receive(_member, _lane, _version, drafts, *_, **__):
            there.extend(path.exists() for path, _ in drafts)
            raise RuntimeError("missed")

        monkeypatch.setattr(lane.Member, "receive", receive)
        await bring(landing, described(await learner.publish(1)))
        assert there == [False]


async def test_files_are_proven_against_the_manifest_of_the_run(tmp_path, landing):
    """Whatever manifest and files the server of the weights has."""
    async with open_learner(config(), tmp_path) as learner:
        manifest, path = await learner.publish(1), learner.publisher.root / "v-1-1" / "00000.safetensors"
        source = files.Source(**{**vars(described(manifest)), "lane": None})
        path.write_bytes(path.read_bytes()[:-1] + b"!")
        data = (path.parent / "manifest.json").read_bytes()
        wrong = file_checksum(path).encode()
        (path.parent / "manifest.json").write_bytes(data.replace(manifest.shards[0].checksum.encode(), wrong))
        with pytest.raises(files.BadVersion, match="not the file that was announced"):
            await bring(landing, source)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a device for each process: two CUDA devices")
async def test_by_nccl_between_two_devices(tmp_path):
    async with (
        open_learner(config(), tmp_path, torch.device("cuda:0")) as learner,
        Process.start(tmp_path, "1") as member,
    ):
        for version in (1, 2, 3):
            await take(learner, version, [member], http=[0] if version > 1 else [2])
        assert learner.server._lane._group._buffer is not None
