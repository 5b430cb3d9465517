"""Which rewards a command line means: those of a run file or a run, one of them by name, or one with arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from streamrl.config import RewardSpec, RunConfig, ScoringConfig
from streamrl.errors import UsageError
from streamrl.runfile import load


@dataclass(frozen=True, slots=True)
class Choice:
    """Options of a command line.

    Attributes:
        reward: name in the run file, built-in name, or `module:Name`; None: all rewards, with their scoring.
        file: run file; None: what the command falls back to.
        overrides: `--set` values, for the run file.
        arguments: `KEY=VALUE` for a reward that is no name in the run file.
        adapter: `verl` or `trl`, for such a reward too.
    """

    reward: str | None
    file: Path | None = None
    overrides: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    adapter: str | None = None

    def config(self, other: RunConfig | None = None) -> RunConfig:
        """The configuration with the chosen rewards. One that is chosen alone counts as it is: no weight, no gate.

        Args:
            other: configuration where there is no run file; None: the defaults.

        Raises:
            ConfigError: the run file is wrong.
            UsageError: the options do not go together, or have wrong values.
        """
        if self.file is None and other is not None:
            if self.overrides:
                raise UsageError("--set changes a run file", "name it with --file")
            config = other
        else:
            config = load(self.file, self.overrides).config
        if self.reward is None:
            if self.arguments or self.adapter:
                raise UsageError("--arg and --adapter belong to a reward", "name it")
            return config
        there = [spec for spec in config.rewards if self.reward in (spec.name, spec.use)]
        if there and not self.arguments and self.adapter is None:
            spec = there[0].model_copy(update={"weight": 1.0, "gate": None})
        else:
            spec = self._spec(self.reward)
        return config.model_copy(update={"rewards": (spec,), "scoring": ScoringConfig()})

    def _spec(self, use: str) -> RewardSpec:
        values: dict[str, Any] = {"use": use, "args": arguments_of(self.arguments), "adapter": self.adapter}
        try:
            return RewardSpec.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            raise UsageError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}", "see docs/rewards.md") from error


def arguments_of(items: Sequence[str]) -> dict[str, Any]:
    """`KEY=VALUE` of `--arg` as keyword arguments; values are read as YAML.

    Raises:
        UsageError: there is no `=`, or the value is no YAML.
    """
    found: dict[str, Any] = {}
    for item in items:
        key, equals, raw = item.partition("=")
        if not equals or not key.isidentifier():
            raise UsageError(f"--arg {item} is not KEY=VALUE", "write --arg tolerance=0.1")
        try:
            found[key] = yaml.safe_load(raw)
        except yaml.YAMLError as error:
            raise UsageError(f"--arg {key}: {raw!r} is no YAML value", "quote it as in YAML") from error
    return found
