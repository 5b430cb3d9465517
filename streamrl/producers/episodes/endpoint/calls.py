"""A call of an agent as a value, whatever API it came through, and what each API has to translate."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final, Protocol, TypeAlias, TypeVar

import msgspec
import orjson

from streamrl.config.episode import CALL_DRAWS
from streamrl.errors import StreamrlError
from streamrl.images.encoded import is_shown, url_of
from streamrl.producers.episodes.messages import text_of
from streamrl.producers.episodes.rendering import Message, ToolSchema
from streamrl.producers.episodes.session import SampledTurn
from streamrl.wire import utf8

MODEL: Final = "policy"  # in `/v1/models`; calls may use any name
Content: TypeAlias = str | list[dict[str, Any]] | None
_IMAGES: Final = ("image_url", "input_image", "image")
Tokens: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
Options: TypeAlias = dict[str, Collection[Any] | None]
"""What a body may have besides fields that are obeyed: values that ask for nothing, None: any. Others are refused."""
_PENALTIES: Final = {"frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (1,)}
_ACCOUNTS: Final = ("metadata", "safety_identifier", "service_tier", "store", "user")
_CACHES: Final = ("prompt_cache_key", "prompt_cache_retention")
HARMLESS: Final[Options] = {**_PENALTIES, **dict.fromkeys((*_ACCOUNTS, *_CACHES))}
OVERFLOW: Final = "context_length_exceeded"  # the agent may go on with a shorter conversation
_Body = TypeVar("_Body", bound=msgspec.Struct)
_Value = TypeVar("_Value")


def content_of(given: Content) -> str | list[dict[str, Any]]:
    """Text, or where images are shown the parts of OpenAI's chat. CallRefused: an image is not in the call itself."""
    listed: list[Any] = given if isinstance(given, list) else []
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in listed]
    if not any(part.get("type") in _IMAGES for part in parts):
        return text_of(given)
    return [_part(part) for part in parts]


def _part(part: dict[str, Any]) -> dict[str, Any]:
    kind = part.get("type")
    if kind not in _IMAGES:
        return {"type": "text", "text": text_of([part])}
    match part:
        case {"type": "image", "source": {"type": "base64", "media_type": str(media), "data": str(data)}}:  # Anthropic
            url = f"data:{media};base64,{data}"
        case {"image_url": {"url": str(url)} | str(url)} if url.startswith("data:"):  # chat/completions, responses
            pass
        case _:
            what = f"`{kind}` has to hold the image itself, as base64 or a data: URL: nothing is fetched here"
            raise CallRefused(400, what, "unsupported_parameter")
    return {"type": "image_url", "image_url": {"url": url}}


def image_bytes(messages: Sequence[Message]) -> int:
    """Bytes of a call that are images, which are not tokenized."""
    parts = (part for message in messages if isinstance(message.get("content"), list) for part in message["content"])
    return sum(len(url_of(part)) for part in parts if is_shown(part))


class CallRefused(StreamrlError):
    """A call that is not carried out, with the HTTP status and the code of its answer."""

    def __init__(self, status: int, message: str, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True, slots=True)
class AgentCall:
    """What an agent asks for: the next message of a conversation. `most_calls` and `options` as in `sampled`."""

    messages: list[Message]
    tools: list[ToolSchema]
    model: str = MODEL
    max_tokens: int | None = None
    most_calls: int | None = None
    stream: bool = False
    usage: bool = False  # a last event with the counts of tokens
    options: Mapping[str, Any] = field(default_factory=dict)
    answers: int = 1
    logprobs: bool = False


class CallBody(msgspec.Struct, kw_only=True):
    model: str = MODEL
    stream: bool | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=10)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None

    def options(self, ignored: Collection[str], **more: Any) -> dict[str, Any]:
        drawn = {name: getattr(self, name) for name in CALL_DRAWS if name not in ignored}
        if drawn.get("top_k") == -1:  # as servers spell it: all tokens
            drawn["top_k"] = 0
        return {name: value for name, value in (drawn | more).items() if value is not None}


class Function(msgspec.Struct):
    name: str = ""
    type: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class AgentApi(Protocol):
    """One API: its bodies to calls, and turns to its answers. Implementations have no state."""

    ping: ClassVar[bytes] = b": it is still being sampled\n\n"
    """What an open stream of events gets while there is nothing to say."""

    def read(self, body: bytes, ignored: Collection[str]) -> AgentCall:
        """CallRefused: the body is no call, or asks for what cannot be done and is not `ignored`."""
        ...

    def answer(self, call: AgentCall, turns: Sequence[SampledTurn], name: str) -> dict[str, Any]:
        """The answer to a call; `name` is unique among the answers of a sample. Only `n` of chat asks for several."""
        ...

    def events(self, call: AgentCall, answer: dict[str, Any]) -> Iterable[bytes]: ...

    def error(self, refused: CallRefused) -> dict[str, Any]:
        """Here as both APIs of OpenAI say it."""
        kind = "authentication_error" if refused.status == 401 else "invalid_request_error"
        kind = "server_error" if refused.status >= 500 else kind
        return {"error": {"message": refused.message, "type": kind, "param": None, "code": refused.code}}


def decoded(body: bytes | msgspec.Raw, kind: type[_Value]) -> _Value:
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


def refuse(name: str, asked: bool, ignored: Collection[str], why: str = "") -> None:
    """CallRefused if it is asked for: ignoring it would give the agent something else, unless the run says so."""
    if asked and name not in ignored:
        hint = f"leave it out, or let the run ignore it (episode.agent.ignore: [{name}])"
        said = f"`{name}` is not supported here{why and f', because {why}'}: {hint}"
        raise CallRefused(400, said, "unsupported_parameter")


def stop_texts(name: str, asked: str | Sequence[str] | None, ignored: Collection[str]) -> list[str] | None:
    """Texts that end the reply; None: those of the run. Empty ones end nothing."""
    texts = [text for text in ([asked] if isinstance(asked, str) else asked or ()) if text]
    return texts if texts and name not in ignored else None


def json_schema(form: Mapping[str, Any] | None, ignored: Collection[str]) -> str | None:
    """The JSON schema that the reply has to fit, of `response_format`; None: it may be any text."""
    kind = (form or {}).get("type", "text")
    if form is None or kind == "text" or "response_format" in ignored:
        return None
    if kind == "json_object":
        return '{"type": "object"}'
    refuse("response_format", kind != "json_schema", ignored, f"its type is {kind!r}, not json_schema or json_object")
    schema = form.get("json_schema", form)
    schema = schema.get("schema") if isinstance(schema, dict) else None
    if not isinstance(schema, dict):
        raise CallRefused(400, "`response_format` has no schema")
    return json.dumps(schema)


def schemas(tools: Sequence[Function] | None, ignored: Collection[str], kind: str = "function") -> list[ToolSchema]:
    found: list[ToolSchema] = []
    for tool in tools or ():
        if tool.type not in (None, kind):
            what = f"there is no tool of type {tool.type!r} here; only functions that the agent runs itself"
            raise CallRefused(400, what, "unsupported_parameter")
        if not tool.name:
            raise CallRefused(400, "a tool has no name")
        refuse("strict", bool(tool.strict), ignored)
        about = {} if tool.description is None else {"description": tool.description}
        parameters = tool.parameters or {"type": "object", "properties": {}}
        found.append({"type": "function", "function": {"name": tool.name, **about, "parameters": parameters}})
    return found


def most_calls(choice: object, ignored: Collection[str], parallel: bool | None) -> int | None:
    """How many calls a reply may have, None: any number. With the choice `none` they stay text; others are refused."""
    refuse("tool_choice", choice not in (None, "auto", "none"), ignored, "nothing forces the model to call a tool")
    return 0 if choice == "none" else 1 if parallel is False else None


def said(turn: SampledTurn) -> tuple[str, str, list[tuple[str, str, str]]]:
    reply = turn.reply
    calls = [(call.id, utf8(call.name), utf8(call.arguments_text)) for call in reply.calls]
    return utf8(reply.content), utf8(reply.reasoning), calls


def event(data: Any, name: str = "") -> bytes:
    line = f"event: {name}\n".encode() if name else b""
    return line + b"data: " + orjson.dumps(data) + b"\n\n"
