"""Tiny vision-language models of random weights, with tokenizer, chat template and image processor; and pictures."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

KINDS = ("qwen2_vl", "qwen3_vl", "smolvlm")
MARKS = {
    "qwen2_vl": ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"],
    "smolvlm": ["<fake_token_around_image>", "<global-img>", "<image>"]
    + [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)],
}
ROLES = ["<|user|>", "<|assistant|>", "<|tool|>", "<|system|>", "<|end|>"]
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_vision_model(folder: Path, kind: str, seed: int = 0) -> Path:
    """A model of one of `KINDS` in `folder`; an image of it is some dozen tokens at most."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(kind)
    tokenizer.save_pretrained(folder)
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in tokenizer.get_added_vocab()}
    config = AutoConfig.for_model(kind, **_description(kind, len(tokenizer), ids))
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config)
    model.generation_config.update(eos_token_id=ids["<|end|>"], pad_token_id=ids["<pad>"])
    model.save_pretrained(folder)
    _processor(kind).save_pretrained(folder)
    if kind == "smolvlm":  # servers take the tokens of a tile from here
        about = {"processor_class": "SmolVLMProcessor", "image_seq_len": 4}
        (folder / "processor_config.json").write_text(json.dumps(about))
    return folder


def make_tokenizer(kind: str) -> Any:
    """A token for each byte, and the marks of the model."""
    from tokenizers import AddedToken, pre_tokenizers
    from transformers import Qwen2Tokenizer

    vocabulary = {character: at for at, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    marks = MARKS["smolvlm" if kind == "smolvlm" else "qwen2_vl"]
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[], unk_token=None, pad_token="<pad>", eos_token="<|end|>")
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in [*ROLES, *marks]], True)
    image = "<image>" if kind == "smolvlm" else "<|vision_start|><|image_pad|><|vision_end|>"
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", image)
    return tokenizer


def _description(kind: str, vocabulary: int, ids: dict[str, int]) -> dict[str, Any]:
    text: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 1024,
        "bos_token_id": None,
        "eos_token_id": ids["<|end|>"],
        "pad_token_id": ids["<pad>"],
        "tie_word_embeddings": False,
    }
    if kind == "smolvlm":
        vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        return {
            "text_config": {"model_type": "llama", **text},
            "vision_config": {**vision, "image_size": 32, "patch_size": 8},
            "scale_factor": 2,
            "image_token_id": ids["<image>"],
            "tie_word_embeddings": False,
        }
    described: dict[str, Any] = {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "tie_word_embeddings": False,
    }
    grid = {
        "in_chans": 3,
        "depth": 2,
        "num_heads": 2,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
    }
    if kind == "qwen2_vl":
        rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10_000.0}
        vision = {**grid, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
        return {**described, "text_config": {**text, "rope_parameters": rope}, "vision_config": vision}
    rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "mrope_interleaved": True, "rope_theta": 10_000.0}
    deep = {
        "intermediate_size": 64,
        "out_hidden_size": 64,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    }
    vision = {**grid, "hidden_size": 32, **deep}
    return {**described, "text_config": {**text, "head_dim": 32, "rope_parameters": rope}, "vision_config": vision}


def _processor(kind: str) -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    if kind == "smolvlm":
        return SmolVLMImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    return Qwen2VLImageProcessorPil(size={"shortest_edge": 56 * 56, "longest_edge": 112 * 112})  # as SGLang resizes


def picture(seed: int = 0, width: int = 40, height: int = 32, **options: Any) -> bytes:
    """An encoded picture of random squares; `options` are those of Pillow's `save`, PNG unless they name a `format`."""
    random = np.random.default_rng(seed)
    squares = random.integers(0, 256, (-(-height // 8), -(-width // 8), 3), dtype=np.uint8)
    image = Image.fromarray(squares.repeat(8, 0).repeat(8, 1)[:height, :width])
    written = io.BytesIO()
    image.save(written, **{"format": "PNG", **options})
    return written.getvalue()
