"""However the network fails, a version arrives whole or not at all, and what arrived is not fetched twice."""

import asyncio
import contextlib
import ctypes
import os
from pathlib import Path

import pytest
import torch
from aiohttp import web
from fetch_kit import Board, Proxy, following, http_config, open_learner, staged_source
from sync_kit import same, tensors, until

from streamrl.errors import CannotCreate, ConfigError, Unreachable, WeightsError
from streamrl.weight_sync.files import read_token, release_memory, staging_root
from streamrl.weight_sync.manifest import decode
from streamrl.weight_sync.pull import RELAY_FIELD, PeerHosts
from streamrl.weight_sync.serve import ShardServer, listen
from streamrl.weight_sync.tensors import map_version


@pytest.fixture
async def learner(tmp_path):
    async with open_learner(http_config(), tmp_path) as learner:
        yield learner


@contextlib.asynccontextmanager
async def source_of(learner, name="rollout.0", **options):
    async with staged_source(options.pop("config", learner.config), learner.run_dir, name, **options) as opened:
        yield opened


def read(folder, manifest):
    return {name: tensor.clone() for name, tensor in map_version(folder, manifest).tensors.items()}


def big(count=6):
    return {f"t{index}": torch.full((1 << 20,), float(index)) for index in range(count)}


async def test_a_version_is_pulled_whole_and_once(learner):
    manifest = decode(learner.write(1))
    async with source_of(learner) as (source, staging):
        folder = await source.fetch(manifest)
        assert folder.parent == staging.root
        assert same(read(folder, manifest), tensors(1))
        assert source.traffic.bytes == manifest.total_bytes
        assert await source.fetch(manifest) == folder
        assert source.traffic.bytes == manifest.total_bytes
        assert staging.root.stat().st_mode & 0o777 == 0o700
    assert not staging.root.exists()


async def test_two_fetches_at_once_do_not_disturb_each_other(learner):
    """A server that was restarted is given the version that was applied last while the next one is on its way."""
    first, second = (decode(learner.write(number, tensors=big())) for number in (1, 2))
    async with source_of(learner) as (source, _):
        folders = await asyncio.gather(*(source.fetch(manifest) for manifest in (first, second, second, first)))
        assert all(same(read(folders[index], manifest), big()) for index, manifest in enumerate((first, second)))
        assert folders[:2] == folders[:1:-1]
        assert source.traffic.bytes == first.total_bytes + second.total_bytes


async def test_what_comes_twice_does_not_take_the_place_of_what_an_engine_reads(learner):
    manifest = decode(learner.write(1))
    async with source_of(learner) as (source, staging):
        folder = await source.fetch(manifest)
        before = folder.stat().st_ino
        again = staging.draft(manifest, "b1")
        assert staging.finish(manifest, again) == folder
        assert folder.stat().st_ino == before
        assert not again.exists()


async def test_a_manifest_names_each_file_once(learner):
    data = learner.write(1)
    names = [shard.file for shard in decode(data).shards]
    for bad in (data.replace(names[1].encode(), names[0].encode()), data.replace(names[0].encode(), b"manifest.json")):
        with pytest.raises(WeightsError, match="named twice, or like the manifest"):
            decode(bad)
    with pytest.raises(WeightsError, match="without a base"):
        decode(data.replace(b'"makes":null', b'"makes":"%s"' % (b"0" * 32), 1))


async def test_broken_transfers_are_gone_on_with(learner):
    async with Proxy(learner.server.sources()[0]) as proxy:
        learner.via = proxy.url
        proxy.cut, proxy.times = 1 << 20, 9
        manifest = decode(learner.write(1, tensors=big()))
        async with source_of(learner) as (source, _):
            assert same(read(await source.fetch(manifest), manifest), big())
            assert proxy.broken == 9
            assert source.traffic.bytes == manifest.total_bytes  # not one byte came twice


async def test_a_server_that_dies_in_mid_file_and_comes_back(tmp_path):
    """The same address, a new server: the rest is asked for, and the fetch ends as if nothing had been."""
    config = http_config()
    async with open_learner(config, tmp_path) as learner:
        server = ShardServer(learner.publisher.root, read_token(tmp_path))
        async with contextlib.AsyncExitStack() as first:
            url = await first.enter_async_context(listen(server.app(), "127.0.0.1", 0))
            async with Proxy(url) as proxy:
                learner.via = proxy.url
                proxy.cut, proxy.times = 3 << 20, 1000  # every transfer breaks, for ever
                manifest = decode(learner.write(1, tensors=big()))
                async with source_of(learner) as (source, _):
                    fetching = asyncio.create_task(source.fetch(manifest))
                    await until(lambda: proxy.broken >= 2)
                    await first.aclose()
                    proxy.times = 0
                    again = ShardServer(learner.publisher.root, read_token(tmp_path)).app()
                    async with listen(again, "127.0.0.1", proxy.target):
                        assert same(read(await fetching, manifest), big())
                    assert source.traffic.bytes == manifest.total_bytes


async def test_a_fetch_that_ran_out_of_time_or_was_cancelled_is_gone_on_with(learner):
    async with Proxy(learner.server.sources()[0]) as proxy:
        learner.via = proxy.url
        proxy.cut, proxy.times, proxy.silent_after = 1 << 20, 10_000, 3
        manifest = decode(learner.write(1, tensors=big()))
        async with source_of(learner, config=http_config(deadline=3)) as (source, staging):
            cancelled = asyncio.create_task(source.fetch(manifest))
            await until(lambda: proxy.broken >= 3)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            assert source.traffic.bytes > 0
            with pytest.raises(Unreachable, match="within 3 s"):
                await source.fetch(manifest)
            assert source.traffic.bytes < manifest.total_bytes
            assert [entry.name for entry in staging.root.iterdir()] == [".draft-v-1-1+"]
            proxy.times = 0
            assert same(read(await source.fetch(manifest), manifest), big())
            assert source.traffic.bytes == manifest.total_bytes


async def test_a_corrupt_shard_is_refused(learner):
    manifest = decode(learner.write(1))
    path = learner.publisher.root / manifest.folder / manifest.shards[0].file
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    async with source_of(learner) as (source, staging):
        with pytest.raises(WeightsError, match="checksums"):
            await source.fetch(manifest)
        assert staging.holds(manifest) is None
        learner.publisher._remove(manifest.folder)
        manifest = decode(learner.write(2))
        assert same(read(await source.fetch(manifest), manifest), tensors(2))


@pytest.mark.parametrize("change", [-1, 1])
async def test_a_file_of_another_size_is_refused_at_once(learner, change):
    manifest = decode(learner.write(1))
    path = learner.publisher.root / manifest.folder / manifest.shards[0].file
    os.truncate(path, path.stat().st_size + change)
    async with source_of(learner) as (source, _):
        with pytest.raises(WeightsError, match="does not have the"):
            await source.fetch(manifest)


async def test_a_version_that_is_gone(learner):
    manifest = decode(learner.write(1))
    learner.publisher._remove(manifest.folder)
    async with source_of(learner) as (source, _):
        with pytest.raises(FileNotFoundError):
            await source.fetch(manifest)


async def test_the_wrong_token_is_said_clearly(learner, tmp_path, monkeypatch):
    manifest = decode(learner.write(1))
    other = tmp_path / "other"
    other.write_text("another-token-of-another-run")
    monkeypatch.setenv("STREAMRL_WEIGHTS_TOKEN_FILE", str(other))
    async with source_of(learner) as (source, _):
        with pytest.raises(WeightsError, match="refuses the token") as caught:
            await source.fetch(manifest)
    assert "another-token" not in str(caught.value)
    monkeypatch.setenv("STREAMRL_WEIGHTS_TOKEN_FILE", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="copy RUN_DIR"):
        async with source_of(learner):
            pass


async def test_nobody_answers(learner):
    learner.via = "http://127.0.0.1:1"
    manifest = decode(learner.write(1))
    async with source_of(learner, config=http_config(deadline=0.5)) as (source, _):
        with pytest.raises(Unreachable, match=r"at last http://127\.0\.0\.1:1: .*refused") as caught:
            await source.fetch(manifest)
    assert "weights.port open" in caught.value.hint


async def test_a_disk_that_is_full_is_said_and_nothing_stays(learner, monkeypatch, tmp_path):
    """In a file system of its own: 1 MiB."""
    small = tmp_path / "small"
    small.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"none", str(small).encode(), b"tmpfs", 0, b"size=1m") != 0:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        monkeypatch.setattr("streamrl.weight_sync.files.staging_root", lambda *_: small / "staging")
        manifest = decode(learner.write(1, tensors=big(1)))
        tiny = decode(learner.write(2))
        async with source_of(learner) as (source, staging):
            with pytest.raises(CannotCreate, match="no room"):
                await source.fetch(manifest)
            # the room goes between the look and the writing
            monkeypatch.setattr("streamrl.weight_sync.files.check_room", lambda *_: None)
            with pytest.raises(CannotCreate, match="No space left"):
                await source.fetch(manifest)
            assert list(staging.root.iterdir()) == []
            assert same(read(await source.fetch(tiny), tiny), tensors(2))
    finally:
        assert libc.umount2(str(small).encode(), 2) == 0


class Hostile:
    """A server that answers a range request as it likes."""

    def __init__(self, answer):
        self.answer = answer

    @contextlib.asynccontextmanager
    async def open(self):
        app = web.Application()
        app.add_routes([web.get("/{folder}/{file}", self.answer)])
        async with listen(app, "127.0.0.1", 0) as url:
            yield url


async def too_much(request):
    first, last = request.http_range.start, request.http_range.stop
    return web.Response(
        status=206, body=bytes(last - first + 9), headers={"Content-Range": f"bytes {first}-{last - 1}/{last}"}
    )


async def another_range(request):
    last = request.http_range.stop
    return web.Response(status=206, body=bytes(5), headers={"Content-Range": f"bytes 5-9/{last}"})


async def redirects(request):
    raise web.HTTPFound("http://127.0.0.1:1/elsewhere")


async def breaks(request):
    raise web.HTTPInternalServerError


@pytest.mark.parametrize("answer", [too_much, another_range, redirects, breaks])
async def test_answers_that_are_not_what_was_asked_for_are_never_written(learner, answer):
    """The neighbour lies, the learner's host does not."""
    board = Board()
    manifest = decode(learner.write(1))

    async def route(request):
        if request.method == "HEAD":
            return web.Response()
        return await answer(request)

    async with Hostile(route).open() as url:
        board.of("rollout.9")[RELAY_FIELD] = url
        async with source_of(learner, board=board) as (source, _):
            assert same(read(await source.fetch(manifest), manifest), tensors(1))


async def test_a_neighbour_with_a_corrupt_copy_is_not_asked_again(learner, tmp_path):
    board = Board()
    manifest = decode(learner.write(1))
    async with source_of(learner, name="rollout.9") as (other, staging):
        folder = await other.fetch(manifest)
        path = folder / manifest.shards[0].file
        path.write_bytes(path.read_bytes()[:-1] + b"!")
        async with listen(ShardServer(staging.root, read_token(tmp_path)).app(), "127.0.0.1", 0) as url:
            board.of("rollout.9")[RELAY_FIELD] = url
            async with source_of(learner, board=board) as (source, _):
                assert same(read(await source.fetch(manifest), manifest), tensors(1))
                assert source.traffic.bytes == manifest.total_bytes + manifest.shards[0].bytes


async def test_a_chain_of_relays(learner):
    """Each replica takes a version from the one before it; the learner's host is asked by the first alone."""
    board, server_bytes = Board(), []
    config = http_config(relay=True)
    async with contextlib.AsyncExitStack() as stack:
        for index in range(3):
            name = f"rollout.{index}"
            replica = await stack.enter_async_context(
                following(learner, name, config, board=board, status=board.of(name))
            )
            if index == 0:
                await learner.publish(1)
            await replica.until(1)
            assert same(replica.applied[0][1], tensors(1))
            server_bytes.append(replica.follower.bytes_fetched)
            # from here on the learner's host has nothing: whoever comes later can only have it of a neighbour
            learner.publisher._remove("v-1-1")
    assert len(set(server_bytes)) == 1
    assert all(RELAY_FIELD not in fields for fields in board.roles.values())


async def test_many_followers_at_once(tmp_path, monkeypatch):
    """A server that takes one transfer, and six replicas that want the same: neighbours help out."""
    monkeypatch.setitem(ShardServer.__init__.__kwdefaults__, "limit", 1)
    board, config = Board(), http_config(relay=True)
    async with open_learner(http_config(), tmp_path) as learner, contextlib.AsyncExitStack() as stack:
        replicas = []
        for index in range(6):
            name = f"rollout.{index}"
            replicas.append(
                await stack.enter_async_context(following(learner, name, config, board=board, status=board.of(name)))
            )
        for version in (1, 2):
            await learner.publish(version, tensors=big(1) | tensors(version))
            await asyncio.gather(*(replica.until(version) for replica in replicas))
        for replica in replicas:
            assert [pair for pair, _ in replica.applied] == [(1, 1), (1, 2)]
            assert replica.follower.refused == 0
            assert same(replica.applied[-1][1], big(1) | tensors(2))


def test_the_least_busy_neighbour_first_and_the_learners_host_last():
    hosts = PeerHosts(["http://learner"], {"http://a": 3, "http://b": 1})
    first = hosts.pick(0.0)
    assert first.url == "http://b"
    hosts.failed(first, 0.0)
    assert hosts.pick(0.0).url == "http://a"
    hosts.pick(0.0).banned = True
    assert hosts.pick(0.0).url == "http://learner"
    hosts.failed(hosts.pick(0.0), 0.0)
    assert hosts.pick(0.0) is None
    assert 0.025 <= hosts.pause(0.0) <= 0.1
    assert hosts.pick(0.2).url == "http://b"
    hosts.add({"http://c": 0, "http://a": 0})
    assert hosts.pick(0.2).url == "http://c"
    hosts.ban_relays(["http://b", "http://c", "http://learner", "http://unknown"])
    assert hosts.pick(0.2).url == "http://learner"
    assert not hosts.exhausted


def test_staging_folders_go_with_the_memory_of_the_run(tmp_path):
    names = [staging_root(tmp_path, name) for name in ("rollout.0", "../../evil", "a/b")]
    assert {path.parent for path in names} == {Path("/dev/shm")}
    for path in names:
        path.mkdir()
    release_memory(tmp_path)
    assert not any(path.exists() for path in names)
