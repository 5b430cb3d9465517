"""Rewards outside of a run's workers: which of them a command line means, and their life for one command."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import yaml

from streamrl.config import RewardSpec, RunConfig, ScoringConfig
from streamrl.errors import UsageError

if TYPE_CHECKING:
    from streamrl.consumers.scoring import Scorer
    from streamrl.queues import Ledgers

Adapter = Literal["verl", "trl"]


def choose(config: RunConfig, reward: str | None, arguments: Sequence[str], adapter: str | None) -> RunConfig:
    """Return the configuration with the rewards that are meant.

    Args:
        config: of the run or the run file.
        reward: name or `use` of one of its rewards, or any other `use`; None: all of its rewards, as they stand.
        arguments: `KEY=VALUE`, values as in YAML; they go over the reward's own.
        adapter: of a function of another system.

    Returns:
        With one reward its value is the score: no weight, no gate, nothing of `scoring`.

    Raises:
        UsageError: an argument without `=`, an unknown adapter, or arguments for no reward.
    """
    if reward is None:
        if arguments or adapter:
            raise UsageError("--arg and --adapter are of one reward, and none is named", "name it")
        return config
    if adapter is not None and adapter not in get_args(Adapter):
        raise UsageError(f"--adapter {adapter} is unknown", f"one of {', '.join(get_args(Adapter))}")
    named = [spec for spec in config.rewards if reward in {spec.name, spec.use}]
    spec = named[0] if named else RewardSpec(use=reward)
    changes: dict[str, Any] = {"args": {**spec.args, **_parsed(arguments)}, "weight": 1.0, "gate": None}
    if adapter is not None:
        changes["adapter"] = cast("Adapter", adapter)
    return config.model_copy(update={"rewards": (spec.model_copy(update=changes),), "scoring": ScoringConfig()})


def _parsed(arguments: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in arguments:
        key, equals, raw = item.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"--arg {item}: no '='", "write --arg tolerance=0.1")
        try:
            found[key.strip()] = yaml.safe_load(raw)
        except yaml.YAMLError as error:
            raise UsageError(f"--arg {item}: {raw!r} is no YAML value", "quote it as in YAML") from error
    return found


@contextlib.asynccontextmanager
async def opened(config: RunConfig, run_dir: Path, ledgers: Ledgers | None = None) -> AsyncIterator[Scorer]:
    """Open the rewards of a configuration with their models for the length of the block; no run has to be there.

    Args:
        config: from `choose`.
        run_dir: where rewards may write; it need not exist.
        ledgers: of a run, for the servers of its models that were started or added there.

    Raises:
        PluginError, ConfigError, DeadlineExceeded: as of `open_scorer`.
    """
    from streamrl.consumers.reward import RewardContext
    from streamrl.consumers.scoring import models_of, open_scorer

    async with models_of(config, ledgers) as models:
        context = RewardContext(config=config, run_dir=run_dir, models=models)
        async with open_scorer(config, context) as scorer:
            yield scorer
