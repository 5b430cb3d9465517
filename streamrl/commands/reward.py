"""`streamrl reward`: writes a reward with its test, and tries one on samples; `servers` are in `reward_servers`."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import keyword
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from streamrl.commands import output, reward_servers
from streamrl.commands.options import JsonOption, SetOption
from streamrl.commands.reward_choice import (
    AdapterOption,
    ArgOption,
    FileOption,
    all_built_in,
    choose,
    opened,
    started_models,
)
from streamrl.commands.rundir import RunDirectory, find_run
from streamrl.config import RunConfig
from streamrl.consumers.reward import RewardSample
from streamrl.errors import CannotCreate, ExitCode, UsageError, unwrapped, writing
from streamrl.monitor.lines import folded, printable, shortened

if TYPE_CHECKING:
    from streamrl import wire
    from streamrl.consumers.calls import ScoringFailed
    from streamrl.consumers.scoring import PatientScorer

_TEMPLATES: Final = {
    "sample": {
        "{module}.py": "reward.py.txt",
        "test_{module}.py": "reward_test.py.txt",
        "{module}_samples.jsonl": "reward_samples.jsonl.txt",
    },
    "group": {
        "{module}.py": "reward_group.py.txt",
        "test_{module}.py": "reward_group_test.py.txt",
        "{module}_samples.jsonl": "reward_group_samples.jsonl.txt",
    },
}
_LINES: Final = """rewards:
  - use: {module}:{name}
    weight: 1.0
    args: {{{args}}}"""
_TAKEN: Final = {"GroupReward", "Reward", "RewardSample", "Score", "Sequence"}
"""Names that the templates import."""
_ARGS: Final = {"sample": "ignore_case: true", "group": "spread: 1.0"}
_FOLDERS: Final = "streamrl-reward-"
_SHOWN_TRACEBACKS: Final = 5
_TEXT: Final = 60
_WAIT_SECONDS: Final = 30.0


app = typer.Typer(no_args_is_help=True, add_completion=False)
app.add_typer(reward_servers.app, name="servers")


@app.command("new")
def new(
    module: Annotated[str, typer.Argument(metavar="NAME", help="Name of the module, e.g. my_reward; makes NAME.py.")],
    folder: Annotated[
        Path,
        typer.Option("--in", metavar="DIR", help="Directory to write to; a run finds the reward beside its run file."),
    ] = Path(),
    form: Annotated[
        Literal["sample", "group"],
        typer.Option("--form", help="sample: scores one response; group: compares those to one prompt."),
    ] = "sample",
) -> int:
    """Write a reward that works, its test that passes, and samples to try it on. Nothing is overwritten.

    NAME.py is the reward, test_NAME.py its test (`pytest test_NAME.py`), NAME_samples.jsonl holds samples for
    `streamrl reward test`. The lines for the run file go to stdout. Exit code 73 if one of the files is there already.
    """
    name = "".join(part[:1].upper() + part[1:] for part in module.split("_"))
    _check(module, name)
    templates = resources.files("streamrl.commands") / "templates"
    files = {
        folder / target.format(module=module): (templates / template)
        .read_text(encoding="utf-8")
        .replace("MODULE", module)
        .replace("CLASS", name)
        for target, template in _TEMPLATES[form].items()
    }
    if there := [path.name for path in files if path.exists()]:
        raise CannotCreate(f"{folder.resolve()} has {', '.join(there)} already", "another name, or --in DIR")
    with contextlib.ExitStack() as undo, writing(inside=folder):
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            with path.open("x", encoding="utf-8") as file:  # "x": never overwrite a file that appeared meanwhile
                undo.callback(path.unlink, missing_ok=True)
                file.write(text)
        undo.pop_all()
    for path in files:
        output.note(f"wrote {path}")
    output.note("lines for the run file; a run looks for modules beside it and in plugin_paths:")
    output.write(_LINES.format(module=module, name=name, args=_ARGS[form]))
    source, _, samples = files
    here = "" if folder.resolve() == Path.cwd() else f"cd {source.parent} && "
    output.note(f"next: {here}pytest test_{module}.py")
    output.note(f"      {here}streamrl reward test {module}:{name} --sample {samples.name}")
    return 0


def _check(module: str, name: str) -> None:
    if not (module.isidentifier() and module.isascii()) or keyword.iskeyword(module) or module.startswith("test_"):
        raise UsageError(f"{module!r} cannot be the name of a reward module", "letters, digits and _: my_reward")
    if not name.isidentifier() or keyword.iskeyword(name) or name in _TAKEN:
        raise UsageError(
            f"the class of {module} would be {name!r}, which cannot be used", "another name, e.g. my_reward"
        )
    here = {"", os.getcwd()}  # noqa: PTH109 (as sys.path has it)
    before = sys.path[:]
    sys.path[:] = [path for path in before if path not in here]
    try:
        taken = module in sys.builtin_module_names or importlib.util.find_spec(module) is not None
    finally:
        sys.path[:] = before
    if taken:
        raise UsageError(f"there is a module {module} already, which Python would import instead", "another name")


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of one sample: `number` is its place in the file, `seconds` of its group if a reward compares."""

    number: int
    sample: RewardSample
    end: wire.SampleScore | ScoringFailed
    seconds: float


@app.command("test")
def trial(
    reward: Annotated[
        str | None,
        typer.Argument(
            metavar="REWARD", help="Built-in name, module:Name, or a name from --file; left out: all of --file."
        ),
    ] = None,
    *,
    sample: Annotated[
        Path, typer.Option("--sample", metavar="FILE", help="JSON or JSON lines, a recording, or a run's archive.")
    ],
    file: FileOption = None,
    run: Annotated[
        Path | None,
        typer.Option(
            "--run",
            metavar="DIR",
            help="Run whose model servers to ask; without --file also the run whose rewards to test.",
        ),
    ] = None,
    overrides: SetOption = None,
    arguments: ArgOption = None,
    adapter: AdapterOption = None,
    limit: Annotated[int, typer.Option("--limit", "-n", metavar="N", min=1, help="At most N samples.")] = 1000,
    wait: Annotated[
        float,
        typer.Option("--wait", metavar="SECONDS", min=0, help="How long to wait for a service that does not answer."),
    ] = _WAIT_SECONDS,
    json: JsonOption = False,
) -> int:
    """Score samples as a worker would; show scores, times, errors with tracebacks. Exit code 1 if one has no score.

    A sample is `{"prompt": "2+2=", "response": "4", "answer": "4"}`; any other key is metadata. Each is tried once,
    with the deadline of the run file.
    """
    from streamrl.consumers.samples import read_samples

    target = find_run(run) if run is not None else None
    if reward is None and file is None and run is None:
        raise UsageError("no reward to test", "name one, a run file with --file, or a run with --run")
    config = _once(choose(target, file, overrides, reward=reward, arguments=arguments, adapter=adapter))
    if target is None:
        _expect_servers(config)
    problems: list[str] = []
    samples = list(itertools.islice(read_samples(sample, problems), limit))
    for problem in problems:
        output.note(f"warning: {problem}")
    with unwrapped():
        trials = asyncio.run(_try(config, samples, target, wait))
    names = [spec.name or spec.use for spec in config.rewards]
    summary, rows = _summary(trials), [_data(each) for each in trials]
    if json:
        output.write_json("streamrl.reward.test/1", {"rewards": names, "samples": rows, **summary})
    else:
        _print(rows, summary, names)
    return int(ExitCode.FAILURE if summary["failed"] or problems else ExitCode.OK)


def _once(config: RunConfig) -> RunConfig:
    """Each sample is tried once, so that an error is seen as it is."""
    once = {"attempts": 1, "on_failure": "drop_sample"}
    return config.model_copy(
        update={
            "rewards": tuple(spec.model_copy(update=once) for spec in config.rewards),
            "reward_worker": config.reward_worker.model_copy(update=once),
        }
    )


async def score_once(config: RunConfig, samples: Sequence[RewardSample]) -> list[Trial]:
    """Score samples with the rewards of a run file, which has not to run. UsageError: their models have no servers."""
    _expect_servers(config)
    return await _try(_once(config), samples, None, _WAIT_SECONDS)


def _expect_servers(config: RunConfig) -> None:
    """Refuse models without servers if there is no run that could have started some."""
    if not (lacking := started_models(config)):
        return
    message = f"reward_models.{lacking[0]} has no url, so only a run has its servers"
    hint = "name the run with --run DIR, or give the model a url"
    if all_built_in(config):
        raise UsageError(message, hint)
    output.note(f"warning: {message}: {hint}")  # the user's own code may ask no model at all


async def _try(
    config: RunConfig, samples: Sequence[RewardSample], run: RunDirectory | None, wait: float
) -> list[Trial]:
    """Score all samples; if a reward compares, the samples of a group together."""
    from streamrl.sandbox.sandbox import own_folder, sweep

    sweep(_FOLDERS)
    with own_folder(_FOLDERS) as folder:
        async with opened(config, Path(folder), run, patience=wait) as scorer:
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
        key = (sample.prompt.evaluation, sample.group_id, sample.prompt.text, sample.prompt.source) if whole else number
        found.setdefault(key, {})[number] = sample
    return list(found.values())


async def _timed(scorer: PatientScorer, group: Mapping[int, RewardSample]) -> list[Trial]:
    began = time.perf_counter()
    ends = await scorer.score_group(list(group.values()))
    seconds = time.perf_counter() - began
    return [Trial(number, sample, end, seconds) for (number, sample), end in zip(group.items(), ends, strict=True)]


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


def _print(rows: Sequence[dict[str, Any]], summary: dict[str, Any], names: Sequence[str]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("SAMPLE", "GROUP", "INDEX", "VALUE", "MS"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("PARTS")
    table.add_column("RESPONSE", no_wrap=True)
    for row in rows:
        failed = row["error"] is not None
        table.add_row(
            *(str(row[name]) for name in ("sample", "group", "index")),
            Text("error", style="bold red") if failed else f"{row['value']:.4g}",
            f"{1000 * row['seconds']:.1f}",
            Text(printable(row["error"] if failed else _parts(row["parts"], names))),
            Text(shortened(row["response"], _TEXT)),
        )
    output.console().print(table)
    for row in [row for row in rows if row["error"] is not None][:_SHOWN_TRACEBACKS]:
        output.write(f"\nsample {row['sample']}: {printable(row['error'])}")
        output.write("\n".join(printable(line) for line in folded(row["detail"])))
    for row in [row for row in rows if row["error"] is None and row["detail"]][:_SHOWN_TRACEBACKS]:
        output.write(f"\nsample {row['sample']}:")
        output.write("\n".join(printable(line) for line in row["detail"].splitlines()))
    mean = f", mean {summary['mean']:.4g}, {summary['min']:.4g} to {summary['max']:.4g}" if summary["scored"] else ""
    output.write(f"\n{summary['scored']} scored, {summary['failed']} failed{mean}")


def _parts(parts: Mapping[str, float], names: Sequence[str]) -> str:
    """The parts on one line; without the name of the reward if there is only one."""
    if len(names) == 1:
        parts = {name.removeprefix(f"{names[0]}/"): part for name, part in parts.items() if name != names[0]}
    return "  ".join(f"{name} {part:.4g}" for name, part in parts.items())
