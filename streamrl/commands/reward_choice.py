"""Rewards outside of a run's workers: which ones a command line means, and opening them for one command."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
import yaml

from streamrl.commands import output
from streamrl.commands.rundir import is_running, ledgers
from streamrl.config import RewardSpec, RunConfig, ScoringConfig
from streamrl.consumers.plugins import BUILT_IN, models_asked
from streamrl.errors import Unreachable, UsageError
from streamrl.monitor.lines import printable
from streamrl.runfile import load

if TYPE_CHECKING:
    from streamrl.commands.rundir import RunDirectory
    from streamrl.consumers.scoring import PatientScorer
    from streamrl.queues import Ledgers

Adapter = Literal["verl", "trl"]
FileOption = Annotated[
    Path | None, typer.Option("--file", metavar="RUN.yaml", help="Take rewards, scoring and models of this run file.")
]
ArgOption = Annotated[
    list[str] | None, typer.Option("--arg", metavar="KEY=VALUE", help="An argument of the reward, e.g. tolerance=0.1")
]
AdapterOption = Annotated[
    Adapter | None, typer.Option("--adapter", help="The function has the signature of verl or TRL.")
]


def choose(
    run: RunDirectory | None,
    file: Path | None,
    overrides: Sequence[str] | None,
    *,
    reward: str | None,
    arguments: Sequence[str] | None,
    adapter: Adapter | None,
) -> RunConfig:
    """The configuration with the rewards that a command line means.

    `reward` is the name or `use` of one of the rewards of `file` (or `run`), or any other `use`; None: all of them, as
    they stand. A single reward's value is the score: no weight, no gate, nothing of `scoring`. Only the models that the
    rewards ask are kept; all of them if a reward is the user's own code, which may ask any.
    """
    if run is not None and file is None and overrides:
        raise UsageError("--set changes a run file", "name it with --file")
    config = run.config if run is not None and file is None else load(file, overrides or ()).config
    if reward is None:
        if arguments or adapter:
            raise UsageError("--arg and --adapter are of one reward, and none is named", "name it")
        return _with_models(config)
    named = [spec for spec in config.rewards if reward in {spec.name, spec.use}]
    spec = named[0] if named else RewardSpec(use=reward)
    changes: dict[str, Any] = {"args": {**spec.args, **_parsed(arguments or ())}, "weight": 1.0, "gate": None}
    if adapter is not None:
        changes["adapter"] = adapter
    alone = {"rewards": (spec.model_copy(update=changes),), "scoring": ScoringConfig()}
    return _with_models(config.model_copy(update=alone))


def _with_models(config: RunConfig) -> RunConfig:
    return config.model_copy(update={"reward_models": models_asked(config.rewards, config.reward_models)})


def all_built_in(config: RunConfig) -> bool:
    """Whether all rewards are built in, so that it is known which models they ask."""
    return all(spec.use in BUILT_IN for spec in config.rewards)


def _parsed(arguments: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in arguments:
        key, equals, raw = item.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"--arg {item}: no '='", "write --arg tolerance=0.1")
        try:
            found[key.strip()] = yaml.safe_load(raw)
        except yaml.YAMLError as error:
            raise UsageError(f"--arg {item}: {raw!r} is not a YAML value", "quote it as in YAML") from error
    return found


@contextlib.asynccontextmanager
async def opened(
    config: RunConfig,
    run_dir: Path,
    run: RunDirectory | None = None,
    say: Callable[[str], None] = output.note,
    patience: float | None = None,
) -> AsyncIterator[PatientScorer]:
    """Open the rewards of a configuration with their models for this block; no run has to exist.

    `run` is the run whose Redis knows the servers of models without `url`; only then is it asked (Unreachable if it
    does not run). `say` gets a line every ten seconds about the service that the rewards wait for, and one after five
    seconds about the line of a reward that blocks. `patience` is how many seconds to wait for such a service; None: as
    a run does. What the block raises comes in a BaseExceptionGroup; errors as of `open_scorer`.
    """
    from streamrl.consumers.opening import models_of, open_scorer
    from streamrl.consumers.reward import RewardContext
    from streamrl.consumers.scoring import PatientScorer
    from streamrl.consumers.watch import Foreground

    async with contextlib.AsyncExitStack() as stack:
        found: Ledgers | None = None
        if run is not None and (lacking := started_models(config)):
            _expect_running(run, config, lacking[0])
            found = await stack.enter_async_context(ledgers(run))
        models = await stack.enter_async_context(models_of(config, found))
        context = RewardContext(config=config, run_dir=run_dir, models=models)
        opening = open_scorer(config, context, patience=patience)
        began = time.monotonic()
        loaded = await stack.enter_async_context(opening)  # a judge asks its servers here already
        left = None if patience is None else max(0.0, patience - (time.monotonic() - began))
        scorer = PatientScorer(loaded, config.lease, left)
        stack.enter_context(Foreground(scorer.calls, lambda text: say(printable(text))).watching())
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        telling = tasks.create_task(scorer.tell(lambda text: say(printable(text))), name="tell what is waited for")
        yield scorer
        telling.cancel()


def _expect_running(run: RunDirectory, config: RunConfig, model: str) -> None:
    if not is_running(run) and all_built_in(config):  # the user's own code may ask no model at all
        raise Unreachable(
            f"run {run.name} is not running, and with it the servers of reward_models.{model}",
            "do this while it runs, or give the model a url in a file for --file",
        )


def started_models(config: RunConfig) -> list[str]:
    """Models whose servers a run starts, so that only its Redis knows their addresses."""
    return [name for name, model in config.reward_models.items() if model.managed]
