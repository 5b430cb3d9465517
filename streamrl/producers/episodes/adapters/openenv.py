"""An environment of an OpenEnv server as an episode. It speaks `EnvClient` 0.10 by itself: the package pins `mcp<2`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import aiohttp
import orjson
from typing_extensions import override

from streamrl.errors import ConfigError, RetryLater, Unreachable
from streamrl.http import MAX_MESSAGE, Call, HttpClient, behind_proxy, read_key
from streamrl.producers.episodes.adapters.stepped import (
    EnvironmentStep,
    NonBlocking,
    SteppedEpisode,
    StepRewards,
    seed_of,
)
from streamrl.producers.episodes.episode import Task
from streamrl.producers.episodes.tools import as_text

_CONNECT_SECONDS: Final = 10.0
PATIENCE: Final = 5.0  # without a server that takes one more session, before a prompt is handed back
_PAUSE: Final = 0.5
_Ask: TypeAlias = Callable[[str, Mapping[str, Any]], Awaitable[dict[str, Any]]]
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
        observation: field of the observation that the model reads; None: the whole observation, as JSON.
        token_file: file with the token that is sent as `Authorization: Bearer`.
        pattern, invalid_reward, rewards: see `SteppedEpisode`.
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
        super().__init__(rewards, pattern, invalid_reward)
        self._url, self._observation = url.rstrip("/"), observation
        self._field, self._fields = field, dict(fields or {})
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
        async with contextlib.AsyncExitStack() as stack:
            ask, said = await self._begun(stack, task)
            reply = yield EnvironmentStep(self._shown(said))
            while True:
                reply = yield await self._step(ask, reply)

    async def _begun(self, stack: contextlib.AsyncExitStack, task: Task) -> tuple[_Ask, dict[str, Any]]:
        """A session, and what `reset` answers. RetryLater: the server is away, or has no free one, for a while."""
        options = task.metadata.get("options") or {}
        end = asyncio.get_running_loop().time() + PATIENCE
        while True:
            try:
                ask = await stack.enter_async_context(_connected(self._url, self._headers))
                return ask, await ask("reset", {"seed": seed_of(task), **options})
            except Unreachable as error:
                await stack.aclose()
                if asyncio.get_running_loop().time() >= end:
                    raise RetryLater(error.message, error.hint) from error
            await asyncio.sleep(_PAUSE)

    async def _step(self, ask: _Ask, reply: str) -> EnvironmentStep:
        action: Any = self.found(reply)
        if self._field is not None and action is not None:
            action = {self._field: action}
        else:
            with contextlib.suppress(orjson.JSONDecodeError):
                action = orjson.loads(action)
        if not isinstance(action, dict):
            return self.refusal("; write it as JSON" if self._field is None else "")
        said = await ask("step", {**self._fields, **action})
        if "errors" in said:
            wrong = (f"{'.'.join(map(str, at['loc']))}: {at['msg']}" for at in said["errors"])
            return self.refusal(f": {'; '.join(wrong)}")
        reward = None if said["reward"] is None else float(said["reward"])
        return EnvironmentStep(self._shown(said), reward, "completed" if said["done"] else None)

    def _shown(self, said: Mapping[str, Any]) -> str:
        observation = said["observation"]
        if self._observation is not None:
            return as_text(observation.get(self._observation))
        return as_text({name: value for name, value in observation.items() if name != "metadata" or value})


@contextlib.asynccontextmanager
async def _connected(url: str, headers: Mapping[str, str]) -> AsyncIterator[_Ask]:
    """A session of a server. Unreachable: there is none, or it is lost; RuntimeError: the environment failed."""
    times = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)
    async with aiohttp.ClientSession(headers=headers, timeout=times, trust_env=behind_proxy(url)) as http:
        try:
            socket = await http.ws_connect(f"{url}/ws", max_msg_size=MAX_MESSAGE)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Unreachable(f"no connection to the environment at {url}: {error}", _HINT) from error
        coming = asyncio.create_task(socket.receive())  # always under way: aiohttp answers the server's pings in it

        async def ask(kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
            nonlocal coming
            with contextlib.suppress(ConnectionError):  # a server without room says so before it closes
                await socket.send_str(orjson.dumps({"type": kind, "data": data}).decode())
            message = await coming
            if message.type is not aiohttp.WSMsgType.TEXT:
                raise Unreachable(f"the environment at {url} closed the connection", _HINT)
            coming = asyncio.create_task(socket.receive())
            said = orjson.loads(message.data)
            answer: dict[str, Any] = said["data"]
            code = answer["code"] if said["type"] == "error" else None
            if code == "CAPACITY_REACHED":
                hint = "raise max_concurrent_envs of its server, or lower the episodes of the replicas"
                raise Unreachable(f"the environment answers {code}: {answer['message']}", hint)
            if code not in (None, "VALIDATION_ERROR"):
                raise RuntimeError(f"the environment answers {code}: {answer['message']}")
            return answer

        try:
            yield ask
        finally:
            await socket.close()
            coming.cancel()
            await asyncio.wait([coming])
