"""However the network fails, a version arrives whole or not at all, and what arrived is not fetched twice."""

import asyncio
import contextlib
import ctypes
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import fsspec
import msgspec
import pytest
import torch
from aiohttp import web
from fetch_kit import Proxy, following, http_config, open_learner, staged_source
from sync_kit import same, tensors, until

from streamrl.config import DeltaConfig
from streamrl.errors import CannotCreate, ConfigError, Unreachable, WeightsError
from streamrl.store import ObjectStore
from streamrl.weight_sync.files import read_token, release_memory, staging_root
from streamrl.weight_sync.manifest import decode
from streamrl.weight_sync.serve import listen, weights_app
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
        app = partial(weights_app, learner.publisher.root, read_token(tmp_path))
        async with contextlib.AsyncExitStack() as first:
            url = await first.enter_async_context(listen(app(), "127.0.0.1", 0))
            async with Proxy(url) as proxy:
                learner.via = proxy.url
                proxy.cut, proxy.times = 3 << 20, 1000  # every transfer breaks, for ever
                manifest = decode(learner.write(1, tensors=big()))
                async with source_of(learner) as (source, _):
                    fetching = asyncio.create_task(source.fetch(manifest))
                    await until(lambda: proxy.broken >= 2)
                    await first.aclose()
                    proxy.times = 0
                    async with listen(app(), "127.0.0.1", proxy.target):
                        assert same(read(await fetching, manifest), big())
                    assert source.traffic.bytes == manifest.total_bytes


async def test_a_fetch_that_ran_out_of_time_or_was_cancelled_is_gone_on_with(learner, monkeypatch):
    monkeypatch.setattr("streamrl.weight_sync.pull._SILENCE", 1.0)
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
            assert [entry.name for entry in staging.root.iterdir()] == [".draft-v-1-1"]
            proxy.times = 0
            assert same(read(await source.fetch(manifest), manifest), big())
            assert source.traffic.bytes == manifest.total_bytes


async def test_a_corrupt_shard_is_refused(learner):
    manifest = decode(learner.write(1))
    path = learner.publisher.root / manifest.folder / manifest.shards[0].file
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    async with source_of(learner) as (source, staging):
        with pytest.raises(WeightsError, match="checksum"):
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
        with pytest.raises(Unreachable, match=r"from http://127\.0\.0\.1:1, at last: .*refused") as caught:
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


async def too_much(request):
    first = request.http_range.start
    last = first + 99
    return web.Response(
        status=206, body=bytes(last - first + 9), headers={"Content-Range": f"bytes {first}-{last}/{last + 1}"}
    )


async def another_range(request):
    return web.Response(status=206, body=bytes(5), headers={"Content-Range": "bytes 5-9/10"})


async def redirects(request):
    raise web.HTTPFound("http://127.0.0.1:1/elsewhere")


async def breaks(request):
    raise web.HTTPInternalServerError


async def all_of_it(request):
    return web.Response(body=bytes(100))


@pytest.mark.parametrize("answer", [too_much, another_range, redirects, breaks, all_of_it])
async def test_answers_that_are_not_what_was_asked_for_are_never_used(learner, answer):
    """The first answers for each file are wrong ones."""
    manifest = decode(learner.write(1))
    served, asked = weights_app(learner.publisher.root, read_token(learner.run_dir)), []

    @web.middleware
    async def wrong_at_first(request, handler):
        asked.append(request.path)
        return await (answer if asked.count(request.path) < 3 else handler)(request)

    served.middlewares.append(wrong_at_first)
    async with listen(served, "127.0.0.1", 0) as learner.via:
        manifest = msgspec.structs.replace(manifest, sources=[learner.via])
        async with source_of(learner) as (source, _):
            if answer is too_much:  # its length is not the one of the manifest
                with pytest.raises(WeightsError, match="does not have the"):
                    await source.fetch(manifest)
            else:
                assert same(read(await source.fetch(manifest), manifest), tensors(1))


async def test_three_versions_stay_so_that_a_reader_has_time(learner):
    manifests = [decode(learner.write(number)) for number in range(1, 6)]
    assert sorted(entry.name for entry in learner.publisher.root.iterdir()) == ["v-1-3", "v-1-4", "v-1-5"]
    async with source_of(learner) as (source, _):
        assert same(read(await source.fetch(manifests[2]), manifests[2]), tensors(3))
        with pytest.raises(FileNotFoundError):
            await source.fetch(manifests[1])


@pytest.fixture(params=["memory://weights", "file://{}/store", "{}/store"])
def url(request, tmp_path):
    yield request.param.format(tmp_path)
    if request.param.startswith("memory"):
        fsspec.filesystem("memory").store.clear()


async def test_many_hosts_pull_from_a_store(tmp_path, url):
    """The learner's host sends each version once, and serves nobody; deltas find their base there too."""
    config = http_config(url=url, dtype="bfloat16", delta=DeltaConfig(enabled=True, every=3))
    small = {"w": torch.zeros(4096, dtype=torch.bfloat16)}

    def changed(number):
        return {"w": small["w"].index_fill(0, torch.tensor([number]), float(number))}

    async with open_learner(config, tmp_path) as learner, contextlib.AsyncExitStack() as stack:
        replicas = []
        for version in range(1, 8):
            manifest = await learner.publish(version, tensors=changed(version))
            assert manifest.sources == []
            replicas.append(await stack.enter_async_context(following(learner, f"rollout.{version}")))
            for replica in replicas:
                await until(lambda replica=replica, version=version: replica.follower.version == version)
                assert same(replica.applied[-1][1], changed(version))
        assert all(replica.follower.refused == 0 for replica in replicas)
        files, root = fsspec.core.url_to_fs(f"{url}/r")
        here = sorted(entry.name for entry in learner.publisher.root.iterdir())
        assert sorted(path.rpartition("/")[2] for path in files.ls(root, detail=False)) == here


async def test_a_learner_on_another_host_leaves_the_versions_before_until_it_has_two(tmp_path):
    config = http_config(url=f"{tmp_path}/store")
    for host in ("first", "second"):
        async with open_learner(config, tmp_path / host) as learner:
            for version in range(1, 4):
                manifest = await learner.publish(version, epoch=1 if host == "first" else 2)
                if host == "second" and version == 1:
                    assert len(list((tmp_path / "store" / "r").iterdir())) == 4
    assert {path.name for path in (tmp_path / "store" / "r").iterdir()} == {f"v-2-{number}" for number in (1, 2, 3)}
    assert manifest.folder == "v-2-3"


async def test_a_transfer_from_a_store_that_breaks_is_gone_on_with(tmp_path, monkeypatch):
    url = f"file://{tmp_path}/store"
    opened = ObjectStore.open
    cuts = []

    @contextlib.contextmanager
    def cut(self, name, at):
        with opened(self, name, at) as (file, size):
            if len(cuts) == 5:
                yield file, size
                return
            cuts.append(at)
            rest = iter([file.read(1000)])
            yield SimpleNamespace(readinto=lambda buffer: _into(buffer, next(rest, b""))), size

    monkeypatch.setattr(ObjectStore, "open", cut)
    async with open_learner(http_config(url=url), tmp_path) as learner:
        manifest = await learner.publish(1, tensors={"t": torch.arange(1 << 16)})
        async with source_of(learner) as (source, _):
            assert same(read(await source.fetch(manifest), manifest), {"t": torch.arange(1 << 16)})
            assert source.traffic.bytes == manifest.total_bytes
        assert cuts == [0, 1000, 2000, 3000, 4000]


def _into(buffer, data):
    buffer[: len(data)] = data
    return len(data)


async def test_a_store_that_cannot_be_written_costs_the_version(tmp_path, monkeypatch):
    async with open_learner(http_config(url=f"{tmp_path}/store"), tmp_path) as learner:
        (tmp_path / "store").write_text("no directory")
        with pytest.raises(CannotCreate, match=r"weights\.url .*store"):
            await learner.publish(1)
        async with source_of(learner) as (source, _):
            (tmp_path / "store").unlink()
            with pytest.raises(FileNotFoundError):
                await source.fetch(decode(learner.write(2)))


def test_staging_folders_go_with_the_memory_of_the_run(tmp_path):
    names = [staging_root(tmp_path, name) for name in ("rollout.0", "../../evil", "a/b")]
    assert {path.parent for path in names} == {Path("/dev/shm")}
    for path in names:
        path.mkdir()
    release_memory(tmp_path)
    assert not any(path.exists() for path in names)
