"""The reward `reward_model`: a model with a head that gives a number, behind vLLM, SGLang or any server with JSON."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from typing_extensions import override

from streamrl.config import RewardModelConfig, RunConfig
from streamrl.consumers.models.client import refuses, slots_within_rate
from streamrl.consumers.models.dialects import DIALECTS, ScoreDialect, UnclearScore, read_score
from streamrl.consumers.models.rendering import Renderer, check_template
from streamrl.consumers.models.template import Template, conversation
from streamrl.consumers.reward import (
    AskedModel,
    Reward,
    RewardContext,
    RewardPrompt,
    RewardSample,
    Score,
    check_model,
)
from streamrl.errors import (
    ConfigError,
    DataError,
    PluginError,
    RewardBusy,
    RewardImpossible,
    RewardUnavailable,
    StreamrlError,
    Unreachable,
)

logger = logging.getLogger(__name__)

SHARE: Final = 0.95
"""Part of the deadline after which a request gives up by itself, so that the server is named that was too slow."""
_PROBE_SECONDS: Final = 10.0
_SCORED_SECONDS: Final = 1.0
"""Longest time of asking whether the run has scores: an attempt that has just failed has little left."""
_LONG: Final = 20_000
"""Characters from which a text is made in a thread: it would hold up the other samples for milliseconds."""
CHARACTERS_PER_TOKEN: Final = 3
"""Of a text whose tokens nobody has counted."""
_TEMPLATE_ARGS: Final = ("path", "body", "value")
_TEXT_ARGS: Final = ("text", "tokenizer", "chat_template", "label")


@dataclass(frozen=True, slots=True)
class _Question:
    """What a server is asked for one sample, and what its answer means."""

    path: str
    body: Mapping[str, Any]
    read: Callable[[Mapping[str, Any]], float]
    tokens: int


@dataclass(slots=True)
class FirstAnswer:
    """The first answer that a reward gets decides: until it could read one, an error may mean that it never will.

    Attributes:
        model: its name in `reward_models`.
        scored: whether the run has scores: then the servers have done before what they refuse now.
        came: it could read one, or the run has scores.
    """

    model: str
    scored: Callable[[], Awaitable[bool]]
    came: bool = False

    async def refuse(self, error: StreamrlError, *, probe: bool = False) -> None:
        """End the run when an error says that the servers will never do what they are asked.

        Args:
            error: that a question ended with.
            probe: of a question that every server can answer, so that a refusal is not for this question alone.

        Raises:
            RewardImpossible: so it is.
        """
        if self.came or isinstance(error, RewardBusy):
            return
        cause = error.__cause__ if isinstance(error, RewardUnavailable) else error
        never = isinstance(cause, UnclearScore) or (probe and isinstance(cause, DataError)) or refuses(cause)
        if not isinstance(cause, StreamrlError) or not never:
            return
        try:
            async with asyncio.timeout(_SCORED_SECONDS):
                self.came = await self.scored()
        except (TimeoutError, Unreachable):
            return  # nobody knows now: the next answer decides
        if not self.came:
            raise RewardImpossible(f"reward model {self.model} cannot be asked: {cause.message}", cause.hint) from error


class RewardModel(Reward):
    """Scores a response with a model that is trained to. The score is the raw number of its head.

    Args:
        model: its name in `reward_models`.
        text: how a sample becomes text. `chat`: the reward model's own chat template; `plain`: prompt and response one
            after the other; `server`: the messages go to the server, which has a template (vLLM); empty: chat where
            the model has a template.
        tokenizer: directory or hub name of tokenizer and template; empty: `model` of `reward_models`.
        chat_template: file with a template that takes the place of the model's own.
        label: which number of several is the score, from 0; negative: from the end.
        path: for servers of kind template: where the body goes.
        body: for servers of kind template: JSON with placeholders such as `{prompt}` and `{response}`.
        value: for servers of kind template: where the score is in the answer, for example `result.score`.

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
        self._name = model
        self._text, self._tokenizer, self._chat_template, self._label = text, tokenizer, chat_template, label
        self._path = path
        given = {name for name, arg in zip(_TEMPLATE_ARGS, (path, body, value), strict=True) if arg is not None}
        if given and given != set(_TEMPLATE_ARGS):
            missing = next(name for name in _TEMPLATE_ARGS if name not in given)
            raise PluginError(f"{missing} is missing", "a server of kind template needs path, body and value")
        self._template = None if body is None or value is None else Template(body, value)
        self._model: AskedModel | None = None
        self._renderer: Renderer | None = None
        self._deadline = 0.0

    @override
    def check_config(self, config: RunConfig) -> None:
        check_model(self._name, config.reward_models)
        self._check(config.reward_models[self._name])
        if self._chat_template is not None:
            check_template(Path(self._chat_template))

    @override
    async def open(self, context: RewardContext) -> None:
        self._model = context.model(self._name)
        self._first = FirstAnswer(self._name, context.scored)
        self.concurrency = slots_within_rate(context, self._model.config, 1)
        self._deadline = SHARE * context.deadline
        self._check(self._model.config)
        if self._template is None and self._text != "server":
            name = self._tokenizer or self._model.config.model
            file = None if self._chat_template is None else Path(self._chat_template)
            self._renderer = await asyncio.to_thread(Renderer.load, name, mode=self._text, template=file)
        await self._probe()

    @override
    def slots(self) -> int | None:
        return None if self._model is None else self._model.slots

    @override
    def away(self) -> str:
        return "" if self._model is None else self._model.away

    @override
    async def score(self, sample: RewardSample) -> Score:
        if len(sample.text) + len(sample.prompt.text) > _LONG:
            question = await asyncio.to_thread(self._question, sample)
        else:
            question = self._question(sample)
        return Score(await self._ask(question, self._deadline))

    async def _ask(self, question: _Question, deadline: float, *, probe: bool = False) -> float:
        path, body, tokens = question.path, question.body, question.tokens
        try:
            value = await self._asked.ask(path, body, question.read, deadline=deadline, tokens=tokens)
        except StreamrlError as error:
            await self._first.refuse(error, probe=probe)
            raise
        self._first.came = True
        return value

    @property
    def _asked(self) -> AskedModel:
        assert self._model is not None, "scores come after open"
        return self._model

    def _question(self, sample: RewardSample) -> _Question:
        config = self._asked.config
        if self._template is not None:
            body = self._template.filled(sample)
            return _Question(str(self._path), body, self._template.read, _estimate(sample))
        dialect = DIALECTS[config.kind, config.task]
        if self._renderer is None:
            body = dialect.conversation(config.model, conversation(sample))
            return _Question(dialect.path, body, self._reader(dialect), _estimate(sample))
        ids = self._renderer.ids(sample)
        return _Question(dialect.path, dialect.body(config.model, ids), self._reader(dialect), len(ids))

    def _reader(self, dialect: ScoreDialect) -> Callable[[Mapping[str, Any]], float]:
        return lambda answer: read_score(dialect, answer, self._label)

    def _check(self, model: RewardModelConfig) -> None:
        """Refuse arguments that the model's kind of server cannot do anything with."""
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

    async def _probe(self) -> None:
        """Ask for the score of a short text. Only what no server will ever do ends the run."""
        try:
            question = self._question(PROBE)
        except DataError:
            return  # a body that needs more of a prompt than this one has
        try:
            await self._ask(question, min(_PROBE_SECONDS, self._deadline), probe=True)
        except RewardImpossible:
            raise
        except StreamrlError as error:
            extra = {"model": self._name, "why": error.message}
            logger.warning("reward model does not answer yet; samples will wait for it", extra=extra)


def _estimate(sample: RewardSample) -> int:
    """Tokens of a sample where nobody has counted those of the reward model."""
    return (len(sample.prompt.text) + len(sample.text)) // CHARACTERS_PER_TOKEN + 1


PROBE: Final = RewardSample(
    text="Four.",
    prompt=RewardPrompt(
        text="What is two plus two?",
        messages=None,
        answer="4",
        metadata={},
        tokens=np.zeros(1, dtype=np.int32),
        line=0,
        evaluation=False,
    ),
    tokens=np.zeros(1, dtype=np.int32),
    finish="stop",
)
"""What a server is asked at the start, to see that it can be asked at all."""
