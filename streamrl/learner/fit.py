"""Whether a second model (critic, reference) can read what the policy reads: the same token ids, as long sequences."""

from __future__ import annotations

import logging
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from streamrl.config import ModelConfig
from streamrl.errors import ConfigError
from streamrl.learner.sharded_module import ShardedModule

logger = logging.getLogger(__name__)
_PROBE = "Two plus 34 is thirty-six; naïve?"


def check_fit(key: str, path: str, module: ShardedModule, actor: ShardedModule, model: ModelConfig) -> None:
    """Refuse a second model that takes shorter sequences, fewer token ids or other ones than the policy.

    Args:
        key: of the configuration, that names the second model.
        path: of the second model.
        module: the second model.
        actor: the policy.
        model: of the policy, as configured.

    Raises:
        ConfigError: it does not fit.
    """
    if module.limits.longest < actor.limits.longest:
        raise ConfigError(
            f"{key} {path} takes {module.limits.longest} tokens, the policy {actor.limits.longest}",
            f"lower model.context to {module.limits.longest}, or name a model that takes longer sequences",
        )
    if module.vocabulary < actor.vocabulary:
        raise ConfigError(
            f"{key} {path} knows {module.vocabulary} tokens, the policy {actor.vocabulary}",
            "name a model with the tokenizer of model.path",
        )
    if path == model.path:
        return
    ours, theirs = _tokenizer(model.tokenizer or model.path), _tokenizer(path)
    if ours is not None and theirs is not None and _ids(ours) != _ids(theirs):
        raise ConfigError(
            f"{key} {path} has another tokenizer than the policy: the same ids would be other words to it",
            "name a model with the tokenizer of model.path",
        )


def _tokenizer(path: str) -> PreTrainedTokenizerBase | None:
    folder = Path(path)
    if folder.is_dir() and not [*folder.glob("tokenizer*"), *folder.glob("vocab*")]:
        # transformers would make up an empty one.
        logger.info("tokenizers not compared", extra={"path": path, "reason": "it has none"})
        return None
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        logger.info("tokenizers not compared", extra={"path": path, "reason": str(error)})
        return None
    return tokenizer


def _ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    ids: list[int] = tokenizer.encode(_PROBE, add_special_tokens=False)
    return ids
