"""Prompts of a data set: records are checked, written as text, tokenized and encoded for the wire.

Held-out prompts are in memory (`load_prompts`); those that are trained are made when they are admitted (`order.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from streamrl.config import ImagesConfig, RunConfig, SourceConfig
from streamrl.errors import DataError, WireError
from streamrl.images.encoded import EncodedImage
from streamrl.images.store import ImageStore
from streamrl.producers.images import PromptImages
from streamrl.producers.records import Records, open_records
from streamrl.producers.tokenizer import Tokenizer
from streamrl.wire import SCHEMA, Int32Array, Prompt, encode, pack_int32

_HINT: Final = 'a record is {"prompt": "2+2=", "answer": "4"}; data.columns takes other names'
_CHUNK: Final = 1024
_NAMED: Final = 5  # lines with the same fault that are named
_SPECIAL: Final = 8  # special tokens around a text, more than any tokenizer adds
_IN_MEMORY: Final = 1_000_000


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
    """Prompts in memory, encoded. `fingerprint` covers records, images and token ids; `dropped` are too long.

    `processor` is the fingerprint of what makes tokens of images; empty: the model takes text alone.
    """

    prompts: list[bytes]
    fingerprint: str
    dropped: int = 0
    processor: str = ""

    def __len__(self) -> int:
        return len(self.prompts)


def load_prompts(
    sources: Sequence[SourceConfig],
    tokenizer: Tokenizer,
    limits: PromptLimits,
    plugin_paths: Iterable[Path] = (),
    *,
    evaluation: bool = False,
    count: int | None = None,
    store: ImageStore | None = None,
) -> PromptSet:
    """Read, check and encode all prompts, or the first `count` of each source; `DataError` names all that is wrong.

    Several sources are spread evenly, so that each piece has a like share of each. `store` keeps the large images;
    None: all of them travel.
    """
    digest, faults, spread = hashlib.blake2b(digest_size=16), Faults(), []
    data = PromptSet([], "", processor="" if tokenizer.vision is None else tokenizer.vision.fingerprint)
    for source in sources:
        records = open_records(source, plugin_paths, count)
        reader = PromptReader(source, records, tokenizer, limits, store, evaluation=evaluation)
        raw = records.first(count or _IN_MEMORY + 1)
        if len(raw) > (count or _IN_MEMORY):
            raise DataError(f"{records.where} has more than {_IN_MEMORY} prompts", "held-out prompts are few")
        digest.update(reader.fingerprint)
        prompts: list[bytes] = []
        for start in range(0, len(raw), _CHUNK):
            for prompt in reader.encode(raw[start : start + _CHUNK], faults):
                data.dropped += prompt is None
                if prompt is not None:
                    prompts.append(prompt[0])
                    digest.update(prompt[1])
        spread += [((number + 0.5) / len(prompts), prompt) for number, prompt in enumerate(prompts)]
    faults.check()
    data.prompts = [prompt for _, prompt in sorted(spread, key=lambda placed: placed[0])]
    if not data.prompts:
        raise DataError(f"{sources[0].source} has no prompts that are short enough", "raise data.max_prompt_tokens")
    data.fingerprint = digest.hexdigest()
    return data


def examine_prompts(
    source: SourceConfig,
    records: Records,
    tokenizer: Callable[[], Tokenizer],
    limits: PromptLimits,
    *,
    count: int,
    images: ImagesConfig | None = None,
) -> int:
    """How many of the first `count` are dropped; `DataError` names all that is wrong with them.

    The tokenizer (seconds) is loaded only where it may matter.
    """
    faults, raw = Faults(), records.first(count)
    found = [line.record for line in _parsed(raw, source, records.where, faults)]
    faults.check()
    if not any("messages" in one or one.get("images") or _may_exceed(one, limits) for one in found):
        return 0
    reader = PromptReader(source, records, tokenizer(), limits, ImageStore(images or ImagesConfig()))
    prompts = list(reader.encode(raw, faults))
    faults.check()
    return prompts.count(None)


def first_prompt(source: SourceConfig, records: Records) -> dict[str, Any]:
    [(_, raw)] = records.first(1)
    return _parse(raw, source)


def _may_exceed(record: dict[str, Any], limits: PromptLimits) -> bool:
    """Whether tokens have to be counted: one has a byte or more, but for those around a text or turn."""
    text = record.get("prompt") or "".join(str(turn["content"]) for turn in record["messages"])
    return limits.exceeded_by(len(text.encode()) + _SPECIAL)


class PromptReader:
    """Makes prompts of the records of one source."""

    def __init__(
        self,
        source: SourceConfig,
        records: Records,
        tokenizer: Tokenizer,
        limits: PromptLimits,
        store: ImageStore | None = None,
        *,
        evaluation: bool = False,
    ) -> None:
        self.source, self.records, self._tokenizer, self._limits = source, records, tokenizer, limits
        store = store or ImageStore(ImagesConfig())
        self._images = PromptImages(records.folder, tokenizer.vision, store)
        processor = "" if tokenizer.vision is None else tokenizer.vision.fingerprint
        self._same = {"evaluation": evaluation, "processor": processor}

    @property
    def fingerprint(self) -> bytes:
        """Of the records and what is made of them, besides the tokens of the first prompts."""
        settings = self.source.model_dump(mode="json", exclude_defaults=True, exclude={"source"})
        settings = {key: value for key, value in settings.items() if value}
        return self.records.identity + (orjson.dumps(settings, option=orjson.OPT_SORT_KEYS) if settings else b"")

    def encode(self, raw: Sequence[tuple[int, Any]], faults: Faults) -> Iterator[tuple[bytes, bytes] | None]:
        """For each record in its order a `wire.Prompt` and what fingerprints cover of it: token ids, hashes of images.

        None for one that is left out; nothing for one with a fault.
        """
        lines = _parsed(raw, self.source, self.records.where, faults, self._images)
        for line, text, tokens in self._tokenize(lines, faults):
            if self._limits.drop and self._limits.exceeded_by(tokens.size):
                yield None
                continue
            with faults.at(self.records.where, line.line):
                _check_tokens(tokens, self._limits)
                more: dict[str, Any] = {}
                names = [image.sha256 for image in line.images]
                if names:
                    more = {
                        "v": SCHEMA,
                        "images": names,
                        "blobs": self._images.store.keep({image.sha256: image.data for image in line.images}),
                    }
                named = "source" in (self.source.columns or ())
                source = line.record.pop("source") if named else self.source.name
                data = _encode_prompt(line, text, tokens, source=source, **self._same, **more)
                of_code = b"" if self.records.identity else data
                yield (data, tokens.tobytes() + "".join(names).encode() + of_code)

    def check(self, rows: range, faults: Faults) -> None:
        """As `encode`, without images, and without tokens where a text is short or a chat is not very long."""
        lines = _parsed(self.records.read(rows), self.source, self.records.where, faults)
        if self._limits.drop or self._tokenizer.vision is not None:
            return
        for line, _, tokens in self._tokenize([one for one in lines if _may_exceed(one.record, self._limits)], faults):
            with faults.at(self.records.where, line.line):
                _check_tokens(tokens, self._limits)

    def _tokenize(self, lines: Sequence[_Line], faults: Faults) -> Iterator[tuple[_Line, str, Int32Array]]:
        """The text and the ids of each prompt; a chat that the template refuses is a fault."""
        tokenizer = self._tokenizer
        texts: list[tuple[_Line, str, str]] = []  # the text, and the same with all tokens of its images
        chats: list[tuple[_Line, str, str]] = []
        for line in lines:
            with faults.at(self.records.where, line.line):
                text, written = line.record.get("prompt"), texts
                if text is None:
                    text, written = tokenizer.chat_text(line.record["messages"]), chats
                sizes = [image.size for image in line.images]
                written.append((line, text, tokenizer.vision.expand(text, sizes) if tokenizer.vision else text))
        found: dict[int, tuple[_Line, str, Int32Array]] = {}
        for part, special in ((texts, True), (chats, False)):  # a template writes the special tokens itself
            ids = tokenizer.encode([expanded for _, _, expanded in part], special=special)
            found |= {id(line): (line, text, tokens) for (line, text, _), tokens in zip(part, ids, strict=True)}
        return (found[id(line)] for line in lines if id(line) in found)


@dataclass(frozen=True)
class _Line:
    line: int
    record: dict[str, Any]
    images: list[EncodedImage]


class Faults:
    """Records that cannot be used, by source and kind of fault: the message without what differs from line to line."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, str], tuple[DataError, list[int]]] = {}

    @contextlib.contextmanager
    def at(self, where: str, line: int) -> Iterator[None]:
        try:
            yield
        except DataError as error:
            kind = re.sub(r"\d+", "", error.message.partition(":")[0])
            self._kinds.setdefault((where, kind), (error, []))[1].append(line + 1)

    def check(self) -> None:
        """`DataError` if there is one; it names the first lines of each kind."""
        said = []
        kinds = sorted(self._kinds.items(), key=lambda item: (item[0][0], item[1][1]))
        for (where, _), (error, (first, *others)) in kinds:
            named = ", ".join(map(str, others[:_NAMED]))
            more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
            said.append(f"{where}:{first}: {error.message}{f' (also {named}{more})' if others else ''}")
        if said:
            hints = dict.fromkeys(error.hint for _, (error, _) in kinds)
            raise DataError("; ".join(said), "; ".join(hints))


def _parsed(
    raw: Iterable[tuple[int, Any]], source: SourceConfig, where: str, faults: Faults, images: PromptImages | None = None
) -> list[_Line]:
    lines = []
    for number, found in raw:
        with faults.at(where, number):
            record = _parse(found, source)
            lines.append(_Line(number, *(images.of(record) if images else (record, []))))
    return lines


def _parse(raw: Any, source: SourceConfig) -> dict[str, Any]:
    """A record with the names that it has inside, checked. A `prompt` that is a list, as in data of verl, is a chat."""
    try:
        found = orjson.loads(raw) if isinstance(raw, bytes) else raw
    except orjson.JSONDecodeError as error:
        raise DataError(f"no JSON: {error}", _HINT) from error
    if not isinstance(found, dict):
        raise DataError("not a JSON object", _HINT)
    record = _mapped(found, source)
    prompt, messages = record.get("prompt"), record.get("messages")
    if messages is None and isinstance(prompt, list):
        prompt, messages = None, prompt
    if (prompt is None) == (messages is None):
        hint = f"{_HINT}; its columns are {', '.join(found)}" if found else _HINT
        raise DataError("needs either `prompt` (text) or `messages` (chat)", hint)
    if prompt is not None and (not isinstance(prompt, str) or not prompt):
        raise DataError("`prompt` must be text and not empty", _HINT)
    if prompt is not None and source.chat:
        prompt, messages = None, [{"role": "user", "content": prompt}]
    if messages is not None and not (isinstance(messages, list) and messages and all(map(_is_turn, messages))):
        what = "`messages` (or a `prompt` that is a list) must be a list of objects with `role` and `content`"
        raise DataError(what, _HINT)
    rest = {key: value for key, value in record.items() if key not in ("prompt", "messages")}
    return {**({"messages": messages} if prompt is None else {"prompt": prompt}), **rest}


def _mapped(found: dict[str, Any], source: SourceConfig) -> dict[str, Any]:
    """The record by the names of `columns`, with the prompt that the template writes; `source` keeps its own column."""
    columns = source.columns or {}
    taken = {}
    for name, column in columns.items():
        if column not in found:
            raise DataError(f"no column `{column}`, which columns.{name} names", f"its columns are {', '.join(found)}")
        taken[name] = found[column]
    renamed = {column for name, column in columns.items() if name != "source"}
    record = {**{key: value for key, value in found.items() if key not in renamed}, **taken}
    if not isinstance(record.get("source", ""), str) and "source" in columns:
        raise DataError("`source` must be text", "it names a source in rewards and figures")
    if source.prompt is not None:
        try:
            record["prompt"] = source.prompt.format_map({**found, **taken})
        except (LookupError, AttributeError, ValueError, TypeError) as error:
            what = f"the template of the prompt finds no {error}" if isinstance(error, KeyError) else str(error)
            raise DataError(what, f"its columns are {', '.join(found)}; data.prompt is the template") from error
        record.pop("messages", None)
    return record


def _is_turn(turn: Any) -> bool:
    return isinstance(turn, dict) and isinstance(turn.get("role"), str) and "content" in turn


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


def _encode_prompt(row: _Line, text: str, tokens: Int32Array, **more: Any) -> bytes:
    record = row.record
    prompt = Prompt(
        tokens=pack_int32(tokens),
        text=text,
        messages=record.get("messages"),
        answer=record.get("answer"),
        metadata={key: value for key, value in record.items() if key not in ("prompt", "messages", "answer")},
        line=row.line,
        **more,
    )
    try:
        return encode(prompt)
    except (WireError, TypeError, OverflowError, ValueError) as error:
        raise DataError(f"cannot be sent: {error}") from error
