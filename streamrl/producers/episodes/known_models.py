"""Models that the `renderers` package knows by their names on the hub; for others the tool format names a class."""

from __future__ import annotations

import logging
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from typing_extensions import override

from streamrl.errors import ConfigError, DataError, need_packages
from streamrl.producers.episodes import probe
from streamrl.producers.episodes.messages import ControlTokens, CuttingTokenizer, json_object
from streamrl.producers.episodes.rendering import ChatRenderer, Ids, Message, Messages, Reply, Tools, ToolSchema
from streamrl.producers.episodes.template import TemplateRenderer
from streamrl.producers.episodes.tool_formats import FORMATS, WrittenCall, name_calls
from streamrl.producers.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# What classes of the package raise for messages or tokenizers that they cannot take.
_REFUSALS: Final = (AssertionError, AttributeError, IndexError, KeyError, TypeError, ValueError)
_NAMES_RESULTS: Final = frozenset({"gpt-oss", "gemma4"})  # families that write the name of the tool before its result


def renderer_of(tokenizer: Tokenizer, tool_format: str = "auto") -> ChatRenderer:
    """That of the `renderers` package if it knows the model or `tool_format` names one, else its chat template's.

    `DataError`: the model has no chat template; `ConfigError`: `tool_format` does not fit it.
    """
    return known_renderer(tokenizer, tool_format) or TemplateRenderer(tokenizer, tool_format)


def examine_chat(tokenizer: Tokenizer, tool_format: str = "auto") -> str:
    """Whether episodes extend the chats of a model, in words. Errors as `renderer_of`."""
    why = probe.examine(renderer_of(tokenizer, tool_format))
    return f"not prefix-stable, so episodes fork: {why}" if why else "prefix-stable"


def known_renderer(tokenizer: Tokenizer, tool_format: str = "auto") -> ChatRenderer | None:
    model = str(getattr(tokenizer.backend, "name_or_path", ""))
    if tool_format in FORMATS or tokenizer.model.renders or tokenizer.vision is not None:
        return None  # its classes know neither the template of a run nor arguments, nor images as they are here
    local = Path(model).is_absolute() or model.count("/") != 1
    if tool_format == "auto" and (local or find_spec("renderers") is None):  # the import takes two seconds
        return None
    need_packages(f"tool format {tool_format!r}", "renderers", extra="episodes", otherwise=f"take {', '.join(FORMATS)}")
    import renderers

    name = renderers.base.MODEL_RENDERER_MAP.get(model) if tool_format == "auto" else tool_format
    return None if name is None else KnownRenderer(tokenizer, name, _create(renderers, tokenizer, name))


class KnownRenderer(ChatRenderer):
    """A class of the `renderers` package; `inner` is its instance, `family` its name."""

    def __init__(self, tokenizer: Tokenizer, family: str, inner: Any) -> None:
        self.family, self._tokenizer, self._inner = family, tokenizer, inner
        self._control = ControlTokens(tokenizer.backend)
        self.stops = frozenset(int(token) for token in inner.get_stop_token_ids())

    @override
    def render(self, messages: Messages, tools: Tools = None) -> list[int]:
        spelled = self._spell(self._tokenizer.with_system(messages))
        try:
            return list(self._inner.render_ids(spelled, tools=_listed(tools), add_generation_prompt=True))
        except _REFUSALS as error:
            what = f"the renderer {self.family} of {self._tokenizer.name} refuses the messages: {error!r}"
            raise DataError(what) from error

    @override
    def extend(self, messages: Messages, tools: Tools, ids: Ids, new: Messages, *, sampled: int) -> list[int] | None:
        begin = len(ids) - sampled
        prompt, turn = [int(token) for token in ids[:begin]], [int(token) for token in ids[begin:]]
        spelled = self._spell([*messages, *new])[len(messages) :]
        try:
            bridged = self._inner.bridge_to_next_turn(prompt, turn, spelled, tools=_listed(tools))
        except _REFUSALS:  # a fork costs less than the sample; what cannot be rendered either is refused there
            logger.debug("the renderer %s failed to extend a conversation", self.family, exc_info=True)
            return None
        if bridged is None or bridged.token_ids[: len(ids)] != [*prompt, *turn]:
            return None
        return list(bridged.token_ids[len(ids) :])

    @override
    def parse(self, ids: Ids, tools: Tools = None, *, prompt: Ids = ()) -> Reply:
        tokens = [int(token) for token in ids]
        before = [int(token) for token in prompt]
        try:
            found = self._inner.parse_response(tokens, tools=_listed(tools), prompt_ids=before or None)
        except _REFUSALS:  # a policy may write anything; what cannot be read is content
            return Reply(self._tokenizer.decode(tokens))
        if found.tool_calls and not tools:  # they stay text, as they were sampled
            if found.tool_calls[0].token_span is None:
                raw = "".join(call.raw for call in found.tool_calls)
                return Reply(f"{found.content or ''}{raw}", found.reasoning_content or "")
            begin = found.tool_calls[0].token_span[0]
            end = len(tokens) - (tokens[-1] in self.stops)
            spoken = self.parse(tokens[:begin], prompt=prompt)
            return replace(spoken, content=spoken.content + self._tokenizer.decode(tokens[begin:end], special=True))
        written = [self._written(call, tokens) for call in found.tool_calls]
        return Reply(found.content or "", found.reasoning_content or "", name_calls(written, tokens, prompt))

    def _written(self, call: Any, tokens: list[int]) -> WrittenCall:
        raw = call.raw
        if call.token_span is not None:
            raw = self._tokenizer.decode(tokens[slice(*call.token_span)], special=True)
        name = call.name if isinstance(call.name, str) else ""
        if call.status not in ("ok", "unknown_tool"):  # whether there is such a tool is for the episode to say
            return WrittenCall(raw, name)
        arguments = call.arguments
        text = arguments if isinstance(arguments, str) else probe.json_text(arguments)
        return WrittenCall(raw, name, json_object(text))

    def _spell(self, messages: Messages) -> list[Message]:
        spelled = self._control.spell_out(messages)
        if self.family in _NAMES_RESULTS:
            calls = [call for message in spelled for call in message.get("tool_calls", ())]
            names = {call["id"]: call["function"]["name"] for call in calls}
            for message in spelled:
                if message["role"] == "tool" and not message.get("name"):
                    message["name"] = names.get(message.get("tool_call_id"), "unknown")
        return spelled


def _create(package: ModuleType, tokenizer: Tokenizer, name: str) -> Any:
    try:
        config = package.config_from_name(name)
    except _REFUSALS as error:
        hint = f"take auto, {', '.join(FORMATS)}, or a class of the package renderers"
        raise ConfigError(f"there is no tool format {name!r}", hint) from error
    try:
        return package.create_renderer(CuttingTokenizer(tokenizer.backend), config)
    except _REFUSALS as error:
        what = f"the renderer {name} does not fit the tokenizer of {tokenizer.name}: {error}"
        raise ConfigError(what, f"set the tool format to one of {', '.join(FORMATS)} for the chat template") from error


def _listed(tools: Tools) -> list[ToolSchema] | None:
    return list(tools) if tools else None
