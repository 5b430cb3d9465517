"""Checks of a server before its first request: is it the right one, and can it do what a run needs."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from streamrl.config import ModelConfig, RunConfig
from streamrl.engine import Request
from streamrl.errors import ConfigError, DataError, Unreachable, WireError
from streamrl.http import BadAnswer, HttpClient, Lost
from streamrl.servers.dialect import PROBE, Dialect, ServerInfo

logger = logging.getLogger(__name__)
PATIENCE: Final = 15.0
"""Seconds in which a server that streamrl did not start has to answer."""
_KNOCK_PAUSE: Final = 0.5
_ABOUT_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True)
class Facts:
    context: int  # longest prompt plus response in tokens
    vocabulary: int | None
    fixed: bool  # its weights cannot be replaced


@dataclass(frozen=True, slots=True)
class _Expected:
    vocabulary: int | None
    positions: int | None
    probe: tuple[int, ...] | None


async def connect(client: HttpClient, dialect: Dialect, config: RunConfig, *, external: bool) -> Facts:
    """Check that the server fits the run; `ConfigError` says what to change, `Unreachable`: no answer.

    An `external` server may have been left paused or asleep by a process that died; it is resumed.
    """
    if external:
        await _reach(client, dialect)
    about = await _ask(client, dialect)
    logger.info("engine server", extra={"url": client.url, "server": dialect.kind, "version": about.version})
    if about.missing:
        raise ConfigError(f"the {dialect.kind} server at {client.url} cannot take part: {about.missing}", about.missing)
    expected = await asyncio.to_thread(_expectations, config.model, about.probe is not None)
    _compare(client.url, about, expected)
    facts = Facts(
        context=_context(client.url, about, config, expected),
        vocabulary=expected.vocabulary,
        fixed=not about.can_update,
    )
    if external and about.can_update:
        await _let_go(client, dialect)
    await _try_out(client, dialect, config, expected.probe)
    return facts


async def _reach(client: HttpClient, dialect: Dialect) -> None:
    """Wait for any answer; a server that is not ready now (503) may be paused, and counts."""
    loop = asyncio.get_running_loop()
    end = loop.time() + PATIENCE
    while True:
        try:
            await client.call(dialect.ready(), PATIENCE, retry=False)
        except BadAnswer as error:
            if error.status != 503:
                raise _refusal(client, dialect, error) from error
            return
        except DataError as error:
            raise _refusal(client, dialect, error) from error
        except Lost:
            if loop.time() + _KNOCK_PAUSE > end:
                raise
        else:
            return
        await asyncio.sleep(_KNOCK_PAUSE)


async def _ask(client: HttpClient, dialect: Dialect) -> ServerInfo:
    try:
        answers = [await client.call(call, _ABOUT_SECONDS) for call in dialect.about()]
        return dialect.read_about(answers)
    except ConfigError as error:
        if isinstance(error, DataError):
            raise _refusal(client, dialect, error) from error
        raise
    except (BadAnswer, WireError) as error:
        raise _refusal(client, dialect, error) from error


def _refusal(client: HttpClient, dialect: Dialect, error: BadAnswer | DataError | WireError) -> ConfigError:
    status = error.status if isinstance(error, BadAnswer) else 0
    if status == 401:
        return ConfigError(f"{client.url} wants a key: {error.message}", "set engine.api_key_file to its file")
    return ConfigError(
        f"{client.url} does not answer as engine.kind {dialect.kind} does: {error.message}",
        "see engine.kind, engine.url and docs/guides/engines.md for the flags and variables it is started with",
    )


def _expectations(model: ModelConfig, probe: bool) -> _Expected:
    """Read the run's own model and tokenizer. A missing one is only logged: it is reported where it is loaded."""
    from transformers import AutoConfig, AutoTokenizer

    vocabulary = positions = ids = None
    try:
        described: Any = AutoConfig.from_pretrained(model.path).get_text_config()
    except (OSError, ValueError, KeyError, ImportError):
        logger.warning("no configuration of the model to compare the server with", extra={"model": model.path})
    else:
        vocabulary = getattr(described, "vocab_size", None)
        positions = getattr(described, "max_position_embeddings", None)
    if probe:
        try:
            tokenizer = AutoTokenizer.from_pretrained(model.tokenizer or model.path)
            ids = tuple(int(token) for token in tokenizer(PROBE, add_special_tokens=False)["input_ids"])
        except (OSError, ValueError, ImportError) as error:
            logger.warning("no tokenizer to compare the server with", extra={"why": str(error)})
    return _Expected(vocabulary, positions, ids)


def _compare(url: str, about: ServerInfo, expected: _Expected) -> None:
    if None not in {about.probe, expected.probe} and about.probe != expected.probe:
        raise ConfigError(
            f"the server at {url} ({about.model!r}) has another tokenizer: {PROBE!r} is {_short(about.probe)} there and"
            f" {_short(expected.probe)} here",
            "start it with the model of the run (model.path), or set model.path to the server's",
        )


def _short(ids: Sequence[int] | None) -> str:
    return str(list(ids or ())[:8])


def _context(url: str, about: ServerInfo, config: RunConfig, expected: _Expected) -> int:
    wanted = min(config.model.context, expected.positions or config.model.context)
    if about.context is not None and about.context < wanted:
        raise ConfigError(
            f"the server at {url} has a context of {about.context} tokens, the run needs {wanted}",
            f"start it with a context of {wanted} or set model.context to {about.context}",
        )
    return wanted


async def _let_go(client: HttpClient, dialect: Dialect) -> None:
    """Wake and resume a server: the process that put it to sleep or paused it may have died."""
    for call in (*dialect.wake(("weights", "kv_cache")), *dialect.resume()):
        try:
            await client.call(call, _ABOUT_SECONDS)
        except (BadAnswer, DataError) as error:
            logger.warning("a server that may be paused does not resume", extra={"why": error.message})


async def _try_out(client: HttpClient, dialect: Dialect, config: RunConfig, probe: Sequence[int] | None) -> None:
    """Sample one token, to check that the route is open and returns token ids and log-probabilities."""
    request = Request(
        id=uuid.uuid4().hex,
        tokens=np.asarray(list(probe or (1,))[:4], dtype=np.int32),
        max_new_tokens=1,
        temperature=config.sampling.temperature,
    )
    received = 0
    try:
        async with asyncio.timeout(config.weights.deadline):
            stream = client.stream(dialect.generation(request, version=0), config.weights.deadline)
            async with aclosing(stream) as messages:
                async for message in messages:
                    chunk = dialect.chunk(message, received=received)
                    received += len(chunk.tokens)
                    if chunk.finish is not None:
                        break
    except TimeoutError as error:
        raise Unreachable(
            f"the server at {client.url} sampled no token within {config.weights.deadline:g} s", "see the server's log"
        ) from error
    except (BadAnswer, DataError, WireError) as error:
        raise _refusal(client, dialect, error) from error
    if received != 1:
        raise ConfigError(f"the server at {client.url} was asked for one token and returned {received}")
