"""Log-probabilities of given tokens from vLLM or SGLang servers that run already: what they are asked and answer.

Both score a prompt: the sampled tokens go in as a part of it, and one more token, which nobody reads, is sampled.
Neither applies a temperature to what it says of a prompt, so temperature 1 is the only one that fits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from streamrl.errors import ConfigError, WireError
from streamrl.http import Call
from streamrl.learner.batch import TrainSample
from streamrl.wire import Float32Array

MODELS: Final = Call("GET", "/v1/models", repeatable=True)
_LOWEST: Final = -9000.0
"""vLLM writes -9999 for a log-probability of minus infinity."""
_HIGHEST: Final = 1e-3
"""Rounding lifts a log-probability above 0 by less; a server that answers with logits goes far beyond."""
_SPARE: Final[Mapping[str, int]] = {"vllm": 1, "sglang": 7}
"""Places of a server's context that no prompt may take: the token that it samples, and what SGLang keeps free."""
_SGLANG_LAST: Final = 0
"""What SGLang calls the last token of its vocabulary; the value is the right one's."""


@dataclass(frozen=True, slots=True)
class About:
    """What a server says of itself.

    Attributes:
        kind: which of the two it is.
        model: name under which it serves its model.
        context: tokens that it keeps of a request at most; None when it does not say.
    """

    kind: Literal["vllm", "sglang"]
    model: str
    context: int | None

    @property
    def longest(self) -> int | None:
        """Longest prompt plus response that it scores; None when it does not say."""
        return None if self.context is None else self.context - _SPARE[self.kind]


def read_about(answer: Any, url: str) -> About:
    """Understand the answer to `MODELS`.

    Raises:
        ConfigError: it is neither vLLM nor SGLang.
    """
    try:
        entry = next(entry for entry in answer["data"] if not entry.get("parent"))
        kind, model, context = entry["owned_by"], str(entry["id"]), entry.get("max_model_len")
    except (KeyError, TypeError, AttributeError, StopIteration) as error:
        raise ConfigError(
            f"learner.reference.url {url} lists no models as vLLM and SGLang do", "name servers of one of them"
        ) from error
    if kind not in {"vllm", "sglang"}:
        raise ConfigError(f"learner.reference.url {url} is a server of {kind!r}", "name servers of vLLM or SGLang")
    return About(kind, model, context if isinstance(context, int) else None)


def scoring(about: About, sample: TrainSample) -> Call:
    """Ask for the log-probabilities of a response. A repeat is harmless."""
    ids = [*sample.prompt.tolist(), *sample.tokens.tolist()]
    if about.kind == "vllm":
        body: dict[str, Any] = {
            "model": about.model,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": 0,
        }
        return Call("POST", "/v1/completions", body, repeatable=True)
    body = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": len(sample.prompt) - 1,
    }
    return Call("POST", "/generate", body, repeatable=True)


def read_scores(about: About, answer: Any, sample: TrainSample) -> Float32Array:
    """Understand the answer to `scoring`; float32, shape (completion tokens,).

    Raises:
        WireError: tokens other than those that were sent, or a value that is no log-probability.
    """
    count = len(sample.tokens)
    try:
        pairs = _vllm_pairs(answer, sample.tokens.tolist()) if about.kind == "vllm" else _sglang_pairs(answer, count)
        tokens, values = zip(*pairs, strict=True)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise WireError(f"no log-probabilities of a prompt in the answer of {about.kind}: {error!r}") from error
    unnamed = {_SGLANG_LAST} if about.kind == "sglang" else set()
    if any(said != sent and said not in unnamed for said, sent in zip(tokens, sample.tokens.tolist(), strict=True)):
        raise WireError(f"{about.kind} answered with the log-probabilities of other tokens")
    if not all(math.isfinite(value) and _LOWEST < value < _HIGHEST for value in values):
        raise WireError(
            f"{about.kind} answered with a value that is no log-probability: {min(values)} to {max(values)}",
            "a token may be impossible under the reference, or the server returns logits",
        )
    return np.minimum(np.asarray(values, dtype=np.float32), 0)


def _vllm_pairs(answer: Any, tokens: Sequence[int]) -> list[tuple[int, float]]:
    entries: Sequence[Mapping[str, Any]] = answer["choices"][0]["prompt_logprobs"][-len(tokens) :]
    return [(token, float(entry[str(token)]["logprob"])) for token, entry in zip(tokens, entries, strict=True)]


def _sglang_pairs(answer: Any, count: int) -> list[tuple[int, float]]:
    entries = answer["meta_info"]["input_token_logprobs"][-count:]
    return [(int(entry[1]), float(entry[0])) for entry in entries]
