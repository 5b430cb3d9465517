"""Text to token ids at the two ends of a trajectory, and nowhere between.

The feeder turns a prompt into token ids once. From there on engines get ids and return ids, and the learner trains on
exactly these. Sampled ids are decoded for people and rewards only: text is never encoded again, because
`encode(decode(ids))` need not be `ids`, and the log-probabilities would then belong to other tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from streamrl.config import ModelConfig
from streamrl.errors import ConfigError, DataError
from streamrl.images.vision import Vision, vision_of
from streamrl.wire import Int32Array


class Tokenizer:
    """A Hugging Face tokenizer (`backend`): prompts to ids, sampled ids to text; `name` is for messages.

    `vision` is the image side of its model, None for a model that takes text alone.
    """

    def __init__(self, backend: Any, name: str, model: ModelConfig | None = None, vision: Vision | None = None) -> None:
        self.backend, self.name, self.model, self.vision = backend, name, model or ModelConfig(), vision

    @classmethod
    def load(cls, config: ModelConfig) -> Tokenizer:
        """Slow: call in a thread."""
        from transformers import AutoTokenizer

        name = config.tokenizer or config.path
        if Path(name).is_absolute() and not Path(name).exists():
            raise ConfigError(f"{name} does not exist", "set model.path or model.tokenizer")
        try:
            backend = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError, ImportError) as error:
            hint = "set model.path or model.tokenizer to a directory or a hub name"
            reason = str(error).partition("\n")[0]
            raise ConfigError(f"no tokenizer in {name}: {reason}", hint) from error
        if config.chat_template is not None:
            try:
                backend.chat_template = config.chat_template.read_text()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"model.chat_template {config.chat_template} cannot be read: {error}") from error
        return cls(backend, name, config, vision_of(config, backend))

    @property
    def template(self) -> str:
        found = self.backend.chat_template or ""
        return "\n".join(found.values()) if isinstance(found, dict) else str(found)

    def encode(self, texts: Sequence[str], *, special: bool) -> list[Int32Array]:
        """Return the ids of texts; `special`: with the special tokens that the model expects at their start."""
        if not texts:
            return []
        # `verbose` would warn of prompts longer than the model; the data set checks lengths itself, with file and line.
        encoded = self.backend(list(texts), add_special_tokens=special, verbose=False)["input_ids"]
        return [np.asarray(ids, dtype=np.int32) for ids in encoded]

    def plain_ids(self, text: str) -> list[int]:
        return [int(token) for token in self.encode([text], special=False)[0]]

    def decode(self, tokens: npt.ArrayLike, *, special: bool = False) -> str:
        """The text of ids without any tidying of spaces; `special`: with the special tokens."""
        ids = np.asarray(tokens).tolist()
        return str(self.backend.decode(ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False))

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        opened: bool = True,
    ) -> str:
        """A chat after the model's template, which may refuse it; `opened`: with what begins the model's next turn."""
        if not self.backend.chat_template:
            what = f"the tokenizer of {self.name} has no chat template, so it cannot take `messages`"
            raise DataError(what, "give prompts as text (`prompt`), or take a chat model")
        whole = self.with_system(messages)
        if self.vision is not None and self._takes_parts_only:
            whole = [{**message, "content": _in_parts(message.get("content"))} for message in whole]
        return self._written(whole, tools, opened=opened)

    @cached_property
    def _takes_parts_only(self) -> bool:
        """Whether the template finds no text in a content that is no list, as that of SmolVLM."""
        with suppress(DataError):
            return "Zebra" not in self._written([{"role": "user", "content": "Zebra"}], None, opened=True)
        return True

    def _written(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, *, opened: bool
    ) -> str:
        from jinja2 import TemplateError

        try:
            text: str = self.backend.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] if tools else None,
                tokenize=False,
                add_generation_prompt=opened,
                **self.model.template_args,
            )
        except (TemplateError, TypeError, KeyError, ValueError, AttributeError) as error:
            raise DataError(f"the chat template of {self.name} refuses the messages: {error}") from error
        return text

    def with_system(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """The messages, after `model.system_prompt` if they begin with no system message."""
        prompt = self.model.system_prompt
        if prompt is None or (messages and messages[0].get("role") in ("system", "developer")):
            return messages
        return [{"role": "system", "content": prompt}, *messages]


def _in_parts(content: Any) -> Any:
    return [{"type": "text", "text": content or ""}] if content is None or isinstance(content, str) else content


def vocabulary_of(config: ModelConfig) -> int | None:
    """How many token ids the model knows, from its configuration alone; None when that does not say."""
    from transformers import AutoConfig

    try:
        described = AutoConfig.from_pretrained(config.path).get_text_config()
    except (OSError, ValueError, KeyError, ImportError):
        return None
    size = getattr(described, "vocab_size", None)
    return size if isinstance(size, int) else None
