"""`streamrl dead`: look at dead letters, admit their groups again, or throw the letters away."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Final

import typer

from streamrl.commands import output
from streamrl.commands.groups import letter_data
from streamrl.commands.options import EvalOption, JsonOption, RunOption
from streamrl.commands.rundir import RunDirectory, find_run, is_running, ledgers, ledgers_to_look
from streamrl.errors import ExitCode, UsageError
from streamrl.monitor.lines import date_time, folded, printable
from streamrl.queues.records import DeadCause, DeadLetter, ReplayOutcome, by_cause

_SHOWN_IDS: Final = 3
_ROOM_FOR_ALL: Final = sys.maxsize >> 1
_REPLAYED: Final = frozenset({ReplayOutcome.REPLAYED, ReplayOutcome.QUEUED, ReplayOutcome.LIVE})
_ADVICE: Final[dict[ReplayOutcome, str]] = {
    ReplayOutcome.NO_PROMPT: ": its prompt was lost, drop it",
    ReplayOutcome.GONE: ": only samples of a group that lives are dead, or it was replayed before",
}

app = typer.Typer(no_args_is_help=True, add_completion=False)
Letters = Annotated[list[str], typer.Argument(metavar="ID", help="Ids as `dead ls` shows them, or all.")]


@app.command("ls")
def ls(
    run: RunOption = None,
    limit: Annotated[
        int, typer.Option("-n", "--lines", metavar="N", min=1, help="Show at most N causes (with --each: letters).")
    ] = 100,
    each: Annotated[bool, typer.Option("--each", help="List letters one by one instead of by cause.")] = False,
    evaluation: EvalOption = False,
    json: JsonOption = False,
) -> int:
    """List dead letters by cause, the most frequent first, each with its newest traceback."""
    letters, queued, elsewhere = asyncio.run(_letters_and_queue(find_run(run), evaluation=evaluation))
    causes = by_cause(letters)
    shown = letters[::-1][:limit]
    data = {"count": len(letters), "queued": queued, "causes": [_cause_data(cause) for cause in causes]}
    data["letters"] = [letter_data(letter) for letter in shown]
    lines = map(_letter_line, shown) if each else ("\n".join(_cause_lines(cause)) + "\n" for cause in causes[:limit])
    output.answer("streamrl.dead/1", data, lines, json=json)
    if json:
        return 0
    count, kind = (len(letters), "letters") if each else (len(causes), "causes")
    if count > limit:
        output.note(f"{count - limit} more {kind}; -n {count} shows all")
    if queued:
        output.note(f"{_counted(len(queued), 'group waits', 'groups wait')} for room to be admitted again")
    if elsewhere:
        which, how = ("training", "without --eval") if evaluation else ("held-out", "with --eval")
        output.note(f"{_counted(elsewhere, 'letter', 'letters')} of {which} groups: {how}")
    if not letters:
        output.note(f"no dead letters of {'held-out' if evaluation else 'training'} groups")
    elif not each:
        output.note("--each lists them one by one; streamrl dead show ID, replay ID or drop ID, or all")
    return 0


def _letter_line(letter: DeadLetter) -> str:
    who = "whole group" if letter.sample is None else f"sample {letter.sample}"
    return f"{letter.entry:18}  group {letter.group_id}  {who}  {letter.stage}  {printable(letter.why)}"


def _cause_data(cause: DeadCause) -> dict[str, Any]:
    """`id` is the newest letter with a traceback, times are seconds since 1970."""
    newest = cause.newest
    return {
        "why": newest.why,
        "stage": newest.stage,
        "samples": cause.samples,
        "groups": cause.groups,
        "messages": cause.messages,
        "first": cause.letters[0].at,
        "last": cause.letters[-1].at,
        "id": newest.entry,
    }


def _cause_lines(cause: DeadCause) -> list[str]:
    first, last = cause.letters[0], cause.letters[-1]
    counts = [(cause.groups, "group", "groups"), (cause.samples, "sample", "samples")]
    dead = ", ".join(_counted(count, one, many) for count, one, many in counts if count)
    ids = [letter.entry for letter in cause.letters[: -_SHOWN_IDS - 1 : -1]]
    more = f" and {len(cause.letters) - len(ids)} more" if len(cause.letters) > len(ids) else ""
    others = f"  (one of {cause.messages} messages)" if cause.messages > 1 else ""
    return [
        f"{dead}  {first.stage}  {printable(cause.newest.why)}{others}",
        *(f"    {printable(line)}" for line in folded(cause.newest.detail)),
        f"    {date_time(first.at)} to {date_time(last.at)}, ids {' '.join(ids)}{more}",
    ]


@app.command("show")
def show(
    letter: Annotated[str, typer.Argument(metavar="ID", help="Id as `dead ls` shows it.")],
    run: RunOption = None,
    evaluation: EvalOption = False,
    json: JsonOption = False,
) -> int:
    """Show one dead letter with its traceback."""
    letters, *_ = asyncio.run(_letters_and_queue(find_run(run), evaluation=evaluation))
    [found] = _chosen(letters, [letter])
    data = letter_data(found)
    lines = [
        f"{key:10}  {date_time(value) if key == 'at' else printable(str(value))}"
        for key, value in data.items()
        if key not in ("detail", "prompt") and value is not None
    ]
    lines += [f"prompt {key}  {value!r}" for key, value in (data["prompt"] or {}).items()]
    lines += [printable(line) for line in found.detail.splitlines()]
    output.answer("streamrl.dead.show/1", data, lines, json=json)
    return 0


@app.command("replay")
def replay(letters: Letters, run: RunOption = None, evaluation: EvalOption = False, json: JsonOption = False) -> int:
    """Admit dead groups again when the budget has room: they are generated and scored anew.

    Exit code 1 if one of them cannot be admitted again.
    """
    target = find_run(run)
    if target.config.recording.mode == "read":
        raise UsageError(
            f"{target.path} trains a recording: nothing is generated", "`streamrl dead drop` removes the letters"
        )
    running = is_running(target)
    outcomes = asyncio.run(_replay(target, letters, evaluation=evaluation))
    waiting = sum(outcome is ReplayOutcome.QUEUED for outcome in outcomes.values())
    data = [{"group": group_id, "outcome": said.value} for group_id, said in outcomes.items()]
    lines = (f"group {group_id}: {said.value}{_ADVICE.get(said, '')}" for group_id, said in outcomes.items())
    output.answer("streamrl.dead.replay/1", data, lines, json=json)
    if waiting and not json:
        groups = _counted(waiting, "group waits", "groups wait")
        output.note(f"{groups} for room: the feeder admits them, before anything new")
    if not json and (waiting or ReplayOutcome.REPLAYED in outcomes.values()):
        _say_how_it_goes_on(target, running=running)
    done = all(outcome in _REPLAYED for outcome in outcomes.values())
    return int(ExitCode.OK if done else ExitCode.FAILURE)


def _say_how_it_goes_on(run: RunDirectory, *, running: bool) -> None:
    """Say how the groups come to be generated if the run is finished or not running."""
    from streamrl.learner.ending import read_finished

    finished = read_finished(run.path)
    if finished is None or not finished.holds(run.config):
        if not running:
            output.note(f"they wait until the run is resumed: streamrl up --resume --run {run.path}")
    elif finished.reason == "data":
        output.note(f"the run is finished: streamrl up --resume --run {run.path} goes on with them")
    else:
        key = "learner.steps" if finished.reason == "steps" else "learner.stop_at_accuracy"
        output.note(
            f"the run is finished, because of {key}. With a greater N this goes on with them:"
            f" streamrl up RUN.yaml --resume --run {run.path} --set {key}=N"
        )


@app.command("drop")
def drop(
    letters: Letters,
    run: RunOption = None,
    evaluation: EvalOption = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: JsonOption = False,
) -> int:
    """Delete dead letters for good. A group that is dead as a whole then counts as dropped."""
    target = find_run(run)
    if not yes and not _confirmed(letters):
        return int(ExitCode.FAILURE)
    removed = asyncio.run(_drop(target, letters, evaluation=evaluation))
    output.answer("streamrl.dead.drop/1", {"removed": removed}, [f"removed {removed}"], json=json)
    return 0


async def _letters_and_queue(run: RunDirectory, *, evaluation: bool) -> tuple[list[DeadLetter], list[int], int]:
    """Letters and queued groups of one ledger, and how many letters the other one has."""
    async with ledgers_to_look(run) as opened:
        ledger, other = (opened.train, opened.evaluation)[:: -1 if evaluation else 1]
        return await ledger.dead_letters(), list(await ledger.queued_replays()), (await other.state()).dead


async def _replay(run: RunDirectory, entries: Sequence[str], *, evaluation: bool) -> dict[int, ReplayOutcome]:
    """Queue the groups, and admit as many as there is room for: the run may have no feeder now.

    Held-out groups have no staleness limit, so there is room for all of them. They are not queued: the feeder reads the
    training queue only, so a queued held-out group would wait forever.
    """
    async with ledgers(run) as opened:
        ledger = opened.evaluation if evaluation else opened.train
        letters = await ledger.dead_letters()
        group_ids = list(dict.fromkeys(letter.group_id for letter in _chosen(letters, entries)))
        if list(entries) == ["all"]:
            group_ids = _dead_groups(letters) or group_ids
        if evaluation:
            return await ledger.replay_each(group_ids, budget=_ROOM_FOR_ALL, hard_cap=_ROOM_FOR_ALL)
        outcomes = await ledger.queue_replays(group_ids)
        for group_id, entry in (await ledger.queued_replays()).items():
            outcome = await ledger.replay_queued(
                group_id, entry, budget=run.config.budget, hard_cap=run.config.hard_cap
            )
            if outcome is ReplayOutcome.FULL:
                break
            if group_id in outcomes and outcome is not ReplayOutcome.GONE:  # gone: the feeder was faster
                outcomes[group_id] = outcome
        return outcomes


def _dead_groups(letters: Sequence[DeadLetter]) -> list[int]:
    """The groups that are dead as a whole; notes what is left out."""
    group_ids = dict.fromkeys(letter.group_id for letter in letters if letter.sample is None)
    alone = sum(letter.group_id not in group_ids for letter in letters)
    if alone:
        samples = _counted(alone, "dead sample of a group that goes", "dead samples of groups that go")
        output.note(f"{samples} on without {'it' if alone == 1 else 'them'} cannot be replayed")
    return list(group_ids)


def _counted(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


async def _drop(run: RunDirectory, entries: Sequence[str], *, evaluation: bool) -> int:
    async with ledgers(run) as opened:
        ledger = opened.evaluation if evaluation else opened.train
        letters = _chosen(await ledger.dead_letters(), entries)
        return await ledger.drop_dead([letter.entry for letter in letters])


def _chosen(letters: Sequence[DeadLetter], entries: Sequence[str]) -> list[DeadLetter]:
    """The letters with these ids; `all` means all of them."""
    if list(entries) == ["all"]:
        return list(letters)
    known = {letter.entry: letter for letter in letters}
    missing = [entry for entry in entries if entry not in known]
    if missing:
        raise UsageError(f"no dead letter {', '.join(missing)}", "`streamrl dead ls` shows the ids")
    return [known[entry] for entry in entries]


def _confirmed(entries: Sequence[str]) -> bool:
    if not sys.stdin.isatty():
        raise UsageError("dead drop deletes letters for good, and there is no terminal to ask on", "confirm with --yes")
    which = "all" if list(entries) == ["all"] else len(entries)
    answer = input(f"delete {which} dead letters for good? [y/N] ")
    return answer.strip().lower() in ("y", "yes")
