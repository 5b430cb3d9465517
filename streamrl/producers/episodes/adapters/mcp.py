"""The tools of an MCP server, for episodes that others score."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from typing_extensions import override

from streamrl.errors import ConfigError, Unreachable, leaves, need_packages
from streamrl.producers.episodes.agent_process import search_path
from streamrl.producers.episodes.environment import act
from streamrl.producers.episodes.episode import Chat, Episode, Task
from streamrl.producers.episodes.tools import Tool, as_text
from streamrl.score import Score

if TYPE_CHECKING:
    from mcp import Client

logger = logging.getLogger(__name__)

_CLOSING: Final = 10.0
"""Seconds for the end of a connection; the mcp package kills a server that does not end within about five."""
_PAGES: Final = 100
"""Pages of a list of tools: a server that always has one more must not hold the start."""


class MCPEpisode(Episode):
    """The model calls the tools of an MCP server until it answers without a call; others score it.

    A call that fails, or answers with something else than text, is told to the model. When the server dies, the calls
    of the episodes that use it fail, and the next episode starts it anew.

    Args:
        command: program and arguments of a server that talks over stdin and stdout; `python` is that of the replica, as
            in `episode.agent.command`. It gets HOME, PATH and a few more variables, and those that `variables` names.
        url: of a server that talks streamable HTTP.
        shared: one connection (and one process of `command`) for all episodes of a replica; False: one for each
            sample, for tools that keep a state.
        tools: names of the tools that the model may call; None: all.
        variables: names of environment variables of the replica that the server gets.
        token_file: file with the token that is sent to `url` as `Authorization: Bearer`; it is in no argv and no log.
        directory: working directory of `command`.
        start_deadline: seconds for the start of the server and the list of its tools.
    """

    def __init__(
        self,
        *,
        command: Sequence[str] = (),
        url: str | None = None,
        shared: bool = True,
        tools: Sequence[str] | None = None,
        variables: Sequence[str] = (),
        token_file: str | None = None,
        directory: str | None = None,
        start_deadline: float = 30.0,
    ) -> None:
        need_packages("MCPEpisode", "mcp", extra="mcp")
        if isinstance(command, str) or bool(command) == (url is not None):
            raise ConfigError("an MCP server has a command or a url", "write command: [PROGRAM, ARGUMENT, ...]")
        if url is not None and (urlsplit(url).username or urlsplit(url).password):
            raise ConfigError("a URL with a password is shown to everybody", "put the token into token_file")
        if url is None and token_file is not None:
            raise ConfigError("token_file is for a url; a command reads environment variables", "name them: variables")
        if missing := [name for name in variables if name not in os.environ]:
            raise ConfigError(f"the environment has no {', '.join(missing)}, which the MCP server needs")
        self._dial: Callable[[contextlib.AsyncExitStack], Awaitable[Client]]
        if url is None:
            passed = {name: os.environ[name] for name in variables}
            passed["PATH"] = search_path(passed)
            self._dial = partial(_start, list(command), passed, directory)
            self._name = Path(command[0]).name
        else:
            self._dial = partial(_dial, url, None if token_file is None else Path(token_file))
            self._name = urlsplit(url).netloc
        self._shared = shared
        self._wanted = None if tools is None else tuple(tools)
        self._start_deadline = start_deadline
        self._present: _Connection | None = None
        self._dialling = asyncio.Lock()

    @override
    async def open(self) -> None:
        """Connect once, so that a wrong command, address or tool ends the run at its start."""
        connection = await self._connected()
        missing = set(self._wanted or ()) - {tool.name for tool in connection.tools}
        if missing or not self._shared:
            await connection.close()
        if missing:
            known = ", ".join(tool.name for tool in connection.tools)
            raise ConfigError(
                f"MCP server {self._name} has no tool {', '.join(sorted(missing))}", f"there are: {known or 'none'}"
            )
        self._present = connection if self._shared else None

    @override
    async def close(self) -> None:
        if self._present is not None:
            await self._present.close()

    @override
    async def run(self, task: Task, chat: Chat) -> float | Score | None:
        async with self._use(chat) as connection:
            tools = [tool for tool in connection.tools if self._wanted is None or tool.name in self._wanted]
            await act(chat.fork(tools), task.messages)
        return None

    @contextlib.asynccontextmanager
    async def _use(self, chat: Chat) -> AsyncIterator[_Connection]:
        """A connection for one episode. The last episode that uses a broken one closes it."""
        async with chat.session.part("start"):
            connection = await self._chosen()
        connection.users += 1
        try:
            yield connection
        finally:
            connection.users -= 1
            if not connection.users and connection is not self._present:
                await connection.close()

    async def _chosen(self) -> _Connection:
        if not self._shared:
            return await self._connected()
        async with self._dialling:
            if self._present is None or self._present.broken:
                broken, self._present = self._present, None
                if broken is not None and not broken.users:
                    await broken.close()
                self._present = await self._connected()
            return self._present

    async def _connected(self) -> _Connection:
        connection = _Connection(self._name)
        try:
            async with asyncio.timeout(self._start_deadline) as limit:
                await connection.start(self._dial)
        except BaseException as error:
            await connection.close()
            if isinstance(error, TimeoutError) and limit.expired():
                what = f"MCP server {self._name} is not ready after {self._start_deadline:g} s"
                raise Unreachable(what, "see what it writes to stderr") from error
            raise
        return connection


class _Connection:
    """A connection to one MCP server. `broken` says that later episodes need another one.

    A task of its own opens and closes it, because the task groups of the mcp package belong to one task.
    """

    def __init__(self, name: str) -> None:
        self.tools: list[Tool] = []
        self.broken = False
        self.users = 0
        self._name = name
        self._client: Client | None = None
        self._ready = False
        self._closing = asyncio.Event()
        self._owner: asyncio.Task[None] | None = None

    async def start(self, dial: Callable[[contextlib.AsyncExitStack], Awaitable[Client]]) -> None:
        """Connect and list the tools. ConfigError: there is no such program or file; Unreachable: no connection."""
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._owner = asyncio.create_task(self._hold(dial, ready), name=f"mcp {self._name}")
        await ready

    async def close(self) -> None:
        """Leave, and end a server that was started; a repeat does nothing."""
        self._closing.set()
        self.broken = True
        if self._owner is None:
            return
        if not self._ready:  # it waits for the server, not for the end
            self._owner.cancel()
        try:
            await asyncio.wait([self._owner], timeout=_CLOSING)
        finally:
            self._owner.cancel()

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool and return its answer as text; any error is one of the tool."""
        from anyio import BrokenResourceError, ClosedResourceError
        from mcp.shared.exceptions import MCPError
        from mcp_types import INVALID_PARAMS, METHOD_NOT_FOUND

        if self._client is None or self.broken:
            raise ConnectionError(f"MCP server {self._name} is gone")
        try:
            result = await self._client.call_tool(name, arguments)
        except MCPError as error:
            if error.error.code in (INVALID_PARAMS, METHOD_NOT_FOUND):
                raise
            self._lost(error)
            raise ConnectionError(f"MCP server {self._name} is gone: {error.error.message}") from error
        except (OSError, BrokenResourceError, ClosedResourceError, BaseExceptionGroup) as error:
            self._lost(error)
            raise ConnectionError(f"MCP server {self._name} is gone") from error
        text = _text(result)
        if result.is_error:
            raise MCPToolFailed(text)
        return text

    async def _hold(
        self, dial: Callable[[contextlib.AsyncExitStack], Awaitable[Client]], ready: asyncio.Future[None]
    ) -> None:
        try:
            async with contextlib.AsyncExitStack() as stack:
                self._client = await stack.enter_async_context(await dial(stack))
                self.tools = await self._listed(self._client)
                if not ready.done():
                    self._ready = True
                    ready.set_result(None)
                await self._closing.wait()
        except Exception as error:  # noqa: BLE001 (whatever the transport raises is told to who waits)
            if ready.done():
                logger.info("an MCP server left with an error", extra={"server": self._name, "why": _why(error)})
            else:
                ready.set_exception(_told(self._name, error))
        finally:
            self._client = None
            self.broken = True
            ready.cancel()

    async def _listed(self, client: Client) -> list[Tool]:
        tools: list[Tool] = []
        cursor = None
        for _ in range(_PAGES):
            page = await client.list_tools(cursor=cursor)
            for tool in page.tools:
                about = tool.description or tool.title or ""
                function = {"name": tool.name, "description": about, "parameters": tool.input_schema}
                schema = {"type": "function", "function": function}
                tools.append(Tool(tool.name, schema, self._function(tool.name)))
            cursor = page.next_cursor
            if cursor is None:
                break
        return tools

    def _function(self, name: str) -> Callable[..., Awaitable[str]]:
        async def call(**arguments: Any) -> str:
            return await self.call(name, arguments)

        return call

    def _lost(self, error: BaseException) -> None:
        if not self.broken:
            self.broken = True
            logger.warning("an MCP server is gone", extra={"server": self._name, "why": _why(error)})


class MCPToolFailed(Exception):
    """A tool of an MCP server says that it failed; its text is for the model."""


async def _start(
    command: Sequence[str], variables: dict[str, str], directory: str | None, stack: contextlib.AsyncExitStack
) -> Client:
    from mcp import Client
    from mcp.client.stdio import StdioServerParameters

    del stack
    return Client(StdioServerParameters(command=command[0], args=list(command[1:]), env=variables, cwd=directory))


async def _dial(url: str, token_file: Path | None, stack: contextlib.AsyncExitStack) -> Client:
    import httpx2
    from mcp import Client
    from mcp.client.streamable_http import streamable_http_client

    token = None if token_file is None else (await asyncio.to_thread(token_file.read_text)).strip()
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    # Longer reads are ended by the deadline of the call.
    for name in ("httpx2", "mcp.client.streamable_http"):  # they write addresses and ids of sessions: perhaps secret
        logging.getLogger(name).setLevel(logging.WARNING)
    http = httpx2.AsyncClient(headers=headers, timeout=httpx2.Timeout(30.0, read=None))
    return Client(streamable_http_client(url, http_client=await stack.enter_async_context(http)))


def _text(result: Any) -> str:
    """What a tool answered. TypeError: an image, sound or bytes."""
    parts = []
    for block in result.content:
        if block.type == "text":
            parts.append(block.text)
        elif block.type == "resource" and hasattr(block.resource, "text"):
            parts.append(block.resource.text)
        elif block.type == "resource_link":
            parts.append(f"{block.name}: {block.uri}")
        else:
            kind = getattr(block, "mime_type", None) or getattr(getattr(block, "resource", None), "mime_type", None)
            raise TypeError(f"the tool returned {block.type} ({kind or 'bytes'}) where text is expected")
    if not parts and result.structured_content is not None:
        return as_text(result.structured_content)
    return "\n".join(parts)


def _told(name: str, error: BaseException) -> Exception:
    """What the start of a server failed of, as an error of streamrl."""
    first = next(leaves(error), error)
    if isinstance(first, OSError) and first.filename is not None:
        return ConfigError(
            f"MCP server {name}: {first.filename}: {first.strerror}", "fix command, directory or token_file"
        )
    return Unreachable(f"MCP server {name} does not answer: {_why(error)}", "see what it writes to stderr")


def _why(error: BaseException) -> str:
    """The first error, without addresses and headers: errors of HTTP clients may hold a secret."""
    first = next(leaves(error), error)
    name, module = type(first).__name__, type(first).__module__
    return name if module.startswith(("httpx", "httpcore")) else f"{name}: {first}"
