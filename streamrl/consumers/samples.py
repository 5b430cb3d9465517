"""Samples without a run: made by hand for tests of rewards, or read from JSON, a recording or an archive."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, get_args

import msgspec
import numpy as np
import numpy.typing as npt
import orjson

from streamrl.consumers.reward import RewardImage, RewardPrompt, RewardSample
from streamrl.errors import ConfigError, DataError
from streamrl.wire import Int32Array

Finish = Literal["stop", "length", "abort"]
_FINISH: Final = get_args(Finish)
_EXAMPLE: Final = '{"prompt": "2+2=", "response": "4", "answer": "4"}'
_OTHER_NAMES: Final = frozenset({"completion", "output", "solution_str", "text"})
_MAX_FILE: Final = 1 << 30


class _Line(msgspec.Struct, kw_only=True):
    response: str
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    answer: Any = None
    metadata: dict[str, Any] = {}
    finish: Finish = "stop"
    tokens: list[int] | None = None
    completion: list[dict[str, Any]] | None = None
    group: int = 0
    index: int = 0
    line: int = 0
    evaluation: bool = False
    source: str = ""


def make_sample(
    response: str,
    *,
    prompt: str = "",
    answer: Any = None,
    metadata: Mapping[str, Any] | None = None,
    messages: list[dict[str, Any]] | None = None,
    tokens: npt.ArrayLike | None = None,
    finish: Finish = "stop",
    group: int = 0,
    index: int = 0,
    line: int = 0,
    evaluation: bool = False,
    completion: Sequence[dict[str, Any]] | None = None,
    images: Sequence[bytes] = (),
    source: str = "",
) -> RewardSample:
    """Make a sample as rewards see it, for tests: `make_sample("4", prompt="2+2=", answer="4")`.

    Args:
        response: its text; of an episode, that of its last turn.
        prompt: text of the prompt.
        answer: that came with the prompt.
        metadata: every other key of the prompt's line.
        messages: of the prompt, if it is a chat.
        tokens: ids of the response; by default, one for each byte of its text.
        finish: how it ended.
        group: id of its group.
        index: its number in the group.
        line: of the data set.
        evaluation: held-out.
        completion: of an episode, all messages from the first reply to the last one.
        images: encoded ones that the prompt shows.
        source: of the prompt, for rewards with `when`.

    Raises:
        ValueError: `finish` is unknown, tokens are no whole numbers, or the completion does not begin and end with a
            message of the assistant.
    """
    if finish not in _FINISH:
        raise ValueError(f"finish is {finish!r}, not one of {', '.join(_FINISH)}")
    shown = tuple(RewardImage(hashlib.sha256(data).hexdigest(), partial(bytes, data)) for data in images)
    seen = RewardPrompt(
        text=prompt,
        messages=messages,
        answer=answer,
        metadata=dict(metadata or {}),
        tokens=_bytes_of(prompt),
        line=line,
        evaluation=evaluation,
        images=shown,
        source=source,
    )
    said = list(completion or ())
    if said and {said[0].get("role"), said[-1].get("role")} != {"assistant"}:
        raise ValueError("the completion must begin and end with a message of the assistant")
    ids = _bytes_of(response) if tokens is None else np.asarray(tokens, dtype=np.int32)
    return RewardSample(
        text=response,
        prompt=seen,
        tokens=ids,
        finish=finish,
        group_id=group,
        index=index,
        completion=said,
        images=shown,
    )


def read_samples(path: Path, problems: list[str] | None = None) -> Iterator[RewardSample]:
    """The samples of a file of JSON or JSON lines, of a recording, or of the archive or the directory of a run.

    JSON has `response` and the keys of a data set: `prompt` or `messages`, `answer`, `metadata`; also `finish`,
    `tokens`, `completion` (messages of an episode), `group`, `index`, `line`, `evaluation` and `source`. Any other key
    is metadata. The default of `line` is the number of the sample in the file, from 0. `messages` that end with those
    of `completion` are a whole conversation, as the reward `http` posts it.

    `problems` collects damage of a recording, and the rest is read; None: damage is a `DataError`, as is a file that
    cannot be read, is empty, or has a line that is no sample. `ConfigError`: the directory has no recorded groups.
    """
    if path.is_dir() or path.name.endswith(".msgpack.zst"):
        from streamrl.archive.reader import archive_files

        if not archive_files(path):
            raise ConfigError(f"{path} has no recorded groups", "name a file with JSON lines, or a run with an archive")
        yield from _recorded(path, problems)
        return
    found = False
    for number, (where, record) in enumerate(_records(path)):
        found = True
        yield _sample(where, record, number)
    if not found:
        raise DataError(f"{path} is empty", f"each line is one sample: {_EXAMPLE}")


def _recorded(path: Path, problems: list[str] | None) -> Iterator[RewardSample]:
    from streamrl.archive.reader import read_archive

    reading = read_archive(path)
    for group in reading:
        for sample in group.samples:
            yield RewardSample.of(group.prompt, sample.response, group.group_id, sample.number, group.images)
    if problems is not None:
        problems += reading.problems
    elif reading.problems:
        raise DataError(f"{path}: {reading.problems[0]}", "what came before it was read")


def _records(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        if path.stat().st_size > _MAX_FILE:
            raise DataError(f"{path} has more than {_MAX_FILE >> 20} MiB", "take a part of it: `head -n 1000`")
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", f"each line is one sample: {_EXAMPLE}") from error
    try:
        whole = orjson.loads(data)
    except orjson.JSONDecodeError:
        yield from _lines(path, data)
        return
    if isinstance(whole, list):
        yield from ((f"{path}, item {number}", record) for number, record in enumerate(whole))
    else:
        yield f"{path}", whole


def _lines(path: Path, data: bytes) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            yield f"{path}, line {number}", orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise DataError(f"{path}, line {number}: no JSON: {error}", f"write: {_EXAMPLE}") from error


def _sample(where: str, record: Any, number: int) -> RewardSample:
    if not isinstance(record, dict):
        raise DataError(f"{where}: not an object", f"write: {_EXAMPLE}")
    if "response" not in record:
        close = [*(_OTHER_NAMES & record.keys()), *difflib.get_close_matches("response", map(str, record), n=1)]
        hint = f"is it `{close[0]}`? the key is `response`" if close else f"write: {_EXAMPLE}"
        raise DataError(f"{where} has no `response`", hint)
    if isinstance(record.get("prompt"), list) and record.get("messages") is None:  # as in the data of verl
        record = {**{key: value for key, value in record.items() if key != "prompt"}, "messages": record["prompt"]}
    if not {"prompt", "messages"} & record.keys():
        raise DataError(f"{where} has neither `prompt` nor `messages`", f"write: {_EXAMPLE}")
    names = set(_Line.__struct_fields__)
    if not isinstance(record.get("completion"), list):
        names.discard("completion")  # text of the data set
    known = {"line": number} | {name: record[name] for name in names if record.get(name) is not None}
    others = {name: value for name, value in record.items() if name not in names}
    try:
        line = msgspec.convert(known, _Line)
        if line.prompt is None:
            line.prompt = "\n".join(str(message.get("content", "")) for message in line.messages or ())
        line.metadata = {**others, **line.metadata}
        if (said := line.completion) and line.messages and line.messages[-len(said) :] == said:
            line.messages = line.messages[: -len(said)]
        return make_sample(**msgspec.structs.asdict(line))
    except (msgspec.ValidationError, ValueError, OverflowError) as error:
        raise DataError(f"{where}: {error}", f"write: {_EXAMPLE}") from error


def _bytes_of(text: str) -> Int32Array:
    return np.frombuffer(text.encode(errors="replace"), dtype=np.uint8).astype(np.int32)
