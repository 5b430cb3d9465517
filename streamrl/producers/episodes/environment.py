"""Ready-made episodes: a list of functions, or a class as TRL's `environment_factory` takes it."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from types import MethodType
from typing import Any, Final

from typing_extensions import override

from streamrl.producers.episodes.clock import EpisodeOver
from streamrl.producers.episodes.episode import Chat, Episode, Task
from streamrl.producers.episodes.rendering import Message
from streamrl.producers.episodes.tools import Tool, Toolbox, call_function, in_thread, told
from streamrl.score import Score

logger = logging.getLogger(__name__)

_CLOSE_SECONDS: Final = 10.0
_NO_TOOLS: Final = frozenset({"reset", "get_reward", "close"})
_RESTORING: Final = frozenset({"get_state", "set_state"})  # no tools either, if a class has both


async def act(chat: Chat, messages: list[Message], done: Callable[[], bool] = lambda: False) -> None:
    """Let the model call tools until a reply has no call or is cut off, or `done()`; `messages` grows with it."""
    while not done():
        reply = await chat(messages)
        messages.append(reply.message)
        if chat.cut is not None:
            chat.session.end(chat.cut)
        if chat.cut or not reply.calls:
            return
        messages += await chat.answer(reply)
    chat.session.end("tool_stopped")


class ToolEpisode(Episode):
    """The model calls tools until it answers without a call (`episode.tools`); others score it."""

    def __init__(self, tools: Sequence[Callable[..., Any] | Tool]) -> None:
        self._toolbox = Toolbox.of(tools)

    @override
    async def open(self) -> None:
        await self._toolbox.open()

    @override
    async def run(self, task: Task, chat: Chat) -> float | Score | None:
        await act(chat.fork(self._toolbox), task.messages)
        return None


class EnvironmentEpisode(Episode):
    """One object of `factory` a sample (`episode.environment`).

    `reset(**row)` gets `prompt`, `messages`, `answer` and the metadata of the line, as far as it takes them; text that
    it returns, or images, are appended to the last message of the user. The other public methods are tools, until an
    attribute `done` of the object is true. `get_reward()`, if there is one, gives the score, also when a limit ended
    the episode. `close()`, if there is one, is called at the end. Each method may be async; others run in threads.
    `tools` are functions that the model may call as well.

    With `get_state()` and `set_state(state)` another process goes on with a sample whose process died: it makes an
    object, calls `reset(**row)`, which has to return the same text, and `set_state` with what `get_state` returned
    after the last turn of tools. Tools of recorded turns do not run again. The state is what MessagePack can write;
    tuples come back as lists. It holds all that tools, `done` and `get_reward` depend on and `reset` does not set.
    """

    def __init__(self, factory: Callable[[], Any], tools: Sequence[Callable[..., Any]] = ()) -> None:
        self._factory, self._tools = factory, [Tool.of(function) for function in tools]
        self._described: dict[type[Any], list[Tool]] = {}

    @override
    async def run(self, task: Task, chat: Chat) -> float | Score | None:
        async with chat.session.part("start"):
            environment = await in_thread(self._factory, "an environment")
            if _restores(type(environment)):
                chat.session.journal.keep_state_of(environment, chat.session.limits.tool_deadline)
            chat = chat.fork([*self._tools, *self._methods(environment)])
        try:
            async with chat.session.part("start"):
                known = {"text": task.text, "rendered": task.rendered, **row(task)}
                begin(task, await _opening(environment, known))
            try:
                await act(chat, task.messages, lambda: bool(getattr(environment, "done", False)))
            except EpisodeOver as over:
                chat.session.end(over.stop)
            async with chat.session.part("scoring"):
                value: float | Score | None = await _called(environment, "get_reward", {})
                return value
        finally:
            await closed(_called(environment, "close", {}), type(environment).__name__)

    def _methods(self, environment: Any) -> list[Tool]:
        """Its methods as tools. They are described once for each class, because that takes milliseconds."""
        kind = type(environment)
        if kind not in self._described:
            names = [name for name in dir(kind) if not name.startswith("_") and name not in _no_tools(kind)]
            methods = [getattr(environment, name) for name in names if callable(getattr(kind, name))]
            tools = [Tool.of(method) for method in methods if inspect.isroutine(method)]
            self._described[kind] = [replace(tool, function=getattr(kind, tool.name)) for tool in tools]
        return [replace(tool, function=getattr(environment, tool.name)) for tool in self._described[kind]]


def check_environment(kind: type[Any]) -> None:
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        if not name.startswith("_") and name not in _no_tools(kind):
            Tool.of(MethodType(method, kind))


def _no_tools(kind: type[Any]) -> frozenset[str]:
    return _NO_TOOLS | _RESTORING if _restores(kind) else _NO_TOOLS


def _restores(kind: type[Any]) -> bool:
    return all(callable(getattr(kind, name, None)) for name in _RESTORING)


def row(task: Task) -> dict[str, Any]:
    """The line of the data set, as keyword arguments. `prompt` is what the line has: text, or messages."""
    prompt = task.messages if task.rendered else task.text
    return {**task.metadata, "prompt": prompt, "messages": task.messages, "answer": task.answer}


def begin(task: Task, text: str | list[dict[str, Any]]) -> None:
    """Append what `reset` returned, text or parts, to the last message of the user."""
    if not text:
        return
    last = next((message for message in reversed(task.messages) if message.get("role") == "user"), None)
    if last is None:
        task.messages.append({"role": "user", "content": text})
    elif isinstance(text, str) and isinstance(last.get("content"), str):
        last["content"] = f"{last['content']}{text}"
    else:
        last["content"] = [*_parts(last.get("content") or []), *_parts(text)]


async def _opening(environment: Any, known: dict[str, Any]) -> str | list[dict[str, Any]]:
    said = await _called(environment, "reset", known)
    content = await told(said)
    if isinstance(content, str) and not isinstance(said, str | None):
        raise TypeError(f"reset returned a {type(said).__name__}, not text, images or None")
    return content


def _parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


async def closed(closing: Awaitable[Any], what: str) -> None:
    """Wait for the end of an environment. A failure is only logged, because the episode is over."""
    try:
        async with asyncio.timeout(_CLOSE_SECONDS):
            await closing
    except Exception:
        logger.exception("an environment did not close", extra={"environment": what})


async def _called(environment: Any, name: str, given: dict[str, Any]) -> Any:
    """Call a method with the arguments that it takes; None if there is no such method."""
    method = getattr(environment, name, None)
    if method is None:
        return None
    parameters = inspect.signature(method).parameters
    if not any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values()):
        given = {key: value for key, value in given.items() if key in parameters}
    return await call_function(method, given, f"{type(environment).__name__}.{name}")
