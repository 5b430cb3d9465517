"""Environments and tools as TRL's `GRPOTrainer(environment_factory=, tools=)` takes them, as an episode."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from typing_extensions import override

from streamrl.errors import DataError, PluginError
from streamrl.plugin_import import import_plugin
from streamrl.producers.episodes.environment import EnvironmentEpisode, check_environment
from streamrl.producers.episodes.episode import Chat, Episode, Task
from streamrl.score import Score


class TRLEpisode(Episode):
    """An `environment_factory` of TRL, also a dict of several, and TRL's `tools` beside its methods.

    With several, the field `environment` of each line of the data set names one, and `reset` does not get that field.
    A single class needs no adapter: `episode.environment` takes it. TRL's `tools` alone are `episode.tools`.

    Args:
        environment_factory: import path (`module:name`) of a factory or of a dict of factories, or a dict of names and
            import paths.
        tools: import paths of functions that the model may call besides the methods.
    """

    def __init__(self, environment_factory: str | Mapping[str, str], tools: Sequence[str] = ()) -> None:
        found: Any = environment_factory
        if isinstance(found, str):
            found = import_plugin(found, [], role="environment_factory")
        several = isinstance(found, Mapping)
        factories = {str(name): _factory(value) for name, value in found.items()} if several else {"": _factory(found)}
        functions = [import_plugin(use, [], role="tool") for use in tools]
        self._several = several
        self._episodes = {name: EnvironmentEpisode(factory, functions) for name, factory in factories.items()}

    @override
    async def run(self, task: Task, chat: Chat) -> float | Score | None:
        rest = dict(task.metadata)
        name = rest.pop("environment", None) if self._several else ""
        if name not in self._episodes:
            known = ", ".join(self._episodes)
            raise DataError(f"line {task.line} of the data set has environment {name!r}; there are: {known}")
        return await self._episodes[name].run(replace(task, metadata=rest), chat)


def _factory(value: Any) -> Callable[[], Any]:
    found = import_plugin(value, [], role="environment_factory") if isinstance(value, str) else value
    if not callable(found):
        raise PluginError(f"environment_factory {value!r} is of type {type(found).__name__}", "name a class")
    if inspect.isclass(found):
        check_environment(found)
    factory: Callable[[], Any] = found
    return factory
