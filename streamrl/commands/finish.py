"""The end of a finished run, trained or only recorded: audit, figures, and what to try next."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any, Self

from streamrl.archive.reader import FOLDER, recording_files
from streamrl.commands import output
from streamrl.commands.audit import audit_run
from streamrl.commands.rundir import RunDirectory, find_run, ledgers
from streamrl.config import RunConfig
from streamrl.errors import Refused, Unreachable
from streamrl.learner.checkpoint import Checkpoints
from streamrl.learner.ending import read_finished
from streamrl.monitor.lines import duration, number, percent, printable, size
from streamrl.pass_at_k import in_words
from streamrl.queues.records import by_cause
from streamrl.runtime.audit import Audit
from streamrl.runtime.roles import stop_signals
from streamrl.runtime.summary import CURVE_FILE, SUMMARY_FILE, Accuracies, measure, write_summary
from streamrl.store import run_store


def finish(config: RunConfig, run_dir: Path) -> bool:
    """Audit the run, write its summary and its picture, print the table; returns whether the audit holds.

    A failure to measure the versions is raised only after everything is shown.
    """
    with _Skip() as skip:
        _bring_here(config, run_dir)
        found = asyncio.run(audit_run(find_run(run_dir)))
        accuracies = asyncio.run(skip.measure(config, run_dir))
    names = ("admitted", "trained", "dropped", "dead", "evaluated", "dead_samples")
    counts = {name: getattr(found, name) for name in names}
    show(config, run_dir, write_summary(config, run_dir, counts, accuracies), found)
    if accuracies.failure is not None:
        raise accuracies.failure
    expect_some("trained", found, run_dir)
    return found.proved


class _Skip:
    """The first signal to stop skips the measurement, and nothing else; the next one ends this process."""

    def __init__(self) -> None:
        self._asked = False
        self._measuring: asyncio.Task[Any] | None = None

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._ask) for number in stop_signals()}
        return self

    def __exit__(self, *_: object) -> None:
        for sign, handler in self._before.items():
            signal.signal(sign, handler)

    def _ask(self, *_: object) -> None:
        self._asked = True
        self.__exit__()
        if self._measuring is not None:
            self._measuring.get_loop().call_soon_threadsafe(self._measuring.cancel)

    async def measure(self, config: RunConfig, run_dir: Path) -> Accuracies:
        if self._asked or not config.evaluation.final_prompts:
            return Accuracies()
        self._measuring = asyncio.current_task()
        output.note("measuring the first and the last version on held-out prompts; Ctrl-C skips that")
        with output.ProgressLine() as progress:

            def measured(label: str, done: int, total: int) -> None:
                progress.show(f"measuring the {label}: {done}/{total}", last=done == total)

            return await measure(config, run_dir, measured)


def finish_recording(config: RunConfig, run_dir: Path) -> bool:
    """Audit the run and print what was recorded; returns whether the audit holds."""
    found = asyncio.run(audit_run(find_run(run_dir)))
    files = recording_files(run_dir / FOLDER)
    written = size(sum(file.stat().st_size for file in files))
    output.write(f"groups recorded / dead   {found.trained} / {found.dead}")
    output.write(f"responses dead           {found.dead_samples}")
    output.write(f"recording                {run_dir / FOLDER} ({len(files)} files, {written})")
    if not found.proved:
        output.write(f"AUDIT: {found.lost} lost, {found.twice} recorded twice")
        for reason in found.unproved:
            output.write(f"AUDIT: {reason}")
    expect_some("recorded", found, run_dir)
    output.write("")
    output.write("next:")
    output.write(
        f"  streamrl up RUN.yaml --train-only {run_dir / FOLDER} --run {run_dir.parent / f'{config.name}-trained'}"
    )
    output.write(f"  streamrl audit --run {run_dir}")
    return found.proved


def _bring_here(config: RunConfig, run_dir: Path) -> None:
    """Fetch the model that a learner on a host without this run directory has left in the store."""
    store, finished = run_store(config.checkpoint.store, config, "checkpoint.store"), read_finished(run_dir)
    if store is None:
        return
    try:
        newest = max((step for _, step in Checkpoints.of(config, run_dir).positions()), default=0)
        if finished is None or finished.step < newest:
            for name in filter(store.has, ("model", "model-ema")):
                store.get_folder(name, run_dir / name)
    except OSError as error:
        raise Unreachable(str(error), f"bring it back, then: streamrl up --resume --run {run_dir}") from error


def expect_some(done: str, found: Audit, run_dir: Path) -> None:
    """Raise Refused, with the cause, if nothing was trained or recorded (`done`) because all groups died."""
    if found.dead and not found.trained and found.proved:
        raise Refused(
            f"nothing was {done}: {found.dead} groups and {found.dead_samples} responses are dead, most of them:"
            f" {asyncio.run(most_died_of(find_run(run_dir)))}",
            "`streamrl dead ls` shows the traceback; fix the cause, `streamrl dead replay all`, then `streamrl up"
            " --resume`",
        )


async def most_died_of(run: RunDirectory) -> str:
    async with ledgers(run) as opened:
        letters = await opened.train.dead_letters()
    causes = by_cause([letter for letter in letters if letter.sample is not None] or letters)
    return causes[0].newest.why if causes else "of nothing that left a letter"


def show(config: RunConfig, run_dir: Path, summary: dict[str, Any], found: Audit) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim")
    table.add_column(justify="left")
    for label, value in rows(summary):
        table.add_row(label, value)
    console = output.console()
    with console.capture() as drawn:  # rich ends the process when nobody reads
        console.print()
        console.print(table)
        if not found.proved:
            console.print(f"AUDIT: {found.lost} lost, {found.twice} trained twice", style="bold red")
            for reason in found.unproved:
                console.print(f"AUDIT: {reason}", style="bold red")
    output.write(drawn.get())
    output.write(f"learning curve  {run_dir / CURVE_FILE}")
    output.write(f"figures         {run_dir / SUMMARY_FILE}")
    if (run_dir / "model").is_dir():
        output.write(f"trained model   {run_dir / 'model'}")
    output.write("")
    output.write("next:")
    last = max(0, config.learner.groups_per_step - 1)
    for command in (f"audit --run {run_dir}", f"trace {last} --run {run_dir}", "init my-run"):
        output.write(f"  streamrl {command}")


def rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    groups = " / ".join(str(summary[f"groups_{name}"]) for name in ("admitted", "trained", "dropped", "dead"))
    gap = summary["engine_gap"]
    sampled = percent(summary["share_of_tokens_sampled_during_learner_steps"])
    return [
        ("held-out accuracy before", _accuracy(summary, "before")),
        ("held-out accuracy after", _accuracy(summary, "after")),
        *(
            (f"  of {printable(name)}", f"{found['accuracy_before']:.3f} -> {number(found.get('accuracy_after'))}")
            for name, found in summary["sources"].items()
            if "accuracy_before" in found
        ),
        ("training", f"{duration(summary['train_seconds'])}, {summary['steps']} steps"),
        ("completion tokens per second", number(summary["completion_tokens_per_second"])),
        ("samples per second", number(summary["samples_per_second"])),
        ("learner waited", percent(summary["learner_idle_fraction"])),
        ("rollouts waited", percent(summary["rollout_idle_fraction"])),
        ("tokens sampled during learner steps", sampled),
        ("staleness, mean / max", f"{summary['staleness_mean']:.2f} / {summary['staleness_max']}"),
        ("difference of log-probabilities, engine and learner", "not measured" if gap is None else f"{gap:.4f}"),
        ("samples that span versions", str(summary["samples_spanning_versions"])),
        ("groups admitted / trained / dropped / dead", groups),
        ("responses dead", str(summary["samples_dead"])),
        ("held-out groups evaluated", str(summary["groups_evaluated"])),
    ]


def _accuracy(summary: dict[str, Any], when: str) -> str:
    value, end = summary[f"accuracy_{when}"], f"_{when}"
    if value is None:
        return "not measured"
    several = {name.removesuffix(end): at for name, at in summary.items() if "_at_" in name and name.endswith(end)}
    return f"{value:.3f}  {in_words(several)}".rstrip()
