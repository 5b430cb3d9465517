"""What a rollout replica asks of anything that generates: token ids in, token ids with exact log-probabilities out.

An engine owns one copy of the policy and decodes many requests at the same time. Weights may change while requests are
in flight: what was generated stays, the rest is sampled by the new weights, and `Completion.runs` says which token
belongs to which version. Requests and completions are values; nothing of an engine leaks into them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from streamrl.weight_sync.manifest import Pair
from streamrl.wire import Float32Array, Int32Array

if TYPE_CHECKING:
    import torch

Finish: TypeAlias = Literal["stop", "length", "abort"]
Runs: TypeAlias = list[tuple[int, int]]


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One response to be sampled.

    Attributes:
        id: name for `abort`; unique among the requests in flight, may be used again afterwards.
        tokens: prompt, shape (prompt tokens,), at least one.
        max_new_tokens: longest response, end-of-sequence token included; the engine lowers it to what its context
            leaves.
        temperature: above 0; log-probabilities are those of the distribution at this temperature.
    """

    id: str
    tokens: Int32Array
    max_new_tokens: int
    temperature: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """What was sampled for one request.

    Attributes:
        tokens: shape (sampled tokens,), the end-of-sequence token included; empty only when aborted.
        logprobs: natural log of the probability each token was sampled with (fp32 log-softmax of logits / temperature),
            shape (sampled tokens,).
        runs: `[(first token, version), ...]`, the first run starts at 0, both numbers grow; empty when no token.
        finish: `stop` (an end-of-sequence token was sampled), `length` (limit or context reached), `abort`.
        prompt_tokens: length of the prompt.
        seconds: from the call of `generate` to its result.
    """

    tokens: Int32Array
    logprobs: Float32Array
    runs: Runs
    finish: Finish
    prompt_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy an engine is.

    Attributes:
        running: requests that are being decoded.
        waiting: requests accepted and not yet begun.
        tokens_sampled: tokens sampled since the start; only grows. The continuous mode counts a request when it ends.
        busy_seconds: seconds spent decoding since the start; only grows.
        version: version of the weights in force, 0 until the first `apply`.
    """

    running: int
    waiting: int
    tokens_sampled: int
    busy_seconds: float
    version: int


class Engine(Protocol):
    """A generator of responses. All methods belong to one event loop.

    Raises of every method but `close`, `load`: `Unreachable` when the engine has not been started, is closed or has
    died. A control (`apply`, `pause`, ...) or a decode step that does not end within a deadline of the engine's own is
    its death as well, also when its caller has left. An engine that died stays dead: its process ends and is started
    again by whoever supervises it.
    """

    async def start(self) -> None:
        """Load the model and begin to decode.

        Raises:
            ConfigError: model missing or unusable, or an option that this model or machine cannot serve.
        """

    async def close(self) -> None:
        """Abort what is in flight (each `generate` returns with `finish="abort"`) and free everything.

        A repeat does nothing. Works on an engine that died or never started.
        """

    async def generate(self, request: Request) -> Completion:
        """Sample one response.

        Waits for as long as it takes, also while the engine is paused or asleep: whoever calls sets the deadline.
        Cancelling frees the request's place and memory at the next decode step; its tokens are lost. The engine's
        death fails every call that is waiting.

        Raises:
            DataError: the prompt is empty, has a token outside the vocabulary or leaves no room in the context, or the
                limits make no sense. The engine goes on.
            ValueError: a request with this id is in flight.
        """
        ...

    async def abort(self, request_id: str | None = None) -> int:
        """End one request (all when None) and let its `generate` return what there is, with `finish="abort"`.

        Works while paused. Returns how many ended; 0 for an unknown id, so a repeat does nothing. A request that ended
        by itself meanwhile keeps its finish and is not counted.
        """
        ...

    async def pause(self) -> None:
        """Stop between two decode steps; returns when no step is running. Requests stay, new ones are accepted.

        A repeat does nothing.
        """

    async def resume(self) -> None:
        """Go on after `pause`. A repeat does nothing."""

    async def apply(self, pair: Pair, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace all weights between two decode steps, while requests are in flight.

        Whole or not at all: names, shapes, types and finiteness are checked before the first copy, and the engine keeps
        the old weights when a check fails. Requests in flight keep their keys and values and are continued by the new
        weights; later tokens carry the version. Requests that begin later see nothing that older weights computed.
        Works while paused and asleep. The present version again is a repeat and does nothing. Cancelling the call
        does not stop an update that has begun.

        Args:
            pair: (epoch, version), newer than the present one; the number of the version never goes down.
            tensors: every parameter by its Hugging Face name; a tied parameter under one of its names or, with equal
                values, several. Floating point of any width. Only read, and not used after the return.

        Raises:
            WeightsError: unknown or missing names, other shapes, values that are not finite, or an older version.
        """

    async def sleep(self) -> None:
        """Give accelerator memory back: free keys and values, move the weights to the host. A repeat does nothing.

        On a CPU only the keys and values are freed. Requests are accepted and wait for `wake`.

        Raises:
            Refused: requests are being decoded; abort them or wait for their end first.
        """

    async def wake(self) -> None:
        """Undo `sleep`. A repeat does nothing; an engine that was paused before stays paused."""

    def load(self) -> EngineLoad:
        """How busy the engine is; cheap, may be called at any time."""
        ...

    async def health(self) -> None:
        """Return when the engine can serve, raise `Unreachable` with the cause when it cannot.

        Notices a decode loop that hangs, not only one that died.
        """
