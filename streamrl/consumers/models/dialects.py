"""How each kind of server is asked for a score, and where its answers hold the numbers. No I/O.

| kind | task | route | numbers |
|---|---|---|---|
| vllm | classify | `POST /classify` | `data[0].probs`, without the activation: the raw output of the head |
| vllm | pooling | `POST /pooling` | `data[0].data`; for a list per token, the last |
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
"""Its current and its former name. Servers ignore the unknown one."""


class UnclearScore(WireError):
    """An answer with several numbers. `label` in the run file has to say which is the score."""


@dataclass(frozen=True, slots=True)
class ScoreDialect:
    path: str  # of the route
    takes_messages: bool  # the server renders messages with its own chat template
    body: Callable[[str, Sequence[int]], dict[str, Any]]  # from the name of the model and token ids
    numbers: Callable[[Mapping[str, Any]], Any]  # of an answer; LookupError, TypeError or ValueError if it has none

    def conversation(self, model: str, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
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
    """The only number in an answer, or number `label` (from 0; negative: from the end).

    Raises `WireError` if there is no finite number, `UnclearScore` if there are several without a `label`, or too few.
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
    """A finite JSON number; `WireError` for anything else, including true."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise WireError(f"{where} answered {str(value)[:100]!r} where a score was expected")
    return float(value)
