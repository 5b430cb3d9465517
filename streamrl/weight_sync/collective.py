"""Broadcasting files within a group of processes: gloo on CPUs, NCCL where every process has a device of its own.

A group is built directly, beside whatever group the process trains in, and has its own name in the store, its own
thread and its own timeout. When one process dies or stalls, the piece that is on its way fails for all within that
timeout, and the group is thrown away: a new one without the dead is cheap.

What runs in gloo is tested with processes that are killed and stopped. NCCL has been written from its documentation:
it needs two devices and has never run. It is used only between processes that have CUDA in use already.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Literal

import torch
import torch.distributed

from streamrl.errors import CannotCreate, Unreachable

dist: Any = torch.distributed  # its stubs lack most of what is used here
PIECE_BYTES: Final = 16 << 20
_POLL_SECONDS: Final = 0.001
_NEVER: Final = timedelta(days=1)


@dataclass(frozen=True)
class Membership:
    """One process in one group.

    Attributes:
        group: name, never used twice in a store.
        rank: 0 sends.
        size: processes.
        backend: what carries the bytes.
        stall: seconds that building the group, or one piece, may take.
        address: of this host, by which the others reach it (gloo).
    """

    group: str
    rank: int
    size: int
    backend: Literal["gloo", "nccl"]
    stall: float
    address: str


class Rendezvous:
    """The store where the processes of all groups find each other; on the learner's host.

    It knows no passwords, like gloo and NCCL: what travels there is checked against the manifest, nothing else.

    Args:
        host: address to listen on, and no other.

    Raises:
        CannotCreate: the address cannot be listened on.
    """

    def __init__(self, host: str) -> None:
        try:
            listener = socket.create_server((host, 0))
        except OSError as error:
            raise CannotCreate(f"cannot listen on {host}: {error}", "set weights.host to one of this host") from error
        self.port: int = listener.getsockname()[1]
        self.store = dist.TCPStore(
            host, self.port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )


class Party:
    """This process in one group. Its calls wait in a thread of its own, so nobody else ever does.

    Attributes:
        progress: bytes sent or received in the present call.

    Args:
        membership: which group, and as whom.
        store: of the rendezvous in this process, or its address.
    """

    def __init__(self, membership: Membership, store: Any | tuple[str, int]) -> None:
        self._membership = membership
        self._store: Any = store
        self._group: _Gloo | _Nccl | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"broadcast {membership.group}")
        self.progress = 0

    async def send(self, files: Sequence[Path]) -> None:
        """Send files to all others, in order.

        Raises:
            Unreachable: somebody did not take a piece in time; the group is of no more use.
            OSError: a file cannot be read.
        """
        await asyncio.get_running_loop().run_in_executor(self._thread, self._send, files)

    async def receive(self, files: Sequence[Path]) -> None:
        """Receive files over those that are there with their final sizes, and all their room taken.

        Cancelling the call does not stop the thread before the stall timeout; it may write to unlinked files then.

        Raises:
            Unreachable: nothing came in time; the group is of no more use.
            OSError: a file cannot be opened or mapped.
        """
        await asyncio.get_running_loop().run_in_executor(self._thread, self._receive, files)

    def leave(self) -> None:
        """Throw the group away, without waiting for a call that is stuck in it."""
        self._thread.submit(self._forget)
        self._thread.shutdown(wait=False)

    def _forget(self) -> None:
        self._group = None

    def _send(self, files: Sequence[Path]) -> None:
        self._pass_on(files, "rb", mmap.MAP_PRIVATE)

    def _receive(self, files: Sequence[Path]) -> None:
        self._pass_on(files, "r+b", mmap.MAP_SHARED)

    def _pass_on(self, files: Sequence[Path], mode: Literal["rb", "r+b"], flags: int) -> None:
        self.progress = 0
        with self._failures():
            group = self._joined()
            for path in files:
                with path.open(mode) as file:
                    for piece in _pieces(file.fileno(), flags):
                        group.broadcast(piece)
                        self.progress += piece.nbytes

    def _joined(self) -> _Gloo | _Nccl:
        if self._group is None:
            who = self._membership
            limit = timedelta(seconds=who.stall)
            if isinstance(self._store, tuple):
                host, port = self._store
                self._store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
            self._store.set_timeout(limit)
            store = dist.PrefixStore(who.group, self._store)
            self._group = _Nccl(store, who) if who.backend == "nccl" else _Gloo(store, who)
        return self._group

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # all that torch raises here
            raise Unreachable(f"broadcast in {self._membership.group} failed: {error}") from error


class _Gloo:
    def __init__(self, store: Any, who: Membership) -> None:
        options = dist.ProcessGroupGloo._Options()  # noqa: SLF001  (the only way to choose the address)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=who.address)]  # noqa: SLF001
        options._timeout = timedelta(seconds=who.stall)  # noqa: SLF001
        self._group = dist.ProcessGroupGloo(store, who.rank, who.size, options)
        self._order = dist.BroadcastOptions()
        self._order.rootRank = 0
        self._order.timeout = timedelta(seconds=who.stall)

    def broadcast(self, piece: torch.Tensor) -> None:
        self._group.broadcast([piece], self._order).wait()


class _Nccl:
    """Pieces go through a buffer on the device. The clock is looked at here: NCCL's watchdog would end the process."""

    def __init__(self, store: Any, who: Membership) -> None:
        calm = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
        before = {name: os.environ.get(name) for name in calm}
        os.environ.update(calm)
        try:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = _NEVER  # noqa: SLF001
            self._group = dist.ProcessGroupNCCL(store, who.rank, who.size, options)
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
        self._sends, self._stall = who.rank == 0, who.stall
        self._buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8, device="cuda")
        cuda: Any = torch.cuda
        self._stream = cuda.Stream()

    def broadcast(self, piece: torch.Tensor) -> None:
        buffer = self._buffer[: piece.numel()]
        end = time.monotonic() + self._stall
        with torch.cuda.stream(self._stream):
            if self._sends:
                buffer.copy_(piece)
            order = dist.BroadcastOptions()
            order.rootRank = 0
            work = self._group.broadcast([buffer], order)
            while not work.is_completed():
                if time.monotonic() > end:
                    self._group.abort()
                    raise RuntimeError(f"a piece took longer than {self._stall:g} s")
                time.sleep(_POLL_SECONDS)
            if not self._sends:
                piece.copy_(buffer)


def _pieces(descriptor: int, flags: int) -> Iterator[torch.Tensor]:
    size = os.fstat(descriptor).st_size
    if not size:
        return
    mapped = mmap.mmap(descriptor, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    whole = torch.frombuffer(mapped, dtype=torch.uint8)
    for start in range(0, size, PIECE_BYTES):
        yield whole[start : start + PIECE_BYTES]


def device_in_use() -> str:
    """Return the UUID of the CUDA device that this process has in use; empty when it uses none."""
    cuda: Any = torch.cuda
    if not cuda.is_available() or not cuda.is_initialized():
        return ""
    return str(cuda.get_device_properties(cuda.current_device()).uuid)
