"""The http transport on loopback, next to a bare sendfile server and a bare client that writes to the same place.

Both servers are processes of their own and serve the same files from /dev/shm. The bare client takes them by
`http.client`, with as many connections at once as the transport, through one buffer each, into files in /dev/shm; it
proves nothing. The transport's time is that of `Source.fetch`: requests, writing, checksums, and the final rename.
"""

from __future__ import annotations

import asyncio
import http.client
import multiprocessing
import os
import shutil
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import torch
from spread import ratios, spread

from streamrl.config import WeightsConfig
from streamrl.weight_sync.files import StagingFolder, make_token
from streamrl.weight_sync.manifest import decode
from streamrl.weight_sync.publisher import Publisher
from streamrl.weight_sync.serve import listen, weights_app
from streamrl.weight_sync.transports import open_source

SHARDS = 4
CONNECTIONS = 4
BUFFER_BYTES = 1 << 20


def serve(root: str, run_dir: str, told: Any) -> None:
    """Our server."""

    async def run() -> None:
        async with listen(weights_app(Path(root), make_token(Path(run_dir))), "127.0.0.1", 0) as url:
            told.put(url)
            await asyncio.Event().wait()

    asyncio.run(run())


def serve_bare(root: str, told: Any) -> None:
    """A thread and a sendfile for each connection."""
    listening = socket.create_server(("127.0.0.1", 0))

    def answer(connection: socket.socket) -> None:
        path = connection.recv(1 << 16).split(b" ")[1].decode()
        with connection, Path(root + path).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % size)
            at = 0
            while at < size:
                at += os.sendfile(connection.fileno(), file.fileno(), at, size - at)

    told.put(f"http://127.0.0.1:{listening.getsockname()[1]}")
    while True:
        threading.Thread(target=answer, args=(listening.accept()[0],), daemon=True).start()


def fetch_bare(url: str, paths: list[str], folder: Path) -> float:
    """Seconds of a bare client."""

    def one(path: str) -> None:
        connection = http.client.HTTPConnection(url.removeprefix("http://"))
        connection.request("GET", path)
        answer = connection.getresponse()
        buffer = memoryview(bytearray(BUFFER_BYTES))
        with (folder / Path(path).name).open("xb", buffering=0) as file:
            while count := answer.readinto(buffer):
                file.write(buffer[:count])
        connection.close()

    begin = time.perf_counter()
    with ThreadPoolExecutor(CONNECTIONS) as threads:
        list(threads.map(one, paths))
    return time.perf_counter() - begin


async def measure(run_dir: Path, size: int, rounds: int) -> dict[str, Any]:
    """Both in turn, as many rounds as asked for and one to warm up."""
    run_dir.mkdir(parents=True)
    config = WeightsConfig(transport="http", shard_bytes=max(size // SHARDS, 1 << 16), deadline=600)
    publisher = Publisher(config, "bench", run_dir)
    piece = size // SHARDS // 4
    tensors = [(f"t{number}", torch.randn(piece)) for number in range(SHARDS)]
    manifest = decode(publisher.publish(epoch=1, version=1, step=1, tensors=tensors))
    making = multiprocessing.get_context("spawn")
    told, told_bare = making.Queue(), making.Queue()
    servers = [
        making.Process(target=serve, args=(str(publisher.root), str(run_dir), told), daemon=True),
        making.Process(target=serve_bare, args=(str(publisher.root), told_bare), daemon=True),
    ]
    for server in servers:
        server.start()
    place = Path(f"/dev/shm/streamrl-bench-{os.getpid()}")
    staging = StagingFolder(run_dir, "bench")
    staging.open()
    try:
        url, bare_url = told.get(timeout=60), told_bare.get(timeout=60)
        manifest = msgspec.structs.replace(manifest, sources=[url])
        paths = [f"/{manifest.folder}/{shard.file}" for shard in manifest.shards]
        ours, bare = [], []
        async with open_source(config, run_dir, staging, run="bench") as source:
            for number in range(rounds + 1):
                place.mkdir()
                bare.append(await asyncio.to_thread(fetch_bare, bare_url, paths, place))
                shutil.rmtree(place)
                begin = time.perf_counter()
                folder = await source.fetch(manifest)
                ours.append(time.perf_counter() - begin)
                if not number:
                    compare(folder, publisher.root / manifest.folder, [shard.file for shard in manifest.shards])
                shutil.rmtree(folder)
    finally:
        for server in servers:
            server.kill()
            server.join()
        shutil.rmtree(place, ignore_errors=True)
        staging.close()
        shutil.rmtree(publisher.root)
    total = manifest.total_bytes
    return {
        "bytes": total,
        "gigabytes_per_second": spread([total / one / 1e9 for one in ours[1:]]),
        "bare_gigabytes_per_second": spread([total / one / 1e9 for one in bare[1:]]),
        "ratio_to_bare": ratios(bare[1:], ours[1:]),
    }


def compare(folder: Path, other: Path, files: list[str]) -> None:
    for file in files:
        assert (folder / file).read_bytes() == (other / file).read_bytes()
