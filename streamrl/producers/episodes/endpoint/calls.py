"""A call of an agent as a value, whatever API it came through, and what each API has to translate."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Protocol, TypeAlias, TypeVar

import msgspec
import orjson

from streamrl.errors import StreamrlError
from streamrl.producers.episodes.rendering import Message, ToolSchema
from streamrl.producers.episodes.session import SampledTurn
from streamrl.wire import utf8

MODEL: Final = "policy"
"""The name of the model in `/v1/models`; calls may use any name."""
Content: TypeAlias = str | list[dict[str, Any]] | None
Tokens: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
Options: TypeAlias = Mapping[str, Collection[Any] | None]
"""What a body may have besides the fields that are obeyed: values that ask for nothing, None: whatever it is. Any other
option is refused by its name."""
_SAMPLING: Final = ("temperature", "top_p", "top_k", "min_p", "seed")
_PENALTIES: Final = ("frequency_penalty", "presence_penalty", "repetition_penalty")
_ACCOUNTS: Final = ("metadata", "safety_identifier", "service_tier", "store", "user")
_CACHES: Final = ("prompt_cache_key", "prompt_cache_retention")
IGNORED: Final = dict.fromkeys((*_SAMPLING, *_PENALTIES, *_ACCOUNTS, *_CACHES))
"""How tokens are sampled belongs to the run; the others do not change an answer."""
OVERFLOW: Final = "context_length_exceeded"
"""Code of a call whose conversation is too long: the agent may go on with a shorter one."""
_Body = TypeVar("_Body", bound=msgspec.Struct)
_Value = TypeVar("_Value")


class CallRefused(StreamrlError):
    """A call that is not carried out, with the HTTP status and the code of its answer."""

    def __init__(self, status: int, message: str, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True)
class AgentCall:
    """What an agent asks for: the next message of a conversation.

    `model` is the name that it used. `most_calls` are calls of tools that it may get, None: any number. `usage` asks
    for a last event with the counts of tokens.
    """

    messages: list[Message]
    tools: list[ToolSchema]
    model: str = MODEL
    max_tokens: int | None = None
    most_calls: int | None = None
    stream: bool = False
    usage: bool = False


class AgentApi(Protocol):
    """One API: its bodies to calls, and turns to its answers. Implementations have no state."""

    def read(self, body: bytes, ignored: Collection[str]) -> AgentCall:
        """CallRefused: the body is no call, or asks for what cannot be done and is not `ignored`."""
        ...

    def answer(self, call: AgentCall, turn: SampledTurn, name: str) -> dict[str, Any]:
        """The answer to a call; `name` is unique among the answers of a sample."""
        ...

    def events(self, call: AgentCall, answer: dict[str, Any]) -> Iterable[bytes]:
        """The same answer as the server-sent events that a streaming client reads."""
        ...

    def error(self, refused: CallRefused) -> dict[str, Any]:
        """Here as both APIs of OpenAI say it."""
        kind = "authentication_error" if refused.status == 401 else "invalid_request_error"
        kind = "server_error" if refused.status >= 500 else kind
        return {"error": {"message": refused.message, "type": kind, "param": None, "code": refused.code}}


def decoded(body: bytes | msgspec.Raw, kind: type[_Value]) -> _Value:
    """The body of a request or a part of it, without fields that `kind` does not have. CallRefused: it is not one."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise CallRefused(400, str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CallRefused(400, f"the body is not JSON: {error}") from error


def read_call(body: bytes, kind: type[_Body], options: Options, ignored: Collection[str]) -> _Body:
    """The body of a call. CallRefused: it is not one, or it has an option that cannot be obeyed."""
    asked = decoded(body, kind)
    for name, raw in decoded(body, dict[str, msgspec.Raw]).items():  # which checks what `kind` does not have
        if name not in kind.__struct_fields__ and (value := decoded(raw, object)) is not None:
            harmless = options.get(name, ())
            refuse(name, harmless is not None and value not in harmless, ignored)
    return asked


def refuse(name: str, asked: bool, ignored: Collection[str]) -> None:
    """CallRefused if it is asked for: ignoring it would give the agent something else, unless the run says so."""
    if asked and name not in ignored:
        hint = f"leave it out, or let the run ignore it (episode.agent.ignore: [{name}])"
        raise CallRefused(400, f"`{name}` is not supported here: {hint}", "unsupported_parameter")


def function_schema(name: str, description: str | None, parameters: dict[str, Any] | None) -> ToolSchema:
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    function["parameters"] = parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def assistant(text: str, calls: Sequence[tuple[str, str, str]], reasoning: str = "") -> Message:
    """An assistant message; `calls` are id, name and JSON arguments."""
    message: Message = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for call_id, name, arguments in calls
        ]
    return message


def said(turn: SampledTurn) -> tuple[str, str, list[tuple[str, str, str]]]:
    """Text, reasoning and calls (id, name, JSON arguments) of a turn, all of which UTF-8 can encode."""
    reply = turn.reply
    calls = [(call.id, utf8(call.name), utf8(call.arguments_text)) for call in reply.calls]
    return utf8(reply.content), utf8(reply.reasoning), calls


def event(data: Any, name: str = "") -> bytes:
    line = f"event: {name}\n".encode() if name else b""
    return line + b"data: " + orjson.dumps(data) + b"\n\n"
