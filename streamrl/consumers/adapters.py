"""Reward functions of other systems, unchanged: the signatures of verl and of TRL.

| `adapter` | the function | called |
|---|---|---|
| `verl` | `fn(data_source, solution_str, ground_truth, extra_info, **args) -> float, or dict with score` | per sample |
| `verl` | `fn(data_sources, solution_strs, ground_truths, extra_infos, **args) -> list of these` | with lists of one |
| `trl` | `fn(prompts, completions, completion_ids, **columns) -> list of float or None` | with lists of one |

A function that takes lists gets those of a whole group with `group: true`, or if it asks for `num_generations`, which
only a group has. All arguments are passed by name. Those from the data set are copies, so a function may change them.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from streamrl.config import RewardSpec, RunConfig
from streamrl.consumers.reward import RewardSample, Score, finite
from streamrl.consumers.transcript import transcript
from streamrl.errors import DataError, PluginError
from streamrl.images.encoded import decode

_VERL: Final = ("data_source", "solution_str", "ground_truth", "extra_info")
_VERL_GROUP: Final = tuple(f"{name}s" for name in _VERL)
_OF_A_GROUP: Final = "num_generations"
"""Parameter that makes a function one that compares: TRL's name for the size of a group."""
_NOT_HERE: Final = {
    "trainer_state": "rewards are scored apart from the learner, which may be steps ahead",
    "environments": "there are no environments of TRL here",
}

_Read = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Adapted:
    """A function of another system as a reward: call it with a sample, or with all samples of a group."""

    function: Callable[..., Any]
    group: bool  # takes all samples of a group
    prepare: Callable[[Any], tuple[dict[str, Any], _Read]]  # makes the keyword arguments, and what reads the result
    needed: frozenset[str] = frozenset()  # parameters without a default: columns that the data set must have

    def __call__(self, subject: Any) -> Any:
        arguments, read = self.prepare(subject)
        result = self.function(**arguments)
        return _later(result, read) if inspect.isawaitable(result) else read(result)

    def check_line(self, record: Mapping[str, Any], where: str, name: str) -> None:
        """Raise `PluginError` if the line lacks a column."""
        columns = [key for key, value in record.items() if value is not None or key != "answer"]
        columns = [key for key in columns if key not in {"prompt", "messages"}]
        if missing := sorted(self.needed - set(columns)):
            raise PluginError(
                f"reward {name} needs the column {missing[0]}, which {where} does not have",
                f"columns are the keys of the lines, here: {', '.join(columns) or 'none'}; constants can stand in args",
            )


async def _later(result: Awaitable[Any], read: _Read) -> Any:
    return read(await result)


def adapt(target: Any, spec: RewardSpec, config: RunConfig) -> Adapted:
    """Return `target`, a function or a class built without arguments, as a reward; `PluginError` if it does not fit."""
    if inspect.isclass(target):
        try:
            target = target()
        except Exception as error:
            raise PluginError(
                f"reward {spec.use} cannot be built: {error}", "its class must need no arguments"
            ) from error
    if not callable(target):
        raise PluginError(
            f"reward {spec.use} is of type {type(target).__name__}", f"name a function for {spec.adapter}"
        )
    if spec.adapter == "trl":
        return _trl(target, spec, config)
    lists = "solution_strs" in _parameters(target)
    if spec.group and not lists:
        raise PluginError(
            f"reward {spec.use} has group: true, and it takes one sample", "a function that takes lists can compare"
        )
    names = _VERL_GROUP if lists else _VERL
    try:
        inspect.signature(target).bind(**dict.fromkeys(names), **spec.args)
    except TypeError as error:
        raise PluginError(
            f"reward {spec.use} does not fit verl: {error}", f"it is called with {', '.join(names)} and its args"
        ) from error
    except ValueError:
        pass  # without a readable signature, the first sample is the check
    if not lists:
        return Adapted(target, False, functools.partial(_verl_sample, spec.args))
    prepare = functools.partial(_verl_group, spec.args)
    return Adapted(target, spec.group, prepare if spec.group else functools.partial(_alone, prepare))


def _alone(
    prepare: Callable[[Sequence[RewardSample]], tuple[dict[str, Any], _Read]], sample: RewardSample
) -> tuple[dict[str, Any], _Read]:
    """The arguments of a function that takes lists, for one sample."""
    arguments, read = prepare([sample])

    def only(results: Any) -> Any:
        (score,) = read(results)
        return score

    return arguments, only


# --- verl -------------------------------------------------------------------------------------------------------------


def _verl_sample(args: Mapping[str, Any], sample: RewardSample) -> tuple[dict[str, Any], _Read]:
    return {**dict(zip(_VERL, _verl_columns(sample), strict=True)), **args}, _verl_score


def _verl_group(args: Mapping[str, Any], samples: Sequence[RewardSample]) -> tuple[dict[str, Any], _Read]:
    columns = map(list, zip(*map(_verl_columns, samples), strict=True))
    return {**dict(zip(_VERL_GROUP, columns, strict=True)), **args}, _verl_scores


def _verl_columns(sample: RewardSample) -> tuple[Any, str, Any, dict[str, Any]]:
    """Data source, response, ground truth and extra information.

    A line made for verl has `data_source`, `reward_model.ground_truth` and `extra_info`. For other lines, the answer is
    the ground truth and all metadata are the extra information.
    """
    metadata = copy.deepcopy(sample.prompt.metadata)
    truth = copy.deepcopy(sample.prompt.answer)
    model = metadata.get("reward_model")
    if truth is None and isinstance(model, dict):
        truth = model.get("ground_truth")
    source = metadata.get("data_source", sample.prompt.source)
    extra = metadata.get("extra_info")
    if not isinstance(extra, dict):
        extra = metadata
    extra.setdefault("num_turns", _turns(sample))
    extra.setdefault("rollout_reward_scores", {})
    return source, transcript(sample), truth, extra


def _turns(sample: RewardSample) -> int:
    """Turns as verl counts them: the prompt, each reply, and what stands between two replies."""
    pairs = itertools.pairwise(message["role"] for message in sample.completion)
    return 2 + sum("assistant" in pair for pair in pairs)


def _verl_score(result: Any) -> Score:
    """Read a number, or a mapping with `score`; its other finite numbers become parts."""
    if not isinstance(result, Mapping):
        return Score(_number(result))
    if "score" not in result:
        raise TypeError(
            f"a function for verl returned a dict without `score`: {', '.join(map(str, result)) or 'empty'}"
        )
    parts = {str(key): _number(value) for key, value in result.items() if key != "score" and _is_number(value)}
    return Score(_number(result["score"]), parts)


def _verl_scores(results: Any) -> list[Score]:
    return [_verl_score(result) for result in results]


# --- TRL --------------------------------------------------------------------------------------------------------------


def _trl(function: Callable[..., Any], spec: RewardSpec, config: RunConfig) -> Adapted:
    parameters = _parameters(function)
    needed = {name for name, one in parameters.items() if one.default is one.empty and one.kind not in _STARRED}
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values()) or not parameters
    for name, why in _NOT_HERE.items():
        if name in needed and name not in spec.args:
            raise PluginError(f"reward {spec.use} needs {name}: {why}", f"give it a default, or args: {{{name}: ...}}")
    if not takes_all and not {"prompts", "completions", "completion_ids"} & parameters.keys():
        raise PluginError(
            f"reward {spec.use} does not fit TRL: it takes {', '.join(parameters)}",
            "it is called with prompts, completions, completion_ids and the columns of the data set",
        )
    if unknown := [name for name in spec.args if not takes_all and name not in parameters]:
        raise PluginError(f"reward {spec.use} takes no {unknown[0]}", f"it takes: {', '.join(parameters)}")
    in_sum = config.scoring.combine == "sum" and spec.gate is None and spec.normalise is None
    if spec.clip is not None and not spec.clip[0] <= 0 <= spec.clip[1]:
        in_sum = False  # clip would turn a skipped sample's 0 into another value
    calls = _TrlCalls(spec.args, None if takes_all else frozenset(parameters), frozenset(needed), in_sum)
    given = {"prompts", "completions", "completion_ids", "log_metric", "log_extra", "trainer_state", *spec.args}
    group = spec.group or (_OF_A_GROUP in needed and _OF_A_GROUP not in spec.args)
    if group:
        given.add(_OF_A_GROUP)
    prepare = calls.group if group else functools.partial(_alone, calls.group)
    return Adapted(function, group, prepare, frozenset(needed) - given)


@dataclass(frozen=True, slots=True)
class _TrlCalls:
    args: Mapping[str, Any]
    names: frozenset[str] | None
    needed: frozenset[str]
    in_sum: bool  # None for a sample can be left out, as TRL does

    def group(self, samples: Sequence[RewardSample]) -> tuple[dict[str, Any], _Read]:
        logged: dict[str, float] = {}

        def log_metric(name: str, value: float) -> None:
            logged[str(name)] = _number(value)

        def read(results: Any) -> list[Score]:
            if isinstance(results, str | Mapping) or not hasattr(results, "__iter__"):
                raise TypeError(f"a function for TRL returned a {type(results).__name__}, not a list of numbers")
            found = list(results)
            if len(found) != len(samples):
                raise ValueError(f"a function for TRL returned {len(found)} rewards for {len(samples)} completions")
            return [self._score(result, logged) for result in found]

        columns = _trl_columns(samples)
        columns.setdefault(_OF_A_GROUP, len(samples))
        arguments = {**columns, "log_metric": log_metric, "log_extra": _ignore, "trainer_state": None, **self.args}
        if missing := sorted(self.needed - arguments.keys()):
            raise DataError(
                f"a function for TRL needs {', '.join(missing)}, and line {samples[0].prompt.line} of the data set has"
                f" {', '.join(sorted(columns))}",
                "columns are the keys of the lines of the data set; constants can stand in args",
            )
        if self.names is not None:
            arguments = {name: value for name, value in arguments.items() if name in self.names}
        return arguments, read

    def _score(self, result: Any, logged: Mapping[str, float]) -> Score:
        if result is not None:
            return Score(_number(result), logged)
        if not self.in_sum:
            raise TypeError(
                "a function for TRL returned None, which can be left out of a sum only, without gate, normalise or clip"
            )
        return Score(0.0, {**logged, "skipped": 1.0})


def _trl_columns(samples: Sequence[RewardSample]) -> dict[str, Any]:
    """The function's columns, each a list with one entry per sample.

    A chat prompt is a list of messages; its completion is the list of messages from the first reply on. `images` are
    those of the prompt, as images of Pillow.
    """
    metadata = [copy.deepcopy(sample.prompt.metadata) for sample in samples]
    columns: dict[str, Any] = {name: [one.get(name) for one in metadata] for name in dict.fromkeys(metadata[0])}
    if samples[0].prompt.answer is not None:
        columns["answer"] = [copy.deepcopy(sample.prompt.answer) for sample in samples]
    chat = samples[0].prompt.messages is not None
    columns["prompts"] = [copy.deepcopy(sample.prompt.messages) if chat else sample.prompt.text for sample in samples]
    columns["completions"] = [copy.deepcopy(sample.completion) if chat else transcript(sample) for sample in samples]
    if any(sample.images for sample in samples):
        columns["images"] = [[decode(image.data) for image in sample.prompt.images] for sample in samples]
    columns["completion_ids"] = [sample.tokens.tolist() for sample in samples]
    return columns


def _ignore(column: str, values: Sequence[Any]) -> None:
    del column, values


# --- both -------------------------------------------------------------------------------------------------------------

_STARRED: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # without a readable signature, the first sample is the check
        return {}


def _number(value: Any) -> float:
    """Return a finite number. Unlike `Score`, verl and TRL take true and false for 1 and 0."""
    if isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")):
        return float(value)
    return finite(value, "the value")


def _is_number(value: Any) -> bool:
    try:
        _number(value)
    except (TypeError, ValueError):
        return False
    return True
