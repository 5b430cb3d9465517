"""Rewards outside of a run's workers: which of them a command line means, and their life for one command."""

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
AdapterOption = Annotated[Adapter | None, typer.Option("--adapter", help="Call it as a function of verl or of TRL.")]


def choose(
    run: RunDirectory | None,
    file: Path | None,
    overrides: Sequence[str] | None,
    *,
    reward: str | None,
    arguments: Sequence[str] | None,
    adapter: Adapter | None,
) -> RunConfig:
    """Return the configuration with the rewards that a command line means.

    Args:
        run: whose rewards are meant without a file.
        file: run file.
        overrides: `--set` of the run file.
        reward: name or `use` of one of its rewards, or any other `use`; None: all of its rewards, as they stand.
        arguments: `KEY=VALUE`, values as in YAML; they go over the reward's own.
        adapter: of a function of another system.

    Returns:
        With one reward its value is the score: no weight, no gate, nothing of `scoring`. Only the models that the
        rewards ask; all models if a reward is the user's own code, which may ask any of them.

    Raises:
        ConfigError: the run file is wrong.
        UsageError: options that do not go together, or an argument without `=`.
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
    """Whether all its rewards came along, so that it is known which models they ask."""
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
    """Open the rewards of a configuration with their models for the length of the block; no run has to be there.

    Args:
        config: from `choose`.
        run_dir: where rewards may write; it need not exist.
        run: whose Redis knows the servers of models that have no `url`; it is asked for them alone.
        say: gets a line every ten seconds about the service that the rewards wait for, and one after five seconds
            about the line of a reward that blocks.
        patience: seconds for which a service that is away is waited for; None: as long as a run does.

    Raises:
        BaseExceptionGroup: around what the block raises.
        PluginError, ConfigError, DeadlineExceeded: as of `open_scorer`.
        Unreachable: the Redis of the run does not answer, and it is asked; or the run does not run.
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
    """Raise Unreachable when the rewards ask servers of a run that is away."""
    if not is_running(run) and all_built_in(config):  # the user's own code may ask no model at all
        raise Unreachable(
            f"run {run.name} is not running, and with it the servers of reward_models.{model}",
            "do this while it runs, or give the model a url in a file for --file",
        )


def started_models(config: RunConfig) -> list[str]:
    """Models whose servers a run starts, so that only its Redis knows where they are."""
    return [name for name, model in config.reward_models.items() if model.managed]
