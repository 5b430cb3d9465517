"""`streamrl weights pin`, `unpin` and `rollback`: keep a version, and go back to one."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from streamrl.commands import output
from streamrl.commands.attach import ledgers
from streamrl.commands.rundir import RunDirectory, find_run
from streamrl.commands.versions import asked, number_of, root_of, size
from streamrl.errors import ExitCode, Refused, UsageError
from streamrl.queues.rollback import Answer, Request, RollbackDesk

if TYPE_CHECKING:
    from streamrl.weight_sync.manifest import Manifest, Pair

PIN_SCHEMA: Final = "streamrl.weights.pin/1"
UNPIN_SCHEMA: Final = "streamrl.weights.unpin/1"
ROLLBACK_SCHEMA: Final = "streamrl.weights.rollback/1"
_ASK_SECONDS: Final = 0.25


def pin(chosen: Path | None, version: str, *, json: bool) -> int:
    """Copy a version that is still there into the run directory, whole and durable."""
    run = find_run(chosen)
    number = number_of(run, version)
    manifest = _pin(run, number)
    folder = run.path / "pinned" / manifest.folder
    if json:
        output.write_json(PIN_SCHEMA, {"version": number, "epoch": manifest.epoch, "directory": str(folder.resolve())})
    else:
        output.write(f"version {number} is in {folder}, {size(manifest.total_bytes)}")
    return 0


def unpin(chosen: Path | None, version: str, *, json: bool) -> int:
    """Remove the pinned copy of a version."""
    from streamrl.weight_sync.chain import unpin as remove
    from streamrl.weight_sync.manifest import PINNED, newest_with, versions

    run = find_run(chosen)
    number = number_of(run, version)
    manifest = newest_with(number, versions(run.path / PINNED))
    if manifest is None:
        raise UsageError(f"version {number} is not pinned", "`streamrl weights ls` shows which are")
    request = asked(run)
    if request is not None and request.version == number and request.answer in {Answer.WAITING, Answer.SHOWN}:
        raise Refused(
            f"version {number} is needed: the run goes back to it, and no checkpoint holds it yet",
            "try again after the next checkpoint",
        )
    removed = remove(run.path, manifest.pair)
    if json:
        output.write_json(UNPIN_SCHEMA, {"version": number, "removed": removed})
    else:
        output.write(f"version {number} is no longer pinned")
    return 0


def rollback(chosen: Path | None, version: str, *, wait: float, json: bool) -> int:
    """Pin a version, ask the learner to go back to it, and wait until engines can get it under a new number."""
    run = find_run(chosen)
    number = number_of(run, version)
    manifest = _pin(run, number)
    outcome = asyncio.run(_roll_back(run, manifest.pair, wait))
    if json:
        output.write_json(ROLLBACK_SCHEMA, outcome.data(number))
    elif outcome.new is not None:
        output.write(f"version {outcome.new} has the weights of version {number}")
        output.note(f"{number} stays pinned: `streamrl weights unpin {number}` when a checkpoint holds the new one")
    else:
        output.note(outcome.text)
    return int(outcome.code)


@dataclass(frozen=True)
class _Outcome:
    """How a request ended for the person who waits."""

    answer: str
    text: str
    code: ExitCode
    new: int | None = None

    def data(self, number: int) -> dict[str, Any]:
        return {"version": number, "answer": self.answer, "new_version": self.new, "text": self.text}


async def _roll_back(run: RunDirectory, pair: Pair, wait: float) -> _Outcome:
    request = Request(uuid.uuid4().hex, *pair)
    until = time.monotonic() + wait
    async with ledgers(run) as opened:
        desk = RollbackDesk(opened.train.connection, opened.train.keys)
        await desk.ask(request.id, *pair)
        said = ""
        while True:
            found = await desk.look()
            if found is None or found.id != request.id:
                return _Outcome("replaced", "another request to go back took its place", ExitCode.FAILURE)
            if found.answer in {Answer.SHOWN, Answer.DONE}:
                return _Outcome(found.answer.value, "", ExitCode.OK, int(found.text))
            if found.answer is Answer.REFUSED:
                return _Outcome(found.answer.value, f"refused: {found.text}", ExitCode.FAILURE)
            learner = (await opened.roles.read()).get("learner.0")
            if learner is None:
                return _Outcome(
                    "waiting",
                    "the learner (learner.0) is not running: the request waits for its next start",
                    ExitCode.NOT_READY,
                )
            said = _progress(said, learner)
            if time.monotonic() > until:
                text = f"not done within {wait:g} s; the request stays: `streamrl weights ls` shows what becomes of it"
                return _Outcome("waiting", text, ExitCode.TEMPORARY)
            await asyncio.sleep(_ASK_SECONDS)


def _progress(said: str, learner: dict[str, str]) -> str:
    """Say on stderr what the learner is at, when that has changed."""
    state, step, version = (learner.get(key, "?") for key in ("state", "step", "version"))
    now = f"learner {state} at step {step}, version {version}"
    if now != said:
        output.note(f"waiting for the end of a step: {now}")
    return now


def _pin(run: RunDirectory, number: int) -> Manifest:
    from streamrl.weight_sync.chain import pin as copy
    from streamrl.weight_sync.manifest import find

    root = root_of(run)
    manifest, _ = find(number, root, run.path)
    return copy(root, run.path, manifest.pair)
