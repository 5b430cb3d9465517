"""A text environment of Gymnasium as an episode: `reset(seed=, options=)`, `step(action)`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal

from typing_extensions import override

from streamrl.errors import ConfigError, need_packages
from streamrl.plugin_import import one_of
from streamrl.producers.episodes.adapters.stepped import Blocking, EnvironmentStep, SteppedEpisode, StepRewards, seed_of
from streamrl.producers.episodes.episode import Task
from streamrl.producers.episodes.tools import as_content, as_text
from streamrl.wire import StopReason

_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")


class GymnasiumEpisode(SteppedEpisode):
    """`gymnasium.make(environment, **kwargs)` for each sample, stepped with what the policy writes.

    The first observation is appended to the last message of the user, later ones are messages of the user. All samples
    of a group see the same instance: its seed is the `seed` of the line of the data set, or made of the line's number;
    `options` of the line go to `reset`. A reply that is no action of the environment does not step it: the model is
    told which actions there are.

    Args:
        environment: id, `module:id` for one that `module` registers.
        kwargs: for `gymnasium.make`.
        actions: names of the actions of a `Discrete` space, in the order of its numbers, or with their numbers; without
            it the model writes the number.
        observation: `observation`, or `render` for what `render()` returns: text with `kwargs: {render_mode: ansi}`, an
            image with `rgb_array`.
        pattern, invalid_reward, rewards: see `SteppedEpisode`.
    """

    def __init__(
        self,
        environment: str,
        *,
        kwargs: Mapping[str, Any] | None = None,
        actions: Sequence[str] | Mapping[str, int] | None = None,
        pattern: str | None = None,
        observation: Literal["observation", "render"] = "observation",
        invalid_reward: float = 0.0,
        rewards: StepRewards = "turns",
    ) -> None:
        super().__init__(rewards, pattern, invalid_reward)
        need_packages("GymnasiumEpisode", "gymnasium", extra="gymnasium")
        import gymnasium

        numbered = actions if isinstance(actions, Mapping) else {name: at for at, name in enumerate(actions or ())}
        self._numbers = {_plain(name): number for name, number in numbered.items()}
        self._make = partial(gymnasium.make, environment, **(kwargs or {}))
        self._rendered = one_of("observation", observation, ("observation", "render")) == "render"

    @override
    async def open(self) -> None:
        """Make one environment, so that a wrong id or space ends the run at its start."""
        await asyncio.to_thread(self._check)

    def _check(self) -> None:
        from gymnasium.spaces import Discrete, Text

        instance = self._make()
        space = instance.action_space
        if not isinstance(space, Text | Discrete):
            raise ConfigError(f"the environment takes {space}, and the policy writes Text or Discrete")
        if wrong := [name for name, number in self._numbers.items() if number not in space]:
            raise ConfigError(f"the environment takes {space}: there is no action for {', '.join(wrong)}")
        if self._rendered and instance.render_mode not in ("ansi", "rgb_array"):
            raise ConfigError("the environment renders no text and no image", "set kwargs: {render_mode: ansi}")
        instance.close()

    @override
    def play(self, task: Task, max_turns: int) -> Blocking:
        instance = self._make()
        try:
            observation, _ = instance.reset(seed=seed_of(task), options=task.metadata.get("options"))
            reply = yield EnvironmentStep(self._shown(instance, observation))
            while True:
                reply = yield self._step(instance, reply)
        finally:
            instance.close()

    def _step(self, instance: Any, reply: str) -> EnvironmentStep:
        action: Any = self.found(reply)
        if action is not None and self._numbers:
            action = self._numbers.get(_plain(action))
        elif action is not None and re.fullmatch(r"-?[0-9]{1,18}", action) and action not in instance.action_space:
            action = int(action)
        if action is None or action not in instance.action_space:
            return self.refusal(f"; the actions are {', '.join(self._numbers) or instance.action_space}")
        observation, reward, terminated, truncated, _ = instance.step(action)
        stop: StopReason | None = "completed" if terminated else "max_turns" if truncated else None
        return EnvironmentStep(self._shown(instance, observation), reward, stop)

    def _shown(self, instance: Any, observation: Any) -> str | list[dict[str, Any]]:
        if not self._rendered:
            return as_text(observation)
        seen = instance.render()
        if isinstance(seen, str):
            return _COLOURS.sub("", seen)
        from PIL import Image

        return as_content(Image.fromarray(seen))


def _plain(name: str) -> str:
    return str(name).strip().casefold()
