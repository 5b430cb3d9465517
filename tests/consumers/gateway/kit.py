"""A gateway that is open without a run, and a program that speaks to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from streamrl.config import RunConfig
from streamrl.consumers import RewardContext, make_sample
from streamrl.consumers.gateway.reward import GatewayReward


class Program:
    """What a program in any language would do."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self._session = session
        self.headers: dict[str, str] = {}

    async def send(self, method: str, path: str, body: Any = None, data: bytes | None = None) -> tuple[int, Any]:
        """Status and JSON of an answer."""
        async with self._session.request(
            method, f"{self.url}{path}", json=body, data=data, headers=self.headers
        ) as answer:
            assert answer.content_type == "application/json"
            assert answer.headers["Cache-Control"] == "no-store"
            found = await answer.json()
            assert found["version"] == 1
            return answer.status, found

    async def lease(self, count: int = 1, **fields: Any) -> list[dict[str, Any]]:
        status, found = await self.send("POST", "/v1/lease", {"count": count, **fields})
        assert status == 200, found
        return found["samples"]

    async def post(self, *scores: dict[str, Any]) -> dict[str, Any]:
        status, found = await self.send("POST", "/v1/scores", {"scores": list(scores)})
        assert status == 200, found
        return found

    async def error(self, status: int, method: str, path: str, body: Any = None, data: bytes | None = None) -> Any:
        """The error of a request that must be answered with this status."""
        got, found = await self.send(method, path, body, data)
        assert got == status, found
        assert set(found["error"]) == {"code", "message", "hint"}
        return found["error"]


def configured(**worker: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "rewards": [{"use": "gateway"}],
            "reward_worker": {"gateway_port": 0, **worker},
            "lease": {"max_deliveries": 3},
        }
    )


@contextlib.asynccontextmanager
async def opened(tmp_path: Path, *, worker: str = "", **args: Any) -> AsyncIterator[tuple[GatewayReward, Program]]:
    """A reward that is open, and a program that has its URL; `config` are keys of reward_worker."""
    reward = GatewayReward(**args)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        try:
            await reward.open(RewardContext(configured(), tmp_path, worker=worker))
            yield reward, Program(reward.url, session)
        finally:
            await reward.close()


@contextlib.asynccontextmanager
async def scoring(reward: GatewayReward, *texts: str, **fields: Any) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Tasks that wait for the scores of samples, as those of a worker do."""
    tasks = [
        asyncio.create_task(reward.score(make_sample(text, group=7, index=index, **fields)))
        for index, text in enumerate(texts)
    ]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
