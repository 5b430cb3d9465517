"""A version is seen whole or not at all, never an older one after a newer one, and a bad one never at all."""

import asyncio
import os
import shutil
import socket
import threading

import msgspec
import pytest
import torch
from sync_kit import Replica, Stream, both_folders, folders, publish, same, tensors, until

from streamrl.config import WeightsConfig
from streamrl.errors import ConfigError, NotFetched, Unreachable, WeightsError
from streamrl.weight_sync.chain import Staging
from streamrl.weight_sync.files import make_token
from streamrl.weight_sync.follower import Follower
from streamrl.weight_sync.manifest import LanePlace, decode, encode
from streamrl.weight_sync.publisher import Publisher
from streamrl.weight_sync.pull import PullSource
from streamrl.weight_sync.serve import listen, weights_app
from streamrl.weight_sync.tensors import map_version


@both_folders
async def test_newest_only_and_old_versions_go(publisher, stream, config, tmp_path):
    for version in range(1, 6):
        await stream.put(publish(publisher, version))
    assert folders(publisher) == ["v-1-4", "v-1-5"]
    replica = Replica(stream, config, tmp_path)  # joins late: takes the newest alone
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(replica.follower.run(stop))
        await replica.until(1)
        await stream.put(publish(publisher, 6))
        await replica.until(2)
        stop.set()
    assert [pair for pair, _ in replica.applied] == [(1, 5), (1, 6)]
    assert same(replica.applied[1][1], tensors(6))
    assert (replica.follower.version, replica.follower.refused) == (6, 0)


def corrupt_byte(path):
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


def truncate(path):
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize("damage", [corrupt_byte, truncate])
async def test_a_damaged_shard_is_refused_and_the_next_version_is_taken(publisher, stream, replica, damage):
    await stream.put(publish(publisher, 1))
    await replica.until(1)
    data = publish(publisher, 2)
    damage(publisher.root / "v-1-2" / decode(data).shards[-1].file)
    await stream.put(data)
    await until(lambda: replica.follower.refused == 1)
    assert replica.follower.version == 1
    await stream.put(publish(publisher, 3))
    await replica.until(2)
    assert [pair for pair, _ in replica.applied] == [(1, 1), (1, 3)]


def foreign(data, **changes):
    return encode(msgspec.structs.replace(decode(data), **changes))


def delta(data, base):
    shards = [msgspec.structs.replace(shard, makes=shard.checksum) for shard in decode(data).shards]
    return foreign(data, base=base, shards=shards)


async def test_a_foreign_manifest_is_refused(publisher, stream, replica, monkeypatch):
    monkeypatch.setattr("streamrl.weight_sync.follower._REFUSED_PAUSE", 0.01)
    changes = [
        lambda data: b"\x00 no json",
        lambda data: b"[" * 100_000,
        lambda data: data.replace(b'"v":3', b'"v":1', 1),
        lambda data: data.replace(b"v-1-4", b"../v-1", 1),
        lambda data: foreign(data, run="other"),
        lambda data: delta(data, (1, 0)),
        lambda data: foreign(data, folder="v-1-99"),
        lambda data: foreign(data, tensors=decode(data).tensors[:-1]),
        lambda data: foreign(data, shards=decode(data).shards[::-1]),
        lambda data: foreign(data, transport="directory"),
    ]
    for version, change in enumerate(changes, 1):
        await stream.put(change(publish(publisher, version)), number=version)
        await until(lambda expected=version: replica.follower.refused == expected)
    await stream.put(publish(publisher, 11))
    await replica.until(1)
    assert [pair for pair, _ in replica.applied] == [(1, 11)]


async def test_an_engine_that_never_takes_any_weights_has_another_model(
    publisher, stream, config, tmp_path, monkeypatch
):
    monkeypatch.setattr("streamrl.weight_sync.follower._REFUSED_PAUSE", 0.01)
    replica = Replica(stream, config, tmp_path)
    replica.fail = WeightsError("24 tensors that this model does not have")
    await stream.put(publish(publisher, 1))
    with pytest.raises(ConfigError, match="never taken any: 24 tensors") as caught:
        await asyncio.wait_for(replica.follower.run(asyncio.Event()), 30)
    assert "model.path" in caught.value.hint
    assert (replica.follower.version, replica.follower.first.is_set()) == (0, False)


async def test_an_engine_that_has_taken_weights_is_never_given_up(publisher, stream, config, tmp_path, monkeypatch):
    """What it refuses is tried again, because there may never be a newer version; only a broken engine ends all."""
    monkeypatch.setattr("streamrl.weight_sync.follower._REFUSED_PAUSE", 0.01)
    replica = Replica(stream, config, tmp_path)
    task = asyncio.create_task(replica.follower.run(asyncio.Event()))
    await stream.put(publish(publisher, 1))
    await replica.until(1)
    replica.fail = WeightsError("not now")
    for version in range(2, 7):
        await stream.put(publish(publisher, version))
        await until(lambda expected=version - 1: replica.follower.refused == expected)
        assert replica.follower.version == 1
    replica.fail = None
    await replica.until(2)
    assert [pair for pair, _ in replica.applied] == [(1, 1), (1, 6)]
    assert replica.follower.refused == 5
    replica.fail = RuntimeError("the engine is broken")
    await stream.put(publish(publisher, 7))
    with pytest.raises(RuntimeError, match="broken"):
        await asyncio.wait_for(task, 10)


async def test_files_that_cannot_be_read_in_time_are_refused(tmp_path, stream, monkeypatch):
    config = WeightsConfig(transport="directory", deadline=0.2)
    publisher = Publisher(config, "r", tmp_path)
    free = threading.Event()
    monkeypatch.setattr("streamrl.weight_sync.chain.map_version", lambda *_, **__: free.wait(30))
    replica = Replica(stream, config, tmp_path)
    stop = asyncio.Event()
    task = asyncio.create_task(replica.follower.run(stop))
    await stream.put(publish(publisher, 1))
    await until(lambda: replica.follower.refused == 1)
    assert not replica.applied
    free.set()
    stop.set()
    await asyncio.wait_for(task, 10)


async def test_an_engine_has_its_own_deadline_and_its_death_ends_the_follower(tmp_path, stream):
    """To cancel an update half-way would leave nobody who knows that the engine hangs."""
    config = WeightsConfig(transport="directory", deadline=0.1)
    publisher = Publisher(config, "r", tmp_path)
    cancelled = []

    async def hangs(version):
        try:
            await asyncio.sleep(0.5)
        except asyncio.CancelledError:
            cancelled.append(version.pair)
            raise
        raise Unreachable("the engine died")

    follower = Follower(stream, config, hangs, run="r", run_dir=tmp_path)
    task = asyncio.create_task(follower.run(asyncio.Event()))
    await stream.put(publish(publisher, 1))
    with pytest.raises(Unreachable, match="died"):
        await asyncio.wait_for(task, 10)
    assert (cancelled, follower.refused) == ([], 0)


async def test_two_epochs_with_one_number_are_two_versions(config, tmp_path, stream, replica):
    old, new = Publisher(config, "r", tmp_path), Publisher(config, "r", tmp_path)
    stale = publish(old, 5, tensors(1), epoch=1)
    await stream.put(publish(new, 5, tensors(2), epoch=2))
    await replica.until(1)
    assert folders(new) == ["v-1-5", "v-2-5"]
    assert same(replica.applied[0][1], tensors(2))
    await stream.put(stale)  # the paused learner wakes up
    await stream.put(publish(old, 6, epoch=1))  # with a greater number even: still an older epoch
    await until(lambda: replica.follower.refused == 1)
    await stream.put(publish(new, 7, epoch=2))
    await replica.until(2)
    assert [pair for pair, _ in replica.applied] == [(2, 5), (2, 7)]
    publish(old, 7, epoch=1)
    publish(old, 8, epoch=1)
    assert {"v-2-5", "v-2-7"} <= set(folders(new))  # an old publisher never removes what is not its own
    shutil.rmtree(old.root, ignore_errors=True)
    shutil.rmtree(new.root, ignore_errors=True)


async def test_files_of_a_learner_that_has_gone_are_no_error_while_the_next_one_loads(
    publisher, stream, replica, monkeypatch
):
    """All roles start at once: a replica is there before the learner has published again."""
    monkeypatch.setattr("streamrl.weight_sync.follower._REFUSED_PAUSE", 0.01)
    monkeypatch.setattr("streamrl.weight_sync.follower._QUIET", 1 << 30)
    tries = 0
    reading = Staging.bring

    async def counted(self, manifest):
        nonlocal tries
        tries += 1
        return await reading(self, manifest)

    monkeypatch.setattr(Staging, "bring", counted)
    await stream.put(foreign(publish(publisher, 1), folder="v-0-1", epoch=0))
    await until(lambda: tries >= 3)
    assert replica.follower.refused == 0
    monkeypatch.setattr("streamrl.weight_sync.follower._QUIET", 2)
    await until(lambda: replica.follower.refused == 1)  # nobody publishes again: then it is one
    await stream.put(publish(publisher, 2))
    await replica.until(1)


async def test_a_version_that_is_gone_is_an_error_only_when_no_newer_one_came(publisher, config, tmp_path, monkeypatch):
    monkeypatch.setattr("streamrl.weight_sync.follower._REFUSED_PAUSE", 0.01)

    class Late(Stream):
        """Shows version 1 to `after` although 2 is there: the follower was slow between the two."""

        asked = 0

        async def newest(self):
            self.asked += 1
            return self.next

    stream = Late()
    stream.next = None
    first = publish(publisher, 1)
    for version in (2, 3):
        publish(publisher, version)
    replica = Replica(stream, config, tmp_path)
    stop = asyncio.Event()
    task = asyncio.create_task(replica.follower.run(stop))
    stream.next = (3, b"")
    await stream.put(first)
    await until(lambda: stream.asked == 1)
    assert replica.follower.refused == 0
    stream.next = (2, b"")
    gone = foreign(first, version=2, folder="v-9-2", epoch=9)
    await stream.put(gone)
    await until(lambda: replica.follower.refused == 1)
    stop.set()
    await asyncio.wait_for(task, 10)


async def test_training_goes_on_while_versions_are_written_and_read(tmp_path):
    """Every tensor on its way out, and every version applied, waits for one more optimizer step: a lock would hang."""
    torch.set_num_threads(1)
    config = WeightsConfig(transport="directory", shard_bytes=1 << 20)
    publisher = Publisher(config, "r", tmp_path)
    stream, loop = Stream(), asyncio.get_running_loop()
    model, stop, done = torch.nn.Linear(64, 64), asyncio.Event(), threading.Event()
    stepped = threading.Condition()
    steps = [0]

    def train():
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        while not done.is_set():
            model(torch.ones(1, 64)).sum().backward()
            optimizer.step()
            with stepped:
                steps[0] += 1
                stepped.notify_all()

    def one_more_step():
        with stepped:
            now = steps[0]
            assert stepped.wait_for(lambda: steps[0] > now, 30)

    def snapshot():
        for index in range(3):
            one_more_step()
            yield f"t{index}", torch.ones(1 << 18)

    def publish_two():
        for version in (1, 2):
            data = publisher.publish(epoch=1, version=version, step=version, tensors=snapshot())
            asyncio.run_coroutine_threadsafe(stream.put(data), loop).result(30)

    async def apply(version):
        await asyncio.to_thread(one_more_step)

    follower = Follower(stream, config, apply, run="r", run_dir=tmp_path)
    async with asyncio.TaskGroup() as group:
        group.create_task(follower.run(stop))
        trainer = group.create_task(asyncio.to_thread(train))
        try:
            await asyncio.to_thread(publish_two)
            await until(lambda: follower.version == 2)
        finally:
            done.set()  # or the thread would train for ever
            stop.set()
        await trainer
    assert follower.refused == 0


async def test_how_far_an_engine_is_behind(publisher, stream, config, tmp_path):
    """The newest step is known while the engine still takes an older version."""
    free, taking = asyncio.Event(), asyncio.Event()

    async def apply(version):
        taking.set()
        await free.wait()

    follower = Follower(stream, config, apply, run="r", run_dir=tmp_path)
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(follower.run(stop))
        assert (follower.newest_step, follower.applied_step) == (0, 0)
        await stream.put(publish(publisher, 1))
        await taking.wait()
        for version in (2, 3):
            await stream.put(publish(publisher, version))
            await until(lambda version=version: follower.newest_step == version)
        assert (follower.version, follower.applied_step) == (0, 0)
        free.set()
        await until(lambda: follower.version == 3)
        assert (follower.newest_step, follower.applied_step) == (3, 3)
        assert follower.apply_seconds > 0
        stop.set()


async def test_a_version_that_could_not_be_fetched_is_tried_again(tmp_path, stream, monkeypatch):
    """The learner's host cannot be reached for a while; no newer version comes, as the learner waits for groups."""
    monkeypatch.setattr("streamrl.weight_sync.follower._FIRST_PAUSE", 0.01)
    config = WeightsConfig(transport="http", deadline=5)
    publisher = Publisher(config, "r", tmp_path)
    token = make_token(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    data = publish(publisher, 1, sources=[f"http://127.0.0.1:{port}"])
    replica = Replica(stream, config, tmp_path)
    monkeypatch.setattr(PullSource, "fetch", hasty(PullSource.fetch))
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(replica.follower.run(stop))
        await stream.put(data)
        await until(lambda: replica.follower.refused == 1)
        assert replica.follower.version == 0
        async with listen(weights_app(publisher.root, token), "127.0.0.1", port):
            await replica.until(1)
        assert replica.follower.refused == 1  # once a version, however often it is tried
        assert replica.follower.traffic.bytes == decode(data).total_bytes
        assert replica.follower.traffic.seconds > 0
        stop.set()
    assert same(replica.applied[0][1], tensors(1))
    shutil.rmtree(publisher.root, ignore_errors=True)


async def test_a_server_that_fetches_gets_no_files_and_is_not_blamed_for_those_that_did_not_come(
    tmp_path, stream, monkeypatch
):
    monkeypatch.setattr("streamrl.weight_sync.follower._FIRST_PAUSE", 0.01)
    config = WeightsConfig(transport="collective", deadline=5)
    publisher, place = Publisher(config, "r", tmp_path), LanePlace("127.0.0.1", 9, 1.0)
    make_token(tmp_path)
    given, problems = [], [NotFetched("no room")] * 5

    async def apply(version):
        given.append(version)
        if problems:
            raise problems.pop()

    follower = Follower(stream, config, apply, run="r", run_dir=tmp_path, fetches=True)
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(follower.run(stop))
        await stream.put(publish(publisher, 1, sources=["http://127.0.0.1:9"], lane=place))
        await until(lambda: follower.version == 1)  # after more failures than an engine with another model may have
        assert (len(given), follower.refused) == (6, 1)
        assert (given[-1].folder, given[-1].lane, given[-1].sources) == (None, place, ("http://127.0.0.1:9",))
        assert given[-1].structure == map_version(publisher.root / "v-1-1", publisher.manifest).structure
        stop.set()
    shutil.rmtree(publisher.root, ignore_errors=True)


async def test_the_host_of_a_learner_that_has_gone_holds_up_no_version_of_the_next_one(tmp_path, stream):
    """All roles start at once, so that a replica of a resumed run sees the last version of the run before."""
    config = WeightsConfig(transport="http", deadline=1000)
    publisher = Publisher(config, "r", tmp_path)
    token = make_token(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        gone = taken.getsockname()[1]
    replica = Replica(stream, config, tmp_path)
    stop = asyncio.Event()
    async with listen(weights_app(publisher.root, token), "127.0.0.1", 0) as url, asyncio.TaskGroup() as group:
        group.create_task(replica.follower.run(stop))
        for epoch, source in ((1, f"http://127.0.0.1:{gone}"), (2, url)):
            await stream.put(publish(publisher, epoch, epoch=epoch, sources=[source]))
            if epoch == 1:
                await until(lambda: replica.follower._fetching is not None)
        await replica.until(1)
        stop.set()
    assert [pair for pair, _ in replica.applied] == [(2, 2)]
    assert replica.follower.refused == 0
    shutil.rmtree(publisher.root, ignore_errors=True)


def hasty(fetch):
    """The first call has no time at all."""
    calls = []

    async def call(self, manifest):
        calls.append(manifest.pair)
        before, self._deadline = self._deadline, 0.05 if len(calls) == 1 else self._deadline
        try:
            return await fetch(self, manifest)
        finally:
            self._deadline = before

    return call


async def test_a_server_that_fetches_hears_of_a_newer_learner_and_a_resume_is_quiet(tmp_path, stream, monkeypatch):
    """The host of the older learner may be gone for good, and nothing was applied yet."""
    monkeypatch.setattr("streamrl.weight_sync.follower._FIRST_PAUSE", 0.01)
    config, tries, taken = WeightsConfig(transport="collective"), [], []
    publisher = Publisher(config, "r", tmp_path)
    make_token(tmp_path)

    async def apply(version):
        tries.append(version.pair)
        if len(tries) == 1:
            raise NotFetched("no host has it")
        if version.pair[0] == 1:
            await until(lambda: follower.newest_epoch > 1)
            raise NotFetched("given up")
        taken.append(version.pair)

    follower, stop = Follower(stream, config, apply, run="r", run_dir=tmp_path, fetches=True), asyncio.Event()
    await stream.put(publish(publisher, 1))
    task = asyncio.create_task(follower.run(stop))
    await until(lambda: len(tries) == 2)
    await stream.put(publish(publisher, 2, epoch=2))
    await until(lambda: taken)
    assert (tries, taken, follower.refused) == ([(1, 1), (1, 1), (2, 2)], [(2, 2)], 0)
    stop.set()
    await asyncio.wait_for(task, 10)
    shutil.rmtree(publisher.root, ignore_errors=True)


async def test_a_follower_that_runs_again_goes_on_where_it_was(publisher, stream, config, tmp_path):
    replica = Replica(stream, config, tmp_path)
    for version in (1, 2):
        stop = asyncio.Event()
        running = asyncio.create_task(replica.follower.run(stop))
        await stream.put(publish(publisher, version))
        await replica.until(version)
        stop.set()
        await asyncio.wait_for(running, 30)
    assert [pair for pair, _ in replica.applied] == [(1, 1), (1, 2)]
