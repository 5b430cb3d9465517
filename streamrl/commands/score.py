"""`streamrl score show GROUP`: what the rewards said of each response of a group, alive in Redis or archived."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from streamrl.archive.reader import RESCORED, ArchivedGroup, ArchiveReading, archive_files
from streamrl.commands import output
from streamrl.commands.archive import note_problems
from streamrl.commands.letters import letter_data, letter_line, parts_line, prompt_data, sample_data
from streamrl.commands.options import EvalOption, GroupArgument, JsonOption, RunOption
from streamrl.commands.rundir import RunDirectory, find_run, ledgers_to_look
from streamrl.errors import ExitCode, StreamrlError
from streamrl.monitor.lines import duration, shortened

SCHEMA: Final = "streamrl.score/1"


app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.command("show")
def show(
    group: GroupArgument,
    run: RunOption = None,
    evaluation: EvalOption = False,
    width: Annotated[int, typer.Option("--width", min=10, help="Show at most so many characters of a text.")] = 200,
    json: JsonOption = False,
) -> int:
    """Show each response of a group: text, score, parts, seconds, or why it died. Exit code 1 if nothing is kept of it.

    A live group is read from Redis, a later one from the archive (archive.enabled) or the recording of the run. Scores
    that `streamrl rescore` made are shown beside the first ones. --json shows the whole texts.
    """
    found = find_group(find_run(run), group, evaluation=evaluation)
    if json:
        output.write_json(SCHEMA, found)
    else:
        output.write("\n".join(_lines(found, width)))
    return int(ExitCode.OK if found["responses"] else ExitCode.FAILURE)


def find_group(run: RunDirectory, group_id: int, *, evaluation: bool) -> dict[str, Any]:
    """What is known of a group: the ledger while it is live there, else the archive; scores made again with both."""
    try:
        known = asyncio.run(_live(run, group_id, evaluation=evaluation))
    except StreamrlError as error:
        output.note(f"warning: Redis cannot be asked, so only the archive is read: {error.message}")
        known = {"state": "unknown", "responses": []}
    found: dict[str, Any] = {
        "group": group_id,
        "evaluation": evaluation,
        "attempt": None,
        "prompt": None,
        "letters": [],
    }
    found |= {"earlier_attempts": 0, "source": "ledger" if known["responses"] else None, **known}
    if not known["responses"]:
        attempts = _archived(run.path, group_id, evaluation=evaluation)
        if attempts:
            newest = attempts[-1]
            found |= {"source": "archive", "earlier_attempts": len(attempts) - 1, **_archived_data(newest)}
    found["rescored"] = _rescored(run.path, group_id, found["attempt"], evaluation=evaluation)
    return found


async def _live(run: RunDirectory, group_id: int, *, evaluation: bool) -> dict[str, Any]:
    async with ledgers_to_look(run) as opened:
        known = await (opened.evaluation if evaluation else opened.train).trace(group_id)
    if known is None:
        return {"state": "unknown", "responses": []}
    letters = [letter_data(letter) for letter in known.get("letters", ())]
    if "samples" not in known:
        return {"state": known["state"], "letters": letters, "responses": []}
    numbers = range(known["samples"])
    payloads, scores, causes = known["payloads"], known["scores"], known["causes"]
    return {
        "state": known["state"],
        "attempt": known["attempt"],
        "prompt": prompt_data(known["prompt"]),
        "letters": letters,
        "responses": [sample_data(k, payloads.get(k), scores.get(k), causes.get(k)) for k in numbers],
    }


def _archived_data(group: ArchivedGroup) -> dict[str, Any]:
    """The part of an archived group that people look at, with the fields of a live one."""
    raw = group.raw
    payloads = {number: payload for number, (payload, _) in zip(raw.numbers, raw.samples, strict=True)}
    scores = {number: score for number, (_, score) in zip(raw.numbers, raw.samples, strict=True)}
    numbers = sorted({*payloads, *group.causes})
    return {
        "attempt": group.attempt,
        "prompt": prompt_data(raw.prompt),
        "responses": [sample_data(k, payloads.get(k), scores.get(k), group.causes.get(k)) for k in numbers],
    }


def _archived(run_dir: Path, group_id: int, *, evaluation: bool) -> list[ArchivedGroup]:
    files = archive_files(run_dir, evaluation=evaluation)
    reading = ArchiveReading(files)
    found = reading.find(group_id)
    note_problems(reading)
    if not files:
        output.note("no archive: archive.enabled: true keeps the groups that have left Redis")
    return found


def _rescored(run_dir: Path, group_id: int, attempt: int | None, *, evaluation: bool) -> dict[str, dict[str, Any]]:
    """Scores that were made again of this attempt at the group, by the name of the set: sample to score and parts."""
    found: dict[str, dict[str, Any]] = {}
    folders = sorted((run_dir / RESCORED).iterdir()) if (run_dir / RESCORED).is_dir() else []
    for folder in folders:
        groups = ArchiveReading(archive_files(folder, evaluation=evaluation)).find(group_id)
        for group in groups:
            if group.attempt != attempt:
                continue  # other responses than those that are shown
            found[folder.name] = {
                str(number): {"score": score.value, "parts": score.parts, "seconds": score.seconds}
                for number, score in ((sample.number, sample.score) for sample in group.samples)
            }
    return found


def _lines(found: dict[str, Any], width: int) -> list[str]:
    kind = "held-out group" if found["evaluation"] else "group"
    where = f", from the {found['source']}" if found["source"] else ""
    attempt = f", attempt {found['attempt']}" if found["attempt"] else ""
    lines = [f"{kind} {found['group']}: {found['state']}{attempt}{where}"]
    if found["prompt"]:
        lines.append(f"  prompt  {shortened(found['prompt'].get('text', found['prompt']), width)}")
        lines.append(f"  answer  {shortened(found['prompt'].get('answer'), width)}")
    for response in found["responses"]:
        lines.extend(_response(response, found["rescored"], width))
    lines.extend(f"  {letter_line(letter)}" for letter in found["letters"])
    if not found["responses"]:
        lines.append("  nothing is kept of its responses")
    return lines


def _response(response: dict[str, Any], rescored: dict[str, dict[str, Any]], width: int) -> list[str]:
    head = [f"  sample {response['sample']}"]
    if "score" in response:
        head.append(f"score {response['score']:g}")
        head.append(f"in {duration(response['seconds'])}")
    if "cause" in response:
        head.append(f"dead: {shortened(response['cause'], width)}")
    if "unreadable" in response:
        head.append(f"unreadable: {response['unreadable']}")
    if "tokens" in response:
        head.append(f"{response['tokens']} tokens ({response['finish']})")
    elif "cause" not in response:
        head.append("not generated yet")
    lines = ["  ".join(head)]
    if response.get("parts"):
        lines.append(f"    parts  {parts_line(response['parts'])}")
    for name, scores in rescored.items():
        if (again := scores.get(str(response["sample"]))) is not None:
            lines.append(f"    {name}  score {again['score']:g}")
    if "text" in response:
        lines.append(f"    {shortened(response['text'], width)}")
    return lines
