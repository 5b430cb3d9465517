"""The models of a run, opened for the life of a reward worker."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

from streamrl.config import RewardModelConfig, RunConfig
from streamrl.consumers.models.client import ModelClient
from streamrl.consumers.models.rate_limit import LocalStore, Quota, RateLimit, RedisStore
from streamrl.consumers.models.servers import RewardServer, RewardServers
from streamrl.consumers.reward import RewardContext
from streamrl.http import read_key
from streamrl.queues.ledgers import Ledgers

_WAITING_SHARE = 0.5
"""Part of a reward's deadline that its samples may wait for the rate limit of their model."""


@contextlib.asynccontextmanager
async def open_models(config: RunConfig, ledgers: Ledgers | None = None) -> AsyncIterator[Mapping[str, ModelClient]]:
    """Every entry of `reward_models`, by name, with its servers watched for the length of this block.

    A server that is away is no error: requests wait for it until their deadline.

    Args:
        config: of the run.
        ledgers: of the run, for the servers that streamrl starts and those that people add, and for rate limits that
            all of the run share; None outside of a run: then the servers are those of the configuration, and the
            limits are kept by this process alone.

    Raises:
        ConfigError: a file with a key cannot be read.
    """
    clients = {}
    for name, model in config.reward_models.items():
        key = await asyncio.to_thread(read_key, f"reward_models.{name}.api_key_file", model.api_key_file)
        clients[name] = ModelClient(name, model, api_key=key, limit=_limit(name, model, ledgers))
    try:
        async with asyncio.TaskGroup() as tasks:
            watches = [
                tasks.create_task(client.watch(_servers(client, ledgers)), name=f"servers of {name}")
                for name, client in clients.items()
            ]
            yield clients
            for watch in watches:
                watch.cancel()
    except BaseExceptionGroup as group:
        if len(group.exceptions) == 1:
            raise group.exceptions[0] from None
        raise
    finally:
        for client in clients.values():
            await client.close()


def places(context: RewardContext, model: RewardModelConfig, tokens: int, requests: int = 1) -> int | None:
    """Samples that a reward should work on at once in one worker, so that the rate limit of its model makes none late.

    Args:
        context: of the reward.
        model: that it asks.
        tokens: that a request costs at least.
        requests: that a sample needs.

    Returns:
        Samples of this worker that get through in half of the deadline; None: the model has no limits.
    """
    quota = Quota(model.requests_per_minute, model.tokens_per_minute)
    most = quota.within(_WAITING_SHARE * context.deadline, tokens)
    return None if most is None else max(1, most // (requests * context.config.reward_worker.replicas))


def _limit(name: str, model: RewardModelConfig, ledgers: Ledgers | None) -> RateLimit | None:
    """The rate limit of a model; None: it has none."""
    quota = Quota(model.requests_per_minute, model.tokens_per_minute)
    if quota == Quota(None, None):
        return None
    store = LocalStore() if ledgers is None else RedisStore(ledgers.connection, ledgers.train.keys, name)
    return RateLimit(name, quota, store)


def _servers(client: ModelClient, ledgers: Ledgers | None) -> Callable[[], Awaitable[Sequence[RewardServer]]]:
    """Where the list of a model's servers comes from."""

    async def listed() -> Sequence[RewardServer]:
        if ledgers is None:
            return [RewardServer(url, url) for url in client.config.url]
        return await RewardServers(ledgers).present(client.name, client.config.url)

    return listed
