"""The reward that programs give: `use: gateway`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial
from pathlib import Path
from typing import Any, Final

import orjson
from typing_extensions import override

from streamrl.atomic import write_whole
from streamrl.consumers.gateway.offers import MAX_LEASE, MIN_LEASE, Offers, SampleOffer
from streamrl.consumers.reward import Reward, RewardContext, RewardSample, Score
from streamrl.errors import ConfigError, RewardUnavailable

logger = logging.getLogger(__name__)
_MIN_TOKEN: Final = 16
_ADDRESS_HINT: Final = (
    "set reward_worker.gateway_host to an address of this host, and reward_worker.gateway_port to a free port or 0"
)


class GatewayReward(Reward):
    """The score that a program posts for a sample it has fetched from the gateway (docs/guides/gateway.md).

    Each worker has its own gateway, at `reward_worker.gateway_port` plus the number of the worker. A sample waits for a
    program as long as any program sends requests. After `patience` seconds without one, the reward is unavailable,
    which does not count against the sample. A program that does not renew its lease in time loses the sample to the
    next one; after `lease.max_deliveries` such losses the attempt fails.

    Args:
        lease_seconds: length of a lease if the program asks for no other, 1 to 600.
        patience: seconds without a request of any program after which a waiting sample gives up.
        body_bytes: size of the largest request that is read.
    """

    deadline: float | None = 600.0

    def __init__(self, lease_seconds: float = 60.0, patience: float = 120.0, body_bytes: int = 1 << 20) -> None:
        if not MIN_LEASE <= lease_seconds <= MAX_LEASE:
            raise ValueError(f"lease_seconds must be {MIN_LEASE:g} to {MAX_LEASE:g}")
        if patience <= 0 or body_bytes <= 0:
            raise ValueError("patience and body_bytes must be above 0")
        self.url = ""
        self._lease_seconds = lease_seconds
        self._patience = patience
        self._body_bytes = body_bytes
        self._stack = contextlib.AsyncExitStack()
        self._offers = Offers(1)

    @override
    def counts(self) -> dict[str, int]:
        counts = self._offers.counts()
        return {name: counts[name] for name in ("waiting", "leased", "lost")}

    @override
    async def open(self, context: RewardContext) -> None:
        from streamrl.consumers.gateway.server import Gateway  # aiohttp.web is slow to import
        from streamrl.listening import listen

        worker = context.config.reward_worker
        if worker.gateway_port is None:
            raise ConfigError("a gateway reward needs reward_worker.gateway_port", "0 is any free port")
        token = await asyncio.to_thread(_token, worker.gateway_token_file)
        self._offers = Offers(context.config.lease.max_deliveries)
        about = {"run": context.config.name, "worker": context.worker}
        self._gateway = Gateway(self._offers, self._lease_seconds, self._body_bytes, token, about)
        port = worker.gateway_port and worker.gateway_port + _number(context.worker)
        serving = listen(
            self._gateway.app(), worker.gateway_host, port, what="the gateway of rewards", hint=_ADDRESS_HINT
        )
        self.url = await self._stack.enter_async_context(serving)
        file = context.run_dir / "rewards" / "gateway" / f"{context.worker or 'gateway'}.url"
        self._stack.callback(file.unlink, missing_ok=True)
        _tell(file, self.url)
        logger.info("gateway open", extra={"url": self.url, "token": token is not None})

    @override
    async def close(self) -> None:
        await self._stack.aclose()

    @override
    async def score(self, sample: RewardSample) -> Score:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Score] = loop.create_future()
        offer = SampleOffer(_render(sample), partial(_settle, future))
        self._gateway.add(offer)
        begun = loop.time()
        try:
            while not future.done():
                left = max(self._gateway.heard, begun) + self._patience - loop.time()
                if left <= 0 and not offer.lease:
                    raise RewardUnavailable(
                        f"no program has asked the gateway at {self.url} for {self._patience:g} s",
                        "start one: docs/guides/gateway.md",
                    )
                await asyncio.wait([future], timeout=left if left > 0 else self._patience)
            return future.result()
        finally:
            self._offers.withdraw(offer)


def _settle(future: asyncio.Future[Score], end: Score | Exception) -> None:
    if future.done():
        return  # the sample was given up at the same moment
    if isinstance(end, Score):
        future.set_result(end)
    else:
        future.set_exception(end)


def _number(worker: str) -> int:
    digits = worker.rpartition(".")[2]
    return int(digits) if digits.isdigit() else 0


def _token(path: Path | None) -> str | None:
    from streamrl.http import read_key

    token = read_key("reward_worker.gateway_token_file", path)
    if token is not None and len(token) < _MIN_TOKEN:
        raise ConfigError(f"the token in {path} has fewer than {_MIN_TOKEN} characters", "write a long random word")
    return token


def _tell(path: Path, url: str) -> None:
    """Write the URL into a file, because programs cannot know a port chosen by the system."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, f"{url}\n".encode())
    except OSError as error:
        logger.warning("cannot write the URL of the gateway", extra={"path": str(path), "error": str(error)})


def _render(sample: RewardSample) -> bytes:
    """The sample as the JSON that `streamrl reward test --sample` reads; `TypeError` if JSON cannot hold its answer."""
    prompt = sample.prompt
    seen: dict[str, Any] = {
        "group": sample.group_id,
        "index": sample.index,
        "evaluation": prompt.evaluation,
        "line": prompt.line,
        "prompt": prompt.text,
        "messages": prompt.messages,
        "answer": prompt.answer,
        "metadata": prompt.metadata,
        "response": sample.text,
        "finish": sample.finish,
        "tokens": sample.tokens,
    }
    return orjson.dumps(seen, option=orjson.OPT_SERIALIZE_NUMPY)
