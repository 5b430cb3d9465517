"""The processes of one learner, and the few small collectives that keep them in step.

All ranks call the same collectives in the same order. Each ends within the deadline: when a rank is gone or stuck, the
others get an error and leave, and the supervisor starts the whole learner again.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from streamrl.cards import choose_device
from streamrl.config import RunConfig
from streamrl.errors import ConfigError, DeadlineExceeded, StreamrlError, Unreachable

RENDEZVOUS = "STREAMRL_RENDEZVOUS"
"""Environment variable with the rendezvous of the ranks: `file:///new/file` or `tcp://host:port`."""


def rows_of(size: int, rank: int, world: int) -> slice:
    """Rows of a tensor of `size` rows that a rank holds: equal pieces, the last shorter or empty, as FSDP2 cuts."""
    piece = -(-size // world)
    return slice(min(rank * piece, size), min((rank + 1) * piece, size))


class Ranks:
    """This process among the ranks of the learner. A single rank is a process group too."""

    def __init__(self, *, rank: int, world: int, device: torch.device, deadline: float, rendezvous: str = "") -> None:
        """Join, when all ranks do; `rendezvous` is `file:///path` of a new file, or `tcp://host:port`."""
        self.rank = rank
        self.world = world
        self.device = device
        self._deadline = deadline
        if world > 1 and not rendezvous:
            raise ConfigError("a learner of several ranks needs a rendezvous", f"set {RENDEZVOUS}=file:///new/file")
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
        arguments = {"store": HashStore()} if world == 1 and not rendezvous else {"init_method": rendezvous}
        with self._collective("joining the process group"):
            dist.init_process_group(
                backend, rank=rank, world_size=world, timeout=timedelta(seconds=deadline), **arguments
            )
        self.mesh: DeviceMesh = init_device_mesh(device.type, (world,))
        self.host_mesh = self.mesh if device.type == "cpu" else init_device_mesh("cpu", (world,))

    @classmethod
    def from_environment(cls, config: RunConfig, environ: Mapping[str, str] | None = None) -> Ranks:
        """Join by the variables of torchrun and `STREAMRL_RENDEZVOUS` or `MASTER_ADDR`; without them, one rank."""
        environ, learner = os.environ if environ is None else environ, config.learner
        rank, world = int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1"))
        if world != learner.ranks:
            raise ConfigError(f"{world} ranks were started, learner.ranks is {learner.ranks}", "make them the same")
        rendezvous = environ.get(RENDEZVOUS, "")
        if not rendezvous and "MASTER_ADDR" in environ:
            rendezvous = f"tcp://{environ['MASTER_ADDR']}:{environ.get('MASTER_PORT', '29500')}"
        local_rank = int(environ.get("LOCAL_RANK", str(rank)))
        device = choose_device(learner.device, config.model.dtype, section="learner", local_rank=local_rank)
        return cls(rank=rank, world=world, device=device, deadline=learner.collective_deadline, rendezvous=rendezvous)

    def broadcast_ints(self, values: Sequence[int] = ()) -> list[int]:
        """Rank 0's `values`, on all ranks. They wait until the deadline, so rank 0 must speak now and then."""
        if self.world == 1:
            return list(values)
        with self._collective("broadcast"):
            length = torch.tensor([len(values)], dtype=torch.int64)
            dist.broadcast(length, 0)
            data = torch.zeros(int(length), dtype=torch.int64)
            if self.rank == 0:
                data.copy_(torch.tensor(list(values), dtype=torch.int64))
            if data.numel():
                dist.broadcast(data, 0)
        return [int(value) for value in data.tolist()]

    def scatter(self, parts: Sequence[bytes]) -> bytes:
        """This rank's part of those that rank 0 has. Collective."""
        if self.world == 1:
            return parts[0]
        sizes = self.broadcast_ints([len(part) for part in parts])
        with self._collective("scatter"):
            if self.rank == 0:
                for rank, part in enumerate(parts):
                    if rank and part:
                        dist.send(torch.frombuffer(bytearray(part), dtype=torch.uint8), rank)
                return parts[0]
            data = torch.empty(sizes[self.rank], dtype=torch.uint8)
            if data.numel():
                dist.recv(data, 0)
        return data.numpy().tobytes()

    def all_max(self, *values: int) -> list[int]:
        return self._reduce_ints(values, dist.ReduceOp.MAX)

    def all_min(self, *values: int) -> list[int]:
        return self._reduce_ints(values, dist.ReduceOp.MIN)

    def share(self, folder: Path) -> bool:
        """Whether every rank has rank 0's `folder` under the same path, by a file that it puts there. Collective."""
        if self.world == 1:
            return True
        number = uuid.uuid4().int >> 65
        if self.rank == 0:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            (folder / f".rank-0-{number}").touch()
        probe = folder / f".rank-0-{self.broadcast_ints([number])[0]}"
        everyone = self.all_min(int(probe.exists())) == [1]
        if self.rank == 0:
            probe.unlink()
        return everyone

    def all_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the ranks in place, on its device."""
        if self.world > 1:
            with self._collective("sum"):
                dist.all_reduce(tensor)
        return tensor

    def give_back_memory(self) -> int:
        """Leave unused memory of torch to others on the device; returns the bytes that it still holds."""
        if self.device.type != "cuda":
            return 0
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self.device)

    def finish(self) -> None:
        """Return when the device has done, without an error, what it was told to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def _reduce_ints(self, values: Sequence[int], operation: dist.ReduceOp.RedOpType) -> list[int]:
        if self.world == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.int64)
        with self._collective("all-reduce"):
            dist.all_reduce(tensor, operation)
        return [int(value) for value in tensor.tolist()]

    @contextmanager
    def _collective(self, what: str) -> Iterator[None]:
        """Name what went wrong: torch raises the same error for a slow rank and for a dead one."""
        try:
            yield
        except RuntimeError as error:
            raise self._named(what, error) from error

    @contextmanager
    def computing(self, what: str) -> Iterator[None]:
        """As `_collective`, for collectives inside torch (FSDP); other errors pass."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, dist.DistError) or "gloo" in str(error):
                raise self._named(what, error) from error
            raise

    def _named(self, what: str, error: RuntimeError) -> StreamrlError:
        where = f"{what} of rank {self.rank} of {self.world}"
        if "connectFullMesh" in str(error):  # gloo takes the address of the host's name, which may be 127.0.0.1
            hint = "set GLOO_SOCKET_IFNAME on each host to the interface that the others reach"
            return Unreachable(f"{where}: the ranks do not reach each other ({error})", hint)
        if isinstance(error, dist.DistStoreError) or "imed out" in str(error) or "imeout" in str(error):
            hint = "a rank is stuck or gone; its log says why"
            return DeadlineExceeded(f"{where}: not all ranks came within {self._deadline:g} s", hint)
        return Unreachable(f"{where}: another rank is gone ({error})", "the log of that rank says why")
