"""`streamrl archive`: what is kept of closed groups, and its export as rows, one for each response."""

from __future__ import annotations

import contextlib
import datetime as dt
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import orjson
import typer

from streamrl.archive.reader import ArchivedGroup, ArchiveReading, archive_files, read_archive, read_file
from streamrl.commands import output
from streamrl.commands.options import EvalOption, JsonOption, RunOption
from streamrl.commands.rundir import find_run
from streamrl.errors import CannotCreate, ConfigError, ExitCode, UsageError, WireError, writing
from streamrl.monitor.lines import date_time, duration, size
from streamrl.wire import Prompt, Turn

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_ARRAYS: Final = ("prompt_tokens", "tokens", "logprobs")

app = typer.Typer(no_args_is_help=True, add_completion=False)
FromOption = Annotated[
    Path | None,
    typer.Option("--from", metavar="DIR|FILE", help="An archive, a recording, or RUN_DIR/rescored/NAME; else the run."),
]
SinceOption = Annotated[
    str | None,
    typer.Option("--since", metavar="TIME", help="Only groups closed since then: 30m, 2h, 1d, or 2026-01-31T12:00."),
]


@app.command("ls")
def ls(run: RunOption = None, source: FromOption = None, json: JsonOption = False) -> int:
    """List the files of an archive: size, groups, samples, times. Exit code 1 if one is damaged.

    The run may go on writing the archive.
    """
    path = source or find_run(run).path
    files = [
        _file(file, evaluation=evaluation)
        for evaluation in (False, True)
        for file in ([] if evaluation and path.is_file() else archive_files(path, evaluation=evaluation))
    ]
    if not files:
        read_archive(path)  # says how one comes to be
    code = int(ExitCode.FAILURE if any(found["problem"] for found in files) else ExitCode.OK)
    data = {"source": str(path), "files": files}
    output.answer("streamrl.archive/1", data, map(_file_line, files), json=json)
    return code


def _file_line(found: dict[str, Any]) -> str:
    kind = "held-out groups" if found["evaluation"] else "groups"
    when = f"{date_time(found['from'])} to {date_time(found['to'])}" if found["from"] else "time unknown"
    line = f"{found['file']}  {size(found['bytes'])}  {found['groups']} {kind}  {found['samples']} samples  {when}"
    return line + (f"  DAMAGED: {found['problem']}" if found["problem"] else "")


def _file(file: Path, *, evaluation: bool) -> dict[str, Any]:
    groups = samples = dead = 0
    first, last, problem = 0.0, 0.0, None
    try:
        for group in read_file(file)[1]:
            if not group.samples:
                continue
            groups, samples, dead = groups + 1, samples + len(group.samples), dead + len(group.causes)
            first, last = first or group.at, max(last, group.at)
    except (WireError, ConfigError) as error:
        problem = error.message
    return {
        "file": str(file),
        "bytes": file.stat().st_size,
        "evaluation": evaluation,
        "groups": groups,
        "samples": samples,
        "dead": dead,
        "from": first or None,
        "to": last or None,
        "problem": problem,
    }


@app.command("export")
def export(
    *,
    out: Annotated[str, typer.Option("--out", metavar="FILE", help="File to write; -: JSON lines to stdout.")],
    run: RunOption = None,
    source: FromOption = None,
    since: SinceOption = None,
    evaluation: EvalOption = False,
    tokens: Annotated[bool, typer.Option("--tokens/--no-tokens", help="With token ids and log-probabilities.")] = True,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    json: JsonOption = False,
) -> int:
    """Write archived groups as JSON lines, one for each response: prompt, text, tokens, score, parts, versions.

    A response that failed has a cause and no score. Exit code 1 if the rest of a damaged file could not be read.
    """
    path = None if out == "-" else Path(out)
    if path is None and json:
        raise UsageError("--out - writes JSON lines and nothing else", "name a file")
    if path is not None and path.suffix == ".parquet":
        raise UsageError("archives are exported as JSON lines", "name a .jsonl file: duckdb and pandas read it")
    reading = read_archive(source or find_run(run).path, evaluation=evaluation)
    started = time.monotonic()
    count = export_rows(later_than(reading, since_of(since)), path, tokens=tokens, force=force)
    note_problems(reading)
    code = int(ExitCode.FAILURE if reading.problems else ExitCode.OK)
    if path is None:
        return code
    written, took = path.stat().st_size, duration(time.monotonic() - started)
    data = {"file": str(path.resolve()), "rows": count, "bytes": written, "problems": reading.problems}
    said = f"{count} responses are in {path} ({size(written)}, {took})"
    output.answer("streamrl.archive.export/1", data, [said], json=json)
    return code


def later_than(groups: ArchiveReading, since: float) -> Iterator[ArchivedGroup]:
    return (group for group in groups if group.at >= since)


def since_of(text: str | None, now: float | None = None) -> float:
    """Seconds since 1970 of `--since`: `30m`, `2h`, `1d` before now, or an ISO 8601 date (here local time)."""
    if text is None:
        return 0.0
    value = text.strip()
    try:
        if value and value[-1] in _UNITS and 0 <= (ago := float(value[:-1])) < math.inf:
            return (time.time() if now is None else now) - ago * _UNITS[value[-1]]
        return dt.datetime.fromisoformat(value).astimezone().timestamp()
    except (ValueError, OverflowError) as error:
        raise UsageError(
            f"--since {text} is not a time", "write 30m, 2h, 1d, or 2026-01-31 or 2026-01-31T12:00"
        ) from error


def note_problems(reading: ArchiveReading) -> None:
    for problem in reading.problems:
        output.note(f"warning: {problem}")


def rows_of(group: ArchivedGroup, *, tokens: bool) -> Iterator[dict[str, Any]]:
    """In the order of the responses; a dead response has a cause and no score."""
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
            "stop": response.stop,
            "replayed": response.replayed,
            "restarts": response.restarts,
            "turns": [_turn_row(turn, tokens=tokens) for turn in response.turns],
        }
        if tokens:
            row["prompt_tokens"] = group.prompt.token_ids
            row["tokens"] = response.token_ids
            row["logprobs"] = response.token_logprobs if group.header.logprobs else None
    names = [*shared, *_OF_RESPONSE, *(_ARRAYS if tokens else ())]
    for number in sorted(found):
        yield {name: found[number].get(name) for name in names}


def _turn_row(turn: Turn, *, tokens: bool) -> dict[str, Any]:
    """`sampled` counts the next ones of the sampled tokens, `observed` those that answered them."""
    row = msgspec.structs.asdict(turn)
    row["tools"] = [msgspec.structs.asdict(use) for use in turn.tools]
    row["observed"] = len(turn.observed) // 4
    if tokens:
        row["observed_tokens"] = turn.observed_ids
    return row


_OF_RESPONSE: Final = (
    *("sample", "text", "finish", "greedy", "engine", "versions", "score", "parts", "seconds", "cause"),
    *("stop", "replayed", "restarts", "turns"),
)


def _shared(group: ArchivedGroup) -> dict[str, Any]:
    prompt: Prompt = group.prompt
    return {
        "run": group.header.run,
        "evaluation": prompt.evaluation,
        "group": group.group_id,
        "attempt": group.attempt,
        "version": group.version,
        "at": group.at,
        "line": prompt.line,
        "prompt": prompt.text,
        "messages": prompt.messages,
        "answer": prompt.answer,
        "metadata": prompt.metadata,
    }


def export_rows(groups: Iterable[ArchivedGroup], out: Path | None, *, tokens: bool, force: bool) -> int:
    """Write rows to a file, or to stdout (None), and return their number. A failure leaves no file."""
    rows = (row for group in groups for row in rows_of(group, tokens=tokens))
    if out is None:
        binary = getattr(sys.stdout, "buffer", None)  # UTF-8 whatever the locale is
        return _to_jsonl(rows, binary.write if binary else lambda line: sys.stdout.write(line.decode()))
    if out.exists() and not force:
        raise CannotCreate(f"{out} is there already", "name another file, or replace it with --force")
    draft = out.with_name(f".{out.name}.draft")
    try:
        with writing(out):
            with draft.open("wb") as file:
                count = _to_jsonl(rows, file.write)
            draft.replace(out)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()
    return count


def _to_jsonl(rows: Iterable[dict[str, Any]], write: Callable[[bytes], object]) -> int:
    count = 0
    for row in rows:
        write(orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE))
        count += 1
    return count
