"""`streamrl lag`: what waits in each stream, for how long, and which roles hold it."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Annotated

import typer

from streamrl.commands import output
from streamrl.commands.options import AnywhereOption, EveryOption, JsonOption, WatchOption
from streamrl.commands.rundir import find_anywhere, looking
from streamrl.errors import ExitCode, UsageError
from streamrl.monitor.snapshot import Snapshot, take, with_rates


def lag(
    *,
    run: AnywhereOption = None,
    json: JsonOption = False,
    watch: WatchOption = False,
    every: EveryOption = 1.0,
    warn: Annotated[int | None, typer.Option(min=0, metavar="N", help="Exit 1 if a stream lags by N or more.")] = None,
    crit: Annotated[int | None, typer.Option(min=0, metavar="N", help="Exit 4 if a stream lags by N or more.")] = None,
) -> int:
    """Show what waits in each stream, for how long, and who holds it.

    Rates (IN/s, OUT/s) need two readings: use --watch.
    """
    if warn is not None and crit is not None and warn > crit:
        raise UsageError(f"--warn {warn} is over --crit {crit}")
    found = find_anywhere(run)

    async def look() -> int:
        previous: Snapshot | None = None
        async with looking(found) as connection:

            async def once() -> int:
                nonlocal previous
                now = await take(connection, found.name, found.config.budget, found.config.hard_cap)
                shown = now if previous is None else with_rates(now, previous)
                previous = now
                code = verdict(shown, warn, crit)
                if json:
                    output.write_json("streamrl.lag/1", {**asdict(shown), "verdict": code.name.lower()})
                else:
                    from streamrl.monitor.tables import lag_table

                    output.console().print(lag_table(shown))
                return int(code)

            return await output.repeat(once, every if watch else None)

    return asyncio.run(look())


def verdict(snapshot: Snapshot, warn: int | None, crit: int | None) -> ExitCode:
    """The exit code for the worst lag of the training streams."""
    worst = max(stream.lag for stream in snapshot.train.streams if stream.name != "scored")
    if crit is not None and worst >= crit:
        return ExitCode.LAG_CRITICAL
    if warn is not None and worst >= warn:
        return ExitCode.FAILURE
    return ExitCode.OK
