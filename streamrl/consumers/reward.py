"""The contract of a reward plug-in: a class, or a plain function, that gives one response a number.

```python
from streamrl.consumers import Reward, Score

class ExactMatch(Reward):
    async def score(self, sample) -> Score:
        return Score(float(sample.text.strip() == sample.prompt.answer))

def short(sample) -> float:              # a plain function will do as well, sync or async
    return 1.0 if len(sample.tokens) < 100 else 0.0
```

A reward may be called again for a sample it has already scored (a retry, or a worker that died before the score was
written), so it must not matter how often it is called. An `async` reward shares the event loop with all samples in
flight and must await what takes long; a sync one runs in a thread of its own, so it must be thread-safe. The first
score that reaches Redis counts.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from streamrl.wire import Int32Array, Prompt, Sample


@dataclass(frozen=True, slots=True)
class Score:
    """A finite number, and by name the parts it was made of (kept for the metrics, not added to anything).

    Raises:
        TypeError: the value or a part is no number (booleans, strings and None are refused, so that a bug is an error
            and never a silent 0).
        ValueError: the value or a part is NaN or infinite.
    """

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", finite(self.value, "the value"))
        parts = {str(name): finite(part, f"part {name}") for name, part in self.parts.items()}
        object.__setattr__(self, "parts", parts)


def finite(value: Any, what: str) -> float:
    """Return `value` as a float; `TypeError` when it is no number, `ValueError` when it is not finite.

    Scalars of numpy and torch are numbers; booleans of any library are not.
    """
    if type(value) is not float:
        if isinstance(value, bool | str | bytes) or value is None or "bool" in str(getattr(value, "dtype", "")):
            raise TypeError(f"{what} of a score is {value!r} ({type(value).__name__}), not a number; write float(...)")
        try:
            number = float(value)
        except (TypeError, ValueError) as error:
            raise TypeError(f"{what} of a score is a {type(value).__name__}, not a number") from error
    else:
        number = value
    if not math.isfinite(number):
        raise ValueError(f"{what} of a score is {number}")
    return number


@dataclass(frozen=True, slots=True)
class RewardPrompt:
    """The prompt of a response: `text` and `messages` as in the data set, with its `answer` and `metadata`.

    `tokens` are the ids the engine was given, shape (prompt tokens,). `line` is the line of the data set, from 0.
    """

    text: str
    messages: list[dict[str, Any]] | None
    answer: Any
    metadata: dict[str, Any]
    tokens: Int32Array
    line: int
    evaluation: bool


@dataclass(frozen=True, slots=True)
class RewardSample:
    """One response to score.

    `text` is the response without special tokens, `tokens` are the sampled ids with the end-of-sequence token, shape
    (completion tokens,), and `finish` says how it ended: `stop` (end of sequence), `length` (limit) or `abort`.
    """

    text: str
    prompt: RewardPrompt
    tokens: Int32Array
    finish: Literal["stop", "length", "abort"]

    @classmethod
    def of(cls, prompt: Prompt, sample: Sample) -> RewardSample:
        """Build what a reward sees from the two messages of the wire (nothing is copied)."""
        seen = RewardPrompt(
            text=prompt.text,
            messages=prompt.messages,
            answer=prompt.answer,
            metadata=prompt.metadata,
            tokens=prompt.token_ids,
            line=prompt.line,
            evaluation=prompt.evaluation,
        )
        return cls(text=sample.text, prompt=seen, tokens=sample.token_ids, finish=sample.finish)


class Reward(ABC):
    """Base class of rewards. `args:` of the run file are the keyword arguments of the constructor.

    `instant` says that scoring takes microseconds and cannot hang: the worker then calls it without a deadline, a
    thread or a task. Only pure rules may set it.
    """

    instant: ClassVar[bool] = False

    @abstractmethod
    async def score(self, sample: RewardSample) -> Score | float:
        """Score one response.

        An exception is not a bad score: the sample is tried again (`reward_worker.attempts`, with a pause), then it
        is a dead letter with the traceback. Cancelled when `reward_worker.deadline` is over, which counts as a
        failed attempt.

        Args:
            sample: the response with its prompt.

        Returns:
            A finite number, or a `Score` with its parts.
        """
