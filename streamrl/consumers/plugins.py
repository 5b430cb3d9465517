"""From a name in the run file to an imported, built and checked reward.

A reward is a built-in name (`exact_match`), an import path (`my_rewards:ExactMatch`) or an entry point of the group
`streamrl.rewards`. All are checked when the run starts, not at the first sample.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from streamrl.config import RewardModelConfig, RewardSpec, RewardWorkerConfig, RunConfig
from streamrl.consumers.adapters import Adapted, adapt
from streamrl.consumers.reward import RewardLife, check_model
from streamrl.errors import ConfigError, PluginError
from streamrl.plugin_import import build_plugin, closest, import_plugin, last_line, look_in

BUILT_IN: Final[dict[str, str]] = {
    "exact_match": "streamrl.consumers.rules.text:ExactMatch",
    "number_match": "streamrl.consumers.rules.text:NumberMatch",
    "math": "streamrl.consumers.rules.math_answer:MathAnswer",
    "regex": "streamrl.consumers.rules.in_processes:Regex",
    "json_schema": "streamrl.consumers.rules.json_schema:JsonSchema",
    "format": "streamrl.consumers.rules.text:Format",
    "length": "streamrl.consumers.rules.text:Length",
    "repetition": "streamrl.consumers.rules.text:Repetition",
    "code": "streamrl.consumers.rules.code:Code",
    "reward_model": "streamrl.consumers.models.reward_model:RewardModel",
    "judge": "streamrl.consumers.models.judge:Judge",
    "http": "streamrl.consumers.http_reward:HttpReward",
    "episode": "streamrl.consumers.rules.episode:EpisodeScore",
}
ASKING: Final = frozenset({"reward_model", "judge"})
"""Rewards that ask a model: `args.model` is its name in `reward_models`."""


def models_asked(
    rewards: Sequence[RewardSpec], models: Mapping[str, RewardModelConfig]
) -> Mapping[str, RewardModelConfig]:
    """The models that these rewards may ask: all of them if a reward is the user's own or names an unknown model."""
    named = {str(spec.args.get("model")) for spec in rewards if spec.use in ASKING}
    if not all(spec.use in BUILT_IN for spec in rewards) or not named <= models.keys():
        return models
    return {name: model for name, model in models.items() if name in named}


ENTRY_POINTS: Final = "streamrl.rewards"
_MARKS: Final = {"solution_str": "verl", "solution_strs": "verl", "completions": "trl"}
"""Parameter names that show that a function was written for another system."""
HOLD_SHARE: Final = 0.95
"""Part of `lease.max_hold` after which a worker hands back unscored samples."""


@dataclass(frozen=True, slots=True)
class LoadedReward:
    name: str  # key in the parts of a score
    call: Callable[[Any], Any | Awaitable[Any]]  # sample -> number or `Score`; for `group`, samples -> as many of them
    blocking: bool  # a sync callable, which runs in a thread
    instant: bool  # a rule that needs neither a thread nor a deadline
    group: bool  # compares the samples of a group
    spec: RewardSpec
    life: RewardLife | None = None  # the object with `open` and `close`, if it has them

    @property
    def limits(self) -> RewardLife:
        return self.life if isinstance(self.life, RewardLife) else RewardLife()

    def deadline(self, worker: RewardWorkerConfig) -> float:
        return self.spec.deadline or self.limits.deadline or worker.deadline


def load_rewards(config: RunConfig) -> list[LoadedReward]:
    """Load and check all rewards of a run, in the order of the run file.

    Puts `plugin_paths` and the working directory at the end of `sys.path`, so that they shadow nothing installed.

    Raises:
        PluginError: a reward cannot be found, imported or built, or does not take one sample.
        ConfigError: an asked model is not in `reward_models`; or the attempts of all stages together may take longer
            than a sample may be held.
    """
    paths = look_in(config.plugin_paths)
    rewards = [_load(spec, config, paths) for spec in config.rewards]
    for spec in config.rewards:
        if spec.use in ASKING:
            check_model(str(spec.args["model"]), config.reward_models)
    _check_deadlines(rewards, config)
    return rewards


def stages(rewards: Iterable[LoadedReward]) -> list[list[LoadedReward]]:
    """The rewards in stages, each up to a gate. Rewards of one stage are called concurrently."""
    found: list[list[LoadedReward]] = [[]]
    for reward in rewards:
        found[-1].append(reward)
        if reward.spec.gate is not None:
            found.append([])
    return found


def _check_deadlines(rewards: Sequence[LoadedReward], config: RunConfig) -> None:
    longest = 0.0
    for stage in stages(rewards):
        longest += max((one.deadline(config.reward_worker) for one in stage if not one.instant), default=0.0)
    held = HOLD_SHARE * config.lease.max_hold
    if longest > held:
        raise ConfigError(
            f"one attempt of each reward, one gate after the other, may take {longest:g} s, and a sample is held for"
            f" {held:g} s ({HOLD_SHARE:.0%} of lease.max_hold)",
            f"lower their `deadline`, or set lease.max_hold to {math.ceil(longest / HOLD_SHARE)}s or more",
        )


def _load(spec: RewardSpec, config: RunConfig, paths: Sequence[Path]) -> LoadedReward:
    target = _find(spec.use, paths)
    life, instant, group = None, False, False
    call: Callable[[Any], Any]
    if spec.adapter is not None:
        call = adapted = adapt(target, spec, config)
        group = adapted.group
    elif inspect.isclass(target):
        instance = build_plugin(target, f"reward {spec.use}", spec.args)
        group = callable(getattr(instance, "score_group", None))
        found = instance.score_group if group else getattr(instance, "score", None)
        if spec.group and not group:
            raise PluginError(f"reward {spec.use} has group: true, and its class has no method score_group")
        if not callable(found):
            raise PluginError(
                f"reward {spec.use}: the class has no method score", "add `async def score(self, sample)`"
            )
        if hasattr(instance, "room") and "slots" not in vars(type(instance)):
            raise PluginError(f"reward {spec.use}: the method room is now called slots", "rename it")
        call = found
        instant = bool(getattr(instance, "instant", False)) and not group
        life = instance if hasattr(instance, "open") and hasattr(instance, "close") else None
        _check_signature(call, {}, spec)
    elif callable(target):
        call = functools.partial(target, **spec.args) if spec.args else target
        group = spec.group
        _check_signature(target, spec.args, spec)
    else:
        raise PluginError(
            f"reward {spec.use} is of type {type(target).__name__}", "name a class or a function of one sample"
        )
    return LoadedReward(
        name=spec.name or spec.use,
        call=call,
        blocking=not _is_async(call),
        instant=instant,
        group=group,
        spec=spec,
        life=life,
    )


def _find(use: str, paths: Sequence[Path]) -> Any:
    if ":" in use:
        return import_plugin(use, paths)
    if use in BUILT_IN:
        return import_plugin(BUILT_IN[use], paths)
    if use == "gateway":
        raise PluginError("the gateway is gone", "`use: http` with args: {url: ...} posts samples to a server of yours")
    points = {point.name: point for point in metadata.entry_points(group=ENTRY_POINTS)}
    if use not in points:
        known = [*BUILT_IN, *points]
        module, dot, name = use.rpartition(".")
        meant = f"did you mean {module}:{name}?" if dot else f"built in: {', '.join(BUILT_IN)}; your own: module:Name"
        hint = closest(use, known) or meant
        raise PluginError(f"reward {use} is unknown", hint)
    try:
        return points[use].load()
    except Exception as error:
        raise PluginError(f"reward {use}: its entry point {points[use].value} fails: {last_line(error)}") from error


def _check_signature(call: Callable[..., Any], args: dict[str, Any], spec: RewardSpec) -> None:
    try:
        inspect.signature(call).bind(None, **args)
    except TypeError as error:
        other = next((name for mark, name in _MARKS.items() if mark in inspect.signature(call).parameters), None)
        hint = "its signature must be score(sample), args apart"
        if other is not None:
            hint = f"is it a function for {other}? then say so with `adapter: {other}`"
        raise PluginError(f"reward {spec.use} does not take one sample: {error}", hint) from error
    except ValueError:
        return  # without a readable signature, the first sample is the check


def _is_async(call: Callable[..., Any]) -> bool:
    """Whether it is async, also behind `functools.partial`, adapters and objects with an async `__call__`."""
    while isinstance(call, functools.partial | Adapted):
        call = call.func if isinstance(call, functools.partial) else call.function
    return inspect.iscoroutinefunction(inspect.unwrap(call)) or inspect.iscoroutinefunction(
        getattr(type(call), "__call__", None)  # noqa: B004 (the coroutine function behind the object, not callability)
    )
