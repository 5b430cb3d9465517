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

from streamrl.errors import ConfigError, RetryLater, Unreachable
from streamrl.http import MAX_MESSAGE, Call, HttpClient, behind_proxy, read_key
from streamrl.producers.episodes.adapters.stepped import (
    Actions,
    EnvironmentStep,
    NonBlocking,
    SteppedEpisode,
    StepRewards,
    seed_of,
)
from streamrl.producers.episodes.episode import Task
from streamrl.producers.episodes.tools import as_text

_CONNECT_SECONDS: Final = 10.0
PATIENCE: Final = 5.0
"""Seconds without a server that takes one more session, after which a prompt is handed back."""
_PAUSE: Final = 0.5
_HINT: Final = "start the environment's server, and name it in `url`"


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
        pattern: see `Actions`; None: the whole reply is what the policy writes of the action.
        observation: field of the observation that the model reads; None: the whole observation, as JSON.
        invalid_reward: of a reply that is no action.
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
        token_file: str | None = None,
        rewards: StepRewards = "turns",
    ) -> None:
        super().__init__(rewards)
        self._url = url.rstrip("/")
        self._actions = Actions(pattern, invalid_reward)
        self._field = field
        self._fields = dict(fields or {})
        self._observation = observation
        self._token_file = None if token_file is None else Path(token_file)
        self._headers: Mapping[str, str] = {}

    @override
    async def open(self) -> None:
        """Ask for the environment's schema, so that a wrong address or field ends the run at its start."""
        token = await asyncio.to_thread(read_key, "token_file", self._token_file)
        client = HttpClient(self._url, token, _HINT, key_option="token_file")
        self._headers = client.headers
        try:
            schema = await client.call(Call("GET", "/schema", repeatable=True), _CONNECT_SECONDS)
        finally:
            await client.close()
        for role, names in (("action", [self._field, *self._fields]), ("observation", [self._observation])):
            known = schema.get(role, {}).get("properties", {}) if isinstance(schema, dict) else {}
            if missing := [name for name in names if name is not None and name not in known]:
                what = f"the {role} of the environment at {self._url} has no {', '.join(missing)}"
                raise ConfigError(what, f"there are: {', '.join(known) or 'none'}")

    @override
    async def play(self, task: Task, max_turns: int) -> NonBlocking:
        times = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)
        proxies = behind_proxy(self._url)
        async with (
            aiohttp.ClientSession(headers=self._headers, timeout=times, trust_env=proxies) as http,
            contextlib.aclosing(_Connection(http, self._url)) as connection,
        ):
            said = await self._begun(connection, task)
            reply = yield EnvironmentStep(self._shown(said))
            while True:
                reply = yield await self._step(connection, reply)

    async def _begun(self, connection: _Connection, task: Task) -> dict[str, Any]:
        """What `reset` answers. RetryLater: the server is away, or has no free session, for a while."""
        options = task.metadata.get("options") or {}
        end = asyncio.get_running_loop().time() + PATIENCE
        while True:
            try:
                await connection.open()
                return await connection.ask("reset", {"seed": seed_of(task), **options})
            except Unreachable as error:
                await connection.aclose()
                if asyncio.get_running_loop().time() >= end:
                    raise RetryLater(error.message, error.hint) from error
            await asyncio.sleep(_PAUSE)

    async def _step(self, connection: _Connection, reply: str) -> EnvironmentStep:
        action: Any = self._actions.found(reply)
        if action is not None and self._field is not None:
            action = {self._field: action}
        elif action is not None:
            with contextlib.suppress(orjson.JSONDecodeError):
                action = orjson.loads(action)
        if not isinstance(action, dict):
            return self._actions.refusal("; write it as JSON" if self._field is None else "")
        said = await connection.ask("step", {**self._fields, **action})
        if "errors" in said:
            wrong = (f"{'.'.join(map(str, at['loc']))}: {at['msg']}" for at in said["errors"])
            return self._actions.refusal(f": {'; '.join(wrong)}")
        reward = None if said["reward"] is None else float(said["reward"])
        return EnvironmentStep(self._shown(said), reward, "completed" if said["done"] else None)

    def _shown(self, said: Mapping[str, Any]) -> str:
        observation = said["observation"]
        if self._observation is not None:
            return as_text(observation.get(self._observation))
        return as_text({name: value for name, value in observation.items() if name != "metadata" or value})


class _Connection:
    """A session of a server. A receive is always under way, because aiohttp answers the server's pings in it."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = url
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._next: asyncio.Task[aiohttp.WSMessage] | None = None

    async def open(self) -> None:
        try:
            self._socket = await self._http.ws_connect(f"{self._url}/ws", max_msg_size=MAX_MESSAGE)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Unreachable(f"no connection to the environment at {self._url}: {error}", _HINT) from error
        self._next = asyncio.create_task(self._socket.receive())

    async def aclose(self) -> None:
        if self._socket is not None and self._next is not None:
            await self._socket.close()
            self._next.cancel()
            await asyncio.wait([self._next])

    async def ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """The data of the answer. Unreachable: no session, or it is lost; RuntimeError: the environment failed."""
        assert self._socket is not None
        assert self._next is not None
        with contextlib.suppress(ConnectionError):  # a server without room says so before it closes
            await self._socket.send_str(orjson.dumps({"type": kind, "data": data}).decode())
        message = await self._next
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise Unreachable(f"the environment at {self._url} closed the connection", _HINT)
        self._next = asyncio.create_task(self._socket.receive())
        said = orjson.loads(message.data)
        answer: dict[str, Any] = said["data"]
        code = answer["code"] if said["type"] == "error" else None
        if code == "CAPACITY_REACHED":
            hint = "raise max_concurrent_envs of its server, or lower the episodes of the replicas"
            raise Unreachable(f"the environment answers {code}: {answer['message']}", hint)
        if code not in (None, "VALIDATION_ERROR"):
            raise RuntimeError(f"the environment answers {code}: {answer['message']}")
        return answer
