"""Data sets of a few records, and the prompts of a run that trains them."""

from __future__ import annotations

import sys

import orjson

from streamrl.config import RunConfig
from streamrl.producers.dataset import PromptLimits
from streamrl.producers.order import TrainingPrompts
from streamrl.producers.tokenizer import Tokenizer
from streamrl.wire import Prompt, decode
from tests.producers.test_dataset import make_backend

TOKENIZER = Tokenizer(make_backend(), "tiny")
LIMITS = PromptLimits(max_prompt_tokens=20, context=24)


def write(path, *records):
    path.write_bytes(b"".join((line if isinstance(line, bytes) else orjson.dumps(line)) + b"\n" for line in records))
    return path


def numbered(path, count, letter="p"):
    return write(path, *({"prompt": f"{letter}{number}", "answer": number} for number in range(count)))


def write_module(monkeypatch, folder, name, text):
    """A module of the user in the folder of its run file."""
    (folder / f"{name}.py").write_text(text)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return {"plugin_paths": [folder]}


def open_training(train, *, drop=False, seed=3, top=None, **data):
    config = RunConfig.model_validate({"seed": seed, "data": {"train": train, **data}, **(top or {})})
    return TrainingPrompts(config, TOKENIZER, PromptLimits(20, 24, drop=drop))


def prompts(data, group_ids):
    return [decode(data.prompt(group_id), Prompt) for group_id in group_ids]


def texts(data, group_ids):
    return [prompt.text for prompt in prompts(data, group_ids)]
