"""`streamrl lag`: what waits in each stream, for how long, which roles hold it, and which stage is the slowest."""

from __future__ import annotations

import asyncio
import math
from dataclasses import asdict
from typing import Annotated, Final

import typer
from pydantic import TypeAdapter, ValidationError

from streamrl.commands import output
from streamrl.commands.options import AnywhereOption, EveryOption, JsonOption, WatchOption
from streamrl.commands.rundir import find_anywhere, is_running, looking
from streamrl.config.base import Duration
from streamrl.errors import ExitCode, UsageError
from streamrl.monitor.snapshot import Rates, Snapshot, take
from streamrl.monitor.verdict import judge, stalled

_BETWEEN: Final = 1.0
"""Seconds between the two readings that make the first rates."""


def limits(option: str, values: list[str] | None) -> tuple[float, float]:
    """Lag and age in seconds from which a stream is late: `100` is a lag, `30s` is an age; infinite: never."""
    lag = age = math.inf
    for value in values or []:
        try:
            if value.isdecimal():
                lag = int(value)
            else:
                age = TypeAdapter(Duration).validate_python(value)
        except ValidationError:
            raise UsageError(
                f"{option} {value} is neither a number of entries nor an age", "write 100, or 30s"
            ) from None
    return lag, age


def lag(
    *,
    run: AnywhereOption = None,
    json: JsonOption = False,
    watch: WatchOption = False,
    every: EveryOption = 1.0,
    warn: Annotated[
        list[str] | None,
        typer.Option(metavar="N|AGE", help="Exit 1 if a stream lags by N or more, or by AGE (30s); may be repeated."),
    ] = None,
    crit: Annotated[
        list[str] | None,
        typer.Option(metavar="N|AGE", help="Exit 4 if a stream lags by N or more, or by AGE (2m); may be repeated."),
    ] = None,
) -> int:
    """Show what waits in each stream, for how long, and who holds it; then the slowest stage, and what helps.

    Rates come from two readings, a second apart at first.
    """
    low, high = limits("--warn", warn), limits("--crit", crit)
    for one, other in zip(low, high, strict=True):
        if other < one < math.inf:
            raise UsageError(f"--warn {one:g} is over --crit {other:g}")
    found = find_anywhere(run)
    config, running = found.config, is_running(found)

    async def look() -> int:
        rates = Rates()
        async with looking(found) as connection:
            if running:
                rates.of(await take(connection, found.name))
                await asyncio.sleep(_BETWEEN)

            async def once() -> int:
                shown = rates.of(await take(connection, found.name, config.budget, config.hard_cap))
                code = exit_code(shown, low, high)
                said = judge(shown, config)
                if json:
                    more = {"verdict": code.name.lower(), "bottleneck": asdict(said), "stalled": stalled(shown)}
                    output.write_json("streamrl.lag/1", {**asdict(shown), **more})
                else:
                    from streamrl.monitor.tables import lag_table

                    show(lag_table(shown, said, output.console().width))
                return int(code)

            return await output.repeat(once, every if watch else None)

    with output.painting(again=watch and not json) as show:
        return asyncio.run(look())


def exit_code(snapshot: Snapshot, warn: tuple[float, float], crit: tuple[float, float]) -> ExitCode:
    """The exit code for the worst of the training streams."""
    streams = snapshot.train.streams
    worst = max(stream.lag for stream in streams), max(stream.oldest_waiting_seconds or 0.0 for stream in streams)
    for late, code in ((crit, ExitCode.LAG_CRITICAL), (warn, ExitCode.FAILURE)):
        if worst[0] >= late[0] or worst[1] >= late[1]:
            return code
    return ExitCode.OK
