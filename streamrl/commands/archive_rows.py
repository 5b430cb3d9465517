"""Archived groups as rows, one for each response, in JSON lines or Parquet; a file appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal

import orjson

from streamrl.archive.reader import ArchivedGroup
from streamrl.errors import CannotCreate, ConfigError
from streamrl.wire import Prompt

Format = Literal["jsonl", "parquet"]
_ROWS_AT_ONCE: Final = 512
"""Rows of one row group of Parquet: what is held in memory."""
_ARRAYS: Final = ("prompt_tokens", "tokens", "logprobs")


def rows_of(group: ArchivedGroup, *, tokens: bool) -> Iterator[dict[str, Any]]:
    """The rows of one group in the order of its responses; a dead response has a cause and no score.

    Args:
        group: from `read_archive`.
        tokens: with the ids of prompt and response and the log-probabilities (null where the archive has none).
    """
    shared = _shared(group)
    found: dict[int, dict[str, Any]] = {
        number: {**shared, "sample": number, "cause": why} for number, why in group.causes.items()
    }
    for sample in group.samples:
        response, score = sample.response, sample.score
        row = found[sample.number] = {
            **shared,
            "sample": sample.number,
            "text": response.text,
            "finish": response.finish,
            "greedy": response.greedy,
            "engine": response.engine,
            "versions": [[first, version] for first, version in response.runs],
            "score": score.value,
            "parts": score.parts,
            "seconds": score.seconds,
            "cause": None,
        }
        if tokens:
            row["prompt_tokens"] = group.prompt.token_ids
            row["tokens"] = response.token_ids
            row["logprobs"] = response.token_logprobs if group.header.logprobs else None
    names = [*shared, *_OF_RESPONSE, *(_ARRAYS if tokens else ())]
    for number in sorted(found):
        yield {name: found[number].get(name) for name in names}


_OF_RESPONSE: Final = ("sample", "text", "finish", "greedy", "engine", "versions", "score", "parts", "seconds", "cause")


def _shared(group: ArchivedGroup) -> dict[str, Any]:
    prompt: Prompt = group.prompt
    return {
        "run": group.header.run,
        "evaluation": prompt.evaluation,
        "group": group.gid,
        "attempt": group.attempt,
        "version": group.version,
        "at": group.at,
        "line": prompt.line,
        "prompt": prompt.text,
        "messages": prompt.messages,
        "answer": prompt.answer,
        "metadata": prompt.metadata,
    }


def export_rows(groups: Iterable[ArchivedGroup], out: Path | None, kind: Format, *, tokens: bool, force: bool) -> int:
    """Write the rows of groups and return their number.

    Args:
        groups: in the order of the rows.
        out: file to write; None: stdout (JSON lines only).
        kind: `jsonl` or `parquet`.
        tokens: as of `rows_of`.
        force: replace a file that is there.

    Raises:
        CannotCreate: a file is there, or there is no room; nothing is left behind.
        ConfigError: pyarrow is missing.
    """
    rows = (row for group in groups for row in rows_of(group, tokens=tokens))
    if out is None:
        return _to_jsonl(rows, sys.stdout.buffer.write if hasattr(sys.stdout, "buffer") else _write_text)
    if kind == "parquet" and not find_spec("pyarrow"):
        raise ConfigError("Parquet needs pyarrow", "pip install 'streamrl[parquet]'; or --format jsonl")
    if out.exists() and not force:
        raise CannotCreate(f"{out} is there already", "name another file, or replace it with --force")
    draft = out.with_name(f".{out.name}.draft")
    try:
        if kind == "parquet":
            count = _to_parquet(rows, draft, tokens=tokens)
        else:
            with draft.open("wb") as file:
                count = _to_jsonl(rows, file.write)
        draft.replace(out)
    except OSError as error:
        raise CannotCreate(f"{out}: {error.strerror or error}", "check space and permissions") from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft)  # noqa: PTH108 (one call, whatever became of it)
    return count


def _write_text(line: bytes) -> object:
    return sys.stdout.write(line.decode())


def _to_jsonl(rows: Iterable[dict[str, Any]], write: Callable[[bytes], object]) -> int:
    count = 0
    for row in rows:
        write(orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE))
        count += 1
    return count


def _to_parquet(rows: Iterable[dict[str, Any]], path: Path, *, tokens: bool) -> int:
    """Columns with any JSON in them (`messages`, `answer`, `metadata`) are JSON text."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = _schema(pa, tokens=tokens)
    count = 0
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for block in _blocks(rows):
            writer.write_table(pa.Table.from_pylist([_flat(row) for row in block], schema=schema))
            count += len(block)
    return count


def _blocks(rows: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    block: list[dict[str, Any]] = []
    for row in rows:
        block.append(row)
        if len(block) == _ROWS_AT_ONCE:
            yield block
            block = []
    if block:
        yield block


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    texts = {name: None if row[name] is None else orjson.dumps(row[name]).decode() for name in _JSON}
    versions = row["versions"] and [{"first": first, "version": version} for first, version in row["versions"]]
    parts = row["parts"] and list(row["parts"].items())
    return {**row, **texts, "versions": versions, "parts": parts}


_JSON: Final = ("messages", "answer", "metadata")


def _schema(pa: Any, *, tokens: bool) -> Any:
    run = pa.struct([("first", pa.int64()), ("version", pa.int64())])
    kinds = {
        "run": pa.string(),
        "evaluation": pa.bool_(),
        "group": pa.int64(),
        "attempt": pa.int32(),
        "version": pa.int64(),
        "at": pa.float64(),
        "line": pa.int64(),
        "prompt": pa.string(),
        "messages": pa.string(),
        "answer": pa.string(),
        "metadata": pa.string(),
        "sample": pa.int32(),
        "text": pa.string(),
        "finish": pa.string(),
        "greedy": pa.bool_(),
        "engine": pa.string(),
        "versions": pa.list_(run),
        "score": pa.float64(),
        "parts": pa.map_(pa.string(), pa.float64()),
        "seconds": pa.float64(),
        "cause": pa.string(),
    }
    if tokens:
        kinds |= {"prompt_tokens": pa.list_(pa.int32()), "tokens": pa.list_(pa.int32())}
        kinds["logprobs"] = pa.list_(pa.float32())
    return pa.schema(list(kinds.items()))
