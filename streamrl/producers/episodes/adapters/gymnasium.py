"""A text environment of Gymnasium as an episode: `reset(seed=, options=)`, `step(action)`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from typing_extensions import override

from streamrl.errors import ConfigError, need_packages
from streamrl.producers.episodes.adapters.stepped import (
    ActionPattern,
    EnvironmentStep,
    SteppedEnvironment,
    StepRewards,
    ThreadedEpisode,
    seed_of,
)
from streamrl.producers.episodes.environment import begin
from streamrl.producers.episodes.episode import Task
from streamrl.producers.episodes.rendering import Message
from streamrl.producers.episodes.session import EpisodeSession, SampledTurn
from streamrl.producers.episodes.tools import as_text
from streamrl.wire import StopReason

_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")


class GymnasiumEpisode(ThreadedEpisode):
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
        pattern: regular expression whose first group holds the action; the last place where it is found counts. Without
            it the whole reply is the action, without spaces around it.
        observation: `observation`, or `render` for the text of `render()` (with `kwargs: {render_mode: ansi}`).
        invalid_reward: of a reply that is no action.
        seed: another one makes other instances of all lines that have none.
        rewards: see `SteppedEpisode`.
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
        seed: int = 0,
        rewards: StepRewards = "turns",
    ) -> None:
        super().__init__(rewards)
        need_packages("GymnasiumEpisode", "gymnasium", extra="gymnasium")
        if observation not in ("observation", "render"):
            raise ValueError(f"observation is {observation!r}: write observation or render")
        numbered = actions if isinstance(actions, Mapping) else {name: at for at, name in enumerate(actions or ())}
        self._id = environment
        self._kwargs = dict(kwargs or {})
        self._actions = {_plain(name): int(number) for name, number in numbered.items()}
        self.pattern = ActionPattern(pattern)
        self._rendered = observation == "render"
        self._invalid_reward = invalid_reward
        self._seed = seed

    @override
    async def open(self) -> None:
        """Make one environment, so that a wrong id or space ends the run at its start."""
        await asyncio.to_thread(lambda: self._made(0, None).close())

    @override
    def make(self, task: Task, max_turns: int) -> SteppedEnvironment:
        return self._made(seed_of(task, self._seed), task)

    @override
    def action(self, session: EpisodeSession, turn: SampledTurn) -> str:
        return turn.reply.content

    def _made(self, seed: int, task: Task | None) -> _GymnasiumInstance:
        import gymnasium

        try:
            instance = gymnasium.make(self._id, **self._kwargs)
        except (gymnasium.error.Error, ImportError) as error:
            raise ConfigError(
                f"gymnasium cannot make {self._id}: {error}", "module:id imports the module that registers it"
            ) from error
        if not isinstance(instance.action_space, gymnasium.spaces.Text | gymnasium.spaces.Discrete):
            raise ConfigError(f"{self._id} takes {instance.action_space}, and the policy writes Text or Discrete")
        if self._actions and isinstance(instance.action_space, gymnasium.spaces.Text):
            raise ConfigError(f"{self._id} takes text, so that its actions have no numbers", "leave `actions` out")
        wrong = [name for name, number in self._actions.items() if number not in instance.action_space]
        if wrong:
            raise ConfigError(f"{self._id} takes {instance.action_space}: there is no action for {', '.join(wrong)}")
        if self._rendered and instance.render_mode != "ansi":
            raise ConfigError(f"{self._id} does not render text", "set kwargs: {render_mode: ansi}")
        return _GymnasiumInstance(instance, self, seed, task)

    def number(self, action: str) -> int | None:
        """The number of an action of a `Discrete` space; None: it is none."""
        if self._actions:
            return self._actions.get(_plain(action))
        return int(action) if re.fullmatch(r"-?[0-9]{1,18}", action) else None

    def shown(self, instance: Any, observation: Any) -> str:
        return _COLOURS.sub("", instance.render()) if self._rendered else as_text(observation)

    def refusal(self, space: Any) -> EnvironmentStep:
        known = ", ".join(self._actions) if self._actions else str(space)
        text = f"error: this is no action; the actions are {known}{self.pattern}"
        return EnvironmentStep([{"role": "user", "content": text}], self._invalid_reward)


class _GymnasiumInstance:
    def __init__(self, instance: Any, episode: GymnasiumEpisode, seed: int, task: Task | None) -> None:
        self._instance = instance
        self._episode = episode
        self._seed = seed
        self._task = task

    def reset(self) -> list[Message]:
        assert self._task is not None
        options = self._task.metadata.get("options")
        observation, _ = self._instance.reset(seed=self._seed, options=options)
        text = self._episode.shown(self._instance, observation)
        begin(self._task, f"\n\n{text}" if self._task.text and text else text)
        return self._task.messages

    def step(self, action: str) -> EnvironmentStep:
        import gymnasium

        space = self._instance.action_space
        chosen: str | int | None = self._episode.pattern.found(action)
        if isinstance(chosen, str) and not isinstance(space, gymnasium.spaces.Text):
            chosen = self._episode.number(chosen)
        if chosen is None or chosen not in space:
            return self._episode.refusal(space)
        observation, reward, terminated, truncated, _ = self._instance.step(chosen)
        text = self._episode.shown(self._instance, observation)
        stop: StopReason | None = "completed" if terminated else "max_turns" if truncated else None
        return EnvironmentStep([{"role": "user", "content": text}], reward, stop)

    def close(self) -> None:
        self._instance.close()


def _plain(name: str) -> str:
    return str(name).strip().casefold()
