"""A tiny reward model with random weights that any server loads, and the forward pass of transformers as its judge."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from streamrl.producers import tiny

CONTEXT = 512
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{{ eos_token }}{% endfor %}"


def make_critic(folder: Path, seed: int = 0, labels: int = 1) -> Path:
    """Write configuration, weights in float32, tokenizer (one token per byte) and chat template into `folder`.

    A Llama: SGLang gives the head of a Qwen a bias that no checkpoint has, drawn at random by each server. Heads of 32
    values: vLLM on a CPU takes no smaller ones.
    """
    import transformers

    tiny.make_model(folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    config = transformers.LlamaConfig(
        vocab_size=tiny.VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        num_labels=labels,
        pad_token_id=tiny.PAD,
        bos_token_id=tiny.BOS,
        eos_token_id=tiny.EOS,
    )
    torch.manual_seed(seed)
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if not name.endswith("norm.weight"):  # far enough apart that scores differ by much more than rounding
                tensor.normal_(0.0, 0.1)
    model.save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


class Judge:
    """The same model by transformers alone."""

    def __init__(self, folder: Path) -> None:
        import transformers

        self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
        self._model: Any = transformers.AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=torch.float32
        ).eval()

    def score(self, prompt: str, response: str) -> float:
        """The number of a response to a prompt, of a model with one."""
        (number,) = self.numbers(prompt, response)
        return number

    @torch.no_grad()
    def numbers(self, prompt: str, response: str) -> list[float]:
        """The numbers of a response to a prompt, each as a turn of the model's own chat template."""
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
        text = self._tokenizer.apply_chat_template(turns, tokenize=False)
        ids: Sequence[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        numbers: list[float] = self._model(input_ids=torch.tensor([ids])).logits[0].tolist()
        return numbers
