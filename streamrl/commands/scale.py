"""`streamrl scale`: more or fewer members of a role, while the run goes on."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Annotated

import typer

from streamrl.commands import output
from streamrl.commands.options import AnywhereOption
from streamrl.commands.rundir import KnownRun, find_anywhere, supervised
from streamrl.errors import Refused, UsageError
from streamrl.queues.supervision import parsed
from streamrl.runtime.plan import ROLE_KINDS, processes


def scale(
    counts: Annotated[
        list[str], typer.Argument(metavar="ROLE=N", help="rollout, engine, reward or reward_model.NAME.")
    ],
    run: AnywhereOption = None,
) -> int:
    """Change how many members a role has, until the run ends. New ones take work at once; old ones finish theirs.

    The numbers of the run file hold again from the next `up` on.
    """
    found = find_anywhere(run)
    wanted = dict(_count(found, item) for item in counts)
    return asyncio.run(_scale(found, wanted))


def _count(run: KnownRun, item: str) -> tuple[str, int]:
    role, equals, number = item.partition("=")
    scalable = [name for name in processes(run.config) if ROLE_KINDS[name.partition(".")[0]].scales]
    if not equals or not number.isdecimal() or int(number) < 1:
        raise UsageError(f"{item!r} is not ROLE=N with N of 1 or more", "streamrl scale rollout=2")
    if role not in scalable:
        raise UsageError(f"role {role} cannot be scaled", f"these can: {', '.join(scalable) or 'none of this run'}")
    if role == "engine" and run.config.engine.url:
        raise Refused("each engine has its server in engine.url", "change that in the run file, then `up --resume`")
    return role, int(number)


async def _scale(run: KnownRun, wanted: dict[str, int]) -> int:
    async with supervised(run) as found:
        if found is None:
            raise Refused(
                f"run {run.name} has no living supervisor", "set the number in the run file, and start it with `up`"
            )
        supervision, said = found
        present = Counter(name.rpartition(".")[0] for name in parsed(said, "members") or ())
        for role, count in wanted.items():
            await supervision.ask_count(said["id"], role, count)
            output.write(f"{role}: {count} asked for, {present[role]} there")
    output.note("`streamrl status` shows them as they come and go")
    return 0
