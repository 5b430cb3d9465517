"""Functions as tools: schema from signature and docstring, one call with its outcome."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import inspect
import logging
import re
import sys
import textwrap
import threading
import time
import typing
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeAlias, TypeVar

import msgspec
import orjson

from streamrl.errors import PluginError
from streamrl.images.encoded import data_url, in_png, is_encoded
from streamrl.plugin_import import closest
from streamrl.producers.episodes.clock import EpisodeOver
from streamrl.producers.episodes.rendering import Message, ToolCall, ToolSchema
from streamrl.wire import Outcome, ToolUse, utf8

logger = logging.getLogger(__name__)

_SECTION: Final = re.compile(r"^(Args|Arguments|Returns|Yields|Raises|Examples?|Notes?):\s*$", re.MULTILINE)
_ARGUMENT: Final = re.compile(r"^(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")
_T = TypeVar("_T")
_OPTIONS: Final = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
_GRACE: Final = 1.0  # seconds that a tool has to end after its cancellation


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    A sync function runs in a thread, an async one in a task of the replica's event loop. What goes on after its
    deadline (a thread, or a task that swallows cancellation) is left behind. A tool that may kill its process, or that
    may never return, starts a process of its own (`asyncio.create_subprocess_exec`). A tool that raises
    `EpisodeOver("tool_stopped")` ends the episode.

    Attributes:
        name: that the model calls.
        schema: that the model reads.
        function: gets the arguments by name, and returns text, or anything that JSON has a word for.
        arguments: the type that the arguments are checked against; None: any object.
        keeps_state: whether it must see each call even if its answer is known; None: all but plain functions must.
        slots: one is held during a call. Waiting for it does not count as time of the call. None: no limit.
        preparation: is awaited by `open`.
    """

    name: str
    schema: ToolSchema
    function: Callable[..., Any]
    arguments: type[msgspec.Struct] | None = None
    keeps_state: bool | None = None
    slots: asyncio.Semaphore | None = None
    preparation: Callable[[], Awaitable[None]] | None = None

    @classmethod
    def of(cls, function: Callable[..., Any], name: str | None = None) -> Tool:
        """A tool from a function with a Google docstring and annotations that JSON has words for, else PluginError."""
        name = name or str(getattr(function, "__name__", type(function).__name__))
        doc = inspect.getdoc(function)
        if not doc:
            raise PluginError(f"tool {name} has no docstring", "say what it does: the model reads it")
        about, described = _read_docstring(doc)
        try:
            arguments = msgspec.defstruct(name, _fields(function, name, described), forbid_unknown_fields=True)
            (_,), parts = msgspec.json.schema_components((arguments,), ref_template="#/$defs/{name}")
        except TypeError as error:
            raise PluginError(f"tool {name}: its parameters have no JSON schema: {error}") from error
        parameters = parts.pop(name)
        parameters.pop("title", None)
        parameters |= {"$defs": parts} if parts else {}
        schema = {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}
        return cls(name, schema, function, arguments)

    async def open(self) -> None:
        """Prepare it, once for each process, before its first call. ConfigError: it cannot work here."""
        if self.preparation is not None:
            await self.preparation()


def _fields(function: Callable[..., Any], tool: str, described: dict[str, str]) -> list[Any]:
    try:
        hints = typing.get_type_hints(function, include_extras=True)
        parameters = inspect.signature(function).parameters.values()
    except (NameError, TypeError, ValueError) as error:
        raise PluginError(f"tool {tool}: its signature cannot be read: {error}") from error
    fields: list[Any] = []
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            raise PluginError(f"tool {tool}: {parameter} cannot be given by name", "tools are called by names")
        if parameter.kind == parameter.VAR_KEYWORD:
            continue
        if parameter.name not in hints:
            raise PluginError(f"tool {tool}: parameter {parameter.name} has no annotation", "write its type: `x: int`")
        kind = hints[parameter.name]
        if parameter.name in described:
            kind = Annotated[kind, msgspec.Meta(description=described[parameter.name])]
        default = parameter.default
        if default is parameter.empty:
            fields.append((parameter.name, kind))
        elif isinstance(default, list | dict | set):
            fields.append((parameter.name, kind, msgspec.field(default_factory=default.copy)))
        else:
            fields.append((parameter.name, kind, default))
    return sorted(fields, key=len)  # a struct wants those without a default first


def _read_docstring(doc: str) -> tuple[str, dict[str, str]]:
    """What a function does, and what its parameters mean by their names, from a docstring in Google's style."""
    pieces = _SECTION.split(doc)
    sections = dict(zip(pieces[1::2], pieces[2::2], strict=True))
    described: dict[str, str] = {}
    name = ""
    for line in textwrap.dedent((sections.get("Args") or sections.get("Arguments") or "").strip("\n")).splitlines():
        found = _ARGUMENT.match(line)
        if found is not None:
            name = found[1]
            described[name] = found[2].strip()
        elif name and line.strip():
            described[name] = f"{described[name]} {line.strip()}".strip()
    return pieces[0].strip(), described


@dataclass(frozen=True, slots=True)
class ToolResult:
    message: Message
    use: ToolUse


class Toolbox:
    """Tools by name. Entries may be bare schemas, whose calls the episode answers itself."""

    def __init__(self, tools: Sequence[Tool], schemas: Sequence[ToolSchema] = ()) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self.schemas: list[ToolSchema] = [*(tool.schema for tool in tools), *schemas]
        if len(self._tools) < len(tools):
            raise PluginError(f"two tools have the same name: {', '.join(tool.name for tool in tools)}")

    @classmethod
    def of(cls, tools: ToolsLike) -> Toolbox:
        """Tools from functions; a toolbox is returned as it is. PluginError as `Tool.of`."""
        if isinstance(tools, Toolbox):
            return tools
        bare = [tool for tool in tools if isinstance(tool, dict)]
        callable_tools = [tool for tool in tools if not isinstance(tool, dict)]
        return cls([tool if isinstance(tool, Tool) else Tool.of(tool) for tool in callable_tools], bare)

    async def open(self) -> None:
        """Prepare all tools. ConfigError: one of them cannot work here."""
        for tool in self._tools.values():
            await tool.open()

    def keeps_state(self, name: str) -> bool:
        """Whether a tool must see each call even if its answer is known: all but plain functions may keep a state."""
        tool = self._tools.get(name)
        if tool is None or tool.keeps_state is not None:
            return tool is not None and bool(tool.keeps_state)
        return not inspect.isfunction(tool.function) or bool(tool.function.__closure__)

    async def call(self, call: ToolCall, *, deadline: float, longest: int) -> ToolResult:
        """Run one call within `deadline` seconds after it gets a slot; what goes wrong is told to the model."""
        begun = time.monotonic()
        outcome, content = await self._outcome(call, deadline)
        content = cut(utf8(content), longest) if isinstance(content, str) else _cut_parts(content, longest)
        message = {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content}
        seconds = round(time.monotonic() - begun, 4)
        return ToolResult(message, ToolUse(name=call.name[:256], outcome=outcome, seconds=seconds))

    async def _outcome(self, call: ToolCall, deadline: float) -> tuple[Outcome, str | list[dict[str, Any]]]:
        if call.status == "malformed":
            return "malformed", "error: the call could not be read: write one JSON object with `name` and `arguments`"
        tool = self._tools.get(call.name)
        if tool is None:
            hint = closest(call.name, self._tools) or f"there are: {', '.join(self._tools) or 'none'}"
            return "unknown", f"error: there is no tool {call.name!r}; {hint}"
        try:
            arguments = _checked(tool, call.arguments)
        except msgspec.ValidationError as error:
            return "malformed", f"error: the arguments do not fit: {error}"
        try:
            async with tool.slots or contextlib.nullcontext(), asyncio.timeout(deadline) as limit:
                calling = call_function(tool.function, arguments, f"tool {tool.name}")
                value = await in_task(calling, f"tool {tool.name}", _GRACE)
            return "ok", await told(value)
        except EpisodeOver:
            raise
        except Exception as error:  # the model is told
            if isinstance(error, TimeoutError) and limit.expired():
                logger.warning("a tool took too long", extra={"tool": tool.name, "seconds": deadline})
                return "timeout", f"error: no answer within {deadline:g} s"
            why = f"{type(error).__name__}: {error}"
            detail = error if logger.isEnabledFor(logging.DEBUG) else None
            logger.info("a tool failed", extra={"tool": tool.name, "why": why}, exc_info=detail)
            return "error", f"error: {why}"


ToolsLike: TypeAlias = Toolbox | Sequence[Callable[..., Any] | Tool | ToolSchema]
"""What is taken as tools: functions, tools, or schemas whose calls the episode answers itself."""


def _checked(tool: Tool, arguments: dict[str, Any]) -> dict[str, Any]:
    return arguments if tool.arguments is None else msgspec.structs.asdict(msgspec.convert(arguments, tool.arguments))


class LeftBehind:
    """Code of users that was given up and goes on: threads, and tasks that swallow cancellation."""

    def __init__(self) -> None:
        self._going_on: dict[asyncio.Future[Any], tuple[str, float]] = {}

    def __len__(self) -> int:
        return len(self._going_on)

    def add(self, work: asyncio.Future[Any], what: str) -> None:
        work.add_done_callback(self._ended)
        if work.done():
            return
        self._going_on[work] = what, time.monotonic()
        if isinstance(work, asyncio.Task):
            logger.warning("code of an episode swallows its cancellation and is left behind", extra={"what": what})
            asyncio.tasks._unregister_task(work)  # noqa: SLF001 (documented: asyncio.run would wait for its end)
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(work))  # or the interpreter's end would wait for its `close`

    def _ended(self, work: asyncio.Future[Any]) -> None:
        if self._going_on.pop(work, None) is not None and isinstance(work, asyncio.Task):
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(work))
        if not work.cancelled():
            work.exception()  # nobody asks for it

    def lasting(self, seconds: float) -> Counter[str]:
        before = time.monotonic() - seconds
        return Counter(what for what, since in self._going_on.values() if since <= before)


left_behind: Final = LeftBehind()  # of this process, as its threads are


async def call_function(function: Callable[..., Any], arguments: dict[str, Any], what: str) -> Any:
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
        return await function(**arguments)
    value = await in_thread(lambda: function(**arguments), what)
    return await value if inspect.isawaitable(value) else value


async def in_task(code: Coroutine[Any, Any, _T], what: str, grace: float) -> _T:
    """Await code of a user in a task of its own. If the caller is cancelled, it has `grace` seconds to end."""
    return await result_of(asyncio.create_task(_contained(code), name=what), what, grace)


async def _contained(code: Coroutine[Any, Any, _T]) -> _T:
    try:
        return await code
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:  # the event loop would end
        raise _as_error(error) from error


async def result_of(work: asyncio.Future[_T], what: str, grace: float = 0.0) -> _T:
    """Await a task, or what a thread does. It is left behind if the caller is cancelled and it goes on for `grace`."""
    try:
        await asyncio.wait([work])
    except asyncio.CancelledError:
        if isinstance(work, asyncio.Task):
            work.cancel()
        try:
            await asyncio.wait([work], timeout=grace)
        finally:
            left_behind.add(work, what)
        raise
    if work.cancelled():
        raise RuntimeError("it raised CancelledError")
    return work.result()


async def in_thread(work: Callable[[], Any], what: str) -> Any:
    """Run code of a user in a thread of its own: a pool would be full after some calls that never return."""
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    target = contextvars.copy_context().run
    threading.Thread(target=target, args=(run_for, future, work), name="tool", daemon=True).start()
    return await result_of(future, what)


def run_for(future: asyncio.Future[_T], work: Callable[[], _T]) -> None:
    """Run `work` in this thread for a future of an event loop in another."""
    loop = future.get_loop()

    def give(put: Callable[[Any], None], outcome: Any) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(lambda: None if future.done() else put(outcome))

    try:
        value = work()
    except BaseException as raised:  # noqa: BLE001 (handed to the caller)
        give(future.set_exception, _as_error(raised))
    else:
        give(future.set_result, value)


def _as_error(raised: BaseException) -> Exception:
    """What code of a user raised, as an error that ends its call alone: SystemExit would end the process."""
    if isinstance(raised, Exception) and not isinstance(raised, StopIteration):
        return raised
    error = RuntimeError(f"it raised {type(raised).__name__}: {raised}")
    error.__cause__ = raised
    return error


async def told(value: Any) -> str | list[dict[str, Any]]:
    """`as_content`, with images in a thread."""
    return await asyncio.to_thread(as_content, value) if any(map(_is_image, _pieces(value))) else as_text(value)


def as_content(value: Any) -> str | list[dict[str, Any]]:
    """What a tool or an environment returned, for the model: text, or parts of OpenAI where it has images.

    An image is one of Pillow, encoded bytes, a part of OpenAI or TRL, or content of MCP: alone, or in a list.
    """
    pieces = _pieces(value)
    if not any(map(_is_image, pieces)):
        return as_text(value)
    return [_image(piece) if _is_image(piece) else {"type": "text", "text": _text_of(piece)} for piece in pieces]


def _pieces(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]


def _is_image(piece: Any) -> bool:
    if isinstance(piece, dict):
        kind = piece.get("type")  # other data may have such keys, too
        return kind in piece if kind == "image_url" else kind == "image" and ("image" in piece or "data" in piece)
    return is_encoded(piece) or _is_of_pillow(piece)


def _is_of_pillow(piece: Any) -> bool:
    return (pillow := sys.modules.get("PIL.Image")) is not None and isinstance(piece, pillow.Image)


def _image(piece: Any) -> dict[str, Any]:
    if not isinstance(piece, dict):
        url = data_url(in_png(piece) if _is_of_pillow(piece) else bytes(piece))
    elif "image_url" in piece:
        return {"type": "image_url", "image_url": piece["image_url"]}
    elif "image" in piece:  # of TRL
        return _image(piece["image"])
    else:  # of MCP
        url = f"data:{piece.get('mimeType')};base64,{piece['data']}"
    return {"type": "image_url", "image_url": {"url": url}}


def _text_of(part: Any) -> str:
    return as_text(part["text"] if isinstance(part, dict) and part.get("type") == "text" else part)


def as_text(value: Any) -> str:
    """What a tool returned, for the model. TypeError: it is nothing that can be written (bytes, an image)."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, bytes | bytearray | memoryview):
        raise TypeError(f"the tool returned {len(value)} bytes where text is expected")
    try:
        return orjson.dumps(value, option=_OPTIONS).decode()
    except TypeError as error:
        raise TypeError(f"the tool returned a {type(value).__name__}, which is no text: {error}") from error


def _cut_parts(parts: list[dict[str, Any]], longest: int) -> list[dict[str, Any]]:
    """Cut texts, never an image."""
    left, kept = longest, []
    for part in parts:
        text = utf8(part.get("text", ""))
        if not text or left >= 0:  # below: the note of the text before stands for this one
            kept.append({**part, "text": cut(text, left)} if text else part)
        left -= len(text)
    return kept


def cut(text: str, longest: int) -> str:
    """At most about `longest` characters of a text: its beginning and its end, with a note between them."""
    if len(text) <= longest:
        return text
    head = (longest + 1) // 2
    tail = longest - head
    return f"{text[:head]}\n[{len(text) - longest} characters left out]\n{text[len(text) - tail :] if tail else ''}"
