"""Checks of a server before its first request: is it the right one, and can it do what a run needs."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any, Final

import numpy as np

from streamrl.config import ModelConfig, RunConfig
from streamrl.engine import Request, RequestImage, RequestLimits
from streamrl.errors import ConfigError, DataError, Unreachable, WireError
from streamrl.http import BadAnswer, HttpClient, Lost
from streamrl.images.encoded import blank
from streamrl.images.vision import vision_of
from streamrl.servers.dialect import PROBE, Dialect
from streamrl.servers.request import UNKNOWN_VOCABULARY, Response, read_response

logger = logging.getLogger(__name__)
_PATIENCE: Final = 15.0  # in which a server that streamrl did not start has to answer
_ABOUT_SECONDS: Final = 30.0
_SIDES: Final = (1, 64, 128, 256, 512, 1024)  # of images that are tried


async def connect(client: HttpClient, dialect: Dialect, config: RunConfig, *, external: bool) -> RequestLimits:
    """Check that the server fits the run; `ConfigError` says what to change. An `external` one is waited for."""
    try:
        return await _connect(client, dialect, config, external=external)
    except (BadAnswer, DataError, WireError) as error:
        if isinstance(error, BadAnswer) and error.status == 401:
            said = f"{client.url} wants a key: {error.message}"
            raise ConfigError(said, "set engine.api_key_file to its file") from error
        raise ConfigError(
            f"{client.url} does not answer as engine.kind {dialect.kind} does: {error.message}",
            "see engine.kind, engine.url and docs/guides/engines.md for the flags and variables it is started with",
        ) from error


async def _connect(client: HttpClient, dialect: Dialect, config: RunConfig, *, external: bool) -> RequestLimits:
    loop = asyncio.get_running_loop()
    end = loop.time() + (_PATIENCE if external else 0.0)
    answers: list[Any] | None = None
    while answers is None:
        try:
            answers = [await client.call(call, _ABOUT_SECONDS) for call in dialect.about()]
        except Lost:  # it may be starting; the client pauses between its attempts
            if loop.time() >= end:
                raise
    if external:
        await check_ready(client, dialect, _ABOUT_SECONDS)
    about = dialect.read_about(answers)
    logger.info("engine server", extra={"url": client.url, "server": dialect.kind, "version": about.version})
    vocabulary, positions = await asyncio.to_thread(_sizes, config.model)
    context = min(config.model.context, positions or config.model.context)
    if about.context is not None and about.context < context:
        said = f"the server at {client.url} has a context of {about.context} tokens, the run needs {context}"
        raise ConfigError(said, f"start it with a context of {context} or set model.context to {about.context}")
    probe = None if about.probe is None else await asyncio.to_thread(_probe, config.model)
    if probe is not None and probe != about.probe:
        raise ConfigError(
            f"the server at {client.url} ({about.model!r}) has another tokenizer: {PROBE!r} begins with"
            f" {(about.probe or ())[:8]} there and {probe[:8]} here",
            "start it with the model of the run (model.path), or set model.path to the server's",
        )
    if external and not dialect.fixed:
        await _let_go(client, dialect)
    limits = RequestLimits(context, vocabulary or UNKNOWN_VOCABULARY)
    if max(probe or (1,)) >= limits.vocabulary:
        said = f"the tokenizer has ids above the vocabulary of the model, {limits.vocabulary}"
        raise ConfigError(said, "set model.tokenizer to that of model.path")
    for request in await asyncio.to_thread(_tries, config, (probe or (1,))[:4], context):
        await _try_out(client, dialect, config, request, limits)
    return limits


def _sizes(model: ModelConfig) -> tuple[int | None, int | None]:
    """Vocabulary and positions of the run's model. A missing one is reported where it is loaded."""
    from transformers import AutoConfig

    try:
        described: Any = AutoConfig.from_pretrained(model.path).get_text_config()
    except (OSError, ValueError, KeyError, ImportError):
        logger.warning("no configuration of the model to compare the server with", extra={"model": model.path})
        return None, None
    return getattr(described, "vocab_size", None), getattr(described, "max_position_embeddings", None)


def _probe(model: ModelConfig) -> tuple[int, ...] | None:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model.tokenizer or model.path)
        return tuple(int(token) for token in tokenizer(PROBE, add_special_tokens=False)["input_ids"])
    except (OSError, ValueError, ImportError) as error:
        logger.warning("no tokenizer to compare the server with", extra={"why": str(error)})
        return None


async def check_ready(client: HttpClient, dialect: Dialect, seconds: float) -> None:
    """Raise what `HttpClient.call` raises, unless the server is ready or says 503, as it does while it is paused."""
    try:
        await client.call(dialect.ready, seconds, retry=False)
    except BadAnswer as error:
        if error.status != 503:
            raise


async def _let_go(client: HttpClient, dialect: Dialect) -> None:
    """Wake and resume a server: the process that put it to sleep or paused it may have died."""
    for call in (*dialect.wake(("weights", "kv_cache")), *dialect.resume):
        try:
            await client.call(call, _ABOUT_SECONDS)
        except (BadAnswer, DataError) as error:
            logger.warning("a server that may be paused does not resume", extra={"why": error.message})


def _tries(config: RunConfig, prompt: tuple[int, ...], context: int) -> list[Request]:
    """Requests for one token: with text alone and, for a model that sees, with a small and a large image."""
    text = Request("check", np.asarray(prompt, dtype=np.int32), 1, config.sampling.temperature)
    if (vision := vision_of(config.model)) is None:
        return [text]
    found = [replace(text, forbidden=vision.forbidden)]
    before, behind = ([] if mark is None else [mark] for mark in vision.around)
    # Letter by letter: a server that makes a text of the tokens and tokens of that again would count fewer.
    before = [token for letter in PROBE[:4] for token in vision.ids(letter)] + before
    fitting = [side for side in _SIDES if len(before + vision.tokens_of((side, side)) + behind) < context]
    for side in sorted({min(fitting, default=0), max(fitting, default=0)} - {0}):
        image, ids = blank(side, side), vision.tokens_of((side, side))
        shown = RequestImage(image.sha256, image.data, len(before), len(ids), vision.token_id)
        tokens = np.asarray([*before, *ids, *behind], dtype=np.int32)
        found.append(replace(found[0], tokens=tokens, images=(shown,)))
    return found


async def _try_out(
    client: HttpClient, dialect: Dialect, config: RunConfig, request: Request, limits: RequestLimits
) -> None:
    """Sample one token, to check that the route is open and returns token ids and log-probabilities."""
    seconds = config.weights.deadline
    try:
        async with asyncio.timeout(seconds):
            done = await read_response(client, dialect, Response(request, limits, 0), seconds=seconds)
    except DataError as error:
        if not request.images:
            raise
        hint = error.hint or "start it with the model of the run (model.path), and with images allowed"
        raise ConfigError(f"the server at {client.url} does not take images: {error.message}", hint) from error
    except TimeoutError as error:
        said = f"the server at {client.url} sampled no token within {seconds:g} s"
        raise Unreachable(said, "see the server's log") from error
    if len(done.tokens) != 1:
        raise ConfigError(f"the server at {client.url} was asked for one token and returned {len(done.tokens)}")
