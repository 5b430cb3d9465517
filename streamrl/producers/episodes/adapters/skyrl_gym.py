"""A text environment of SkyRL-Gym as an episode: `init(prompt)`, `step(text)`."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import override

from streamrl.errors import ConfigError, DataError, need_packages
from streamrl.producers.episodes.adapters.stepped import Blocking, EnvironmentStep, SteppedEpisode, StepRewards
from streamrl.producers.episodes.episode import Task
from streamrl.wire import StopReason


class SkyRLGymEpisode(SteppedEpisode):
    """`skyrl_gym.make(environment, env_config=config, extras=line)` for each sample.

    `extras` are the fields of the line of the data set, as SkyRL gives them: `reward_spec`, `extra_info`, `data`, ...
    A line that has an `answer` instead of `reward_spec` and `reward_model` gets both with it as their `ground_truth`.
    A field `env_class` of a line names its environment. The environment gets all text of a reply, its thinking and
    calls of tools as well. A `postprocessed_action` that differs from the reply stands in the conversation, which
    begins another branch.

    Args:
        environment: id; None: each line has an `env_class`.
        config: what the environment reads as `env_config`.
        modules: modules to import, because they register environments.
        rewards: see `SteppedEpisode`.
    """

    whole_text = True

    def __init__(
        self,
        environment: str | None = None,
        config: Mapping[str, Any] | None = None,
        modules: Sequence[str] = (),
        rewards: StepRewards = "turns",
    ) -> None:
        super().__init__(rewards)
        need_packages("SkyRLGymEpisode", "skyrl_gym", extra="skyrl-gym")
        self._id = environment
        self._config = dict(config or {})
        self._modules = tuple(modules)

    @override
    async def open(self) -> None:
        """Import what registers environments, so that a wrong id ends the run at its start."""
        for module in ("skyrl_gym", *self._modules):
            await asyncio.to_thread(importlib.import_module, module)
        import skyrl_gym

        if self._id is not None and self._id not in skyrl_gym.registry:
            known = ", ".join(sorted(skyrl_gym.registry))
            what = f"skyrl_gym has no environment {self._id}; there are: {known}"
            raise ConfigError(what, "name its module in `modules`")

    @override
    def play(self, task: Task, max_turns: int) -> Blocking:
        import omegaconf
        import skyrl_gym

        extras = {**task.metadata}
        name = extras.pop("env_class", None) or self._id
        if name not in skyrl_gym.registry:
            raise DataError(f"line {task.line} of the data set has env_class {name!r}, which skyrl_gym does not know")
        if task.answer is not None and not {"reward_spec", "reward_model"} & set(extras):
            extras |= {field: {"ground_truth": task.answer} for field in ("reward_spec", "reward_model")}
        if "max_turns" not in extras.get("extra_info", {}):
            extras.setdefault("max_turns", max_turns)
        instance = skyrl_gym.make(name, env_config=omegaconf.OmegaConf.create(self._config), extras=extras)
        try:
            conversation, _ = instance.init(task.messages)
            reply = yield EnvironmentStep(list(conversation))
            while True:
                step = instance.step(reply)
                # An environment that says nothing lets the policy go on, which a chat template wants a message for.
                answer, said = list(step["observations"]) or "", step.get("postprocessed_action")
                stop: StopReason | None = "completed" if step["done"] else None
                reply = yield EnvironmentStep(answer, step["reward"], stop, None if said == reply else said)
        finally:
            instance.close()
