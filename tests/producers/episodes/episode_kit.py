"""A model that calls tools, an engine that says what it is told, and a configuration for both."""

from __future__ import annotations

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from streamrl.config import RunConfig
from streamrl.engine import Completion, EngineLoad
from streamrl.producers.episodes.known_models import renderer_of
from streamrl.producers.sampler import SampleOrder
from streamrl.wire import Prompt, pack_int32

from .chat_kit import HERMES, make_tokenizer

ADD = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
WRONG = '{"name": "add", "arguments": {"a": "x", "b": 2}}'
ABSENT = '{"name": "ad", "arguments": {}}'
BROKEN = '{"name": "add", "arguments": {"a": 1'
DONE = "it is three"


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


def save_talker(folder, calls=(ADD, WRONG, ABSENT, BROKEN), *, ends=True):
    """A model that answers at random: half of its replies are `DONE` (if it `ends`), the others one of `calls`."""
    backend = make_tokenizer(HERMES, eos="<|im_end|>").backend
    backend.add_tokens([*calls, DONE])
    backend.save_pretrained(folder)
    size = 512
    id_of = backend.convert_tokens_to_ids
    config = Qwen2Config(
        vocab_size=size,
        hidden_size=size,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=id_of("<|im_end|>"),
        pad_token_id=id_of("<|endoftext|>"),
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    following = {
        backend("\n", add_special_tokens=False)["input_ids"][-1]: ["<tool_call>", DONE] if ends else ["<tool_call>"],
        id_of("<tool_call>"): list(calls),
        **{id_of(call): ["</tool_call>"] for call in calls},
        id_of("</tool_call>"): ["<|im_end|>"],
        id_of(DONE): ["<|im_end|>"],
    }
    with torch.no_grad():  # what is said depends on the last token alone
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        for before, after in following.items():
            model.lm_head.weight[[id_of(word) for word in after], before] = 16 / size**0.5
    model.save_pretrained(folder)
    return folder


class Script:
    """An engine that says texts in turn; `None` breaks off, an exception is raised, bytes are cut by the limit.

    It says that half of each prompt was cached.
    """

    end = "<|im_end|>"

    def __init__(self, tokenizer, texts, version=1):
        self.tokenizer = tokenizer
        self.texts = list(texts)
        self.version = version
        self.requests = []

    def load(self):
        return EngineLoad(0, 0, 0, 0.0, self.version)

    async def generate(self, request):
        self.requests.append(request)
        text = self.texts.pop(0)
        if isinstance(text, Exception):
            raise text
        ids = np.zeros(0, dtype=np.int32)
        finish = "abort"
        if text is not None:
            cut = isinstance(text, bytes)
            ids = self.ids(text.decode() if cut else f"{text}{self.end}")
            finish = "length" if cut or len(ids) > request.max_new_tokens else "stop"
            ids = ids[: request.max_new_tokens]
        logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32)
        runs = [(0, self.version)] if len(ids) else []
        return Completion(ids, logprobs, runs, finish, 0.01, len(request.tokens) // 2)

    def ids(self, text):
        return np.asarray(self.tokenizer.plain_ids(text), dtype=np.int32)


def call(*calls, text=""):
    return text + "".join(f"<tool_call>\n{one}\n</tool_call>" for one in calls)


def config_of(episode, **sections):
    """A configuration of episodes; `sections` are merged into it."""
    values = {"episode": episode, "model": {"context": 512}, "sampling": {"max_new_tokens": 64, "group_size": 2}}
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return RunConfig.model_validate(values)


def order_of(tokenizer, text="what is 1 + 2?", **fields):
    messages = [{"role": "user", "content": text}]
    ids = renderer_of(tokenizer).render(messages)
    rendered = tokenizer.backend.decode(ids)
    prompt = Prompt(tokens=pack_int32(ids), text=rendered, messages=messages, answer="3", metadata={"level": 1}, line=7)
    return SampleOrder(prompt, id="rollout.0-1", affinity="g0", **fields)
