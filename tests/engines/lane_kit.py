"""A learner's side of `weights.transport: collective`, and a member that is no server, for tests of real servers."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from aiohttp import web

from streamrl.config import RunConfig
from streamrl.servers.dialect import describe_version
from streamrl.servers.plugin.streamrl_engine.lane import Group
from streamrl.weight_sync import transports
from streamrl.weight_sync.files import TOKEN_VARIABLE
from streamrl.weight_sync.manifest import decode
from streamrl.weight_sync.publisher import Publisher
from streamrl.weight_sync.tensors import Version, announced_version
from tests.engines.server_kit import Live

MEMBER = Path(__file__).parents[1] / "weight_sync" / "lane_member.py"


@dataclass
class Sender:
    """`asked` are files that were asked for over HTTP; `strikes[N]` is called before piece N of a version."""

    publisher: Publisher
    server: transports.WeightServer
    asked: list[str] = field(default_factory=list)
    strikes: dict[int, Any] = field(default_factory=dict)
    pieces: int = 0

    def publish(self, number: int, tensors: Mapping[str, torch.Tensor]) -> Version:
        """A version that is on its way to who waits for it."""
        self.pieces = 0
        del self.asked[:]
        sources, lane = self.server.sources(), self.server.lane
        data = self.publisher.publish(
            epoch=1, version=number, step=number, tensors=tensors.items(), sources=sources, lane=lane
        )
        self.server.announce(decode(data))
        return announced_version(decode(data))


@asynccontextmanager
async def sending(run_dir: Path) -> AsyncIterator[Sender]:
    """The token is in RUN_DIR/weights.token."""
    config = RunConfig.model_validate(
        {
            "name": "r",
            "engine": {"kind": "vllm"},
            "weights": {"transport": "collective", "shard_bytes": 100_000, "deadline": 20},
        }
    )
    publisher = Publisher(config.weights, config.name, run_dir)
    app, broadcast = transports.weights_app, Group._broadcast
    sender: Sender

    def heard(*given: Any) -> web.Application:
        @web.middleware
        async def hear(request: web.Request, handler: Any) -> web.StreamResponse:
            if request.path.endswith(".safetensors"):
                sender.asked.append(request.path)
            return await handler(request)  # type: ignore[no-any-return]

        made = app(*given)
        made.middlewares.append(hear)
        return made

    def struck(group: Group, piece: torch.Tensor) -> None:
        sender.pieces += 1
        sender.strikes.get(sender.pieces, lambda: None)()
        broadcast(group, piece)

    with mock.patch.object(transports, "weights_app", heard), mock.patch.object(Group, "_broadcast", struck):
        async with transports.open_server(config, run_dir, publisher.root) as server:
            sender = Sender(publisher, server)
            yield sender
    shutil.rmtree(publisher.root, ignore_errors=True)


class PlainMember:
    """A process that takes versions as a server does."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    def want(self, version: Version) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(describe_version(version)).encode() + b"\n")

    async def http(self) -> int:
        """How many files of it did not come by the lane."""
        assert self.process.stdout is not None
        answer = json.loads(await asyncio.wait_for(self.process.stdout.readline(), 60))
        assert "error" not in answer, answer
        return int(answer["http"])


async def both_take(sender: Sender, member: PlainMember, live: Live, version: Version, blow: Any = None) -> None:
    """A server takes a version beside a member, which `blow` strikes in the middle if it is given."""
    sender.strikes = {3: blow} if blow else {}
    member.want(version)
    assert not await live.prefetch(version)
    if blow is None:
        await member.http()  # by whichever way: the next version waits for both
    await live.apply(version)


@asynccontextmanager
async def plain_member(run_dir: Path) -> AsyncIterator[PlainMember]:
    pipe, environ = asyncio.subprocess.PIPE, os.environ | {TOKEN_VARIABLE: str(run_dir / "weights.token")}
    command = [sys.executable, str(MEMBER)]
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=environ)
    try:
        yield PlainMember(process)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
