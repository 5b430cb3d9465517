"""The reward `reward_model`: a model with a scalar head behind vLLM, SGLang or any JSON server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from typing_extensions import override

from streamrl.config import RewardModelConfig, RunConfig
from streamrl.consumers.models.asking import CHARACTERS_PER_TOKEN, PROBE, AskingReward
from streamrl.consumers.models.client import slots_within_rate
from streamrl.consumers.models.dialects import DIALECTS, ScoreDialect, read_score
from streamrl.consumers.models.rendering import Renderer, check_template
from streamrl.consumers.models.template import Template
from streamrl.consumers.reward import RewardContext, RewardSample, Score
from streamrl.consumers.transcript import transcript
from streamrl.errors import ConfigError, DataError, PluginError, StreamrlError

logger = logging.getLogger(__name__)

_PROBE_SECONDS: Final = 10.0
_LONG: Final = 20_000
"""Characters from which a text is encoded in a thread, since encoding would hold the event loop for milliseconds."""
_TEMPLATE_ARGS: Final = ("path", "body", "value")
_TEXT_ARGS: Final = ("text", "tokenizer", "chat_template", "label")


@dataclass(frozen=True, slots=True)
class _Question:
    path: str
    body: Mapping[str, Any]
    read: Callable[[Mapping[str, Any]], float]
    tokens: int


class RewardModel(AskingReward):
    """Scores a response with a trained reward model. The score is the raw number of its head.

    Args:
        model: its name in `reward_models`.
        text: how a sample becomes text. `chat`: the reward model's own chat template; `plain`: prompt and response one
            after the other; `server`: messages are sent to the server, which has a template (vLLM); empty: chat if the
            model has a template.
        tokenizer: directory or hub name of tokenizer and template; empty: `model` of `reward_models`.
        chat_template: file with a template that replaces the model's own.
        label: index of the score if the model gives several numbers, from 0; negative: from the end.
        path: for servers of kind template: route of the request.
        body: for servers of kind template: JSON with placeholders such as `{prompt}` and `{response}`.
        value: for servers of kind template: path of the score in the answer, for example `result.score`.

    Raises:
        PluginError: arguments do not fit together.
    """

    def __init__(
        self,
        model: str,
        *,
        text: Literal["chat", "plain", "server"] | None = None,
        tokenizer: str | None = None,
        chat_template: str | None = None,
        label: int | None = None,
        path: str | None = None,
        body: Mapping[str, Any] | None = None,
        value: str | None = None,
    ) -> None:
        if text not in {None, "chat", "plain", "server"}:
            raise PluginError(f"text is {text!r}", "it is one of chat, plain, server")
        if label is not None and (isinstance(label, bool) or not isinstance(label, int)):
            raise PluginError(f"label is {label!r}", "it is a whole number: 0 for the first")
        if text in {"plain", "server"} and chat_template is not None:
            raise PluginError(f"chat_template is for text: chat, and text is {text}")
        if text == "server" and tokenizer is not None:
            raise PluginError("tokenizer is not used with text: server: the server has one")
        super().__init__(model)
        self._text, self._tokenizer, self._chat_template, self._label = text, tokenizer, chat_template, label
        self._path = path
        given = {name for name, arg in zip(_TEMPLATE_ARGS, (path, body, value), strict=True) if arg is not None}
        if given and given != set(_TEMPLATE_ARGS):
            missing = next(name for name in _TEMPLATE_ARGS if name not in given)
            raise PluginError(f"{missing} is missing", "a server of kind template needs path, body and value")
        self._template = None if body is None or value is None else Template(body, value)
        self._renderer: Renderer | None = None

    @override
    def check_config(self, config: RunConfig) -> None:
        super().check_config(config)
        if self._chat_template is not None:
            check_template(Path(self._chat_template))

    @override
    async def open(self, context: RewardContext) -> None:
        await super().open(context)
        self.concurrency = slots_within_rate(context, self._asked.config, 1)
        if self._template is None and self._text != "server":
            name = self._tokenizer or self._asked.config.model
            file = None if self._chat_template is None else Path(self._chat_template)
            self._renderer = await asyncio.to_thread(Renderer, name, mode=self._text, template=file)
        try:
            question = self._question(PROBE)
        except DataError:
            return  # the body needs fields that `PROBE` lacks
        await self._probe(self._ask(question, min(_PROBE_SECONDS, self._limit)))

    @override
    async def score(self, sample: RewardSample) -> Score:
        if len(sample.completion) > 1 or _characters(sample) > _LONG:
            question = await asyncio.to_thread(self._question, sample)
        else:
            question = self._question(sample)
        return Score(await self._ask(question, self._limit))

    async def _ask(self, question: _Question, deadline: float) -> float:
        path, body, tokens = question.path, question.body, question.tokens
        try:
            value = await self._asked.ask(path, body, question.read, deadline=deadline, tokens=tokens)
        except StreamrlError as error:
            await self._refuse(error)
            raise
        self._answered = True
        return value

    def _question(self, sample: RewardSample) -> _Question:
        config = self._asked.config
        if self._template is not None:
            body = self._template.filled(sample)
            return _Question(str(self._path), body, self._template.read, _estimate(sample))
        dialect = DIALECTS[config.kind, config.task]
        if self._renderer is None:
            body = dialect.conversation(config.model, sample.messages)
            return _Question(dialect.path, body, self._reader(dialect), _estimate(sample))
        ids = self._renderer.ids(sample)
        return _Question(dialect.path, dialect.body(config.model, ids), self._reader(dialect), len(ids))

    def _reader(self, dialect: ScoreDialect) -> Callable[[Mapping[str, Any]], float]:
        return lambda answer: read_score(dialect, answer, self._label)

    @override
    def _check(self, model: RewardModelConfig) -> None:
        kind, task = model.kind, model.task
        where = f"reward_models.{self._name}"
        if kind == "template":
            if self._template is None:
                raise ConfigError(f"{where}: a server of kind template needs path, body and value in the reward's args")
            unused = [name for name in _TEXT_ARGS if getattr(self, f"_{name}") is not None]
            if unused:
                raise ConfigError(f"{unused[0]} is not used with a server of kind template: its body says what it gets")
            return
        if self._template is not None:
            raise ConfigError(f"path, body and value are for kind template, and {where}.kind is {kind}")
        if (kind, task) not in DIALECTS:
            raise ConfigError(
                f"{where} is of kind {kind} and task {task}, which gives no score by itself",
                "`use: judge` asks chat models; this reward takes kind vllm or sglang with task classify or pooling",
            )
        if self._text == "server" and not DIALECTS[kind, task].takes_messages:
            raise ConfigError(f"servers of kind {kind} take no messages for a score", "leave args.text empty")


def _estimate(sample: RewardSample) -> int:
    return _characters(sample) // CHARACTERS_PER_TOKEN + 1


def _characters(sample: RewardSample) -> int:
    return len(sample.prompt.text) + len(transcript(sample))
