"""`streamrl up`: prepare a run, supervise it, show it, and say at the end what it was."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

from streamrl.commands import output
from streamrl.commands.attach import live_probe
from streamrl.commands.config import configuration, leaves, origin_of, without_secrets, write_checks
from streamrl.commands.rolestates import RoleStates
from streamrl.commands.rundir import RUNS, RunDirectory, find_run
from streamrl.commands.viewers import LiveViewer, LogViewer, PlainViewer, Viewer
from streamrl.config import RunConfig
from streamrl.errors import ExitCode, LedgerDamaged, Unreachable, UsageError
from streamrl.monitor.board import Board, Goal
from streamrl.queues.probe import Probe
from streamrl.queues.snapshot import Snapshot, take
from streamrl.runfile import LoadedConfig
from streamrl.runtime.launch import PreparedRun, describe, prepare_run
from streamrl.runtime.preflight import check_all
from streamrl.runtime.supervisor import RunOutcome, supervise

VIEWERS: Final[dict[str, type[Viewer]]] = {"live": LiveViewer, "plain": PlainViewer, "logs": LogViewer}


def up(
    file: Path | None,
    run: Path | None,
    overrides: Sequence[str],
    *,
    until: Literal["plan", "prepare", "run"],
    fresh: bool,
    resume: bool,
    screen: str,
) -> int:
    """Run a whole run on this machine.

    With `until` "plan" it only prints what it would do, with "prepare" it makes the run directory and stops there, for
    whoever places `streamrl run ROLE` elsewhere. The run file is `file`, else `run.yaml` when there is one; with
    `resume` and neither, the run goes on as it is.

    Returns:
        0 finished, or drained after the first Ctrl-C; 1 a role failed for good (78, 73: configuration, disk), or the
        closing audit does not hold; 130 or 143 cut short by a second signal.

    Raises:
        StreamrlError: configuration, data, model or directory do not allow the start.
    """
    loaded, run_dir = configuration(file, run, overrides, resume=resume)
    if until == "plan":
        return _plan(loaded, run_dir)
    prepared = prepare_run(loaded, run_dir, fresh=fresh, resume=resume)
    _announce(prepared)
    if until == "prepare":
        return 0
    outcome = _supervise(prepared, screen)
    if not outcome.finished:
        if outcome.exit_code == ExitCode.OK:
            output.note(f"stopped; go on with: streamrl up --resume --run {prepared.run_dir}")
        else:
            _explain(prepared.run_dir, outcome)
        return int(outcome.exit_code)
    if prepared.config.recording.mode == "write":
        from streamrl.commands.recorded import finish_recording as finish
    else:
        from streamrl.commands.finish import finish

    return int(outcome.exit_code if finish(prepared.config, prepared.run_dir) else ExitCode.FAILURE)


def recording_overrides(*, rollout_only: bool, train_only: Path | None) -> list[str]:
    """What the options about recordings change in a run file."""
    if rollout_only and train_only is not None:
        raise UsageError("--rollout-only and --train-only exclude each other")
    if rollout_only:
        return ["recording.mode=write"]
    if train_only is None:
        return []
    # There are no engines to evaluate with; the measurement at the end is made by transformers and stays.
    without = ["evaluation.every=0", "learner.stop_at_accuracy=null"]
    return ["recording.mode=read", f"recording.path={train_only.resolve()}", *without]


def _plan(loaded: LoadedConfig, run_dir: Path | None) -> int:
    """Print what would be started, the checks and the configuration; the first failed check decides the exit code."""
    folder = run_dir if run_dir is not None else RUNS / loaded.config.name
    output.write(f"run {loaded.config.name} in {folder}")
    for line in describe(loaded.config, folder):
        output.write(f"start  {line}")
    checks = check_all(loaded.config, folder)
    write_checks(checks)
    for key, value in leaves(without_secrets(loaded)):
        output.write(f"value  {key} = {value!r}  ({origin_of(loaded, key)})")
    failed = next((check.error for check in checks if check.error is not None), None)
    if failed is not None:
        raise failed
    return 0


def _announce(prepared: PreparedRun) -> None:
    output.note(f"run {prepared.config.name} in {prepared.run_dir}{' (resumed)' if prepared.resumed else ''}")
    if prepared.put_aside is not None:
        output.note(f"what was there before is in {prepared.put_aside}")
    for key in prepared.changed:
        output.note(f"changed since the last start: {key}")


def _supervise(prepared: PreparedRun, screen: str) -> RunOutcome:
    if screen == "auto":
        screen = "live" if sys.stdout.isatty() else "plain"
    board = Board(
        name=prepared.config.name,
        run_dir=prepared.run_dir,
        goal=_goal(prepared.config),
        look=Look(find_run(prepared.run_dir)),
    )
    with VIEWERS[screen](board, RoleStates(prepared.run_dir)) as viewer:
        return asyncio.run(supervise(prepared.config, prepared.run_dir, viewer.on_event))


def _goal(config: RunConfig) -> Goal:
    return Goal(
        steps=config.learner.steps,
        accuracy=config.learner.stop_at_accuracy,
        round_responses=config.evaluation.prompts * config.evaluation.samples,
    )


class Look:
    """Takes snapshots of a run over one connection; None while Redis is away."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._probe: Probe | None = None

    def __call__(self) -> Snapshot | None:
        """One look."""
        try:
            if self._probe is None:
                self._probe = live_probe(self._run)
            if self._probe is None:
                return None
            return take(self._probe, self._run.name, self._run.budget, self._run.hard_cap)
        except LedgerDamaged:
            return None  # the roles find it too, and what ends them is said at the end of the run
        except Unreachable:
            if self._probe is not None:
                self._probe.close()
            self._probe = None
            return None


def _explain(run_dir: Path, outcome: RunOutcome) -> None:
    forced = outcome.exit_code in {ExitCode.INTERRUPTED, ExitCode.TERMINATED}
    output.note(f"{'cut short' if forced else 'error: the run failed'}: {outcome.reason}")
    output.note(f"hint: streamrl logs --run {run_dir}; go on with: streamrl up --resume --run {run_dir}")
