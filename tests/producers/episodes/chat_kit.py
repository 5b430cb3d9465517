"""Chat templates as models have them, and a tokenizer with their special tokens, made without network."""

from __future__ import annotations

import json
from functools import cache

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from streamrl.producers.tokenizer import Tokenizer

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>")
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

_CALLS = (
    "{%- for call in message.tool_calls or [] %}{{- '\\n' if message.content or not loop.first }}"
    '{{- \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}{%- endfor %}"
)
_QWEN = (
    "{%- if tools %}{{- '<|im_start|>system\\n<tools>' }}{%- for tool in tools %}{{- '\\n' + tool | tojson }}"
    "{%- endfor %}{{- '\\n</tools><|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- else %}{{- '<|im_start|>' + message.role + '\\n' }}"
    "THINKING{{- message.content }}CALLS{{- '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
_THOUGHT = "{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}"

HERMES = _QWEN.replace("THINKING", "").replace("CALLS", _CALLS)
"""Qwen2.5: no thinking of its own."""
KEEPS_THINKING = _QWEN.replace("THINKING", "{%- if message.reasoning_content %}" + _THOUGHT + "{%- endif %}").replace(
    "CALLS", _CALLS
)
STRIPS_THINKING = (
    "{%- set ns = namespace(asked=0) %}"
    "{%- for message in messages if message.role == 'user' %}{%- set ns.asked = ns.asked + 1 %}{%- endfor %}"
    "{%- set seen = namespace(asked=0) %}"
    + _QWEN.replace(
        "THINKING",
        "{%- if message.role == 'user' %}{%- set seen.asked = seen.asked + 1 %}{%- endif %}"
        "{%- if message.reasoning_content and seen.asked == ns.asked %}" + _THOUGHT + "{%- endif %}",
    ).replace("CALLS", _CALLS)
)
"""Qwen3: what was thought before the last question is left out."""
PYTHON_VALUES = HERMES.replace(
    "{{- call.function.arguments | tojson }}",
    "{{- '{ ' }}{%- for key, value in call.function.arguments | items %}"
    "{{- '\"' + key + '\": ' }}"
    "{{- value if value is not string or value in ['false', 'true', 'null'] else value | tojson }}"
    "{{- '' if loop.last else ', ' }}{%- endfor %}{{- '}' }}",
)
"""Writes values as Python does, so that `false` becomes `False`."""
DROPS_THINKING = _QWEN.replace("THINKING", "").replace(
    "message.content }}CALLS", "message.content.split('</think>')[-1] }}"
)
"""DeepSeek-R1: what was thought is never written again."""
NO_CALLS = _QWEN.replace("THINKING", "").replace("CALLS", "")
LLAMA = (
    "{%- for message in messages %}"
    "{{- '<|start_header_id|>' + ('ipython' if message.role == 'tool' else message.role) + '<|end_header_id|>\\n\\n' }}"
    "{%- if message.tool_calls %}{%- set call = message.tool_calls[0].function %}"
    "{{- '{\"name\": \"' + call.name + '\", ' }}{{- '\"parameters\": ' }}{{- call.arguments | tojson }}{{- '}' }}"
    "{%- else %}{{- message.content | trim }}{%- endif %}{{- '<|eot_id|>' }}{%- endfor %}"
    '{# Respond in the format {"name": function name, "parameters": dictionary of argument name #}'
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)

PLAIN = (
    '{% if tools %}tools:{{ tools | tojson }}{{ "\\n" }}{% endif %}'
    "{% for message in messages %}{{ message.role }}:{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}"
    '{% if message.role == "assistant" %}{{ eos_token }}{% endif %}{{ "\\n" }}{% endfor %}'
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""`ROLE:CONTENT`, a line each, calls in the format `hermes`, the end of sequence after a turn of the policy."""

LOOK_UP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string"}, "deep": {"type": "boolean"}},
        },
    },
}


@cache
def _trained() -> str:
    """Byte pairs learnt from a few words, as JSON: most texts have several tokenizations."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    words = [
        "the zebra eats grass and the lion looks at the zebra",
        '{"name": "look_up", "arguments": {"deep": false}}',
    ]
    backend.train_from_iterator(words * 20, trainer)
    backend.add_special_tokens(list(SPECIAL))
    backend.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    return str(backend.to_str())


def make_tokenizer(template: str | None, name: str = "tiny", eos: str = "<|endoftext|>") -> Tokenizer:
    backend = PreTrainedTokenizerFast(
        tokenizer_object=Backend.from_str(_trained()), eos_token=eos, additional_special_tokens=list(SPECIAL)
    )
    backend.chat_template = template
    backend.name_or_path = name
    return Tokenizer(backend, name)


def make_sentence_tokenizer(template: str) -> Tokenizer:
    """As of SentencePiece: a text begins with a space that is not there."""
    alphabet = {chr(code): code for code in range(32, 127)} | {"\n": 10, "▁": 0}
    backend = Backend(models.BPE(vocab=alphabet | {"▁u": 1, "▁x": 2}, merges=[("▁", "u"), ("▁", "x")]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    backend.add_special_tokens(["</s>", "<|im_start|>", "<|im_end|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    fast.chat_template = template
    return Tokenizer(fast, "sentences")


def asked(text: str = "what does the zebra eat?") -> dict[str, object]:
    return {"role": "user", "content": text}


def answered(text: str, call: str = "call_0") -> dict[str, object]:
    return {"role": "tool", "tool_call_id": call, "content": text}


def called(*arguments: dict[str, object], content: str = "", reasoning: str = "") -> dict[str, object]:
    calls = [
        {"id": f"call_{n}", "type": "function", "function": {"name": "look_up", "arguments": json.dumps(each)}}
        for n, each in enumerate(arguments)
    ]
    message: dict[str, object] = {"role": "assistant", "content": content, "tool_calls": calls}
    return message | ({"reasoning_content": reasoning} if reasoning else {})
