"""What servers of each kind are asked for a score, and the numbers in their answers. Values only, no I/O.

| kind | task | route | numbers |
|---|---|---|---|
| vllm | classify | `POST /classify` | `data[0].probs`, without the activation: what the model's head gives |
| vllm | pooling | `POST /pooling` | `data[0].data`; of a list for each token the last |
| sglang | classify | `POST /classify` | `embedding` |
| sglang | pooling | `POST /v1/embeddings` | `data[0].embedding` |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from streamrl.errors import WireError

_RAW: Final = {"use_activation": False, "activation": False}
"""Its present and its former name; servers ignore the one that they do not know."""


class UnclearScore(WireError):
    """An answer with several numbers; the run file has to say which of them is the score."""


@dataclass(frozen=True, slots=True)
class ScoreDialect:
    """How a kind of server is asked.

    Attributes:
        path: of the route.
        takes_messages: the server renders a conversation with its own chat template.
        body: of the request, from the name of the model and token ids.
        numbers: of an answer; `LookupError`, TypeError or ValueError: it has none.
    """

    path: str
    takes_messages: bool
    body: Callable[[str, Sequence[int]], dict[str, Any]]
    numbers: Callable[[Mapping[str, Any]], Any]

    def conversation(self, model: str, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The body of a request with messages instead of token ids, where `takes_messages`."""
        return {**_named(model), "messages": list(messages), **_RAW}


def _vllm(model: str, ids: Sequence[int]) -> dict[str, Any]:
    return {**_named(model), "input": list(ids), **_RAW}


def _sglang(_: str, ids: Sequence[int]) -> dict[str, Any]:
    return {"input_ids": list(ids)}


def _embedding(model: str, ids: Sequence[int]) -> dict[str, Any]:
    return {"model": model or "default", "input": list(ids), "encoding_format": "float"}


def _named(model: str) -> dict[str, Any]:
    return {"model": model} if model else {}


def _first(answer: Mapping[str, Any], key: str) -> Any:
    """A value of the only entry of `data`."""
    (entry,) = answer["data"]
    return entry[key]


DIALECTS: Final[Mapping[tuple[str, str], ScoreDialect]] = {
    ("vllm", "classify"): ScoreDialect("/classify", True, _vllm, lambda answer: _first(answer, "probs")),
    ("vllm", "pooling"): ScoreDialect("/pooling", True, _vllm, lambda answer: _first(answer, "data")),
    ("sglang", "classify"): ScoreDialect("/classify", False, _sglang, lambda answer: answer["embedding"]),
    ("sglang", "pooling"): ScoreDialect(
        "/v1/embeddings", False, _embedding, lambda answer: _first(answer, "embedding")
    ),
}


def read_score(dialect: ScoreDialect, answer: Mapping[str, Any], label: int | None) -> float:
    """The score in an answer: its only number, or number `label` (from 0, or from the end when negative).

    Raises:
        WireError: there is no such number, or it is not finite.
        UnclearScore: there are several without a `label`, or fewer than it says.
    """
    try:
        numbers = dialect.numbers(answer)
    except (LookupError, TypeError, ValueError) as error:
        raise WireError(f"an answer of {dialect.path} without a score: {str(answer)[:200]}") from error
    if isinstance(numbers, list) and numbers and isinstance(numbers[-1], list):
        numbers = numbers[-1]
    if not isinstance(numbers, list) or not numbers:
        raise WireError(f"an answer of {dialect.path} without a score: {str(numbers)[:200]}")
    if label is None and len(numbers) > 1:
        raise UnclearScore(
            f"{dialect.path} answered with {len(numbers)} numbers where one score was expected: {str(numbers)[:100]}",
            "say which of them is the score with the label of the reward (args: {label: 0})",
        )
    if label is not None and not -len(numbers) <= label < len(numbers):
        raise UnclearScore(f"{dialect.path} answered with {len(numbers)} numbers, and label is {label}")
    return finite_number(numbers[label or 0], dialect.path)


def finite_number(value: Any, where: str) -> float:
    """A finite number of JSON; `WireError` for null, text, true, NaN and infinity."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise WireError(f"{where} answered {str(value)[:100]!r} where a score was expected")
    return float(value)
