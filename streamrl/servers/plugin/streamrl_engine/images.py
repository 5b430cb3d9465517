"""Servers read images as the learner does: with Pillow, and the settings that the run has for the image processor."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

VARIABLE = "STREAMRL_IMAGE_PROCESSOR"
"""Has those settings and the `path` of the model, for one that sees."""


def prefer_pillow() -> None:
    """In a process of vLLM, which is told the settings by a flag: torchvision rounds pixels another way."""
    if VARIABLE not in os.environ:
        return
    from transformers.models.auto import image_processing_auto

    resolve = image_processing_auto._resolve_backend  # noqa: SLF001  (there is no public one)
    image_processing_auto._resolve_backend = lambda backend, _, base: resolve(backend or "pil", None, base)  # noqa: SLF001


def same_processor(processor: Any, *_args: Any, **_named: Any) -> Any:
    """Of SGLang, which has sizes of its own for some models, and does not count tokens by the settings in its flags."""
    if hasattr(processor, "image_processor"):
        from transformers import AutoImageProcessor

        settings = json.loads(os.environ[VARIABLE])
        processor.image_processor = AutoImageProcessor.from_pretrained(settings.pop("path"), backend="pil", **settings)
        processor.tokenizer.init_kwargs.pop("size", None)  # where SGLang's own sizes have got, and would count
    return processor


async def by_tokens(original: Callable[..., Any], processor: Any, **named: Any) -> Any:
    """Let SGLang find the images by their tokens: it looks in a text of them, where "<image>" is one, too."""
    prompt = named["prompt"]
    if not isinstance(prompt, list):
        return await original(processor, **named)
    known = processor.mm_tokens
    named["prompt"] = known.image_token * prompt.count(known.image_token_id)
    output = await original(processor, **named)
    output.input_ids = prompt
    return output
