"""`streamrl dead`: look at dead letters, admit their groups again, or throw the letters away."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from streamrl.commands import output
from streamrl.commands.attach import is_running, ledgers, ledgers_to_look
from streamrl.commands.letters import letter_data
from streamrl.commands.rundir import RunDirectory, find_run
from streamrl.errors import ExitCode, UsageError
from streamrl.monitor.lines import date_time, printable
from streamrl.queues.records import DeadLetter, ReplayOutcome

LIST_SCHEMA = "streamrl.dead/1"
SHOW_SCHEMA = "streamrl.dead.show/1"
REPLAY_SCHEMA = "streamrl.dead.replay/1"
DROP_SCHEMA = "streamrl.dead.drop/1"


def ls(chosen: Path | None, *, limit: int, evaluation: bool, json: bool) -> int:
    """List dead letters, newest first."""
    letters = asyncio.run(_letters(find_run(chosen), evaluation=evaluation))
    shown = letters[::-1][:limit]
    if json:
        output.write_json(LIST_SCHEMA, {"count": len(letters), "letters": [letter_data(letter) for letter in shown]})
        return 0
    for letter in shown:
        who = "whole group" if letter.sample is None else f"sample {letter.sample}"
        output.write(f"{letter.entry:18}  group {letter.gid}  {who}  {letter.stage}  {printable(letter.why)}")
    if len(letters) > len(shown):
        output.note(f"{len(letters) - len(shown)} more; -n {len(letters)} shows all")
    if not letters:
        output.note("no dead letters")
    return 0


def show(chosen: Path | None, entry: str, *, evaluation: bool, json: bool) -> int:
    """Show one dead letter with its detail."""
    letters = asyncio.run(_letters(find_run(chosen), evaluation=evaluation))
    [letter] = _chosen(letters, [entry])
    data = letter_data(letter)
    if json:
        output.write_json(SHOW_SCHEMA, data)
        return 0
    for key, value in data.items():
        if key not in ("detail", "prompt") and value is not None:
            output.write(f"{key:10}  {date_time(value) if key == 'at' else printable(str(value))}")
    for key, value in (data["prompt"] or {}).items():
        output.write(f"prompt {key}  {value!r}")
    if letter.detail:
        output.write("\n".join(printable(line) for line in letter.detail.splitlines()))
    return 0


def replay(chosen: Path | None, entries: Sequence[str], *, evaluation: bool, json: bool) -> int:
    """Admit the groups of dead letters again under a new attempt; 1 when one of them was not."""
    run = find_run(chosen)
    running = is_running(run)
    outcomes = asyncio.run(_replay(run, entries, evaluation=evaluation))
    if json:
        output.write_json(REPLAY_SCHEMA, [{"group": gid, "outcome": outcome.value} for gid, outcome in outcomes])
    else:
        for gid, outcome in outcomes:
            output.write(f"group {gid}: {outcome.value}{_advice(outcome)}")
        if not running and any(outcome is ReplayOutcome.REPLAYED for _, outcome in outcomes):
            output.note(f"nobody takes them until the run goes on: streamrl up --resume --run {run.path}")
    done = all(outcome in {ReplayOutcome.REPLAYED, ReplayOutcome.LIVE} for _, outcome in outcomes)
    return int(ExitCode.OK if done else ExitCode.FAILURE)


def drop(chosen: Path | None, entries: Sequence[str], *, evaluation: bool, yes: bool, json: bool) -> int:
    """Throw dead letters away; a whole group counts as dropped from then on. Asks on a terminal unless `yes`."""
    run = find_run(chosen)
    if not yes and not _confirmed(entries):
        return int(ExitCode.FAILURE)
    removed = asyncio.run(_drop(run, entries, evaluation=evaluation))
    if json:
        output.write_json(DROP_SCHEMA, {"removed": removed})
    else:
        output.write(f"removed {removed}")
    return 0


async def _letters(run: RunDirectory, *, evaluation: bool) -> list[DeadLetter]:
    async with ledgers_to_look(run) as opened:
        return await (opened.evaluation if evaluation else opened.train).dead_letters()


async def _replay(run: RunDirectory, entries: Sequence[str], *, evaluation: bool) -> list[tuple[int, ReplayOutcome]]:
    async with ledgers(run) as opened:
        ledger = opened.evaluation if evaluation else opened.train
        gids = dict.fromkeys(letter.gid for letter in _chosen(await ledger.dead_letters(), entries))
        # A held-out group has no staleness to keep within: there is always room for it.
        room = (sys.maxsize >> 1, sys.maxsize >> 1) if evaluation else (run.budget, run.hard_cap)
        return [(gid, await ledger.replay(gid, budget=room[0], hard_cap=room[1])) for gid in gids]


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


def _advice(outcome: ReplayOutcome) -> str:
    advice: dict[Any, str] = {
        ReplayOutcome.FULL: ": no room in the budget now, try again after a step",
        ReplayOutcome.NO_PROMPT: ": its prompt was lost, drop it",
        ReplayOutcome.GONE: ": only samples of a group that lives are dead, or it was replayed before",
    }
    return advice.get(outcome, "")


def _confirmed(entries: Sequence[str]) -> bool:
    if not sys.stdin.isatty():
        raise UsageError("dead drop throws letters away for good", "say --yes where nobody can be asked")
    which = "all" if list(entries) == ["all"] else len(entries)
    answer = input(f"throw {which} dead letters away for good? [y/N] ")
    return answer.strip().lower() in ("y", "yes")
