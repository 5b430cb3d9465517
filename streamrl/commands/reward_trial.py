"""`streamrl reward test`: scores, times and errors of a reward on samples that are at hand."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from streamrl.commands import output
from streamrl.commands.options import JsonOption, SetOption
from streamrl.commands.reward_choice import all_built_in, choose, opened, started_models
from streamrl.commands.rundir import RunDirectory, find_run
from streamrl.config import RunConfig
from streamrl.consumers.reward import RewardSample
from streamrl.errors import ExitCode, UsageError, unwrapped
from streamrl.monitor.lines import folded, printable, shortened

if TYPE_CHECKING:
    from streamrl import wire
    from streamrl.consumers.calls import ScoringFailed
    from streamrl.consumers.scoring import PatientScorer

SCHEMA: Final = "streamrl.reward.test/1"
_FOLDERS: Final = "streamrl-reward-"
_SHOWN_TRACEBACKS: Final = 5
_TEXT: Final = 60


@dataclass(frozen=True, slots=True)
class Trial:
    """How one sample fared: `number` is its place in the file, `seconds` of its whole group where a reward compares."""

    number: int
    sample: RewardSample
    end: wire.SampleScore | ScoringFailed
    seconds: float


def trial(
    reward: Annotated[
        str | None,
        typer.Argument(metavar="REWARD", help="Built-in name, module:Name, or one of --file; else all of --file."),
    ] = None,
    *,
    sample: Annotated[
        Path, typer.Option("--sample", metavar="FILE", help="JSON or JSON lines, a recording, or a run's archive.")
    ],
    file: Annotated[
        Path | None, typer.Option("--file", metavar="RUN.yaml", help="Run file: its rewards, models and plugin_paths.")
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option("--run", metavar="DIR", help="A run whose servers are asked; without --file its rewards too."),
    ] = None,
    overrides: SetOption = None,
    arguments: Annotated[
        list[str] | None,
        typer.Option("--arg", metavar="KEY=VALUE", help="An argument of the reward, e.g. tolerance=0.1"),
    ] = None,
    adapter: Annotated[
        str | None, typer.Option("--adapter", metavar="verl|trl", help="Call it as a function of verl or of TRL.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Score at most so many samples.")] = 1000,
    wait: Annotated[
        float, typer.Option("--wait", metavar="SECONDS", min=0, help="How long to wait for a service that is away.")
    ] = 30.0,
    json: JsonOption = False,
) -> int:
    """Score samples as a worker would; show scores, times, errors with tracebacks. Exit code 1 if one has no score.

    A sample is `{"prompt": "2+2=", "response": "4", "answer": "4"}`; any other key is metadata. Each is tried once,
    with the deadline of the run file. `streamrl reward test gateway` waits for your program to fetch them.
    """
    from streamrl.consumers.samples import read_samples

    target = find_run(run) if run is not None else None
    config = _configured(reward, file, target, overrides or [], arguments=arguments or [], adapter=adapter)
    problems: list[str] = []
    samples = list(itertools.islice(read_samples(sample, problems), limit))
    for problem in problems:
        output.note(f"warning: {problem}")
    with unwrapped():
        trials = asyncio.run(_try(config, samples, target, wait))
    failed = sum(not _has_score(each) for each in trials)
    names = [spec.name or spec.use for spec in config.rewards]
    if json:
        output.write_json(SCHEMA, {"rewards": names, "samples": [_data(each) for each in trials], **_summary(trials)})
    else:
        _print(trials, _summary(trials), names)
    return int(ExitCode.FAILURE if failed or problems else ExitCode.OK)


def _configured(
    reward: str | None,
    run_file: Path | None,
    run: RunDirectory | None,
    overrides: Sequence[str],
    *,
    arguments: Sequence[str],
    adapter: str | None,
) -> RunConfig:
    """What the samples are scored with: each is tried once, so that an error is seen as it is."""
    from streamrl.runfile import load

    if reward is None and run_file is None and run is None:
        raise UsageError("no reward to test", "name one, a run file with --file, or a run with --run")
    if run is not None and run_file is None and overrides:
        raise UsageError("--set changes a run file", "name it with --file")
    whole = run.config if run is not None and run_file is None else load(run_file, overrides).config
    config = choose(whole, reward, arguments, adapter)
    if run is None:
        _expect_servers(config)
    once = {"attempts": 1, "on_failure": "drop_sample"}
    worker: dict[str, Any] = {**once}
    if any(spec.use == "gateway" for spec in config.rewards) and config.reward_worker.gateway_port is None:
        worker["gateway_port"] = 0
    return config.model_copy(
        update={
            "rewards": tuple(spec.model_copy(update=once) for spec in config.rewards),
            "reward_worker": config.reward_worker.model_copy(update=worker),
        }
    )


def _expect_servers(config: RunConfig) -> None:
    """See that the models have servers where there is no run that could have started some.

    Raises:
        UsageError: a model that is asked has none.
    """
    lacking = started_models(config)
    if not lacking:
        return
    message = f"reward_models.{lacking[0]} has no url, and its servers are those of a run"
    hint = "name the run with --run DIR, or give the model a url"
    if all_built_in(config):
        raise UsageError(message, hint)
    output.note(f"warning: {message}: {hint}")  # nobody knows whether the reward asks it


async def _try(
    config: RunConfig, samples: Sequence[RewardSample], run: RunDirectory | None, wait: float
) -> list[Trial]:
    """Score all samples; in their order, those of a group together where a reward compares."""
    from streamrl.consumers.gateway.reward import GatewayReward
    from streamrl.consumers.sandbox.sandbox import own_folder, sweep

    by_hand = any(spec.use == "gateway" for spec in config.rewards)  # a person starts the program that asks
    sweep(_FOLDERS)
    with own_folder(_FOLDERS) as folder:
        async with opened(config, Path(folder), run, patience=None if by_hand else wait) as scorer:
            for calls in scorer.calls:
                if isinstance(calls.reward.life, GatewayReward):
                    output.note(
                        f"{calls.reward.name}: {len(samples)} samples wait for a program at {calls.reward.life.url}"
                    )
            groups = _groups(samples, whole=scorer.group_scored)
            slots = asyncio.Semaphore(config.reward_worker.concurrency)

            async def one(group: Mapping[int, RewardSample]) -> list[Trial]:
                async with slots:
                    return await _timed(scorer, group)

            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(one(group)) for group in groups]
    return sorted((each for task in running for each in task.result()), key=lambda each: each.number)


def _groups(samples: Sequence[RewardSample], *, whole: bool) -> list[dict[int, RewardSample]]:
    """What is scored together, by number: single samples, or groups, which have one prompt."""
    found: dict[Any, dict[int, RewardSample]] = {}
    for number, sample in enumerate(samples):
        key = (sample.prompt.evaluation, sample.group_id, sample.prompt.text) if whole else number
        found.setdefault(key, {})[number] = sample
    return list(found.values())


async def _timed(scorer: PatientScorer, group: Mapping[int, RewardSample]) -> list[Trial]:
    began = time.perf_counter()
    ends = await scorer.score_group(list(group.values()))
    seconds = time.perf_counter() - began
    return [Trial(number, sample, end, seconds) for (number, sample), end in zip(group.items(), ends, strict=True)]


def _has_score(each: Trial) -> bool:
    return not isinstance(each.end, Exception)


def _data(each: Trial) -> dict[str, Any]:
    sample, end = each.sample, each.end
    data: dict[str, Any] = {"sample": each.number, "group": sample.group_id, "index": sample.index}
    data["line"] = sample.prompt.line
    data |= {"response": sample.text, "seconds": round(each.seconds, 6)}
    if isinstance(end, Exception):
        return data | {"value": None, "parts": {}, "error": end.message, "detail": end.detail}
    return data | {"value": end.value, "parts": end.parts, "error": None, "detail": end.detail or None}


def _summary(trials: Sequence[Trial]) -> dict[str, Any]:
    values = [each.end.value for each in trials if not isinstance(each.end, Exception)]
    return {
        "scored": len(values),
        "failed": len(trials) - len(values),
        "mean": sum(values) / len(values) if values else None,
        "min": min(values, default=None),
        "max": max(values, default=None),
        "longest_seconds": round(max((each.seconds for each in trials), default=0.0), 6),
    }


def _print(trials: Sequence[Trial], summary: dict[str, Any], names: Sequence[str]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("SAMPLE", "GROUP", "INDEX", "VALUE", "MS"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("PARTS")
    table.add_column("RESPONSE", no_wrap=True)
    for each in trials:
        data = _data(each)
        failed = data["error"] is not None
        table.add_row(
            str(each.number),
            str(data["group"]),
            str(data["index"]),
            Text("error", style="bold red") if failed else f"{data['value']:.4g}",
            f"{1000 * each.seconds:.1f}",
            Text(printable(data["error"] if failed else _parts(data["parts"], names))),
            Text(shortened(data["response"], _TEXT)),
        )
    output.console().print(table)
    for each in [each for each in trials if not _has_score(each)][:_SHOWN_TRACEBACKS]:
        data = _data(each)
        output.write(f"\nsample {each.number}: {printable(data['error'])}")
        output.write("\n".join(printable(line) for line in folded(data["detail"])))
    for each in [each for each in trials if _has_score(each) and _data(each)["detail"]][:_SHOWN_TRACEBACKS]:
        output.write(f"\nsample {each.number}:")
        output.write("\n".join(printable(line) for line in _data(each)["detail"].splitlines()))
    mean = f", mean {summary['mean']:.4g}, {summary['min']:.4g} to {summary['max']:.4g}" if summary["scored"] else ""
    output.write(f"\n{summary['scored']} scored, {summary['failed']} failed{mean}")


def _parts(parts: Mapping[str, float], names: Sequence[str]) -> str:
    """The parts; those of a reward that is alone without its name."""
    if len(names) == 1:
        parts = {name.removeprefix(f"{names[0]}/"): part for name, part in parts.items() if name != names[0]}
    return "  ".join(f"{name} {part:.4g}" for name, part in parts.items())
