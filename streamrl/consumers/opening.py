"""Opens the rewards and models of a run for a worker or a command, and retries while a service is away."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import logging
import random
import socket
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Final

from streamrl.config import RunConfig
from streamrl.consumers.calls import described
from streamrl.consumers.plugins import LoadedReward, load_rewards
from streamrl.consumers.reward import AskedModel, RewardContext
from streamrl.consumers.scoring import Scorer
from streamrl.errors import DeadlineExceeded, PluginError, StreamrlError, Unreachable
from streamrl.queues.connection import Outage
from streamrl.queues.ledgers import Ledgers

logger = logging.getLogger(__name__)

_CLOSE_SECONDS: Final = 10.0
_OPEN_SHARE: Final = 0.9
"""Part of `supervisor.start_deadline` for which opening is retried while a service is away."""


def models_of(
    config: RunConfig, ledgers: Ledgers | None = None
) -> contextlib.AbstractAsyncContextManager[Mapping[str, AskedModel]]:
    if not config.reward_models:
        return contextlib.nullcontext({})
    from streamrl.consumers.models import open_models  # its HTTP client is slow to import

    return open_models(config, ledgers)


@contextlib.asynccontextmanager
async def open_scorer(
    config: RunConfig,
    context: RewardContext,
    rewards: Sequence[LoadedReward] | None = None,
    *,
    patience: float | None = None,
) -> AsyncIterator[Scorer]:
    """Load the rewards of a run, open them, and close them at the end of the block, also if opening fails.

    While a service is away, opening is retried for `patience` seconds; None: for most of `supervisor.start_deadline`.

    Raises:
        PluginError: a reward cannot be loaded or opened.
        Unreachable: a service stayed away during opening, in a run that has scores already.
        ConfigError: a reward refuses its own settings.
        DeadlineExceeded: a reward was not open within `supervisor.start_deadline`.
    """
    rewards = load_rewards(config) if rewards is None else rewards
    patience = _OPEN_SHARE * config.supervisor.start_deadline if patience is None else patience
    begun: list[LoadedReward] = []
    try:
        for reward in rewards:
            await _open(reward, context, patience, begun)
        yield Scorer(rewards, config.reward_worker, config.scoring, config.sampling.max_new_tokens)
    finally:
        for reward in reversed(begun):
            await _close(reward)


async def _open(reward: LoadedReward, context: RewardContext, patience: float, begun: list[LoadedReward]) -> None:
    """Open one reward; retry while its service is away. Adds it to `begun`, the rewards that must be closed."""
    if reward.life is None:
        return
    seconds = context.config.supervisor.start_deadline
    about = dataclasses.replace(context, deadline=reward.deadline(context.config.reward_worker))
    outage = Outage(patience)
    try:
        async with asyncio.timeout(seconds) as limit:
            while True:
                begun.append(reward)
                try:
                    await reward.life.open(about)
                except Exception as error:
                    if limit.expired() or not is_transient(error):
                        raise
                    pause = await _pause_before_next(reward, context, outage, error)
                    begun.pop()
                    await _close(reward)
                    await asyncio.sleep(pause)
                else:
                    return
    except TimeoutError as error:
        if not limit.expired():
            raise _not_opened(reward, error) from error
        raise DeadlineExceeded(f"reward {reward.name} was not open within {seconds:g} s", "see its `open`") from error
    except StreamrlError:
        raise
    except Exception as error:
        raise _not_opened(reward, error) from error


async def _pause_before_next(reward: LoadedReward, context: RewardContext, outage: Outage, error: Exception) -> float:
    now = time.monotonic()
    pause = outage.failed(now, random.random())  # noqa: S311 (jitter, no secret)
    if pause is None or outage.since is None:
        scored = await context.scored()  # if so, the service was there before: restart the worker instead of ending
        times = f", {outage.failures} times within {outage.patience:.3g} s"
        raise _not_opened(reward, error, times, Unreachable if scored else PluginError) from error
    if outage.failures & (outage.failures - 1) == 0:  # the first, second, fourth, ... time
        extra = {"reward": reward.name, "why": described(error), "times": outage.failures}
        logger.warning("a reward cannot be opened yet", extra=extra)
    return min(pause, outage.since + outage.patience - now)


def _not_opened(
    reward: LoadedReward, error: Exception, times: str = "", kind: type[StreamrlError] = PluginError
) -> StreamrlError:
    hint = "start its service, then continue with `streamrl up --resume`" if times else ""
    return kind(f"reward {reward.name} cannot be opened{times}: {described(error)}", hint)


async def _close(reward: LoadedReward) -> None:
    """Close a reward. A failure is only logged, because its scores are written."""
    if reward.life is None:
        return
    try:
        async with asyncio.timeout(_CLOSE_SECONDS):
            await reward.life.close()
    except Exception:
        logger.exception("a reward did not close", extra={"reward": reward.name})


_NETWORK_ERRNOS: Final = frozenset(
    {errno.EADDRNOTAVAIL, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETRESET, errno.ENETUNREACH}
)
"""Network errors without an exception class of their own; the others are `ConnectionError` or `TimeoutError`."""
_NO_ADDRESS: Final = "Multiple exceptions: [Errno "
"""Start of asyncio's message, without an errno, if no address of a host answers."""
_RETRY_STATUSES: Final = frozenset({408, 425, 429})
"""HTTP statuses below 500 after which another attempt makes sense."""
_LONGEST_CHAIN: Final = 20


def is_transient(error: BaseException) -> bool:
    """Whether the same call may succeed later: no connection, no answer in time, a failing or overloaded server.

    Libraries wrap such errors in their own, so the first error in the chain of causes that has an HTTP status or is a
    network error decides. Errors of files and values, and refused keys, are not transient.
    """
    if isinstance(error, StreamrlError):
        return isinstance(error, Unreachable | DeadlineExceeded)
    for link in _chain(error):
        status = _status(link)
        if status is not None:
            return status in _RETRY_STATUSES or status >= 500
        if _is_network_error(link):
            return True
    return False


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    for _ in range(_LONGEST_CHAIN):
        if link is None:
            return
        yield link
        if isinstance(link, BaseExceptionGroup):
            link = link.exceptions[0]
        else:
            link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _is_network_error(error: BaseException) -> bool:
    if isinstance(error, ConnectionError | TimeoutError | socket.gaierror):
        return True
    return isinstance(error, OSError) and (error.errno in _NETWORK_ERRNOS or str(error).startswith(_NO_ADDRESS))


def _status(error: BaseException) -> int | None:
    """HTTP status of an error of urllib, aiohttp, requests, httpx or openai."""
    response = getattr(error, "response", None)
    for owner, name in ((error, "status"), (error, "status_code"), (response, "status_code")):
        status = getattr(owner, name, None)
        if isinstance(status, int) and 400 <= status < 600:
            return status
    return None
