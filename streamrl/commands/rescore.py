"""`streamrl rescore`: recorded groups scored again by other rewards, and both sets of scores compared."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Self

import msgspec
import typer

from streamrl import wire
from streamrl.archive.reader import ArchiveReading, read_archive
from streamrl.commands import output
from streamrl.commands.archive import FromOption, SinceOption, later_than, note_problems, since_of
from streamrl.commands.options import EvalOption, JsonOption, RunOption, SetOption
from streamrl.commands.rescore_report import check_drawing, draw, report
from streamrl.commands.reward_choice import choose, opened
from streamrl.commands.rundir import RunDirectory, find_run
from streamrl.config import RunConfig
from streamrl.consumers.comparison import compare, most_different
from streamrl.consumers.patience import PatientScorer
from streamrl.consumers.rescoring import Outcome, RescoredSet, ScoreGroup, rescore_groups
from streamrl.consumers.reward import RewardSample
from streamrl.errors import ExitCode, StreamrlError, UsageError, unwrapped
from streamrl.monitor.lines import duration
from streamrl.runfile import load

SCHEMA: Final = "streamrl.rescore/1"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NOTE_SECONDS: Final = 10.0
_DRAW_SECONDS: Final = 0.2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line says; `streamrl rescore --help` explains each."""

    into: str
    source: Path | None = None
    reward: str | None = None
    file: Path | None = None
    overrides: Sequence[str] = ()
    arguments: Sequence[str] = ()
    adapter: str | None = None
    since: str | None = None
    evaluation: bool = False
    concurrency: int = 16
    limit: int | None = None
    threshold: float = 0.5
    differ: int = 10
    drop_failed: bool = False
    force: bool = False
    picture: Path | None = None

    def config(self, run: RunDirectory) -> RunConfig:
        """The configuration with the rewards that are meant.

        Raises:
            ConfigError: the run file is wrong.
            UsageError: options that do not go together.
        """
        if self.file is None and self.overrides:
            raise UsageError("--set changes a run file", "name it with --file")
        whole = run.config if self.file is None else load(self.file, self.overrides).config
        return choose(whole, self.reward, self.arguments, self.adapter)


def rescore(
    *,
    reward: Annotated[
        str | None,
        typer.Option(
            "--reward", metavar="REWARD", help="Built-in name, module:Name, or one of the run or --file; else all."
        ),
    ] = None,
    into: Annotated[str, typer.Option("--into", metavar="NAME", help="Name of the new scores: RUN_DIR/rescored/NAME.")],
    run: RunOption = None,
    source: FromOption = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", metavar="RUN.yaml", help="Rewards, scoring and models of a run file; else of the run."),
    ] = None,
    overrides: SetOption = None,
    arguments: Annotated[
        list[str] | None, typer.Option("--arg", metavar="KEY=VALUE", help="One of its args, e.g. tolerance=0.1")
    ] = None,
    adapter: Annotated[
        str | None, typer.Option("--adapter", metavar="verl|trl", help="The function is one of verl or of TRL.")
    ] = None,
    since: SinceOption = None,
    evaluation: EvalOption = False,
    concurrency: Annotated[
        int, typer.Option("--concurrency", min=1, help="Responses at a time; groups where the reward compares.")
    ] = 16,
    limit: Annotated[int | None, typer.Option("--limit", "-n", min=1, help="At most so many groups.")] = None,
    threshold: Annotated[
        float, typer.Option("--threshold", help="Where `same side` draws the line: right is above.")
    ] = 0.5,
    differ: Annotated[int, typer.Option("--differ", min=0, help="Responses to show that differ most.")] = 10,
    drop_failed: Annotated[
        bool, typer.Option("--drop-failed", help="Write groups that lost responses to failures too.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Throw away the scores of this name first.")] = False,
    picture: Annotated[
        Path | None, typer.Option("--picture", metavar="FILE.png", help="Draw both sets of scores (matplotlib).")
    ] = None,
    json: JsonOption = False,
) -> int:
    """Score recorded groups with another reward, and compare: agreement, correlation, histogram, what differs most.

    Example: `streamrl rescore --reward my_rewards:Stricter --into strict --since 2h`. The run is not changed. The new
    scores are a recording, RUN_DIR/rescored/NAME: `--from` reads it, and `streamrl up --train-only` trains it. A repeat
    goes on where the last call stopped, and tries again what failed. A sample that the reward fails on is listed and
    gets no new score, never a 0. Exit code 1 if there was one, or if groups could not be read.
    """
    options = Options(
        into=into,
        source=source,
        reward=reward,
        file=file,
        overrides=overrides or [],
        arguments=arguments or [],
        adapter=adapter,
        since=since,
        evaluation=evaluation,
        concurrency=concurrency,
        limit=limit,
        threshold=threshold,
        differ=differ,
        drop_failed=drop_failed,
        force=force,
        picture=picture,
    )
    return _rescore(find_run(run), options, json=json)


def _rescore(run: RunDirectory, options: Options, *, json: bool) -> int:
    if not _NAME.fullmatch(options.into):
        raise UsageError(f"--into {options.into} is no name", "letters, digits, dots, dashes, underscores, at most 64")
    if not math.isfinite(options.threshold):
        raise UsageError(f"--threshold {options.threshold} is no score", "a number, e.g. 0.5")
    if options.picture is not None:
        check_drawing(options.picture)
    config = options.config(run)
    reading = read_archive(options.source or run.path, evaluation=options.evaluation)
    with unwrapped(), Counting() as counting:
        outcome, folder = asyncio.run(_score(run, config, reading, options, counting))
    problems = list(reading.problems)
    note_problems(reading)
    groups = [key[:2] for key in outcome.keys]
    comparison = compare(outcome.old, outcome.new, groups, options.threshold) if groups else None
    data = {
        "run": run.name,
        "into": options.into,
        "directory": str(folder),
        "rewards": [spec.name or spec.use for spec in config.rewards],
        **_counts(outcome),
        "comparison": None if comparison is None else dataclasses.asdict(comparison),
        "differ": _different(reading, outcome, options.differ),
        "problems": problems,
    }
    if json:
        output.write_json(SCHEMA, data)
    else:
        output.write("\n".join(report(data, comparison, options.threshold)))
    if options.picture is not None and comparison is not None:
        draw(options.picture, options.into, comparison, outcome.old, outcome.new)
        output.note(f"wrote {options.picture}")
    return int(ExitCode.FAILURE if outcome.failures or problems else ExitCode.OK)


async def _score(
    run: RunDirectory,
    config: RunConfig,
    reading: ArchiveReading,
    options: Options,
    counting: Counting,
) -> tuple[Outcome, Path]:
    """Open the rewards, then the folder of the new scores; returns what came of it, and the folder."""
    groups = itertools.islice(later_than(reading, since_of(options.since)), options.limit)
    about = _about(config, options.source or run.path)
    async with opened(config, run.path, run, counting.say) as scorer:
        if options.force:
            RescoredSet.remove(run.path, options.into, evaluation=options.evaluation)
        new = RescoredSet(run.path, options.into, about, evaluation=options.evaluation)
        try:
            outcome = await rescore_groups(
                groups,
                scoring_of(scorer, options.concurrency),
                new,
                concurrency=options.concurrency,
                drop_failed=options.drop_failed,
                on_progress=counting.show,
            )
        finally:
            new.close()
    return outcome, new.files


def scoring_of(scorer: PatientScorer, concurrency: int) -> ScoreGroup:
    """How a scorer scores a group: sample by sample, or whole where a reward compares; so many calls at a time."""
    places = asyncio.Semaphore(concurrency)

    async def once(samples: Sequence[RewardSample]) -> list[wire.Score | StreamrlError]:
        async with places:
            began = time.monotonic()
            results = await scorer.score_group(samples)
        seconds = round(time.monotonic() - began, 6)
        return [
            msgspec.structs.replace(result, seconds=seconds) if isinstance(result, wire.Score) else result
            for result in results
        ]

    async def each(samples: Sequence[RewardSample]) -> list[wire.Score | StreamrlError]:
        async with asyncio.TaskGroup() as tasks:
            scored = [tasks.create_task(once([sample])) for sample in samples]
        return [result for task in scored for result in task.result()]

    return once if scorer.whole else each


def _about(config: RunConfig, source: Path) -> dict[str, Any]:
    """What the scores of a name are made with; without the variables of servers, which may be secrets."""
    models = config.reward_models.items()
    return {
        "rewards": [spec.model_dump(mode="json") for spec in config.rewards],
        "scoring": config.scoring.model_dump(mode="json"),
        "reward_models": {name: model.model_dump(mode="json", exclude={"variables"}) for name, model in models},
        "source": str(source.resolve()),
    }


def _counts(outcome: Outcome) -> dict[str, Any]:
    failures = [
        {"group": each.gid, "attempt": each.attempt, "sample": each.number, "why": each.why}
        for each in sorted(outcome.failures, key=lambda failure: (failure.gid, failure.attempt, failure.number))
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


def _different(reading: ArchiveReading, outcome: Outcome, count: int) -> list[dict[str, Any]]:
    """The responses whose scores differ most, with their texts: the archive is read once more for them."""
    places = most_different(outcome.old, outcome.new, count) if outcome.keys else []
    wanted = {outcome.keys[place][:2] for place in places}
    if not wanted:
        return []
    groups = {key: group for group in reading if (key := (group.gid, group.attempt)) in wanted}
    rows = []
    for place in places:
        gid, attempt, number = outcome.keys[place]
        group = groups.get((gid, attempt))
        sample = next((each for each in group.samples if each.number == number), None) if group is not None else None
        if group is None or sample is None:
            continue  # `archive.files` removed it meanwhile
        rows.append(
            {
                "group": gid,
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


class Counting:
    """Progress on stderr: one line that changes on a terminal, elsewhere a line every ten seconds."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._next = 0.0 if self._terminal else time.monotonic() + _NOTE_SECONDS
        self._drawn = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._drawn:
            output.note("")

    def say(self, text: str) -> None:
        """Write a line of its own, in the place of the one that changes."""
        if self._drawn:
            sys.stderr.write("\r\x1b[K")
        output.note(text)

    def show(self, outcome: Outcome) -> None:
        """Show what is done, unless that was a moment ago."""
        now = time.monotonic()
        if now < self._next:
            return
        rate = outcome.scored / outcome.seconds if outcome.seconds else 0.0
        text = (
            f"{outcome.groups} groups, {outcome.scored} responses scored, {outcome.kept} kept,"
            f" {len(outcome.failures)} failed, {duration(outcome.seconds)}, {rate:.0f}/s"
        )
        if self._terminal:
            self._next, self._drawn = now + _DRAW_SECONDS, True
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()
        else:
            self._next = now + _NOTE_SECONDS
            output.note(text)
