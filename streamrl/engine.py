"""What a rollout replica asks of anything that generates: token ids in, token ids with exact log-probabilities out.

An engine owns one copy of the policy and decodes many requests at the same time. Weights may change while requests are
in flight: what was generated stays, the rest is sampled by the new weights, and `Completion.runs` says which token
belongs to which version. Requests and completions are values; nothing of an engine leaks into them.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias
from uuid import uuid4

from streamrl.errors import DataError
from streamrl.wire import Float32Array, Int32Array

if TYPE_CHECKING:
    from streamrl.queues.role import Role

Finish: TypeAlias = Literal["stop", "length", "abort"]
Runs: TypeAlias = list[tuple[int, int]]
MemoryTag: TypeAlias = Literal["weights", "kv_cache"]


async def life_seed(role: Role) -> int:
    """A sampling seed below 2**63 for this life of a role: for the first that of the run file, so that a run repeats.

    No two lives draw the same numbers: a group whose samples come from both must not hold one response twice.
    """
    nonce = uuid4().hex  # where Redis has forgotten the lives, the metrics of the role tell of them
    first = await role.ledgers.roles.first_life(role.name, nonce)
    life = "0" if first and not (role.run_dir / "metrics" / f"{role.name}.jsonl").exists() else nonce
    digest = hashlib.blake2b(f"{role.config.seed}/{role.name}/{life}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True, slots=True, eq=False)
class RequestImage:
    """An encoded image, for which `count` tokens of its request stand from `begin` on.

    Engines that count the tokens themselves are sent one token `placeholder` in their place.
    """

    sha256: str  # of `data`, in hexadecimal
    data: bytes
    begin: int
    count: int
    placeholder: int


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One response to be sampled."""

    id: str  # its name in messages
    tokens: Int32Array  # prompt, shape (prompt tokens,), at least one
    max_new_tokens: int  # end of the sequence included; the engine lowers it to what its context leaves
    # Log-probabilities are those of the distribution at this temperature. 0: greedy, the most probable token each time;
    # each engine decides which log-probabilities it returns then, since nothing was drawn.
    temperature: float = 1.0
    # Requests with the same one share a prefix (samples of one group, turns of one sample) and are better off on one
    # server. GROUP/SAMPLE: with its own earlier turns, else with its group. Empty: none.
    affinity: str = ""
    # Its keys and values may be those that weights of this version computed for an earlier request with the same one;
    # None: only those of the weights in force.
    cache_version: int | None = None
    # These cut the distribution at this temperature (`streamrl.config.sampling.DrawConfig`); log-probabilities are of
    # what is left, where the engine gives them. Engines differ in how they combine two of them.
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    # Texts that end the response, whose tokens end with the one that completes such a text, as far as the engine's
    # tokenizer sees it; `streamrl.producers.stopping` looks again.
    stop: tuple[str, ...] = ()
    min_tokens: int = 0  # no end of the sequence, and no text of `stop`, before so many tokens
    seed: int | None = None  # of random numbers of its own, which the same request to the same weights repeats
    # The response is JSON that fits it, and its log-probabilities are those without the tokens that do not fit; for
    # engines in `streamrl.config.base.SERVER_KINDS` only.
    json_schema: str = ""
    images: tuple[RequestImage, ...] = ()  # in the order of their tokens
    forbidden: tuple[int, ...] = ()  # tokens that are never sampled, and have no probability: those of images

    @property
    def cuts(self) -> bool:
        """Whether some tokens are impossible everywhere."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What an engine can serve; `context`: longest prompt plus response in tokens; token ids lie below `vocabulary`."""

    context: int
    vocabulary: int

    def check(self, request: Request) -> int:
        """Return how many tokens the response may have. `DataError`: the request can never be served."""
        tokens = request.tokens
        name = f"request {request.id!r}"
        if tokens.ndim != 1 or not len(tokens):
            raise DataError(f"{name} has an empty prompt")
        room = self.context - len(tokens)
        if room < 1:
            raise DataError(f"{name}: {len(tokens)} prompt tokens fill a context of {self.context}")
        if tokens.min() < 0 or tokens.max() >= self.vocabulary:
            raise DataError(f"{name} has a token outside the vocabulary of {self.vocabulary}")
        if request.max_new_tokens < 1:
            raise DataError(f"{name}: max_new_tokens is {request.max_new_tokens}")
        if not (0 <= request.temperature < math.inf):
            raise DataError(f"{name}: temperature is {request.temperature}")
        if not (0 < request.top_p <= 1 and request.top_k >= 0 and 0 <= request.min_p <= 1):
            raise DataError(f"{name}: top_p {request.top_p}, top_k {request.top_k}, min_p {request.min_p}")
        return min(request.max_new_tokens, room)


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """What was sampled for one request."""

    tokens: Int32Array  # shape (sampled tokens,), the end-of-sequence token included; empty only when aborted
    # Natural log of the probability each token was sampled with (fp32 log-softmax of logits / temperature, without what
    # `Request.top_p` and others cut), shape (sampled tokens,).
    logprobs: Float32Array
    runs: Runs  # `[(first token, version), ...]`, the first run starts at 0, both numbers grow; empty when no token
    finish: Finish  # `stop`: end of sequence or a text of `Request.stop`; `length`: limit or context; `abort`: given up
    seconds: float  # from the call of `generate` to its result
    cached_tokens: int = 0  # prompt tokens whose keys and values the engine still had; 0 from engines that do not say


def join_runs(before: Runs, count: int, after: Runs) -> Runs:
    """Runs of `count` tokens followed by those of another piece; the same version on both sides is one run."""
    joined = [*before, *((first + count, version) for first, version in after)]
    return [run for at, run in enumerate(joined) if at == 0 or run[1] != joined[at - 1][1]]


def first_tokens(piece: Completion, count: int) -> Completion:
    if count >= len(piece.tokens):
        return piece
    runs = [run for run in piece.runs if run[0] < count]
    return replace(piece, tokens=piece.tokens[:count], logprobs=piece.logprobs[:count], runs=runs)


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy an engine is."""

    running: int  # requests that are being decoded
    waiting: int  # requests accepted and not yet begun
    tokens_sampled: int  # since the start; only grows
    busy_seconds: float  # spent decoding since the start; only grows
    version: int  # of the weights in force, 0 until the first `apply`
    capacity: int = 1  # requests that the engine can make use of at the same time; grows and shrinks
    cache_use: float = 0.0  # share of the memory for keys and values that is in use, 0 to 1; 0 when not known
    servers: int = 1  # that can serve now; 1 for an engine in this process


class Generator(Protocol):
    """What the maker of a sample needs of an engine. All belongs to one event loop."""

    async def generate(self, request: Request) -> Completion:
        """Sample one response. `DataError`: the request can never be served; the engine goes on.

        It has no deadline, also while the engine is asleep. Cancelling frees its place at the next decode step. The
        engine's death fails every call that is waiting.
        """
        ...

    def load(self) -> EngineLoad:
        """Cheap, may be called at any time."""
        ...

    async def health(self) -> None:
        """Return when the engine can serve; `Unreachable`: its decode loop has died or hangs."""
