"""`streamrl rescore`: recorded groups scored again by other rewards, and both sets of scores compared."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import math
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from streamrl import wire
from streamrl.archive.reader import ArchiveReading, read_archive
from streamrl.commands import output
from streamrl.commands.archive import FromOption, SinceOption, later_than, note_problems, since_of
from streamrl.commands.groups import parts_line
from streamrl.commands.options import EvalOption, JsonOption, RunOption, SetOption
from streamrl.commands.reward_choice import AdapterOption, ArgOption, FileOption, choose, opened
from streamrl.commands.rundir import find_run
from streamrl.config import RunConfig
from streamrl.consumers.rescoring import (
    Comparison,
    RescoredSet,
    RescoreResult,
    ScoreGroup,
    compare,
    most_different,
    rescore_groups,
)
from streamrl.consumers.reward import RewardSample
from streamrl.consumers.scoring import PatientScorer
from streamrl.errors import ExitCode, StreamrlError, UsageError, unwrapped
from streamrl.monitor.lines import duration, number, printable, shortened

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
RewardOption = Annotated[
    str | None,
    typer.Option(
        "--reward",
        metavar="REWARD",
        help="Built-in name, module:Name, or a name from the run file; left out: all its rewards.",
    ),
]
ConcurrencyOption = Annotated[
    int,
    typer.Option(
        "--concurrency", metavar="N", min=1, help="Responses (or groups, if the reward compares) scored at once."
    ),
]
ThresholdOption = Annotated[
    float, typer.Option("--threshold", metavar="SCORE", help='A score above this counts as right in "same side".')
]
DropOption = Annotated[
    bool, typer.Option("--drop-failed", help="Also write groups in which a response failed, without it.")
]


def rescore(
    *,
    reward: RewardOption = None,
    into: Annotated[str, typer.Option("--into", metavar="NAME", help="Name of the new scores: RUN_DIR/rescored/NAME.")],
    run: RunOption = None,
    source: FromOption = None,
    file: FileOption = None,
    overrides: SetOption = None,
    arguments: ArgOption = None,
    adapter: AdapterOption = None,
    since: SinceOption = None,
    evaluation: EvalOption = False,
    concurrency: ConcurrencyOption = 16,
    limit: Annotated[int | None, typer.Option("--limit", "-n", metavar="N", min=1, help="At most N groups.")] = None,
    threshold: ThresholdOption = 0.5,
    differ: Annotated[
        int, typer.Option("--differ", metavar="N", min=0, help="How many responses to show whose rank differs most.")
    ] = 10,
    drop_failed: DropOption = False,
    force: Annotated[bool, typer.Option("--force", help="Discard existing scores of this name.")] = False,
    json: JsonOption = False,
) -> int:
    """Score recorded groups with another reward, and compare: agreement, correlation, what differs most.

    Example: `streamrl rescore --reward my_rewards:Stricter --into strict --since 2h`. The run is not changed. The new
    scores are a recording, RUN_DIR/rescored/NAME: `--from` reads it, and `streamrl up --train-only` trains it. A repeat
    continues where the last call stopped, and retries what failed. A sample on which the reward fails is listed and
    gets no new score, never a 0. Exit code 1 if a sample failed, or if groups could not be read.
    """
    _check(into, threshold)
    target = find_run(run)
    config = choose(target, file, overrides, reward=reward, arguments=arguments, adapter=adapter)
    place = source or target.path
    reading = read_archive(place, evaluation=evaluation)
    groups = itertools.islice(later_than(reading, since_of(since)), limit)

    async def score(progress: output.ProgressLine) -> tuple[RescoreResult, Path]:
        """Open the rewards, then the folder of the new scores: what cannot be opened changes nothing there."""
        async with opened(config, target.path, target, progress.say) as scorer:
            if force:
                RescoredSet.remove(target.path, into, evaluation=evaluation)
            new = RescoredSet(target.path, into, _about(config, place), evaluation=evaluation)
            with contextlib.closing(new):
                scoring = scoring_of(scorer, concurrency)
                outcome = await rescore_groups(
                    groups, scoring, new, concurrency=concurrency, drop_failed=drop_failed, on_progress=_on(progress)
                )
        return outcome, new.files

    with unwrapped(), output.ProgressLine() as progress:
        outcome, folder = asyncio.run(score(progress))
    note_problems(reading)
    problems = list(reading.problems)  # `_different` reads the archive again
    keys = [key[:2] for key in outcome.keys]
    comparison = compare(outcome.old, outcome.new, keys, threshold) if keys else None
    rewards = [spec.name or spec.use for spec in config.rewards]
    data = {"run": target.name, "into": into, "directory": str(folder), "rewards": rewards, **_counts(outcome)}
    data["comparison"] = None if comparison is None else dataclasses.asdict(comparison)
    data |= {"differ": _different(reading, outcome, differ), "problems": problems}
    output.answer("streamrl.rescore/2", data, report(data, comparison, threshold), json=json)
    return int(ExitCode.FAILURE if outcome.failures or problems else ExitCode.OK)


def _check(into: str, threshold: float) -> None:
    """Before anything is opened."""
    if not _NAME.fullmatch(into):
        raise UsageError(f"--into {into} is not a valid name", "letters, digits, dots, dashes, underscores, at most 64")
    if not math.isfinite(threshold):
        raise UsageError(f"--threshold {threshold} is not a finite number", "a number, e.g. 0.5")


def _on(progress: output.ProgressLine) -> Callable[[RescoreResult], None]:
    def show(outcome: RescoreResult) -> None:
        rate = outcome.scored / outcome.seconds if outcome.seconds else 0.0
        progress.show(
            f"{outcome.groups} groups, {outcome.scored} responses scored, {outcome.kept} kept,"
            f" {len(outcome.failures)} failed, {duration(outcome.seconds)}, {rate:.0f}/s"
        )

    return show


def scoring_of(scorer: PatientScorer, concurrency: int) -> ScoreGroup:
    """Score a group sample by sample, or whole if a reward compares; `concurrency` calls at a time."""
    slots = asyncio.Semaphore(concurrency)

    async def once(samples: Sequence[RewardSample]) -> list[wire.SampleScore | StreamrlError]:
        async with slots:
            began = time.monotonic()
            results = await scorer.score_group(samples)
        seconds = round(time.monotonic() - began, 6)
        return [
            msgspec.structs.replace(result, seconds=seconds) if isinstance(result, wire.SampleScore) else result
            for result in results
        ]

    async def each(samples: Sequence[RewardSample]) -> list[wire.SampleScore | StreamrlError]:
        async with asyncio.TaskGroup() as tasks:
            scored = [tasks.create_task(once([sample])) for sample in samples]
        return [result for task in scored for result in task.result()]

    return once if scorer.group_scored else each


def _about(config: RunConfig, source: Path) -> dict[str, Any]:
    """What the scores of a name are made with, without the variables of servers, which may be secrets."""
    models = config.reward_models.items()
    return {
        "rewards": [spec.model_dump(mode="json") for spec in config.rewards],
        "scoring": config.scoring.model_dump(mode="json"),
        "reward_models": {name: model.model_dump(mode="json", exclude={"variables"}) for name, model in models},
        "source": str(source.resolve()),
    }


def _counts(outcome: RescoreResult) -> dict[str, Any]:
    failures = [
        {"group": each.group_id, "attempt": each.attempt, "sample": each.number, "why": each.why}
        for each in sorted(outcome.failures, key=lambda failure: (failure.group_id, failure.attempt, failure.number))
    ]
    return {
        "groups": outcome.groups,
        "scored": outcome.scored,
        "kept": outcome.kept,
        "failed": len(failures),
        "unwritten": outcome.unwritten,
        "seconds": round(outcome.seconds, 3),
        "failures": failures,
    }


def _different(reading: ArchiveReading, outcome: RescoreResult, count: int) -> list[dict[str, Any]]:
    """The responses whose scores differ most; their texts need another reading of the archive."""
    places = most_different(outcome.old, outcome.new, count) if outcome.keys else []
    wanted = {outcome.keys[place][:2] for place in places}
    if not wanted:
        return []
    groups = {key: group for group in reading if (key := (group.group_id, group.attempt)) in wanted}
    rows = []
    for place in places:
        group_id, attempt, number = outcome.keys[place]
        group = groups.get((group_id, attempt))
        sample = next((each for each in group.samples if each.number == number), None) if group is not None else None
        if group is None or sample is None:
            continue  # it was thinned out meanwhile (`archive.max_bytes`)
        rows.append(
            {
                "group": group_id,
                "attempt": attempt,
                "sample": number,
                "old": outcome.old[place],
                "new": outcome.new[place],
                "parts": sample.score.parts,
                "prompt": group.prompt.text,
                "answer": group.prompt.answer,
                "text": sample.response.text,
            }
        )
    return rows


_SHOWN_FAILURES: Final = 10
_TEXT: Final = 100


def report(data: dict[str, Any], comparison: Comparison | None, threshold: float) -> list[str]:
    counts = f"{data['kept']} were there already, {data['failed']} failed  ({data['groups']} groups)"
    lines = [f"{data['scored']} responses scored in {duration(data['seconds'])}, {counts}"]
    if comparison is None:
        lines.append("nothing to compare: no response has both scores")
    else:
        lines += ["", *_figures(comparison, threshold)]
    if data["differ"]:
        lines += ["", "these differ most, by their rank in each set:"]
        lines += [line for row in data["differ"] for line in _different_lines(row)]
    lines += _failures(data)
    lines += ["", f"new scores   {data['directory']}"]
    return lines


def _figures(found: Comparison, threshold: float) -> list[str]:
    old, new = found.old, found.new
    rows = [
        ("", "old", "new"),
        ("mean", number(old.mean), number(new.mean)),
        ("deviation", number(old.std), number(new.std)),
        ("least", number(old.min), number(new.min)),
        ("greatest", number(old.max), number(new.max)),
        (
            "zero-variance groups",
            f"{found.zero_variance_old}/{found.groups}",
            f"{found.zero_variance_new}/{found.groups}",
        ),
    ]
    lines = [f"{name:20} {a:>10} {b:>10}".rstrip() for name, a, b in rows]
    lines += [
        "",
        f"same score        {_share(found.same)} of {found.samples} responses",
        f"same side of {threshold:<4g} {_share(found.agreement)}",
        f"same order        {_share(found.order)} of {found.pairs} pairs of responses to one prompt",
        f"correlation       {_two(found.pearson)} linear, {_two(found.spearman)} of ranks",
    ]
    if found.pearson is None:
        lines.append("                  one side has a single value, so there is no correlation")
    return lines


def _share(value: float | None) -> str:
    """With one digit more than usual, because one different response of a thousand matters."""
    return "-" if value is None else f"{100 * value:.1f} %"


def _two(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _different_lines(row: dict[str, Any]) -> list[str]:
    change = f"{row['old']:g} -> {row['new']:g}"
    return [
        f"  group {row['group']} sample {row['sample']}  {change}  {parts_line(row['parts'])}".rstrip(),
        f"    prompt    {shortened(row['prompt'], _TEXT)}",
        f"    response  {shortened(row['text'], _TEXT)}",
    ]


def _failures(data: dict[str, Any]) -> list[str]:
    failures: list[dict[str, Any]] = data["failures"]
    if not failures:
        return []
    lines = ["", "without a new score:"]
    lines += [f"  group {f['group']} sample {f['sample']}  {printable(f['why'])}" for f in failures[:_SHOWN_FAILURES]]
    if len(failures) > _SHOWN_FAILURES:
        lines.append(f"  and {len(failures) - _SHOWN_FAILURES} more; --json lists all")
    if data["unwritten"]:
        lines.append(
            f"their {data['unwritten']} groups are not written: the same call tries them again (--drop-failed)"
        )
    return lines
