"""Prompts from a JSONL file, in a reproducible order.

The prompt of a group is a pure function of (seed, data, group id): the id is the cursor at which the group was
admitted, so a restarted feeder, or one whose Redis went back some seconds, admits the same prompt under the same id.
The ledger keeps a fingerprint of all that the function depends on and refuses any other data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson

from streamrl.errors import DataError, WireError
from streamrl.producers.tokenizer import Tokenizer
from streamrl.wire import Int32Array, Prompt, encode, pack_int32

_LINE_HINT: Final = 'each line is one JSON object: {"prompt": "2+2=", "answer": "4"}'
_CHUNK: Final = 1024


@dataclass(frozen=True)
class PromptLimits:
    """Longest prompt in tokens (`max_prompt_tokens`), of prompt plus response (`context`); `vocabulary` of the model.

    Ids at or above `vocabulary` mean that the tokenizer is another model's; None: not known, not checked.
    """

    max_prompt_tokens: int
    context: int
    vocabulary: int | None = None


@dataclass
class PromptSet:
    """The prompts of one file, encoded, in its order. `fingerprint` covers the file's bytes and the token ids."""

    path: Path
    prompts: list[bytes]
    fingerprint: str
    _orders: dict[tuple[int, int], npt.NDArray[np.int64]] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.prompts)

    def index(self, group_id: int, seed: int, *, shuffle: bool) -> int:
        """Return which prompt group `group_id` has: each epoch of `len(self)` ids has every prompt once."""
        epoch, position = divmod(group_id, len(self.prompts))
        if not shuffle:
            return position
        key = (seed, epoch)
        if key not in self._orders:
            self._orders.clear()
            self._orders[key] = permutation(len(self.prompts), seed, epoch)
        return int(self._orders[key][position])


def permutation(count: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Return a permutation of `range(count)`, the same on every platform and version.

    Numbers are sorted by a keyed hash (splitmix64; Steele, Lea, Flood 2014, "Fast splittable pseudorandom number
    generators"), because NumPy's shuffles may change between releases, and a run must survive an upgrade.
    """
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8).digest()
    key = np.frombuffer(digest, dtype="<u8")
    mixed = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(mixed ^ (mixed >> np.uint64(31)), kind="stable").astype(np.int64)


def load_prompts(path: Path, tokenizer: Tokenizer, limits: PromptLimits, *, evaluation: bool = False) -> PromptSet:
    """Read, check and encode all prompts of a JSONL file. Memory: about the file plus 4 bytes a token.

    A line is an object with `prompt` (text) or `messages` (a list of objects with `role` and `content`), perhaps
    `answer`, and any other keys, which travel as metadata. A `prompt` that is a list of messages, as in the data of
    verl, is read as `messages`. Empty lines are skipped but counted.

    Raises:
        DataError: the file is missing, empty, or has a line that cannot be used; the message names file and line.
    """
    digest = hashlib.blake2b(digest_size=16)
    prompts: list[bytes] = []
    chunk: list[_Line] = []
    for row in _rows(path, digest):
        chunk.append(row)
        if len(chunk) == _CHUNK:
            prompts += _encode_chunk(chunk, tokenizer, limits, digest, path, evaluation=evaluation)
            chunk = []
    prompts += _encode_chunk(chunk, tokenizer, limits, digest, path, evaluation=evaluation)
    if not prompts:
        raise DataError(f"{path} has no prompts", _LINE_HINT)
    return PromptSet(path, prompts, digest.hexdigest())


@dataclass(frozen=True)
class _Line:
    line: int
    record: dict[str, Any]


def _rows(path: Path, digest: hashlib.blake2b) -> Iterator[_Line]:
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file):
                digest.update(raw)
                if raw.strip():
                    yield _Line(number, _parse(raw, f"{path}:{number + 1}"))
    except OSError as error:
        raise DataError(
            f"cannot read the prompts {path}: {error.strerror}", "set data.train (and data.held_out)"
        ) from error


def _parse(raw: bytes, where: str) -> dict[str, Any]:
    try:
        record = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise DataError(f"{where}: no JSON: {error}", _LINE_HINT) from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: not a JSON object", _LINE_HINT)
    prompt, messages = record.get("prompt"), record.get("messages")
    if messages is None and isinstance(prompt, list):
        prompt, messages = None, prompt
        record = {**{key: value for key, value in record.items() if key != "prompt"}, "messages": messages}
    if (prompt is None) == (messages is None):
        raise DataError(f"{where}: needs either `prompt` (text) or `messages` (chat)", _LINE_HINT)
    if prompt is not None and (not isinstance(prompt, str) or not prompt):
        raise DataError(f"{where}: `prompt` must be text and not empty", _LINE_HINT)
    if messages is not None and not _is_chat(messages):
        raise DataError(
            f"{where}: `messages` (or a `prompt` that is a list) must be a list of objects with `role` and `content`",
            _LINE_HINT,
        )
    return record


def _is_chat(messages: Any) -> bool:
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(isinstance(turn, dict) and isinstance(turn.get("role"), str) and "content" in turn for turn in messages)
    )


def _encode_chunk(
    rows: Sequence[_Line],
    tokenizer: Tokenizer,
    limits: PromptLimits,
    digest: hashlib.blake2b,
    path: Path,
    *,
    evaluation: bool,
) -> list[bytes]:
    texts = [row for row in rows if "prompt" in row.record and row.record["prompt"] is not None]
    found: dict[int, tuple[str, Int32Array]] = {
        row.line: (row.record["prompt"], tokens)
        for row, tokens in zip(texts, tokenizer.encode_texts([row.record["prompt"] for row in texts]), strict=True)
    }
    for row in rows:
        if row.line not in found:
            try:
                [found[row.line]] = tokenizer.encode_chats([row.record["messages"]])
            except DataError as error:
                raise DataError(f"{path}:{row.line + 1}: {error.message}", error.hint) from error
    encoded = []
    for row in rows:
        text, tokens = found[row.line]
        _check_tokens(tokens, limits, f"{path}:{row.line + 1}")
        digest.update(tokens.tobytes())
        encoded.append(_encode_prompt(row, text, tokens, f"{path}:{row.line + 1}", evaluation=evaluation))
    return encoded


def _check_tokens(tokens: Int32Array, limits: PromptLimits, where: str) -> None:
    if tokens.size == 0:
        raise DataError(f"{where}: the prompt has no tokens")
    if tokens.size > limits.max_prompt_tokens:
        raise DataError(
            f"{where}: the prompt has {tokens.size} tokens, data.max_prompt_tokens is {limits.max_prompt_tokens}",
            "leave the line out, or raise data.max_prompt_tokens (and model.context)",
        )
    if tokens.size >= limits.context:
        raise DataError(
            f"{where}: the prompt has {tokens.size} tokens, which leaves no room in model.context {limits.context}",
            "leave the line out, or raise model.context",
        )
    if limits.vocabulary is not None and int(tokens.max()) >= limits.vocabulary:
        raise DataError(
            f"{where}: token id {tokens.max()} of the prompt is outside the model's vocabulary of {limits.vocabulary}",
            "the tokenizer is another model's: set model.tokenizer to the one that belongs to model.path",
        )


def _encode_prompt(row: _Line, text: str, tokens: Int32Array, where: str, *, evaluation: bool) -> bytes:
    record = row.record
    prompt = Prompt(
        tokens=pack_int32(tokens),
        text=text,
        messages=record.get("messages"),
        answer=record.get("answer"),
        metadata={key: value for key, value in record.items() if key not in ("prompt", "messages", "answer")},
        line=row.line,
        evaluation=evaluation,
    )
    try:
        return encode(prompt)
    except (WireError, TypeError, OverflowError, ValueError) as error:
        raise DataError(f"{where}: cannot be sent: {error}") from error


def fingerprint_of(data: PromptSet, **settings: int | bool) -> str:
    """Combine file, tokens, and the settings that `index` depends on; the ledger refuses any other fingerprint."""
    options = orjson.dumps([data.fingerprint, settings], option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(options, digest_size=16).hexdigest()
