"""Whole batches of sequences from any engine, padded into arrays: `generate_sequences` as trainers in batches know it.

```
prompts         left-padded      [ . . p p p | r r r r . . ]      responses     right-padded
attention_mask                   [ 0 0 1 1 1 | 1 1 1 1 0 0 ]      response_mask of the right part: the sampled tokens
position_ids                     [ 0 0 0 1 2 | 3 4 5 6 7 8 ]      go on into the padding
```
There is no greedy decoding: a token that was not drawn from the policy has no log-probability under it that an
importance ratio could use, and servers do not agree on what they report for one. Near-greedy is a low temperature.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from streamrl.engine import Completion, Engine, Finish, Request
from streamrl.errors import ConfigError, DataError

IntArray: TypeAlias = npt.NDArray[np.int64]
FloatArray: TypeAlias = npt.NDArray[np.float32]
OnAbort: TypeAlias = Literal["keep", "continue"]

_CONTINUATIONS: Final = 32
"""Times that one response is continued after an abort that came from elsewhere."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptBatch:
    """What to generate for.

    Attributes:
        prompts: token ids, shape (batch, prompt length), left-padded.
        attention_mask: 1 for tokens, 0 for padding, same shape; each row 0...0 1...1 with at least one 1.
        samples: responses for each prompt.
        max_new_tokens: longest response; also the length that responses are padded to.
        temperature: above 0.
        pad: token id of the padding.
        adapter: name of a loaded LoRA adapter.
    """

    prompts: IntArray
    attention_mask: IntArray
    samples: int = 1
    max_new_tokens: int = 256
    temperature: float = 1.0
    pad: int = 0
    adapter: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SequenceBatch:
    """What was generated; row `i * samples + k` is response k to prompt i. R is `max_new_tokens`, P the prompt length.

    Attributes:
        prompts: (rows, P), left-padded.
        responses: (rows, R), right-padded.
        input_ids: (rows, P + R), the two next to each other.
        attention_mask: (rows, P + R), 1 for tokens of prompt and response.
        position_ids: (rows, P + R), from 0 at the first token of the prompt; 0 in its padding.
        response_mask: (rows, R), 1 for sampled tokens, the one that ends the sequence included.
        rollout_log_probs: (rows, R), as sampled; 0 in the padding.
        versions: (rows, R), version of the weights that sampled each token; -1 in the padding.
        finishes: why each response ended; `abort`: its tokens are what there was.
    """

    prompts: IntArray
    responses: IntArray
    input_ids: IntArray
    attention_mask: IntArray
    position_ids: IntArray
    response_mask: IntArray
    rollout_log_probs: FloatArray
    versions: IntArray
    finishes: tuple[Finish, ...]


async def generate_sequences(engine: Engine, batch: PromptBatch, *, on_abort: OnAbort = "keep") -> SequenceBatch:
    """Generate all responses of a batch and put them into arrays.

    Cancelling aborts nothing but this batch. The first error cancels the rest of the batch and is raised.

    Args:
        engine: any, started.
        batch: the prompts.
        on_abort: what becomes of a response that the engine aborts (`Engine.abort`, `pause("abort")`): `keep` takes
            what there is; `continue` asks for the rest with the prefix as the prompt, until it ends by itself.

    Raises:
        ConfigError: a batch that makes no sense: shapes, masks or numbers; also a temperature of 0 (greedy).
        DataError: the engine cannot serve a prompt.
        Unreachable: the engine died.
    """
    rows = _rows(batch)
    name = uuid.uuid4().hex[:12]
    numbers = itertools.count()

    async def one(prompt: npt.NDArray[np.int32], affinity: str) -> Completion:
        request = Request(
            id=f"{name}-{next(numbers)}",
            tokens=prompt,
            max_new_tokens=batch.max_new_tokens,
            temperature=batch.temperature,
            adapter=batch.adapter,
            affinity=affinity,
        )
        return await (_to_the_end(engine, request) if on_abort == "continue" else engine.generate(request))

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(one(prompt, f"{name}-p{at}"))
                for at, prompt in enumerate(rows)
                for _ in range(batch.samples)
            ]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return pad(batch, [task.result() for task in tasks])


def pad(batch: PromptBatch, completions: Sequence[Completion]) -> SequenceBatch:
    """Put completions into arrays, `samples` for each prompt in turn; `ConfigError` when they do not fit the batch."""
    count, length = len(batch.prompts) * batch.samples, batch.max_new_tokens
    if len(completions) != count or any(len(completion.tokens) > length for completion in completions):
        raise ConfigError(f"{len(completions)} completions do not fit a batch of {count} with {length} tokens each")
    prompts = np.repeat(batch.prompts.astype(np.int64), batch.samples, axis=0)
    prompt_mask = np.repeat(batch.attention_mask.astype(np.int64), batch.samples, axis=0)
    prompts = np.where(prompt_mask == 1, prompts, batch.pad)
    responses = np.full((count, length), batch.pad, dtype=np.int64)
    mask = np.zeros((count, length), dtype=np.int64)
    logprobs = np.zeros((count, length), dtype=np.float32)
    versions = np.full((count, length), -1, dtype=np.int64)
    for row, completion in enumerate(completions):
        end = len(completion.tokens)
        responses[row, :end] = completion.tokens
        mask[row, :end] = 1
        logprobs[row, :end] = completion.logprobs
        for first, version in completion.runs:
            versions[row, first:end] = version
    before = np.clip(np.cumsum(prompt_mask, axis=1) - 1, 0, None)
    after = prompt_mask.sum(axis=1, keepdims=True) + np.arange(length)
    return SequenceBatch(
        prompts=prompts,
        responses=responses,
        input_ids=np.concatenate([prompts, responses], axis=1),
        attention_mask=np.concatenate([prompt_mask, mask], axis=1),
        position_ids=np.concatenate([before, after], axis=1),
        response_mask=mask,
        rollout_log_probs=logprobs,
        versions=versions,
        finishes=tuple(completion.finish for completion in completions),
    )


def _rows(batch: PromptBatch) -> list[npt.NDArray[np.int32]]:
    prompts, mask = batch.prompts, batch.attention_mask
    if prompts.ndim != 2 or prompts.shape != mask.shape or not prompts.size:
        raise ConfigError(f"prompts {prompts.shape} and attention_mask {mask.shape} do not form a batch")
    if batch.temperature <= 0:
        raise ConfigError(
            "greedy decoding is not offered: its tokens are not drawn from the policy",
            "take a low temperature, and log-probabilities that belong to it",
        )
    if batch.samples < 1 or batch.max_new_tokens < 1:
        raise ConfigError(f"samples {batch.samples} and max_new_tokens {batch.max_new_tokens} must be at least 1")
    if not np.isin(mask, (0, 1)).all() or (np.diff(mask.astype(np.int64), axis=1) < 0).any():
        raise ConfigError("attention_mask must be 0 for padding on the left and 1 for tokens")
    if not mask.any(axis=1).all():
        raise DataError(f"prompt {int(np.flatnonzero(~mask.any(axis=1))[0])} of the batch is empty")
    return [row[kept == 1].astype(np.int32) for row, kept in zip(prompts, mask, strict=True)]


async def _to_the_end(engine: Engine, request: Request) -> Completion:
    """Continue a response after each abort, unless the engine returns no more tokens."""
    from streamrl.producers.colocated import PartialResponse

    pieces = iter(range(_CONTINUATIONS))

    async def ask(rest: Request) -> Completion | None:
        return await engine.generate(rest) if next(pieces, None) is not None else None

    partial = PartialResponse(request, frozenset(), context=len(request.tokens) + request.max_new_tokens)
    return await partial.complete(ask)
