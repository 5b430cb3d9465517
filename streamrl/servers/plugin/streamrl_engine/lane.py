"""The fast lane: files of one version from the learner to all servers at once, in one group of processes.

```
member  -> store   FOLDER/joined, FOLDER/N: it has room; its name, its device, and the group that it still holds
learner -> store   FOLDER/decision, written once: the group, gloo or nccl, and the rank of each member
learner -> group   the files in pieces; each piece has a timeout
```
The store is the learner's. Whoever is not in the decision takes the files over HTTP, and so do all when a process of
the group dies or stalls; the next version makes another group. A member proves that it knows the token of the run, but
store and bytes are not protected on the network: what came by the lane is used only with the checksums of the manifest.
NCCL has never run here, because it needs two devices; its first broadcast may block a thread for good.
"""

from __future__ import annotations

import hmac
import json
import mmap
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed

PIECE_BYTES = 16 << 20
GRACE = 2.0  # seconds for which the learner waits for members, unless a piece has less
_POLL_SECONDS = 0.001
dist: Any = torch.distributed  # its stubs lack most of what is used here
cuda: Any = torch.cuda


class Group:
    """This process in one group, of which rank 0 sends, until a `RuntimeError`; each piece may take `stall` seconds."""

    def __init__(
        self, store: Any, name: str, backend: str, rank: int, size: int, *, stall: float, address: str
    ) -> None:
        self.name, self._sends, self._stall = name, rank == 0, stall
        self._order = dist.BroadcastOptions()
        self._order.rootRank = 0
        limit = timedelta(seconds=stall)
        store.set_timeout(limit)
        keys = dist.PrefixStore(name, store)
        self._buffer: torch.Tensor | None = None
        if backend == "nccl":
            self._group = _nccl(keys, rank, size)
            self._buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8, device="cuda")
            self._stream = cuda.Stream()
            return
        options = dist.ProcessGroupGloo._Options()  # noqa: SLF001  (the only way to choose the address)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]  # noqa: SLF001
        options._timeout = self._order.timeout = limit  # noqa: SLF001
        self._group = dist.ProcessGroupGloo(keys, rank, size, options)

    def transfer(self, path: Path, given_up: Callable[[], bool]) -> None:
        """Send a file, or receive one, which has its final size already."""
        with path.open("rb" if self._sends else "r+b") as file:
            if not (size := os.fstat(file.fileno()).st_size):
                return
            flags = mmap.MAP_PRIVATE if self._sends else mmap.MAP_SHARED
            mapped = mmap.mmap(file.fileno(), size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        whole = torch.frombuffer(mapped, dtype=torch.uint8)
        for start in range(0, size, PIECE_BYTES):
            if given_up():
                raise RuntimeError("given up")
            self._broadcast(whole[start : start + PIECE_BYTES])

    def _broadcast(self, piece: torch.Tensor) -> None:
        if self._buffer is None:
            self._group.broadcast([piece], self._order).wait()
            return
        buffer, end = self._buffer[: piece.numel()], time.monotonic() + self._stall
        with cuda.stream(self._stream):
            if self._sends:
                buffer.copy_(piece)
            work = self._group.broadcast([buffer], self._order)
            while not work.is_completed():  # NCCL's own watchdog would end the process
                if time.monotonic() > end:
                    self._group.abort()
                    raise RuntimeError(f"a piece took longer than {self._stall:g} s")
                time.sleep(_POLL_SECONDS)
            if not self._sends:
                piece.copy_(buffer)


def _nccl(keys: Any, rank: int, size: int) -> Any:
    calm = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
    before = {name: os.environ.get(name) for name in calm}
    os.environ.update(calm)
    try:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(days=1)  # noqa: SLF001
        return dist.ProcessGroupNCCL(keys, rank, size, options)
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def device_in_use() -> tuple[int, str]:
    """Index and UUID of the calling thread's CUDA device; the UUID is empty when this process uses none."""
    if not cuda.is_available() or not cuda.is_initialized():
        return 0, ""
    index = cuda.current_device()
    return index, str(cuda.get_device_properties(index).uuid)


class Member:
    """A server's process in the lane; it keeps connection and group from version to version. For one thread."""

    def __init__(self) -> None:
        self._mark = secrets.token_hex(4)
        self._place: tuple[str, int] | None = None
        self._joined: tuple[str, int, str] | None = None
        self._store: Any = None
        self._group: Group | None = None

    def receive(
        self,
        lane: Mapping[str, Any],
        version: str,
        files: Sequence[tuple[Path, int]],
        device: tuple[int, str],
        given_up: Callable[[], bool],
        *,
        token: str,
    ) -> None:
        """Receive new files of these sizes, once; any exception: they are not whole. `lane` is the manifest's."""
        host, port, stall = lane["host"], int(lane["port"]), float(lane["stall"])
        if self._joined == (host, port, version):
            raise RuntimeError("its broadcast is over")
        self._joined = host, port, version
        if device[1]:
            cuda.set_device(device[0])  # each thread has its own
        group = self._group if self._place == (host, port) else None
        if self._place != (host, port):
            limit = timedelta(seconds=stall)
            self._store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
        self._group = self._place = None  # back when all went well
        name = f"{socket.gethostname()}:{os.getpid()}:{self._mark}"
        me = {"name": name, "device": device[1], "group": group.name if group is not None else ""}
        me["proof"] = proof(token, version, name)
        number = self._store.add(f"{version}/joined", 1)
        self._store.set(f"{version}/{number}", json.dumps(me))
        try:
            self._store.wait([f"{version}/decision"], timedelta(seconds=2 * min(GRACE, stall)))
        except RuntimeError:
            self._store.delete_key(f"{version}/{number}")  # the learner is busy with another version
            self._group, self._place = group, (host, port)
            raise
        decision = json.loads(self._store.get(f"{version}/decision"))
        self._place = host, port
        ranks = decision["ranks"]
        if name not in ranks:
            raise RuntimeError("too late for it")
        if group is None or group.name != decision["group"]:
            place = decision["group"], decision["backend"], ranks[name], len(ranks) + 1
            group = Group(self._store, *place, stall=stall, address=_address_toward(host, port))
        for path, size in files:
            with path.open("wb") as file:
                if size:  # a write into mapped memory without room would kill the process
                    os.posix_fallocate(file.fileno(), 0, size)
            group.transfer(path, given_up)
        self._group = group


def proof(token: str, version: str, name: str) -> str:
    """That a member of a version knows the token of the run."""
    return hmac.new(token.encode(), f"{version} {name}".encode(), "sha256").hexdigest()


def _address_toward(host: str, port: int) -> str:
    """Of this host, by which the others reach it."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])
