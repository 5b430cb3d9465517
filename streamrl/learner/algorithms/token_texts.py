"""The text of single tokens, for estimators of advantages that look for tags in a response."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from streamrl.config import ModelConfig
from streamrl.errors import ConfigError


class TokenTexts:
    """Token ids to text, one by one; a token that is a part of a character has a replacement character.

    Args:
        model: of the policy, as configured.
    """

    def __init__(self, model: ModelConfig) -> None:
        self._name = model.tokenizer or model.path
        self._known: dict[int, str] = {}

    def load(self) -> None:
        """Load the tokenizer, so that one that is missing shows when the run starts.

        Raises:
            ConfigError: there is none.
        """
        _ = self._tokenizer

    def __call__(self, ids: npt.ArrayLike) -> list[str]:
        """Return the text of each token."""
        return [self._text(token) for token in np.asarray(ids).tolist()]

    def _text(self, token: int) -> str:
        text = self._known.get(token)
        if text is None:
            # Tags may be special tokens.
            text = self._known[token] = str(self._tokenizer.decode([token], skip_special_tokens=False))
        return text

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(self._name)
        except (OSError, ValueError, KeyError, ImportError) as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                f"learner.advantage needs the text of tokens, and there is no tokenizer in {self._name}: {reason}",
                "set model.tokenizer, or learner.advantage.args part: joint",
            ) from error
        return tokenizer
