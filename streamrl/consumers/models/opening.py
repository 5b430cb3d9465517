"""The models of a run, opened for the life of a reward worker."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

from streamrl.config import RewardModelConfig, RunConfig
from streamrl.consumers.models.client import Limit, ModelClient
from streamrl.http import read_key
from streamrl.queues.ledgers import Ledgers


@contextlib.asynccontextmanager
async def open_models(
    config: RunConfig,
    ledgers: Ledgers | None = None,
    *,
    limit: Callable[[str, RewardModelConfig], Limit | None] = lambda *_: None,
) -> AsyncIterator[Mapping[str, ModelClient]]:
    """Every entry of `reward_models`, by name, with its servers watched for the length of this block.

    A server that is away is no error: requests wait for it until their deadline.

    Args:
        config: of the run.
        ledgers: of the run, for the servers that streamrl starts and those that people add; None outside of a run:
            then the servers are those of the configuration.
        limit: makes the shared rate limit of a model; None: it has none.

    Raises:
        ConfigError: a file with a key cannot be read.
    """
    clients = {}
    for name, model in config.reward_models.items():
        key = await asyncio.to_thread(read_key, model.api_key_file, f"reward_models.{name}.api_key_file")
        clients[name] = ModelClient(name, model, api_key=key, limit=limit(name, model))
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


def _servers(client: ModelClient, ledgers: Ledgers | None) -> Callable[[], Awaitable[Sequence[str]]]:
    """Where the list of a model's servers comes from."""

    async def listed() -> Sequence[str]:
        if ledgers is None:
            return client.config.url
        servers = await ledgers.reward_servers.present(client.name, client.config.url)
        return [server.url for server in servers if server.awake]

    return listed
