"""An environment of an OpenEnv server as an episode: `reset(seed=)` and `step(action)` over a WebSocket.

It speaks the protocol of `openenv.core.EnvClient` (0.10), which is JSON, by itself: the package pins `mcp<2`, and a
replica needs no part of it. The replies are stepped as text, so that all tokens are sampled by the session.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import aiohttp
import orjson
from typing_extensions import override

from streamrl.errors import ConfigError, RetryLater, StreamrlError, Unreachable
from streamrl.http import MAX_MESSAGE, Call, HttpClient, behind_proxy, read_key
from streamrl.producers.episodes.adapters.stepped import (
    ActionPattern,
    EnvironmentStep,
    RunningEnvironment,
    SteppedEpisode,
    StepRewards,
    seed_of,
)
from streamrl.producers.episodes.environment import begin
from streamrl.producers.episodes.episode import Task
from streamrl.producers.episodes.rendering import Message
from streamrl.producers.episodes.session import EpisodeSession, SampledTurn
from streamrl.producers.episodes.tools import as_text

_CONNECT_SECONDS: Final = 10.0
PATIENCE: Final = 5.0
"""Seconds without a server that takes one more session, after which a prompt is handed back."""
_PAUSE: Final = 0.5
_HINT: Final = "start the environment's server, and name it in `url`"


class OpenEnvError(StreamrlError):
    """The environment's server answered with an error."""


class OpenEnvEpisode(SteppedEpisode):
    """A session on the server of an OpenEnv environment for each sample, stepped with what the policy writes.

    The first observation is appended to the last message of the user, later ones are messages of the user. All samples
    of a group get the same `seed` for `reset`: the one of the line of the data set, or made of the line's number; the
    field `options` of the line holds further arguments of `reset`. A reply that the server refuses as an action does
    not step the environment: the model is told why.

    Args:
        url: of the server, `http://HOST:PORT`.
        field: field of the action that the reply is; None: the reply is the whole action, as JSON.
        fields: other fields of each action.
        pattern: regular expression whose first group holds what the policy writes of the action; the last place where
            it is found counts. Without it that is the whole reply, without spaces around it.
        observation: field of the observation that the model reads; None: the whole observation, as JSON.
        invalid_reward: of a reply that is no action.
        seed: another one gives other seeds to all lines that have none.
        token_file: file with the token that is sent as `Authorization: Bearer`.
        rewards: see `SteppedEpisode`.
    """

    def __init__(
        self,
        url: str,
        *,
        field: str | None = None,
        fields: Mapping[str, Any] | None = None,
        pattern: str | None = None,
        observation: str | None = None,
        invalid_reward: float = 0.0,
        seed: int = 0,
        token_file: str | None = None,
        rewards: StepRewards = "turns",
    ) -> None:
        super().__init__(rewards)
        self.url = url.rstrip("/")
        self.field = field
        self.fields = dict(fields or {})
        self.pattern = ActionPattern(pattern)
        self.observation = observation
        self.invalid_reward = invalid_reward
        self._seed = seed
        self._token_file = None if token_file is None else Path(token_file)
        self._http: aiohttp.ClientSession | None = None

    @override
    async def open(self) -> None:
        """Ask for the environment's schema, so that a wrong address or field ends the run at its start."""
        token = await asyncio.to_thread(read_key, "token_file", self._token_file)
        client = HttpClient(self.url, token, _HINT, key_option="token_file")
        try:
            schema = await client.call(Call("GET", "/schema", repeatable=True), _CONNECT_SECONDS)
        finally:
            await client.close()
        for role, names in (("action", [self.field, *self.fields]), ("observation", [self.observation])):
            known = schema.get(role, {}).get("properties", {}) if isinstance(schema, dict) else {}
            if missing := [name for name in names if name is not None and name not in known]:
                what = f"the {role} of the environment at {self.url} has no {', '.join(missing)}"
                raise ConfigError(what, f"there are: {', '.join(known) or 'none'}")
        self._http = aiohttp.ClientSession(
            headers=client.headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
            trust_env=behind_proxy(self.url),
        )

    @override
    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    @override
    def environment(self, task: Task, max_turns: int) -> RunningEnvironment:
        assert self._http is not None
        return _OpenEnvSession(self._http, self, seed_of(task, self._seed), task)

    @override
    def action(self, session: EpisodeSession, turn: SampledTurn) -> str:
        return turn.reply.content

    def made(self, text: str) -> dict[str, Any] | None:
        """The action that a reply stands for; None: it is none."""
        found = self.pattern.found(text)
        if found is None or self.field is not None:
            return None if found is None else {**self.fields, str(self.field): found}
        try:
            action = orjson.loads(found)
        except orjson.JSONDecodeError:
            return None
        return {**self.fields, **action} if isinstance(action, dict) else None

    def shown(self, observation: Mapping[str, Any]) -> str:
        if self.observation is not None:
            return as_text(observation.get(self.observation))
        return as_text({name: value for name, value in observation.items() if name != "metadata" or value})

    def refusal(self, why: str) -> EnvironmentStep:
        return EnvironmentStep([{"role": "user", "content": f"error: this is no action{why}"}], self.invalid_reward)


class _OpenEnvSession:
    """A receive is always under way, because aiohttp answers the server's pings in it."""

    def __init__(self, http: aiohttp.ClientSession, episode: OpenEnvEpisode, seed: int, task: Task) -> None:
        self._http = http
        self._episode = episode
        self._seed = seed
        self._task = task
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._next: asyncio.Task[aiohttp.WSMessage] | None = None

    async def reset(self) -> list[Message]:
        """RetryLater: the server is away, or has no free session, for a while: the prompt is handed back."""
        end = asyncio.get_running_loop().time() + PATIENCE
        while True:
            try:
                return await self._begin()
            except Unreachable as error:
                await self.close()
                if asyncio.get_running_loop().time() >= end:
                    raise RetryLater(error.message, error.hint) from error
            await asyncio.sleep(_PAUSE)

    async def _begin(self) -> list[Message]:
        try:
            self._socket = await self._http.ws_connect(f"{self._episode.url}/ws", max_msg_size=MAX_MESSAGE)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Unreachable(f"no connection to the environment at {self._episode.url}: {error}", _HINT) from error
        self._receive(self._socket)
        said = await self._ask("reset", {"seed": self._seed, **(self._task.metadata.get("options") or {})})
        text = self._episode.shown(_observed(said))
        begin(self._task, f"\n\n{text}" if self._task.text and text else text)
        return self._task.messages

    async def step(self, action: str) -> EnvironmentStep:
        made = self._episode.made(action)
        if made is None:
            what = "; write it as JSON" if self._episode.field is None else ""
            return self._episode.refusal(f"{what}{self._episode.pattern}")
        said = await self._ask("step", made)
        if said.get("code") == "VALIDATION_ERROR":
            wrong = [f"{'.'.join(map(str, at['loc']))}: {at['msg']}" for at in said.get("errors", ())]
            return self._episode.refusal(f": {'; '.join(wrong) or said.get('message')}")
        text = self._episode.shown(_observed(said))
        reward = said.get("reward")
        return EnvironmentStep(
            [{"role": "user", "content": text}],
            None if reward is None else float(reward),
            "completed" if said.get("done") else None,
        )

    async def close(self) -> None:
        if self._socket is not None:
            await self._socket.close()
        if self._next is not None:
            self._next.cancel()
            await asyncio.wait([self._next])

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """The data of the answer. Unreachable: the connection is lost; OpenEnvError: the environment failed."""
        socket, pending = self._socket, self._next
        assert socket is not None
        assert pending is not None
        with contextlib.suppress(ConnectionError):  # a server without room says so before it closes
            await socket.send_str(orjson.dumps({"type": kind, "data": data}).decode())
        message = await pending
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise Unreachable(f"the environment at {self._episode.url} closed the connection", _HINT)
        self._receive(socket)
        said = orjson.loads(message.data)
        answer: dict[str, Any] = said.get("data") or {}
        if said.get("type") == "error" and answer.get("code") != "VALIDATION_ERROR":
            raise _failure(answer)
        return answer

    def _receive(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._next = asyncio.create_task(socket.receive(), name="openenv")


def _observed(said: Mapping[str, Any]) -> Mapping[str, Any]:
    """The observation in an answer. OpenEnvError: there is none, because `reset` refused its arguments."""
    observation = said.get("observation")
    if not isinstance(observation, dict):
        raise _failure(said)
    return observation


def _failure(answer: Mapping[str, Any]) -> StreamrlError:
    what = f"the environment answers {answer.get('code', 'without an observation')}: {answer.get('message')}"
    if answer.get("code") == "CAPACITY_REACHED":
        return Unreachable(what, "raise max_concurrent_envs of its server, or lower the episodes of the replicas")
    return OpenEnvError(what)
