"""`streamrl episode`: tries an episode, an environment or an agent on some tasks, outside of a run."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from streamrl.commands import output
from streamrl.commands.options import JsonOption, SetOption
from streamrl.commands.turns import Decode, episode_data, episode_lines
from streamrl.config import RunConfig, SourceConfig
from streamrl.config.episode import RUN_PYTHON
from streamrl.errors import (
    DataError,
    DeadlineExceeded,
    ExitCode,
    StreamrlError,
    UsageError,
    need_packages,
    unwrapped,
)
from streamrl.monitor.lines import duration, folded, printable, shortened
from streamrl.plugin_import import import_plugin, look_in
from streamrl.runfile import load
from streamrl.wire import PROMPT, Prompt, Sample, SampleScore, decode

if TYPE_CHECKING:
    from streamrl.producers.sampler import Sampler
    from streamrl.producers.tokenizer import Tokenizer

_TRACEBACK_LINES: Final = 12

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def episodes() -> None:
    """Keep `test` a word of its own while it is the only command."""


@dataclass(slots=True)
class Played:
    """One episode: `failure` says why there is no sample, or no score of the run; `notes` are errors of its tools.

    `score` is that of the run's rewards, None if they could not be applied.
    """

    prompt: Prompt
    sample: Sample | None
    seconds: float
    failure: str = ""
    detail: str = ""
    notes: list[str] = field(default_factory=list)
    score: SampleScore | None = None


@app.command("test")
def trial(
    episode: Annotated[
        str | None,
        typer.Argument(
            metavar="EPISODE",
            help="module:Name of an Episode, an environment or a tool; or run_python; else that of the run file.",
        ),
    ] = None,
    *,
    task: Annotated[
        Path | None,
        typer.Option("--task", metavar="FILE", help="Lines of a data set; data.train of the run file if left out."),
    ] = None,
    file: Annotated[
        Path, typer.Option("--file", metavar="RUN.yaml", help="Run file with the model and the limits.")
    ] = Path("run.yaml"),
    overrides: SetOption = None,
    limit: Annotated[int, typer.Option("--limit", "-n", metavar="N", min=1, help="At most N lines.")] = 1,
    width: Annotated[
        int, typer.Option("--width", metavar="N", min=10, help="At most N characters of each text.")
    ] = 100,
    json: JsonOption = False,
) -> int:
    """Play one episode for each line against the model, in this process, and show its turns. Exit code 1 if one fails.

    It shows who said what, with tokens, tools and times, why the episode ended, the score by the rewards of the run
    file, and errors of your code with their tracebacks. The model is that of the run file; transformers samples,
    whatever engine the run file names.
    """
    need_packages("training", "torch", "transformers")
    config = _chosen(load(file, overrides or ()).config, episode)
    with unwrapped():
        tokenizer, played = asyncio.run(_play_all(config, task, limit))
        _score(config, played)

    rows = [_data(each, lambda ids: tokenizer.decode(ids, special=True)) for each in played]
    failed = sum(row["error"] is not None for row in rows)
    agents_failed = sum(row["stop"] == "agent_failed" for row in rows)
    if json:
        counts = {"failed": failed, "agents_failed": agents_failed}
        output.write_json("streamrl.episode.test/1", {"episodes": rows, **counts})
    else:
        for row in rows:
            output.write("\n".join(_lines(row, width)))
        agents = f", the agent of {agents_failed} failed" if agents_failed else ""
        output.write(f"{len(rows) - failed} played, {failed} failed{agents}")
    return int(ExitCode.FAILURE if failed or agents_failed else ExitCode.OK)


def _score(config: RunConfig, played: Sequence[Played]) -> None:
    """Score the samples with the rewards of the run; if these cannot be opened here, a warning says why."""
    from streamrl.commands.reward import score_once
    from streamrl.consumers.reward import RewardSample

    made = {n: RewardSample.of(each.prompt, each.sample, n) for n, each in enumerate(played) if each.sample is not None}
    try:
        trials = asyncio.run(score_once(config, list(made.values())))
    except StreamrlError as error:
        output.note(f"warning: the rewards of the run are not applied: {error.message}")
        return
    for each, trial in zip((played[n] for n in made), trials, strict=True):
        if isinstance(trial.end, SampleScore):
            each.score = trial.end
        else:
            each.failure, each.detail = f"no score: {trial.end.message}", trial.end.detail


def _chosen(config: RunConfig, use: str | None) -> RunConfig:
    """The configuration with the episode that the command line names, of whichever kind it is."""
    if use is None:
        if config.episode.kind is None:
            raise UsageError("no episode to test", "name one, or a run file with a section `episode`")
        return config
    if use in (config.episode.run, config.episode.environment):
        return config  # with its args
    nothing: dict[str, Any] = {"run": None, "tools": (), "environment": None, "agent": None, "args": {}}
    episode = config.episode.model_copy(update=nothing | _kind_of(use, config))
    return config.model_copy(update={"episode": episode})


def _kind_of(use: str, config: RunConfig) -> dict[str, Any]:
    from streamrl.producers.episodes.episode import Episode

    if use == RUN_PYTHON:
        return {"tools": (use,)}
    target = import_plugin(use, look_in(config.plugin_paths), role="episode")
    if inspect.isclass(target):
        return {"run": use} if issubclass(target, Episode) else {"environment": use}
    return {"tools": (use,)}


async def _play_all(config: RunConfig, task: Path | None, limit: int) -> tuple[Tokenizer, list[Played]]:
    from streamrl.images.store import ImageStore
    from streamrl.producers.dataset import PromptLimits, load_prompts
    from streamrl.producers.engines.hf import HfEngine
    from streamrl.producers.episodes.sampler import sampler_of
    from streamrl.producers.tokenizer import Tokenizer

    tokenizer = await asyncio.to_thread(Tokenizer.load, config.model)
    limits = PromptLimits.of(config)
    sources = config.data.whole(config.data.train if task is None else [SourceConfig(source=task)])
    store, paths = ImageStore(config.images), config.plugin_paths
    data = await asyncio.to_thread(load_prompts, sources, tokenizer, limits, paths, count=limit, store=store)
    prompts = [decode(prompt, Prompt) for prompt in itertools.islice(data.prompts, limit)]
    engine = HfEngine(config, config.seed)
    try:
        await engine.start()
        async with sampler_of(config, engine, tokenizer) as sampler:
            return tokenizer, [await _play(sampler, prompt) for prompt in prompts]
    finally:
        await engine.close()


async def _play(sampler: Sampler, prompt: Prompt) -> Played:
    """Play one episode; errors of the user's code are its result."""
    from streamrl.producers.episodes.sampler import EpisodeFailed
    from streamrl.producers.sampler import SampleOrder

    begun = time.perf_counter()
    with _tool_errors() as notes:
        try:
            sample = await sampler.sample(SampleOrder(prompt, id=f"test-{prompt.line}"))
        except (EpisodeFailed, DataError, DeadlineExceeded) as error:
            detail = _last_lines(error.__cause__) if error.__cause__ else error.hint
            return Played(prompt, None, time.perf_counter() - begun, error.message, detail, notes)
    return Played(prompt, sample, time.perf_counter() - begun, notes=notes)


@contextmanager
def _tool_errors() -> Iterator[list[str]]:
    """Collect what goes wrong in tools and agents, which only the model or a log is told otherwise."""
    notes: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            about = [str(getattr(record, name)) for name in ("tool", "what", "why") if hasattr(record, name)]
            if record.exc_info and record.exc_info[1] is not None:
                notes.append(f"tool {about[0] if about else ''}:\n{_last_lines(record.exc_info[1])}")
            elif record.levelno >= logging.WARNING:
                notes.append(": ".join([record.getMessage(), *about]))

    logger, handler = logging.getLogger("streamrl.producers.episodes"), Collector()
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)  # with tracebacks
    logger.propagate = False
    try:
        yield notes
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = before


def _last_lines(error: BaseException) -> str:
    return "\n".join(folded("".join(traceback.format_exception(error)))[-_TRACEBACK_LINES:])


def _data(each: Played, decode: Decode) -> dict[str, Any]:
    sample = each.sample
    score = sample.score if sample else None
    found: dict[str, Any] = {"turns": [], "replayed": 0, "restarts": 0, "dropped": 0, "auxiliary": 0}
    if sample is not None:
        found = {**episode_data(sample, decode), "stop": sample.stop or "completed"}
    return found | {
        "line": each.prompt.line,
        "prompt": decode(each.prompt.token_ids),
        "answer": each.prompt.answer,
        "stop": found.get("stop"),
        "score": None if score is None else score.value,
        "parts": {} if score is None else score.parts,
        "run_score": None if each.score is None else each.score.value,
        "run_parts": {} if each.score is None else each.score.parts,
        "seconds": round(each.seconds, 4),
        "tool_errors": each.notes,
        "error": each.failure or None,
        "detail": each.detail or None,
    }


def _lines(row: dict[str, Any], width: int) -> Iterator[str]:
    score = "" if row["run_score"] is None else f", score {row['run_score']:.4g}"
    if row["score"] not in (None, row["run_score"]):
        score += f", own score {row['score']:.4g}"
    end = "played" if row["error"] is None else f"failed: {printable(row['error'])}"
    yield f"line {row['line']}: {end}{score}, {duration(row['seconds'])}"
    if any(turn["parent"] == PROMPT for turn in row["turns"]):
        yield f"    prompt\n      {shortened(row['prompt'], width)}"
    if row["turns"]:
        yield from episode_lines(row, width)
    for note in [row["detail"] or "", *row["tool_errors"]]:
        yield from (f"  {printable(line)}" for line in note.splitlines())
    yield ""
