"""A learner's host with its server, and a proxy between the two that breaks on purpose."""

import asyncio
import contextlib
import shutil

from sync_kit import Replica, Stream, publish

from streamrl.config import RunConfig, WeightsConfig
from streamrl.weight_sync.files import StagingFolder, release_memory
from streamrl.weight_sync.manifest import decode
from streamrl.weight_sync.publisher import Publisher
from streamrl.weight_sync.transports import open_server, open_source


def http_config(**changes):
    return WeightsConfig(**{"transport": "http", "shard_bytes": 4096, "deadline": 20, **changes})


class Learner:
    """Publisher, server of weights and stream of one run."""

    def __init__(self, config, run_dir, server):
        self.config, self.run_dir, self.server = config, run_dir, server
        self.publisher = Publisher(config, "r", run_dir)
        self.stream = Stream()
        self.via = None  # URL to put into the manifests instead of the server's own

    def write(self, version, tensors=None, **options):
        sources = [self.via] if self.via else self.server.sources()
        return publish(self.publisher, version, tensors, sources=sources, lane=self.server.lane, **options)

    async def publish(self, version, **options):
        data = await asyncio.to_thread(self.write, version, **options)
        await asyncio.to_thread(self.server.store, decode(data))
        self.server.announce(decode(data))
        await self.stream.put(data)
        return decode(data)


@contextlib.asynccontextmanager
async def open_learner(config, run_dir, *device):
    root = Publisher(config, "r", run_dir).root
    run = RunConfig(name="r", weights=config, engine={"kind": "vllm"})
    async with open_server(run, run_dir, root, *device) as server:
        learner = Learner(config, run_dir, server)
        try:
            yield learner
        finally:
            shutil.rmtree(learner.publisher.root, ignore_errors=True)
            release_memory(run_dir)  # the staging folders of members that were killed


@contextlib.asynccontextmanager
async def following(learner, name="rollout.0", config=None, **options):
    """A replica whose follower runs for the length of the block."""
    replica = Replica(learner.stream, config or learner.config, learner.run_dir, name=name, **options)
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(replica.follower.run(stop))
        try:
            yield replica
        finally:
            stop.set()
            async with asyncio.timeout(30):
                await asyncio.wait([task])


@contextlib.asynccontextmanager
async def staged_source(config, run_dir, name):
    """A source and the staging folder that it fills."""
    folder = StagingFolder(run_dir, name)
    folder.open()
    try:
        async with open_source(config, run_dir, folder, run="r") as source:
            yield source, folder
    finally:
        folder.close()


class Proxy:
    """Passes connections on to a server; the next `times` connections end after `cut` bytes.

    After `silent_after` of those it accepts connections and says nothing.
    """

    def __init__(self, url):
        self.host, port = url.removeprefix("http://").split(":")
        self.target = int(port)
        self.cut, self.times, self.broken, self.silent_after = 0, 0, 0, 1 << 30

    async def __aenter__(self):
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_):
        self.server.close()

    async def serve(self, reader, writer):
        there, back = await asyncio.open_connection(self.host, self.target)
        cut = None
        if self.times:
            self.times, cut = self.times - 1, self.cut
            if self.broken >= self.silent_after:
                await reader.read()  # until the client gives up
                writer.close()
                back.close()
                return
        async with asyncio.TaskGroup() as group:
            up = group.create_task(self.pump(reader, back, None))
            await self.pump(there, writer, cut)
            up.cancel()
            back.close()

    async def pump(self, reader, writer, cut):
        left = cut
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 14):
                if left is not None and len(data) >= left:
                    writer.write(data[:left])
                    await writer.drain()
                    self.broken += 1
                    break
                left = None if left is None else left - len(data)
                writer.write(data)
                await writer.drain()
        writer.close()
