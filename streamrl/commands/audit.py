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


def audit(run: RunOption = None, json: JsonOption = False) -> int:
    """Check that no group was lost and none was trained twice. Exit code 1 if that cannot be proved."""
    found = asyncio.run(audit_run(find_run(run)))
    output.answer("streamrl.audit/2", msgspec.to_builtins(found), _lines(found), json=json)
    return int(ExitCode.OK if found.proved else ExitCode.FAILURE)


async def audit_run(run: RunDirectory) -> Audit:
    async with ledgers_to_look(run) as opened:
        return await run_audit(run.config, run.path, opened)


def _lines(found: Audit) -> Iterator[str]:
    held_out = found.held_out
    here = found.lost - held_out.lost
    rows = [
        ("groups", "training", "held-out"),
        ("admitted", found.admitted, held_out.admitted),
        ("trained", found.trained, "-"),
        ("evaluated", "-", found.evaluated),
        ("dropped", found.dropped, held_out.dropped),
        ("dead", found.dead, held_out.dead),
        ("live", found.live, held_out.live),
        ("lost", here, held_out.lost),
        ("twice", found.twice, "-"),
        ("dead responses", found.dead_samples, held_out.dead_samples),
    ]
    yield from (f"{name:14}  {training:>8}  {other:>8}" for name, training, other in rows)
    yield f"checkpoint {found.checkpoint or 'none yet'}"
    yield from (
        f"{kind} ids: {' '.join(ids)}" for kind, ids in (("lost", found.lost_ids), ("twice", found.twice_ids)) if ids
    )
    yield from (f"unproved: {reason}" for reason in found.unproved)
    yield from (f"fault: {fault}" for fault in found.faults)
    for dead, option in ((found.dead_samples, ""), (held_out.dead_samples, " --eval")):
        if dead:
            yield f"streamrl dead ls{option} shows why responses are dead"
    yield "nothing lost, nothing trained twice" if found.proved else "NOT PROVED: see above"
