"""A taskset of verifiers v1 as an episode. Its harness, often a program, gets the endpoint of agents as its model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override

from streamrl.config.episode import CALL_DRAWS
from streamrl.errors import DataError, need_packages
from streamrl.producers.episodes.clock import EpisodeOver
from streamrl.producers.episodes.endpoint.calls import MODEL
from streamrl.producers.episodes.endpoint.door import AgentDoor
from streamrl.producers.episodes.endpoint.server import AgentEndpoint
from streamrl.producers.episodes.environment import row
from streamrl.producers.episodes.episode import Chat, Episode, Task
from streamrl.score import Score
from streamrl.wire import StopReason

if TYPE_CHECKING:
    import verifiers.v1 as vf

_HOST: Final = "127.0.0.1"  # calls come from this process, wherever the harness runs: verifiers passes them on
_MAX_CALLS: Final = 32
_CONTEXT: Final = 1 << 18  # tokens of the longest conversation; the body of a call is bounded by the server
# Options that a harness sends of itself, and that are the run's to say.
_IGNORED: Final = ("strict", "seed", "frequency_penalty", "presence_penalty", *CALL_DRAWS)
# Limits of verifiers that have a name here; its other stops complete an episode.
_STOPS: Final[dict[str, StopReason]] = {"max_turns": "max_turns", "agent_timeout": "rollout_timeout"}


class VerifiersEpisode(Episode):
    """The agent of verifiers plays the task of each line of the data set; the task's own rewards are the score.

    A line holds the fields of the taskset's `TaskData`, as `task.data.model_dump_json()` writes them. The harness and
    its runtime see the endpoint of this process as their model: all its calls are turns of the sample.

    Args:
        taskset: id of an installed taskset, as `vf.load_taskset` finds it.
        config: other fields of the taskset's configuration.
        agent: fields of `vf.AgentConfig`: `harness`, `runtime`, `timeout`, ... Without a harness it is the one of the
            taskset, else `bash`; without a runtime the harness is a process beside this one, in no sandbox.
    """

    def __init__(
        self, taskset: str, *, config: Mapping[str, Any] | None = None, agent: Mapping[str, Any] | None = None
    ) -> None:
        need_packages("VerifiersEpisode", "verifiers", extra="verifiers")
        self._id = taskset
        self._config = dict(config or {})
        self._agent = {"runtime": {"type": "subprocess"}, **(agent or {})}
        self._resources = contextlib.AsyncExitStack()

    @override
    async def open(self) -> None:
        """Load the taskset and the harness, and start the taskset's tools: what is wrong ends the run at its start."""
        await asyncio.to_thread(self._load)
        from verifiers.v1.mcp import serve_shared
        from verifiers.v1.runtimes import runtime_is_local

        toolsets = self._taskset.toolsets(self._taskset.config)
        serving = serve_shared(toolsets, harness_is_local=runtime_is_local(self._seat.runtime))
        self._endpoint = await self._resources.enter_async_context(AgentEndpoint.open(_HOST))
        self._tools = await self._resources.enter_async_context(serving)

    def _load(self) -> None:
        import verifiers.v1 as vf
        from verifiers.v1.configs.env import default_agent_harness

        config = vf.taskset_config_type(self._id).model_validate({**self._config, "id": self._id})
        self._taskset: Any = vf.load_taskset(config)
        seat = vf.AgentConfig.model_validate(self._agent)
        harness = seat.harness or default_agent_harness(self._id)
        vf.load_harness(harness)
        self._seat: Any = seat.model_copy(update={"harness": harness, "model": seat.model or MODEL})

    @override
    async def close(self) -> None:
        await self._resources.aclose()

    @override
    async def run(self, task: Task, chat: Chat) -> float | Score | None:
        session = chat.session
        played = self._task(task)
        door = AgentDoor(session, _MAX_CALLS, _CONTEXT, _IGNORED)
        with self._endpoint.serving(door) as key:
            try:
                trace = await self._player(key, session.limits.max_turns).run(played, tools=self._tools)
            finally:
                await door.close()
        if not trace.ok:
            if session.stop is not None:
                raise EpisodeOver(session.stop)
            last = trace.last_error
            raise RuntimeError(f"{last.type}: {last.message}" if last else f"it stopped: {trace.stop_condition}")
        if stop := _STOPS.get(trace.stop_condition):
            session.end(stop)
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
        return Score(trace.reward, metrics | rewards)

    def _player(self, key: str, max_turns: int) -> vf.Agent:
        """The agent of one sample. The client of verifiers overwrites one header or the other, by the API it speaks."""
        import verifiers.v1 as vf

        headers = {"Authorization": f"Bearer {key}", "x-api-key": key}
        client = vf.EvalClientConfig(base_url=f"{self._endpoint.url}/v1", api_key_var="", headers=headers)
        most = min(max_turns, self._seat.max_turns or max_turns)
        return vf.make_agent(self._seat.model_copy(update={"client": client, "max_turns": most}))

    def _task(self, task: Task) -> Any:
        """The task of a line. DataError: its fields are none of the taskset's `TaskData`."""
        from pydantic import ValidationError

        fields, kind = row(task), self._taskset.task_type()
        data = kind.data_type()
        known = {name: fields[name] for name in data.model_fields if fields.get(name) is not None}
        try:
            played = kind(data.model_validate(known), self._taskset.config.task)
        except ValidationError as error:
            raise DataError(f"line {task.line} of the data set is no {data.__name__}: {error}") from error
        prompt = self._taskset.system_prompt
        return played if prompt is None else played.with_system_prompt(prompt)
