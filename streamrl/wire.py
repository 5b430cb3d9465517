"""Messages between roles (typed MessagePack with size limits) and files of frames. Never pickle.

A message is a map with a `type` tag and a schema version `v`. Arrays travel as raw little-endian bytes
(`int32` for token ids, `float32` for log-probabilities), so that any language can read them and a sampled token
costs 8 bytes. Sizes are checked before anything is decoded. Unknown fields are ignored. An unknown
schema version is a `WireError`, and the message goes to the dead letters. Schema 1 is without turns and has no `v`;
a sample with turns is of schema 2, what has images of schema 3, so that a program that does not know them refuses it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar

import msgpack
import msgspec
import numpy as np
import numpy.typing as npt

from streamrl.errors import WireError

SCHEMA: Final = 3
TURNS: Final = 2
"""The schema of a sample with turns and without images."""
MAX_MESSAGE_BYTES: Final = 64 << 20
MAX_TOKENS: Final = 1 << 22
MAX_TURNS: Final = 4096
PROMPT: Final = -1
"""Parent of a turn that continues the prompt."""
NOTHING: Final = -2
"""Parent of a turn that continues nothing: a branch with a prompt of its own."""

_Packed: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=4 * MAX_TOKENS)]
_Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=16 << 20)]
_Blobs: TypeAlias = Annotated[list[bytes], msgspec.Meta(max_length=MAX_TURNS)]
_Sha256: TypeAlias = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 53))]

_INT32: Final = np.dtype("<i4")
_FLOAT32: Final = np.dtype("<f4")
Int32Array: TypeAlias = npt.NDArray[np.int32]
Float32Array: TypeAlias = npt.NDArray[np.float32]


class Prompt(msgspec.Struct, frozen=True, kw_only=True, tag="prompt", omit_defaults=True):
    """One prompt of the data set, as the feeder admitted it.

    `tokens` are the ids that the engine gets; `text` is for people. `messages` is set when the line of the data set has
    chat messages. Rewards get `answer` and `metadata` unchanged. `line` is the line of the data set, from 0; `source`
    names the data set among several. `evaluation` marks held-out prompts, which are scored and never trained.

    `images` are the SHA-256 sums of its images, in hexadecimal, in the order in which they stand in `tokens`. `blobs`
    are the bytes of the small ones among them (`streamrl.images.store`). For a model that sees, `processor` is the
    fingerprint of what counts the tokens of images.
    """

    v: int = 1
    tokens: _Packed
    text: _Text = ""
    messages: list[dict[str, Any]] | None = None
    answer: Any = None
    metadata: dict[str, Any] = {}
    line: _Count = 0
    evaluation: bool = False
    images: Annotated[list[_Sha256], msgspec.Meta(max_length=MAX_TURNS)] = []
    blobs: _Blobs = []
    processor: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        if self.images and self.v < SCHEMA:
            raise ValueError(f"a prompt with images needs schema version {SCHEMA}")

    @property
    def token_ids(self) -> Int32Array:
        return unpack_int32(self.tokens)


class SampleScore(msgspec.Struct, frozen=True, kw_only=True, tag="score", omit_defaults=True):
    """Score of one sample: the weighted sum, and each part by the name of its reward.

    `detail` is shown by commands that try a reward; workers do not write it.
    """

    v: int = 1
    value: float
    parts: dict[str, float] = {}
    seconds: float = 0.0
    detail: str = ""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.value) and all(map(math.isfinite, self.parts.values()))):
            raise ValueError("a score must be finite")


Role: TypeAlias = Literal["assistant", "tool", "user", "system"]
Outcome: TypeAlias = Literal["ok", "error", "timeout", "malformed", "unknown"]
"""How a call of a tool ended: with a result, with an exception, not in time; its arguments were no JSON object that the
tool takes; there is no tool of that name."""
StopReason: TypeAlias = Literal[
    "completed",
    "tool_stopped",
    "max_turns",
    "max_tokens",
    "max_sampled_tokens",
    "max_tool_calls",
    "context_overflow",
    "parse_error",
    "rollout_timeout",
    "agent_failed",
]
"""Why an episode ended, in the words of tinker-cookbook (`tinker_cookbook/rl/types.py`), and `agent_failed`."""
LIMITS: Final[frozenset[StopReason]] = frozenset(
    {"max_turns", "max_tokens", "max_sampled_tokens", "max_tool_calls", "context_overflow", "rollout_timeout"}
)


class ToolUse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One call of a tool that a turn answers: the tool's name, its outcome and the seconds that it took."""

    name: Annotated[str, msgspec.Meta(max_length=256)]
    outcome: Outcome = "ok"
    seconds: float = 0.0


class Turn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One turn of an episode: what the policy sampled, or what answered it.

    It continues the branch that ends with turn `parent` (an earlier one, `PROMPT`, or `NOTHING`). Its tokens are only
    what it adds. Either they were sampled: then `sampled` counts them, and they are the next ones in the arrays of the
    sample. Or they were not: then `observed` (int32) holds them, what opens the next sampled turn included. `finish`
    is that of a sampled turn. `reward` is for the actions up to this turn. `model_seconds` (the wait for a
    place in the engine included) and `tool_seconds` add up to the time of the turn. `media` are the images that an
    observed turn adds, as those of `Prompt`.
    `cached` counts the tokens before a sampled turn whose keys and values the engine still had. `messages` of a sampled
    turn are what was said since the sampled turn that its branch had before, the reply last. The first one of a branch
    that begins with an observed turn has the whole conversation; one that continues the prompt has the reply alone.
    """

    parent: Annotated[int, msgspec.Meta(ge=-2, lt=MAX_TURNS)] = PROMPT
    role: Role = "assistant"
    sampled: _Count = 0
    observed: _Packed = b""
    finish: Literal["", "stop", "length", "abort"] = ""
    reward: float | None = None
    tools: list[ToolUse] = []
    media: list[_Sha256] = []
    model_seconds: float = 0.0
    tool_seconds: float = 0.0
    cached: _Count = 0
    messages: list[dict[str, Any]] = []

    def __post_init__(self) -> None:
        if (self.sampled > 0) == (len(self.observed) > 0):
            raise ValueError("a turn has sampled tokens or observed ones")
        if len(self.observed) % 4:
            raise ValueError("the observed tokens of a turn were cut in the middle of an element")
        if self.reward is not None and not math.isfinite(self.reward):
            raise ValueError("the reward of a turn must be finite")

    @property
    def observed_ids(self) -> Int32Array:
        return unpack_int32(self.observed)


class Sample(msgspec.Struct, frozen=True, kw_only=True, tag="sample", omit_defaults=True):
    """One response to a prompt, or one episode, with the policy version that sampled each token.

    `tokens` (int32) and `logprobs` (float32, natural log of the probability the token was *sampled with*) have one
    entry per sampled token, including the end-of-sequence token. `runs` is `[(first token, version), ...]`: the first
    run starts at token 0 and both numbers grow. Token i was sampled by the version of the last run that starts at or
    before i. `finish` is `stop` (end of sequence sampled), `length` (limit reached) or `abort`. `greedy` marks a
    response of the most probable tokens: its reward is a baseline, it is not trained, and its log-probabilities are
    not used.

    `turns` form a tree in the order in which they were recorded; none: a single sampled turn. The arrays hold the
    sampled tokens of all turns, in that order; `stop` says why an episode ended, and `finish` is that of its last
    sampled turn. Versions do not go back within a turn; turns of other branches may have been sampled meanwhile.
    `score` is what the episode gave itself, for the reward `episode`. `replayed` turns came from the journal of a
    process that died; `restarts` counts the times that such an episode had to begin again. `dropped` and `auxiliary`
    count sampled turns that are no part of it: ones that its agent did not use, and ones beside its work. `blobs` are
    the bytes of the small images among the `media` of its turns.
    """

    v: int = 1
    tokens: _Packed
    logprobs: _Packed
    runs: list[tuple[_Count, _Count]]
    finish: Literal["stop", "length", "abort"]
    text: _Text = ""
    engine: str = ""
    seconds: float = 0.0
    greedy: bool = False
    turns: Annotated[list[Turn], msgspec.Meta(max_length=MAX_TURNS)] = []
    stop: StopReason | None = None
    score: SampleScore | None = None
    replayed: _Count = 0
    restarts: _Count = 0
    dropped: _Count = 0
    auxiliary: _Count = 0
    blobs: _Blobs = []

    @property
    def truncated(self) -> bool:
        """Whether a limit ended it."""
        return self.finish == "length" or self.stop in LIMITS

    @property
    def images(self) -> list[str]:
        """Those of all turns, in their order."""
        return [name for turn in self.turns for name in turn.media]

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.logprobs):
            raise ValueError("a sample needs one log-probability for each token")
        count = len(self.tokens) // 4
        begins = _begins(self, count) if self.turns else frozenset()
        if len(self.runs) == 1 and self.runs[0][0] == 0 and count:
            return  # the common case
        starts = [first for first, _ in self.runs]
        versions = [version for _, version in self.runs]
        if count and (not starts or starts[0] != 0 or starts[-1] >= count):
            raise ValueError("the version runs of a sample do not cover its tokens")
        back = {starts[at] for at in range(1, len(starts)) if versions[at] < versions[at - 1]}
        if starts != sorted(set(starts)) or back - begins:
            raise ValueError("the version runs of a sample are out of order")

    @property
    def token_ids(self) -> Int32Array:
        return unpack_int32(self.tokens)

    @property
    def token_logprobs(self) -> Float32Array:
        return unpack_float32(self.logprobs)

    @property
    def token_versions(self) -> npt.NDArray[np.int64]:
        """Version of the weights that sampled each token, shape (completion tokens,)."""
        count = len(self.tokens) // 4
        if not count:
            return np.zeros(0, dtype=np.int64)
        ends = [first for first, _ in self.runs[1:]] + [count]
        lengths = [end - first for end, (first, _) in zip(ends, self.runs, strict=True)]
        return np.repeat(np.asarray([version for _, version in self.runs], dtype=np.int64), lengths)


def _begins(sample: Sample, count: int) -> frozenset[int]:
    """First tokens of the sampled turns; ValueError for turns that form no tree or do not fit the arrays."""
    needed = SCHEMA if sample.images else TURNS
    if sample.v < needed:
        raise ValueError(f"a sample with {'images' if sample.images else 'turns'} needs schema version {needed}")
    begins, begin = [], 0
    for number, turn in enumerate(sample.turns):
        if turn.parent >= number:
            raise ValueError(f"turn {number} of a sample comes after turn {turn.parent}, which is not before it")
        if turn.sampled and turn.parent == NOTHING:
            raise ValueError(f"turn {number} of a sample is sampled after nothing")
        if turn.sampled:
            begins.append(begin)
        begin += turn.sampled
    if begin != count:
        raise ValueError(f"the turns of a sample have {begin} sampled tokens, its arrays {count}")
    return frozenset(begins)


Message: TypeAlias = Prompt | Sample | SampleScore
_M = TypeVar("_M", Prompt, Sample, SampleScore)

_encoder: Final = msgspec.msgpack.Encoder()
_decoders: Final[dict[type, msgspec.msgpack.Decoder[Any]]] = {
    kind: msgspec.msgpack.Decoder(kind) for kind in (Prompt, Sample, SampleScore)
}


class _Header(msgspec.Struct):
    """The two fields of every message. Decoded alone, they tell a newer schema from garbage."""

    type: str = ""
    v: int = 1


_header: Final = msgspec.msgpack.Decoder(_Header)


def _name(kind: type[Message]) -> str:
    return str(kind.__struct_config__.tag)


def encode(message: Message) -> bytes:
    """Return the bytes of a message. Raises `WireError` above `MAX_MESSAGE_BYTES`."""
    data = _encoder.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"a {_name(type(message))} of {len(data)} bytes is over the limit of the wire")
    return data


def decode(data: bytes, kind: type[_M]) -> _M:
    """Return the message of type `kind` in `data`; nothing large is allocated before the checks.

    WireError: it is too large, truncated, of another type, of an unknown schema version, or breaks a rule of its type.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"a message of {len(data)} bytes is over the limit of the wire")
    try:
        message: _M = _decoders[kind].decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise WireError(f"not a {_name(kind)}: {_reason(data, error)}") from error
    if not 1 <= message.v <= SCHEMA:
        raise WireError(f"schema version {message.v} of a {_name(kind)}, this program knows {SCHEMA}")
    _check_arrays(message)
    return message


def _reason(data: bytes, error: Exception) -> str:
    """A newer schema is named, because people can fix that."""
    try:
        version = _header.decode(data).v
    except (msgspec.DecodeError, RecursionError):
        return str(error)
    return f"schema version {version}, this program knows {SCHEMA}" if version > SCHEMA else str(error)


def _check_arrays(message: Message) -> None:
    if isinstance(message, SampleScore):
        return
    if len(message.tokens) % 4 or (isinstance(message, Sample) and len(message.logprobs) % 4):
        raise WireError("an array of tokens or log-probabilities was cut in the middle of an element")
    # On such short arrays the search for a zero byte takes half the time of `all`.
    if isinstance(message, Sample) and b"\0" in np.isfinite(message.token_logprobs).tobytes():
        raise WireError("a sample has a log-probability that is not finite")


def prompt_key(prompt: bytes) -> str:
    """What names a prompt in a curriculum: a hash of its bytes."""
    return hashlib.blake2b(prompt, digest_size=8).hexdigest()


def utf8(text: str) -> str:
    """Replace each lone surrogate by a question mark: models can write them, and UTF-8 cannot encode them."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def pack_int32(values: npt.ArrayLike) -> bytes:
    return np.ascontiguousarray(values, dtype="<i4").tobytes()


def pack_float32(values: npt.ArrayLike) -> bytes:
    return np.ascontiguousarray(values, dtype="<f4").tobytes()


def unpack_int32(data: bytes) -> Int32Array:
    """Read-only view, shape (n,)."""
    return np.frombuffer(data, dtype=_INT32)


def unpack_float32(data: bytes) -> Float32Array:
    """Read-only view, shape (n,)."""
    return np.frombuffer(data, dtype=_FLOAT32)


def unpack_frames(chunks: Iterable[bytes], path: Path, longest: int) -> Iterator[dict[str, Any]]:
    """Yield the MessagePack maps in pieces of a file, each of at most `longest` bytes.

    One that a crash cut off at the end is not yielded. Anything else that is no such map raises `WireError`.
    """
    unpacker = msgpack.Unpacker(raw=False, max_buffer_size=longest, strict_map_key=True)
    try:
        for chunk in chunks:
            unpacker.feed(chunk)
            for record in unpacker:
                if not isinstance(record, dict):
                    raise WireError(f"{path}: a frame that is no map before byte {unpacker.tell()}")
                yield record
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        if isinstance(error, WireError):
            raise
        raise WireError(f"{path}: not a file of frames near byte {unpacker.tell()}: {error}") from error
