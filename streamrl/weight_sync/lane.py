"""The learner's side of the fast lane: a version goes to all servers that wait for it, in one broadcast.

```
announce -> members join the version in the store -> all of the last version are there, or the grace is over
         -> decision -> the same group as before, or a new one -> the files in pieces
```
The protocol and the group are `streamrl_engine/lane.py`, which servers load. A server that missed the broadcast, for
whatever reason, takes the files over HTTP, so no failure here is one of the learner.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import logging
import socket
import threading
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

import msgspec
import torch.distributed

from streamrl.errors import CannotCreate
from streamrl.listening import reachable
from streamrl.servers.plugin.streamrl_engine.lane import GRACE, Group, proof
from streamrl.weight_sync.manifest import LanePlace, Manifest

logger = logging.getLogger(__name__)
_STALL_SHARE: Final = 0.1  # part of `weights.deadline` that one piece may take
_SHORTEST_STALL: Final = 1.0
_POLL_SECONDS: Final = 0.01
_KEPT: Final = 3  # versions whose keys stay in the store, for members that come late


class Joined(msgspec.Struct, frozen=True):
    """What a member says of itself; `device` is the UUID of its CUDA device, `group` the one that it still holds."""

    name: str
    device: str
    group: str
    proof: str


class Decision(msgspec.Struct, frozen=True):
    """Who takes part in one version; rank 0 is the learner."""

    group: str
    backend: str
    ranks: dict[str, int]


class Lane:
    """Sends each version that is announced, in a thread of its own; one that has not begun gives way to a newer one."""

    def __init__(self, root: Path, host: str, deadline: float, token: str, device: torch.device) -> None:
        self._root, self._deadline, self._token = root, deadline, token
        on_cuda = device.type == "cuda"
        self._device = device
        self._device_id = str(torch.cuda.get_device_properties(device).uuid) if on_cuda else ""
        address, stall = reachable(host), max(_SHORTEST_STALL, _STALL_SHARE * deadline)
        try:
            listener = socket.create_server((address, 0))
        except OSError as error:
            raise CannotCreate(
                f"cannot listen on {address}: {error}", "set weights.host to one of this host"
            ) from error
        self.place = LanePlace(host=address, port=listener.getsockname()[1], stall=stall)
        dist: Any = torch.distributed
        self._store = dist.TCPStore(
            address, self.place.port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self._numbers = itertools.count(1)
        self._versions: list[str] = []
        self._group: Group | None = None
        self._ranks: dict[str, int] = {}
        self._closing = False
        self._queue: SimpleQueue[Manifest | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="weights lane", daemon=True)
        self._thread.start()

    def announce(self, manifest: Manifest) -> None:
        """Send a version to the servers that want it; returns at once. Adapters and deltas only go as files."""
        if manifest.kind == "full":
            self._queue.put(manifest)

    async def close(self) -> None:
        self._closing = True
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join, GRACE + self.place.stall)

    def _run(self) -> None:
        while (todo := self._queue.get()) is not None:
            if not self._queue.empty():
                continue
            try:
                self._send(todo)
            except (RuntimeError, OSError, ValueError) as error:
                self._group = None
                extra = {"version": todo.version, "error": str(error)}
                logger.warning("weights broadcast failed: servers take the files", extra=extra)

    def _send(self, manifest: Manifest) -> None:
        members = self._gather(manifest.folder)
        if not self._goes_on(members):
            self._group, self._ranks = None, {name: rank for rank, name in enumerate(members, 1)}
        devices = [self._device_id, *(member.device for member in members.values())]
        backend = "nccl" if all(devices) and len(set(devices)) == len(devices) else "gloo"
        name = f"g{next(self._numbers)}" if self._group is None else self._group.name
        decision = Decision(name, backend, self._ranks if members else {})
        self._store.set(f"{manifest.folder}/decision", msgspec.json.encode(decision))
        if not members:
            return
        began = time.monotonic()
        if self._group is None:
            if self._device_id:
                torch.cuda.set_device(self._device)  # each thread has its own
            place = self.place
            self._group = Group(self._store, name, backend, 0, len(members) + 1, stall=place.stall, address=place.host)
        for shard in manifest.shards:
            self._group.transfer(
                self._root / manifest.folder / shard.file,
                lambda: self._closing or time.monotonic() - began > self._deadline,
            )
        extra = {"version": manifest.version, "members": len(members), "seconds": round(time.monotonic() - began, 3)}
        logger.info("weights broadcast", extra=extra)

    def _goes_on(self, members: dict[str, Joined]) -> bool:
        """Whether the group of the last broadcast can be used: it has these members, and all of them hold it."""
        group = self._group
        held = group is not None and all(member.group == group.name for member in members.values())
        return held and (not members or members.keys() == self._ranks.keys())

    def _gather(self, version: str) -> dict[str, Joined]:
        """Wait a short while for those who joined the version before; without any, for whoever comes."""
        awaited = self._joined(self._versions[-1]).keys() if self._versions else set()
        self._versions.append(version)
        end = time.monotonic() + min(GRACE, self.place.stall)
        while True:
            found = self._joined(version)
            if (awaited and awaited <= found.keys()) or time.monotonic() > end or self._closing:
                break
            time.sleep(_POLL_SECONDS)
        while len(self._versions) > _KEPT:
            old = self._versions.pop(0)
            for key in ("joined", "decision", *range(1, self._store.add(f"{old}/joined", 0) + 1)):
                self._store.delete_key(f"{old}/{key}")
        return found

    def _joined(self, version: str) -> dict[str, Joined]:
        keys = [f"{version}/{number}" for number in range(1, self._store.add(f"{version}/joined", 0) + 1)]
        members: dict[str, Joined] = {}
        for key in keys:
            with contextlib.suppress(msgspec.DecodeError):  # anybody on the network may write there
                member = msgspec.json.decode(self._store.get(key) if self._store.check([key]) else b"", type=Joined)
                if hmac.compare_digest(member.proof.encode(), proof(self._token, version, member.name).encode()):
                    members[member.name] = member
        return members
