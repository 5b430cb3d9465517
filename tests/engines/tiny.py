"""A tiny model with random weights that any engine loads, and the forward pass of transformers to compare with.

It samples for ever, whatever its weights, and ends at once after the token `STOP`. So no check depends on when a
response happened to end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file

from streamrl.engine import Completion
from streamrl.weight_sync.tensors import Version

VOCABULARY: Final = 320
CONTEXT: Final = 16384
"""A response of this length takes longer than anything that is done while it is generated."""
PAD, BOS, EOS, STOP = 0, 1, 2, 5
FIRST_PLAIN: Final = 8
"""Tokens from here on mean nothing in particular: prompts are drawn of them."""

_HIDDEN, _LAYERS, _HEADS, _KV_HEADS = 128, 2, 4, 2
_SPREAD, _EMBEDDED = 0.08, 0.03  # logits stay small: rounded to bfloat16 they are off by less than 0.01
_FILE: Final = "model.safetensors"


def make_model(folder: Path, seed: int = 0) -> None:
    """Write configuration, weights in bfloat16 and tokenizer (one token per byte) into `folder`."""
    from tokenizers import pre_tokenizers
    from transformers import Qwen2Tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    model = _skeleton().to(torch.bfloat16)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    save_file(random_weights(seed), folder / _FILE, metadata={"format": "pt"})
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": PAD, "<bos>": BOS, "<eos>": EOS}
    vocabulary |= {character: len(vocabulary) + number for number, character in enumerate(alphabet)}
    special = dict.fromkeys(("pad_token", "bos_token", "eos_token"))
    special.update(zip(special, vocabulary, strict=False))
    Qwen2Tokenizer(vocab=vocabulary, merges=[], unk_token=None, **special).save_pretrained(folder)


def random_weights(seed: int) -> dict[str, torch.Tensor]:
    """Fresh weights in bfloat16 by their Hugging Face names; the head is tied to the embeddings and has no name.

    The first position of the hidden state is set: positive after every token, which makes `EOS` and `STOP` as good as
    impossible, and negative after `STOP`, which makes `EOS` as good as certain.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, tensor in _skeleton().state_dict().items():
        if name == "lm_head.weight":
            continue
        if name.endswith("norm.weight"):
            weights[name] = torch.ones(tensor.shape, dtype=torch.bfloat16)
            continue
        spread = _EMBEDDED if "embed" in name else _SPREAD
        value = spread * torch.randn(tensor.shape, generator=generator)
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            value *= 0.25
            value[0] = 0.0
        weights[name] = value.to(torch.bfloat16)
    embeddings = weights["model.embed_tokens.weight"]
    embeddings[:, 0], embeddings[EOS, 0], embeddings[STOP, 0] = 0.3, -30.0, -15.0
    return weights


def build(weights: dict[str, torch.Tensor]) -> Any:
    model = _skeleton().float()
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    return model.eval()


def make_version(folder: Path, number: int, weights: dict[str, torch.Tensor], epoch: int = 1) -> Version:
    place = folder / f"v-{epoch}-{number}"
    place.mkdir(parents=True, exist_ok=True)
    save_file(weights, place / _FILE)
    return Version((epoch, number), number, load_file(place / _FILE), place, (_FILE,))


@torch.no_grad()
def judged_logprobs(models: Mapping[int, Any], prompt: Sequence[int], completion: Completion) -> torch.Tensor:
    """Log-probabilities of a completion's tokens by transformers alone, shape (tokens,), float32, temperature 1.

    Each token is computed by the model of its version, on keys and values as they grew: those of earlier tokens stay as
    the version of their time computed them.
    """
    from transformers import DynamicCache

    tokens = [*map(int, prompt), *completion.tokens.tolist()]
    ends = [first for first, _ in completion.runs[1:]] + [len(completion.tokens)]
    cache, fed, found = DynamicCache(), 0, []
    for (first, version), end in zip(completion.runs, ends, strict=True):
        upto = len(prompt) + end - 1
        logits = models[version](input_ids=torch.tensor([tokens[fed:upto]]), past_key_values=cache).logits[0]
        logprobs = torch.log_softmax(logits[first - end :].float(), -1)
        wanted = torch.tensor(tokens[len(prompt) + first : len(prompt) + end])
        found.append(logprobs.gather(1, wanted[:, None])[:, 0])
        fed = upto
    return torch.cat(found)


def worst_error(models: Mapping[int, Any], prompt: Sequence[int], completion: Completion) -> float:
    found = judged_logprobs(models, prompt, completion)
    return float((found - torch.from_numpy(completion.logprobs.copy())).abs().max())


def _skeleton() -> Any:
    import transformers

    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=_HIDDEN,
        intermediate_size=2 * _HIDDEN,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS,
        num_key_value_heads=_KV_HEADS,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
