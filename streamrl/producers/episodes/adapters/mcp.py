"""The tools of an MCP server, for episodes that others score."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from typing_extensions import override

from streamrl.errors import ConfigError, Unreachable, leaves, need_packages, unwrapped
from streamrl.http import read_key
from streamrl.producers.episodes.agent import search_path
from streamrl.producers.episodes.environment import act
from streamrl.producers.episodes.episode import Chat, Episode, Task
from streamrl.producers.episodes.tools import Tool, as_text
from streamrl.score import Score

if TYPE_CHECKING:
    import httpx2
    from mcp import Client

_START_SECONDS: Final = 30.0  # from the start of a server to the list of its tools
_CLOSE_SECONDS: Final = 5.0  # for the answer of a server at `url` to the end of a session


class MCPEpisode(Episode):
    """The model calls the tools of an MCP server until it answers without a call; others score it.

    Each sample has a connection of its own, and a process of `command`, so that tools may keep a state. A call that
    fails, or answers with something else than text, is told to the model. When the server dies, the calls of the
    episodes that use it fail.

    Args:
        command: program and arguments of a server that talks over stdin and stdout; `python` is that of the replica, as
            in `episode.agent.command`. It gets HOME, PATH and a few more variables, and those that `variables` names.
        url: of a server that talks streamable HTTP, for all samples.
        tools: names of the tools that the model may call; None: all.
        variables: names of environment variables of the replica that `command` gets.
        token_file: file with the token that is sent to `url` as `Authorization: Bearer`; it is in no argv and no log.
    """

    def __init__(
        self,
        *,
        command: Sequence[str] = (),
        url: str | None = None,
        tools: Sequence[str] | None = None,
        variables: Sequence[str] = (),
        token_file: str | None = None,
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
        self._command = tuple(command)
        self._variables = {name: os.environ[name] for name in variables}
        self._url = url
        self._token_file = None if token_file is None else Path(token_file)
        self._name = Path(command[0]).name if url is None else urlsplit(url).netloc
        self._wanted = None if tools is None else frozenset(tools)

    @override
    async def open(self) -> None:
        """Connect once, so that a wrong command, address or tool ends the run at its start."""
        async with self._tools():
            pass

    @override
    async def run(self, task: Task, chat: Chat) -> float | Score | None:
        async with contextlib.AsyncExitStack() as stack:
            async with chat.session.part("start"):
                tools = await stack.enter_async_context(self._tools())
            await act(chat.fork(tools), task.messages)
        return None

    @contextlib.asynccontextmanager
    async def _tools(self) -> AsyncIterator[list[Tool]]:
        """The tools of a new connection. ConfigError: there is no such tool; Unreachable: no answer."""
        token = await asyncio.to_thread(read_key, "token_file", self._token_file)
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(unwrapped())  # the mcp package makes groups of all errors
            try:
                async with asyncio.timeout(_START_SECONDS):
                    client = await self._connected(stack, token)
                    tools = {tool.name: tool for tool in await _listed(client)}
            except Exception as error:
                first = next(leaves(error))
                if isinstance(first, FileNotFoundError | PermissionError):
                    raise
                why = f"MCP server {self._name} does not answer: {type(first).__name__}: {first}".removesuffix(": ")
                raise Unreachable(why, "see what it writes to stderr") from error
            if missing := (self._wanted or frozenset()) - set(tools):
                what = f"MCP server {self._name} has no tool {', '.join(sorted(missing))}"
                raise ConfigError(what, f"there are: {', '.join(tools) or 'none'}")
            yield [tool for name, tool in tools.items() if self._wanted is None or name in self._wanted]

    async def _connected(self, stack: contextlib.AsyncExitStack, token: str | None) -> Client:
        from mcp import Client
        from mcp.client.stdio import StdioServerParameters
        from mcp.client.streamable_http import streamable_http_client

        if self._url is not None:
            http = await stack.enter_async_context(_http_client(token))
            return await stack.enter_async_context(Client(streamable_http_client(self._url, http_client=http)))
        program, *arguments = self._command
        variables = {**self._variables, "PATH": search_path(self._variables)}
        server = StdioServerParameters(command=program, args=arguments, env=variables)
        return await stack.enter_async_context(Client(server))


def _http_client(token: str | None) -> httpx2.AsyncClient:
    import httpx2

    class Answering(httpx2.AsyncClient):
        """A server that is away answers with an error, else the mcp package would cancel the episode."""

        async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
            try:
                async with asyncio.timeout(_CLOSE_SECONDS if request.method == "DELETE" else None):
                    return await super().send(request, **options)
            except (httpx2.TransportError, TimeoutError) as error:
                said = {"jsonrpc": "2.0", "id": None, "error": {"code": -32000, "message": type(error).__name__}}
                return httpx2.Response(503, json=said, request=request)

    for name in ("httpx2", "mcp.client.streamable_http"):  # they write addresses and ids of sessions: perhaps secret
        logging.getLogger(name).setLevel(logging.WARNING)
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    # Longer reads are ended by the deadline of the call.
    return Answering(headers=headers, timeout=httpx2.Timeout(30.0, read=None))


async def _listed(client: Client) -> list[Tool]:
    tools, cursor = [], None
    while True:
        page = await client.list_tools(cursor=cursor)
        for tool in page.tools:
            about = tool.description or tool.title or ""
            function = {"name": tool.name, "description": about, "parameters": tool.input_schema}
            tools.append(Tool(tool.name, {"type": "function", "function": function}, partial(_call, client, tool.name)))
        cursor = page.next_cursor
        if cursor is None:
            return tools


async def _call(client: Client, name: str, /, **arguments: Any) -> str | list[Any]:
    """What a tool answered, as parts of OpenAI where it shows images; RuntimeError: it failed, and says why.

    TypeError: sound or bytes.
    """
    result = await client.call_tool(name, arguments)
    parts: list[str] = []
    shown: list[Any] = []
    for block in result.content:
        if block.type == "text":
            parts.append(block.text)
        elif block.type == "image":
            shown.append({"type": "image_url", "image_url": {"url": f"data:{block.mime_type};base64,{block.data}"}})
        elif block.type == "resource" and hasattr(block.resource, "text"):
            parts.append(block.resource.text)
        elif block.type == "resource_link":
            parts.append(f"{block.name}: {block.uri}")
        else:
            raise TypeError(f"the tool returned {block.type} where text is expected")
    if result.is_error:
        raise RuntimeError("\n".join(parts))
    if not parts and result.structured_content is not None:
        return as_text(result.structured_content)
    return ["\n".join(parts), *shown] if shown else "\n".join(parts)
