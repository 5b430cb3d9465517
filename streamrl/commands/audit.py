"""`streamrl audit`: the proof that nothing was lost and nothing was trained twice."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec

from streamrl.commands import output
from streamrl.commands.options import JsonOption, RunOption
from streamrl.commands.rundir import RunDirectory, find_run, ledgers_to_look
from streamrl.errors import ExitCode
from streamrl.runtime.audit import Audit
from streamrl.runtime.audit import audit as run_audit

COUNTS = ("admitted", "trained", "dropped", "dead", "evaluated", "live", "lost", "twice")


def audit(run: RunOption = None, json: JsonOption = False) -> int:
    """Check that no group was lost and none was trained twice. Exit code 1 if that cannot be proved."""
    found = asyncio.run(audit_run(find_run(run)))
    output.answer("streamrl.audit/1", msgspec.to_builtins(found), _lines(found), json=json)
    return int(ExitCode.OK if found.proved else ExitCode.FAILURE)


async def audit_run(run: RunDirectory) -> Audit:
    async with ledgers_to_look(run) as opened:
        return await run_audit(run.config, run.path, opened)


def _lines(found: Audit) -> Iterator[str]:
    yield from (f"{name:10} {getattr(found, name)}" for name in COUNTS)
    yield f"responses  {found.dead_samples} dead"
    yield f"checkpoint {found.checkpoint or 'none yet'}"
    yield from (
        f"{kind} ids: {' '.join(ids)}" for kind, ids in (("lost", found.lost_ids), ("twice", found.twice_ids)) if ids
    )
    yield from (f"unproved: {reason}" for reason in found.unproved)
    yield from (f"fault: {fault}" for fault in found.faults)
    dead = f"; {found.dead} groups and {found.dead_samples} responses are dead" if found.dead_samples else ""
    yield f"nothing lost, nothing trained twice{dead}" if found.proved else "NOT PROVED: see above"
