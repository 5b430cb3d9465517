"""`streamrl trace`: one prompt group, from Redis, the archive and the files of its run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from streamrl import wire
from streamrl.archive.reader import RESCORED, ArchiveReading, archive_files
from streamrl.commands import output
from streamrl.commands.archive import note_problems
from streamrl.commands.options import EvalOption, GroupArgument, JsonOption, RunOption
from streamrl.commands.rundir import RunDirectory, find_run, ledgers_to_look
from streamrl.commands.turns import decoder_of, episode_data, episode_lines
from streamrl.errors import DataError, ExitCode, StreamrlError, WireError, writing
from streamrl.images.encoded import known, suffix_of
from streamrl.images.store import ImageStore
from streamrl.monitor.lines import duration, printable, shortened
from streamrl.monitor.tail import Tail
from streamrl.queues.records import DeadLetter, LedgerState

_BYTES: Final = frozenset({"prompt", "payloads", "scores", "causes", "letters"})
_Parts = tuple[Mapping[int, bytes], Mapping[int, bytes], Mapping[int, str]]
"""Payloads, scores and causes of death by the number of the response."""
_Show = Callable[[wire.Sample], dict[str, Any]]
"""What is shown of a response besides its text."""


def trace(
    *,
    group: GroupArgument,
    run: RunOption = None,
    evaluation: EvalOption = False,
    turns: Annotated[bool, typer.Option("--turns", help="The turns of each response, as a tree.")] = False,
    width: Annotated[
        int, typer.Option("--width", metavar="N", min=10, help="At most N characters of each text.")
    ] = 200,
    images: Annotated[
        Path | None, typer.Option("--images", metavar="DIR", help="Write the images that it shows into a directory.")
    ] = None,
    json: JsonOption = False,
) -> int:
    """Show all that is known of one prompt group: prompt, responses, scores with their parts, causes of death.

    Images are named by their hash.

    A live group is read from Redis, an older one from the archive or the recording of the run, and its training from
    the checkpoints. Scores of `streamrl rescore` are shown beside the original ones. --json shows the whole texts. Exit
    code 1 if nothing is known of the group.
    """
    target = find_run(run)
    show = _episodes(target) if turns else None
    shown = _Images(ImageStore.of(target.config, target.path))
    found: dict[str, Any] = {"group": group, "evaluation": evaluation, "source": None, "earlier_attempts": 0}
    found |= {"attempt": None, "letters": [], "record": None, "prompt": None, "responses": []}
    state = failure = None
    try:
        known, state = asyncio.run(_known(target, group, shown, evaluation=evaluation, show=show))
    except StreamrlError as error:
        known, failure = {"state": "unknown"}, error
    found |= known
    if found["responses"]:
        found["source"] = "ledger"
    else:
        found |= _archived(target.path, group, shown, evaluation=evaluation, show=show)
    if failure is not None and not found["responses"]:
        raise failure
    if failure is not None:
        output.note(f"warning: Redis cannot be asked, so only the archive is read: {failure.message}")
    if images is not None:
        found["written"] = shown.write(images)
    found["rescored"] = _rescored(target.path, group, found["attempt"], evaluation=evaluation)
    record = _evaluated(target.path, group) if evaluation else _trained(target, group, state)
    if record is not None:
        # The disk decides what was trained: Redis may have lost its newest state since.
        found["record"] = record
        if found["state"] in ("unknown", "retired"):
            found["state"] = "evaluated" if evaluation else "trained"
    output.answer("streamrl.trace/1", found, _lines(found, width), json=json)
    return int(ExitCode.FAILURE if found["state"] == "unknown" and not found["responses"] else ExitCode.OK)


def _episodes(run: RunDirectory) -> _Show:
    decode = decoder_of(run.config.model)
    return lambda sample: episode_data(sample, decode)


async def _known(
    run: RunDirectory, group_id: int, images: _Images, *, evaluation: bool, show: _Show | None = None
) -> tuple[dict[str, Any], LedgerState]:
    async with ledgers_to_look(run) as opened:
        ledger = opened.evaluation if evaluation else opened.train
        known, state = await ledger.trace(group_id), await ledger.state()
    if known is None:
        return {"state": "unknown"}, state
    found = {key: value for key, value in known.items() if key not in _BYTES and key != "gid"}
    found["letters"] = [letter_data(letter) for letter in known.get("letters", ())]
    if "samples" in known:
        found["prompt"] = prompt_data(known["prompt"], images)
        parts = known["payloads"], known["scores"], known["causes"]
        found["responses"] = [_sample_data(k, parts, images, show) for k in range(known["samples"])]
    return found, state


def _trained(run: RunDirectory, group_id: int, state: LedgerState | None) -> dict[str, Any] | None:
    """The training of a group that the current weights were trained on: its step, as far as the metrics tell."""
    from streamrl.learner.checkpoint import Checkpoints

    if state is None:
        return None
    checkpoints = Checkpoints.of(run.config, run.path)
    newest = next(checkpoints.loadable(state.base, state.base_epoch, state.checkpoint), None)
    if newest is None or not any(first <= group_id <= last for first, last in newest.trained):
        return None
    record: dict[str, Any] = {"gid": group_id}
    for line in Tail(run.path / "metrics" / "learner.0.jsonl").read():  # the last one: steps before may have been lost
        for trained, staleness in line.get("trained", ()):
            if trained == group_id:
                record |= {name: line[name] for name in ("step", "epoch", "version")} | {"staleness": staleness}
    return record


def _evaluated(run_dir: Path, group_id: int) -> dict[str, Any] | None:
    return next((line for line in Tail(run_dir / "evaluation.jsonl").read() if line.get("gid") == group_id), None)


def _archived(
    run_dir: Path, group_id: int, images: _Images, *, evaluation: bool, show: _Show | None = None
) -> dict[str, Any]:
    """The newest archived attempt at a group, with the fields of a live one; empty if there is none."""
    reading = ArchiveReading(archive_files(run_dir, evaluation=evaluation))
    attempts = reading.find(group_id)
    note_problems(reading)
    if not attempts:
        return {}
    group = attempts[-1]
    raw = group.raw
    payloads = {number: payload for number, (payload, _) in zip(raw.numbers, raw.samples, strict=True)}
    scores = {number: score for number, (_, score) in zip(raw.numbers, raw.samples, strict=True)}
    parts, numbers = (payloads, scores, group.causes), sorted({*payloads, *group.causes})
    return {
        "source": "archive",
        "earlier_attempts": len(attempts) - 1,
        "attempt": group.attempt,
        "prompt": prompt_data(raw.prompt, images),
        "responses": [_sample_data(k, parts, images, show) for k in numbers],
    }


def _rescored(run_dir: Path, group_id: int, attempt: int | None, *, evaluation: bool) -> dict[str, dict[str, Any]]:
    """Later scores of this attempt at the group, by the name of the set: sample to score and parts."""
    found: dict[str, dict[str, Any]] = {}
    folders = sorted((run_dir / RESCORED).iterdir()) if (run_dir / RESCORED).is_dir() else []
    for folder in folders:
        groups = ArchiveReading(archive_files(folder, evaluation=evaluation)).find(group_id)
        for group in groups:
            if group.attempt != attempt:
                continue  # these scores belong to other responses
            found[folder.name] = {
                str(number): {"score": score.value, "parts": score.parts, "seconds": score.seconds}
                for number, score in ((sample.number, sample.score) for sample in group.samples)
            }
    return found


class _Images:
    """Those of one group: what is told of each, and its bytes by its hash."""

    def __init__(self, store: ImageStore) -> None:
        self._store, self._travelled = store, list[bytes]()
        self.found: dict[str, bytes] = {}

    def of(self, names: Sequence[str], travelled: Sequence[bytes]) -> dict[str, Any]:
        self._travelled += travelled  # in the archive those of the samples are beside the prompt
        return {"images": [self._one(name) for name in names]} if names else {}

    def _one(self, name: str) -> dict[str, Any]:
        try:
            data = self._store.read([name], self._travelled)[name]
        except DataError as error:
            return {"sha256": name, "missing": error.message}
        self.found[name] = data
        image = known(name, data)
        return {"sha256": name, "bytes": len(data), "width": image.width, "height": image.height}

    def write(self, folder: Path) -> dict[str, Any]:
        with writing(inside=folder):
            folder.mkdir(parents=True, exist_ok=True)
            for name, data in self.found.items():
                (folder / f"{name}.{suffix_of(data)}").write_bytes(data)
        return {"directory": str(folder), "count": len(self.found)}


def _image_lines(shown: dict[str, Any], indent: str) -> Iterator[str]:
    for image in shown.get("images", ()):
        about = image.get("missing") or f"{image['width']} x {image['height']}, {image['bytes']:,} bytes"
        yield f"{indent}image   {image['sha256'][:12]}  {about}"


def prompt_data(data: bytes | None, images: _Images | None = None) -> dict[str, Any] | None:
    """A prompt as plain data; `{"unreadable": why}` for invalid bytes."""
    if data is None:
        return None
    try:
        prompt = wire.decode(data, wire.Prompt)
    except WireError as error:
        return {"unreadable": error.message}
    return {
        "text": prompt.text,
        "answer": prompt.answer,
        "metadata": prompt.metadata,
        "line": prompt.line,
        "tokens": len(prompt.token_ids),
        **({} if images is None else images.of(prompt.images, prompt.blobs)),
    }


def _sample_data(number: int, parts: _Parts, images: _Images, show: _Show | None = None) -> dict[str, Any]:
    payload, score, cause = parts[0].get(number), parts[1].get(number), parts[2].get(number)
    found: dict[str, Any] = {"sample": number}
    try:
        if payload is not None:
            sample = wire.decode(payload, wire.Sample)
            found |= {
                "text": sample.text,
                "tokens": len(sample.token_ids),
                "finish": sample.finish,
                "versions": [[first, version] for first, version in sample.runs],
            }
            found |= images.of(sample.images, sample.blobs)
            found |= {} if show is None else show(sample)
        if score is not None:
            value = wire.decode(score, wire.SampleScore)
            found |= {"score": value.value, "parts": value.parts, "seconds": value.seconds}
    except WireError as error:
        found["unreadable"] = error.message
    if cause is not None:
        found["cause"] = cause
    return found


def parts_line(parts: dict[str, float]) -> str:
    return "  ".join(f"{printable(name)} {value:g}" for name, value in parts.items())


def letter_data(letter: DeadLetter) -> dict[str, Any]:
    """A dead letter as plain data; `sample` is null for a whole group."""
    return {
        "id": letter.entry,
        "group": letter.group_id,
        "sample": letter.sample,
        "attempt": letter.attempt,
        "stage": letter.stage,
        "why": letter.why,
        "deliveries": letter.deliveries,
        "at": letter.at,
        "detail": letter.detail,
        "prompt": prompt_data(letter.prompt),
    }


def letter_line(letter: dict[str, Any]) -> str:
    who = "group" if letter["sample"] is None else f"sample {letter['sample']}"
    return f"dead {who} in {letter['stage']}: {printable(letter['why'])}  ({letter['id']})"


def _lines(found: dict[str, Any], width: int) -> Iterator[str]:
    why = f" ({found['why']})" if "why" in found else ""
    attempt = f", attempt {found['attempt']}" if found["attempt"] else ""
    where = f", from the {found['source']}" if found["source"] else ""
    yield f"{_name(found)}: {found['state']}{why}{attempt}{where}"
    facts = ("version", "samples", "min_group", "without_payload", "without_score", "crashes")
    if "version" in found:
        whole = "  scored whole" if found["whole"] else ""
        yield "  " + "  ".join(f"{key} {found[key]}" for key in facts) + whole
    if found.get("journaled"):
        yield "  turns so far  " + "  ".join(f"sample {k}: {count}" for k, count in found["journaled"].items())
    if found.get("doom"):
        yield f"  will be dead: {found['doom']}"
    if found["prompt"]:
        yield f"  prompt  {shortened(found['prompt'].get('text', found['prompt']), width)}"
        yield f"  answer  {shortened(found['prompt'].get('answer'), width)}"
        yield from _image_lines(found["prompt"], "  ")
    for response in found["responses"]:
        yield from _response(response, found["rescored"], width)
    if "written" in found:
        yield f"  images  {found['written']['count']} in {found['written']['directory']}"
    yield from (f"  {letter_line(letter)}" for letter in found["letters"])
    if found["record"] is not None:
        yield "  " + "  ".join(f"{key} {value}" for key, value in found["record"].items() if key != "gid")
    if not found["responses"]:
        yield "  nothing is kept of its responses: see archive.enabled and archive.max_bytes"


def _name(found: dict[str, Any]) -> str:
    return f"{'held-out group' if found['evaluation'] else 'group'} {found['group']}"


def _response(response: dict[str, Any], rescored: dict[str, dict[str, Any]], width: int) -> Iterator[str]:
    head = [f"  sample {response['sample']}"]
    if "score" in response:
        head += [f"score {response['score']:g}", f"in {duration(response['seconds'])}"]
    if "cause" in response:
        head.append(f"dead: {shortened(response['cause'], width)}")
    if "unreadable" in response:
        head.append(f"unreadable: {response['unreadable']}")
    if "tokens" in response:
        versions = ",".join(f"v{version}" for _, version in response["versions"])
        head.append(f"{response['tokens']} tokens ({response['finish']}) by {versions}")
    elif "cause" not in response:
        head.append("not generated yet")
    yield "  ".join(head)
    if response.get("parts"):
        yield f"    parts  {parts_line(response['parts'])}"
    for name, scores in rescored.items():
        if (again := scores.get(str(response["sample"]))) is not None:
            yield f"    {name}  score {again['score']:g}"
    yield from _image_lines(response, "    ")
    if "turns" in response:
        yield from episode_lines(response, width)
    elif "text" in response:
        yield f"    {shortened(response['text'], width)}"
