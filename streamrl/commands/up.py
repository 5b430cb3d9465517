"""`streamrl up`: prepare a run, supervise it, show it, and say at the end what it was."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from streamrl.commands import output
from streamrl.commands.config import configuration, origin_of, without_secrets, write_checks
from streamrl.commands.options import RunFile, SetOption
from streamrl.commands.rundir import RunDirectory, find_run, ledgers_to_look, live
from streamrl.commands.viewers import LiveViewer, LogViewer, PlainViewer, Viewer
from streamrl.config import RunConfig
from streamrl.errors import ConfigError, ExitCode, LedgerDamaged, Refused, Unreachable, UsageError, writing
from streamrl.learner.ending import has_ended, read_finished
from streamrl.monitor.board import Board, Goal
from streamrl.monitor.roles import read_states
from streamrl.monitor.snapshot import Snapshot, take
from streamrl.queues.access import ReplyError
from streamrl.queues.connection import Connection
from streamrl.runfile import RUN_DIGEST, RUNS, LoadedConfig, leaves
from streamrl.runtime.control import find_published, publish
from streamrl.runtime.launch import PreparedRun, describe, describe_threads, prepare_run
from streamrl.runtime.preflight import check_all
from streamrl.runtime.supervisor import RunOutcome, supervise

_DETACH_SECONDS: Final = 120.0
_DETACH_POLL: Final = 0.1
VIEWERS: Final[dict[str, type[Viewer]]] = {"live": LiveViewer, "plain": PlainViewer, "logs": LogViewer}


def up(
    file: RunFile = None,
    *,
    run: Annotated[
        Path | None,
        typer.Option("--run", metavar="DIR", envvar="STREAMRL_RUN", help="Run directory; runs/NAME if left out."),
    ] = None,
    overrides: SetOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and the configuration; start nothing.")] = (
        False
    ),
    prepare: Annotated[
        bool,
        typer.Option("--prepare", help="Check everything and make the run directory; start nothing."),
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Move the old run directory to DIR.old-TIME first.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the run directory.")] = False,
    rollout_only: Annotated[
        bool, typer.Option("--rollout-only", help="Record complete groups in RUN_DIR/recording; train nothing.")
    ] = False,
    train_only: Annotated[
        Path | None, typer.Option("--train-only", metavar="FILE|DIR", help="Train recorded groups; generate nothing.")
    ] = None,
    on: Annotated[
        Literal["local", "ray"], typer.Option(help="Where the roles run: on this machine, or on a Ray cluster.")
    ] = "local",
    detach: Annotated[
        bool, typer.Option("--detach", help="Leave the run in the background; `logs -f` shows it, `down` ends it.")
    ] = False,
    screen: Annotated[
        Literal["auto", "live", "plain", "logs"],
        typer.Option(help="What to show while the run goes on; auto: live on a terminal, else plain."),
    ] = "auto",
) -> int:
    """Start all roles of a run, on this machine or a cluster, and supervise them until it is finished.

    If the run directory holds a run, `up` resumes it. `--resume` without a run file uses `run.json` of DIR, or of the
    newest run in runs/.

    Exit code 0: finished, now or before, or drained after the first Ctrl-C. 1: a role failed for good, or the closing
    audit does not hold. 130 or 143: ended early by a second signal.
    """
    changes = [*(overrides or []), *recording_overrides(rollout_only=rollout_only, train_only=train_only)]
    loaded, run_dir = configuration(file, run, changes, resume=resume)
    if dry_run:
        return _plan(loaded, run_dir, here=on == "local")
    if not fresh and not prepare and _is_over(loaded.config, run_dir or RUNS / loaded.config.name):
        return 0
    output.outlive_readers()
    published = asyncio.run(find_published(loaded.config)) if prepare else None
    prepared = prepare_run(
        loaded, run_dir, fresh=fresh, resume=resume, published=published, here=on == "local" and not prepare
    )
    _announce(prepared)
    if prepare:
        if prepared.config.redis.url is not None:
            asyncio.run(publish(prepared.config, prepared.run_dir, os.environ.get(RUN_DIGEST, "")))
        return 0
    if detach:
        return _detach(prepared, on)
    return _run_to_its_end(prepared, screen, on)


def _run_to_its_end(prepared: PreparedRun, screen: str, on: Literal["local", "ray"]) -> int:
    outcome = _supervise(prepared, screen, on)
    if not outcome.finished:
        if outcome.exit_code == ExitCode.OK:
            output.note(f"stopped; go on with: streamrl up --resume --run {prepared.run_dir}")
        else:
            _explain(prepared.run_dir, outcome)
        return int(outcome.exit_code)
    if prepared.config.recording.mode == "write":
        from streamrl.commands.finish import finish_recording as finish
    else:
        from streamrl.commands.finish import finish

    return int(outcome.exit_code if finish(prepared.config, prepared.run_dir) else ExitCode.FAILURE)


def _is_over(config: RunConfig, folder: Path) -> bool:
    """Whether the run is finished and measured; says so."""
    finished = read_finished(folder)
    measured = config.recording.mode == "write" or (folder / "summary.json").exists()
    if finished is None or not measured or not asyncio.run(_trains_no_more(config, folder)):
        return False
    output.note(f"run {config.name} {finished}; {finished.hint}")
    return True


async def _trains_no_more(config: RunConfig, folder: Path) -> bool:
    async with ledgers_to_look(find_run(folder)) as opened:
        return await has_ended(config, folder, opened.train)


def _detach(prepared: PreparedRun, on: str) -> int:
    """Start `up` in a session of its own, and wait until it supervises the run."""
    log = prepared.run_dir / "logs" / "up.log"
    up = ("up", "--resume", "--run", str(prepared.run_dir), "--screen", "plain", "--on", on)
    with writing(log), log.open("ab") as out:
        begun = out.tell()
        process = subprocess.Popen(  # noqa: S603 (this program)
            [sys.executable, "-P", "-m", "streamrl", *up],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    deadline = time.monotonic() + _DETACH_SECONDS
    with output.ProgressLine() as progress:
        while not read_states(prepared.run_dir).alive:
            if process.poll() is not None:
                said = log.read_bytes()[begun:].decode(errors="replace").strip()
                raise Refused(f"the run did not start:\n{said}", f"the same without --detach, or {log}")
            if time.monotonic() > deadline:
                process.terminate()
                raise Refused(f"no supervisor after {_DETACH_SECONDS:g} s", f"see {log}")
            progress.show("starting")
            time.sleep(_DETACH_POLL)
    output.note(f"run {prepared.config.name} goes on in the background as process {process.pid}")
    place = f"--run {prepared.run_dir}"
    output.note(f"hint: streamrl status {place}; streamrl logs -f {place}; streamrl down {place}")
    return 0


def recording_overrides(*, rollout_only: bool, train_only: Path | None) -> list[str]:
    if rollout_only and train_only is not None:
        raise UsageError("--rollout-only and --train-only exclude each other")
    if rollout_only:
        return ["recording.mode=write"]
    if train_only is None:
        return []
    # There are no engines to evaluate with. The measurement at the end stays: transformers makes it.
    without = ["evaluation.every=0", "learner.stop_at_accuracy=null"]
    return ["recording.mode=read", f"recording.path={train_only.resolve()}", *without]


def _plan(loaded: LoadedConfig, run_dir: Path | None, *, here: bool) -> int:
    """Print what would be started, the checks and the configuration; the first failed check decides the exit code."""
    folder = run_dir if run_dir is not None else RUNS / loaded.config.name
    output.write(f"run {loaded.config.name} in {folder}")
    for line in describe(loaded.config, folder):
        output.write(f"start  {line}")
    if here:
        output.write(f"threads  {describe_threads(loaded.config)}")
    checks = check_all(loaded.config, folder, here=here)
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
        output.note(f"the old run directory is now {prepared.put_aside}")
    for key in prepared.changed:
        output.note(f"changed since the last start: {key}")


def _supervise(prepared: PreparedRun, screen: str, on: Literal["local", "ray"]) -> RunOutcome:
    if screen == "auto":
        screen = "live" if sys.stdout.isatty() else "plain"
    look = Look(find_run(prepared.run_dir))
    config = prepared.config
    goal = Goal(
        steps=config.learner.steps,
        accuracy=config.learner.stop_at_accuracy,
        round_responses=config.evaluation.prompts * config.evaluation.samples,
    )
    board = Board(config.name, prepared.run_dir, goal, look, config)
    with contextlib.closing(look), VIEWERS[screen](board) as viewer:
        return asyncio.run(supervise(config, prepared.run_dir, viewer.on_event, on=on))


class Look:
    """Takes snapshots of a run over one connection; None while Redis is away. For one thread at a time."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._runner = asyncio.Runner()
        self._opened = AsyncExitStack()
        self._connection: Connection | None = None

    def __call__(self) -> Snapshot | None:
        return self._runner.run(self._look())

    async def _look(self) -> Snapshot | None:
        config = self._run.config
        try:
            if self._connection is None:
                self._connection = await self._opened.enter_async_context(live(self._run))
            if self._connection is not None:
                return await take(self._connection, config.name, config.budget, config.hard_cap)
        except (LedgerDamaged, ReplyError, ConfigError):
            return None  # the roles meet the same error, and the end of the run reports it
        except Unreachable:
            self._connection = None
        await self._opened.aclose()
        return None

    def close(self) -> None:
        self._runner.run(self._opened.aclose())
        self._runner.close()


def _explain(run_dir: Path, outcome: RunOutcome) -> None:
    forced = outcome.exit_code in {ExitCode.INTERRUPTED, ExitCode.TERMINATED}
    output.note(f"{'cut short' if forced else 'error: the run failed'}: {outcome.reason}")
    output.note(f"hint: streamrl logs --run {run_dir}; go on with: streamrl up --resume --run {run_dir}")
