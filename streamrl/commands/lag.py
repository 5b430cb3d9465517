"""`streamrl lag`: what waits where, for how long, and who holds what."""

from __future__ import annotations

from pathlib import Path

from streamrl.commands import output
from streamrl.commands.attach import attached
from streamrl.commands.rundir import RunDirectory, find_run
from streamrl.errors import ExitCode, UsageError
from streamrl.queues.probe import Probe
from streamrl.queues.snapshot import Snapshot, take, with_rates

SCHEMA = "streamrl.lag/1"


def lag(chosen: Path | None, *, json: bool, every: float | None, warn: int | None, crit: int | None) -> int:
    """Show the lag of each stream of a run; with `every` again each so many seconds.

    Returns:
        0; 1 when the lag of a training stream is at or over `warn`; 4 at or over `crit`.
    """
    if warn is not None and crit is not None and warn > crit:
        raise UsageError(f"--warn {warn} is over --crit {crit}")
    run = find_run(chosen)
    previous: list[Snapshot] = []
    with attached(run) as probe:

        def once() -> int:
            snapshot = _look(probe, run, previous)
            code = verdict(snapshot, warn, crit)
            _show(snapshot, json=json, code=code)
            return int(code)

        return once() if every is None else output.repeat(every, once)


def verdict(snapshot: Snapshot, warn: int | None, crit: int | None) -> ExitCode:
    """The exit code that the worst lag of the training streams earns."""
    worst = max(stream.lag for stream in snapshot.train.streams if stream.name != "scored")
    if crit is not None and worst >= crit:
        return ExitCode.LAG_CRITICAL
    if warn is not None and worst >= warn:
        return ExitCode.FAILURE
    return ExitCode.OK


def _look(probe: Probe, run: RunDirectory, previous: list[Snapshot]) -> Snapshot:
    now = take(probe, run.name, run.budget, run.hard_cap)
    shown = with_rates(now, previous[0]) if previous else now
    previous[:] = [now]
    return shown


def _show(snapshot: Snapshot, *, json: bool, code: ExitCode) -> None:
    if json:
        output.write_json(SCHEMA, {**_data(snapshot), "verdict": code.name.lower()})
        return
    from streamrl.monitor.tables import lag_table

    output.console().print(lag_table(snapshot))


def _data(snapshot: Snapshot) -> dict[str, object]:
    from dataclasses import asdict

    return asdict(snapshot)
