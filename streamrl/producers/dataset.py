"""Prompts from a JSONL file, in a reproducible order.

The prompt of a group is a pure function of (seed, data, group id): the id is the cursor at which the group was
admitted, so a restarted feeder, or one whose Redis went back some seconds, admits the same prompt under the same id.
The ledger keeps a fingerprint of all that the function depends on and refuses any other data.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson

from streamrl.config import ImagesConfig, RunConfig
from streamrl.errors import DataError, WireError
from streamrl.images.encoded import EncodedImage
from streamrl.images.store import ImageStore
from streamrl.producers.images import PromptImages
from streamrl.producers.tokenizer import Tokenizer
from streamrl.wire import SCHEMA, Int32Array, Prompt, encode, pack_int32

_LINE_HINT: Final = 'each line is one JSON object: {"prompt": "2+2=", "answer": "4"}'
_CHUNK: Final = 1024
_NAMED: Final = 5  # lines with the same fault that are named
_SPECIAL: Final = 8  # special tokens around a text, more than any tokenizer adds


@dataclass(frozen=True)
class PromptLimits:
    max_prompt_tokens: int
    context: int  # prompt plus response
    vocabulary: int | None = None  # ids at or above it are of another model's tokenizer; None: not known, not checked
    drop: bool = False  # longer prompts are left out

    @classmethod
    def of(cls, config: RunConfig, vocabulary: int | None = None) -> PromptLimits:
        data = config.data
        return cls(data.max_prompt_tokens, config.model.context, vocabulary, drop=data.long_prompts == "drop")

    def exceeded_by(self, tokens: int) -> bool:
        return tokens > self.max_prompt_tokens or tokens >= self.context


@dataclass
class PromptSet:
    """The prompts of one file, encoded. `fingerprint` covers its bytes, images and token ids; `dropped` are too long.

    `processor` is the fingerprint of what makes tokens of images; empty: the model takes text alone.
    """

    path: Path
    prompts: list[bytes]
    fingerprint: str
    dropped: int = 0
    processor: str = ""

    def __len__(self) -> int:
        return len(self.prompts)

    def index(self, group_id: int, seed: int, *, shuffle: bool) -> int:
        """Which prompt a group has: each epoch of `len(self)` ids has every prompt once."""
        epoch, position = divmod(group_id, len(self.prompts))
        return int(permutation(len(self.prompts), seed, epoch)[position]) if shuffle else position


@lru_cache(1)
def permutation(count: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Of `range(count)`, sorted by a keyed hash: NumPy's shuffles may change, and a run must survive an upgrade.

    The hash is splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators").
    """
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8).digest()
    key = np.frombuffer(digest, dtype="<u8")
    mixed = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(mixed ^ (mixed >> np.uint64(31)), kind="stable").astype(np.int64)


def load_prompts(
    path: Path,
    tokenizer: Tokenizer,
    limits: PromptLimits,
    *,
    evaluation: bool = False,
    count: int | None = None,
    store: ImageStore | None = None,
) -> PromptSet:
    """Read, check and encode all prompts of a JSONL file, or the first `count`; `DataError` names all that is wrong.

    A `prompt` that is a list of messages, as in the data of verl, is read as `messages`. Other keys travel as metadata.
    `store` keeps the large images; None: all of them travel.
    """
    images = PromptImages(path, tokenizer.vision, store or ImageStore(ImagesConfig()))
    digest = hashlib.blake2b(digest_size=16)
    processor = "" if tokenizer.vision is None else tokenizer.vision.fingerprint
    data, faults = PromptSet(path, [], "", processor=processor), _Faults(path)
    lines = islice(_lines(path, digest), count)
    while raw := list(islice(lines, _CHUNK)):
        for row, text, tokens in _tokenize(faults.parse(raw, images), tokenizer, faults):
            if limits.drop and limits.exceeded_by(tokens.size):
                data.dropped += 1
                continue
            with faults.at(row.line):
                _check_tokens(tokens, limits)
                digest.update(tokens.tobytes())
                more: dict[str, Any] = {"processor": data.processor}
                if row.images:
                    names = [image.sha256 for image in row.images]
                    digest.update("".join(names).encode())
                    blobs = images.store.keep({image.sha256: image.data for image in row.images})
                    more |= {"v": SCHEMA, "images": names, "blobs": blobs}
                data.prompts.append(_encode_prompt(row, text, tokens, evaluation=evaluation, **more))
    faults.check()
    if not data.prompts:
        raise DataError(f"{path} has no prompts{' that are short enough' if data.dropped else ''}", _LINE_HINT)
    data.fingerprint = digest.hexdigest()
    return data


def examine_prompts(
    path: Path, tokenizer: Callable[[], Tokenizer], limits: PromptLimits, count: int, images: ImagesConfig | None = None
) -> int:
    """How many are dropped; errors as of `load_prompts`. The tokenizer (seconds) is loaded only where it may matter."""
    faults = _Faults(path)
    rows = faults.parse(islice(_lines(path, hashlib.blake2b()), count))
    faults.check()
    if not rows:
        raise DataError(f"{path} is empty", _LINE_HINT)
    for row in rows:
        # A token has a byte or more, but for the special ones at the ends of a text.
        text = row.record.get("prompt")
        if text is None or row.record.get("images") or limits.exceeded_by(len(text.encode()) + _SPECIAL):
            store = ImageStore(images or ImagesConfig())
            return load_prompts(path, tokenizer(), limits, count=count, store=store).dropped
    return 0


@dataclass(frozen=True)
class _Line:
    line: int
    record: dict[str, Any]
    images: list[EncodedImage]


class _Faults:
    """Lines of a file that cannot be used, by kind of fault: the message without what differs from line to line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kinds: dict[str, tuple[DataError, list[int]]] = {}

    @contextlib.contextmanager
    def at(self, line: int) -> Iterator[None]:
        try:
            yield
        except DataError as error:
            kind = re.sub(r"\d+", "", error.message.partition(":")[0])
            self._kinds.setdefault(kind, (error, []))[1].append(line + 1)

    def parse(self, lines: Iterable[tuple[int, bytes]], images: PromptImages | None = None) -> list[_Line]:
        rows = []
        for number, raw in lines:
            with self.at(number):
                record = _parse(raw)
                rows.append(_Line(number, *(images.of(record) if images else (record, []))))
        return rows

    def check(self) -> None:
        said = []
        kinds = sorted(self._kinds.values(), key=lambda kind: kind[1])
        for error, (first, *others) in kinds:
            named = ", ".join(map(str, others[:_NAMED]))
            more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
            said.append(f"{self._path}:{first}: {error.message}{f' (also {named}{more})' if others else ''}")
        if said:
            raise DataError("; ".join(said), "; ".join(dict.fromkeys(error.hint for error, _ in kinds)))


def _lines(path: Path, digest: hashlib.blake2b) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file):
                digest.update(raw)
                if raw.strip():
                    yield number, raw
    except OSError as error:
        what = f"cannot read the prompts {path}: {error.strerror}"
        raise DataError(what, "set data.train (and data.held_out)") from error


def first_prompt(path: Path) -> dict[str, Any]:
    for _, raw in _lines(path, hashlib.blake2b()):
        return _parse(raw)
    raise DataError(f"{path} is empty", _LINE_HINT)


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        record = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise DataError(f"no JSON: {error}", _LINE_HINT) from error
    if not isinstance(record, dict):
        raise DataError("not a JSON object", _LINE_HINT)
    prompt, messages = record.get("prompt"), record.get("messages")
    if messages is None and isinstance(prompt, list):
        prompt, messages = None, prompt
        record = {**{key: value for key, value in record.items() if key != "prompt"}, "messages": messages}
    if (prompt is None) == (messages is None):
        raise DataError("needs either `prompt` (text) or `messages` (chat)", _LINE_HINT)
    if prompt is not None and (not isinstance(prompt, str) or not prompt):
        raise DataError("`prompt` must be text and not empty", _LINE_HINT)
    if messages is not None and not (isinstance(messages, list) and messages and all(map(_is_turn, messages))):
        what = "`messages` (or a `prompt` that is a list) must be a list of objects with `role` and `content`"
        raise DataError(what, _LINE_HINT)
    return record


def _is_turn(turn: Any) -> bool:
    return isinstance(turn, dict) and isinstance(turn.get("role"), str) and "content" in turn


def _tokenize(rows: Sequence[_Line], tokenizer: Tokenizer, faults: _Faults) -> Iterator[tuple[_Line, str, Int32Array]]:
    """The text and the ids of each prompt; a chat that the template refuses is a fault."""
    texts: list[tuple[_Line, str, str]] = []  # the text, and the same with all tokens of its images
    chats: list[tuple[_Line, str, str]] = []
    for row in rows:
        with faults.at(row.line):
            text, written = row.record.get("prompt"), texts
            if text is None:
                text, written = tokenizer.chat_text(row.record["messages"]), chats
            sizes = [image.size for image in row.images]
            written.append((row, text, tokenizer.vision.expand(text, sizes) if tokenizer.vision else text))
    found: dict[int, tuple[_Line, str, Int32Array]] = {}
    for part, special in ((texts, True), (chats, False)):  # a template writes the special tokens itself
        ids = tokenizer.encode([expanded for _, _, expanded in part], special=special)
        found |= {row.line: (row, text, tokens) for (row, text, _), tokens in zip(part, ids, strict=True)}
    return (found[row.line] for row in rows if row.line in found)


def _check_tokens(tokens: Int32Array, limits: PromptLimits) -> None:
    if tokens.size == 0:
        raise DataError("the prompt has no tokens")
    if limits.exceeded_by(tokens.size):
        bounds = f"data.max_prompt_tokens is {limits.max_prompt_tokens}, model.context {limits.context}"
        hint = "set data.long_prompts: drop, or raise data.max_prompt_tokens and model.context"
        raise DataError(f"the prompt has {tokens.size} tokens, {bounds}", hint)
    if limits.vocabulary is not None and int(tokens.max()) >= limits.vocabulary:
        what = f"token id {tokens.max()} of the prompt is outside the model's vocabulary of {limits.vocabulary}"
        raise DataError(what, "the tokenizer is another model's: set model.tokenizer to that of model.path")


def _encode_prompt(row: _Line, text: str, tokens: Int32Array, *, evaluation: bool, **images: Any) -> bytes:
    record = row.record
    prompt = Prompt(
        tokens=pack_int32(tokens),
        text=text,
        messages=record.get("messages"),
        answer=record.get("answer"),
        metadata={key: value for key, value in record.items() if key not in ("prompt", "messages", "answer")},
        line=row.line,
        evaluation=evaluation,
        **images,
    )
    try:
        return encode(prompt)
    except (WireError, TypeError, OverflowError, ValueError) as error:
        raise DataError(f"cannot be sent: {error}") from error


def fingerprint_of(data: PromptSet, **settings: int | bool) -> str:
    """Of file, tokens, and the settings that `index` depends on; the ledger refuses any other fingerprint."""
    options = orjson.dumps([data.fingerprint, settings], option=orjson.OPT_SORT_KEYS)
    digest = hashlib.blake2b(options, digest_size=16).hexdigest()
    return f"{digest} {data.processor}" if data.processor else digest
