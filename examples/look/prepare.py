"""Make what the look demo starts from, in `cache/` beside this file, once; `--force` makes it again.

The model is a Qwen2-VL of 0.34M parameters, whose rotary positions tell apart what is a square away.
"""

import sys
from pathlib import Path

import look_task
import torch
from tokenizers import AddedToken
from transformers import Qwen2Tokenizer, Qwen2VLConfig, Qwen2VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from streamrl.demo import task
from streamrl.demo.prepare import Demo, main, make_tokenizer

HERE = Path(__file__).parent
WIDTH, SPREAD = 64, 0.08


def make_look_tokenizer() -> Qwen2Tokenizer:
    """Characters, and tokens for the turns of a chat and for pictures."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in look_task.MARKS], True)
    tokenizer.chat_template = look_task.TEMPLATE
    return tokenizer


def make_model() -> Qwen2VLForConditionalGeneration:
    ids = {name: look_task.SPECIAL[f"<|{name}|>"] for name in ("image_pad", "video_pad", "vision_start", "vision_end")}
    text = {
        "vocab_size": task.VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 4 * WIDTH,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 128,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 7, 7], "rope_theta": 10.0},
        "initializer_range": SPREAD,
        "pad_token_id": task.PAD,
        "bos_token_id": task.BOS,
        "eos_token_id": task.EOS,
    }
    vision = {"depth": 1, "embed_dim": WIDTH, "hidden_size": WIDTH, "num_heads": 2, "mlp_ratio": 2, "in_chans": 3}
    patches = {"patch_size": look_task.SIDE // 2, "spatial_merge_size": 2, "temporal_patch_size": 2}
    config = Qwen2VLConfig(
        text_config=text,
        vision_config={**vision, **patches, "initializer_range": SPREAD},
        **{f"{name.replace('_pad', '')}_token_id": token for name, token in ids.items()},
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    model = Qwen2VLForConditionalGeneration(config)
    model.generation_config.update(eos_token_id=task.EOS, pad_token_id=task.PAD)
    return model


def make_processor() -> Qwen2VLImageProcessorPil:
    side = look_task.SIDE
    return Qwen2VLImageProcessorPil(size={"shortest_edge": side**2, "longest_edge": 64 * side**2}, patch_size=side // 2)


def loss_of(model: Qwen2VLForConditionalGeneration, lessons: list) -> torch.Tensor:
    """All chats are of one length."""
    tokens, written = torch.tensor([ids for ids, _, _ in lessons]), torch.tensor([marks for _, marks, _ in lessons])
    pictures = [look_task.draw(colours) for _, _, problem in lessons for colours in problem.pictures]
    logits = model(
        input_ids=tokens,
        mm_token_type_ids=(tokens == model.config.image_token_id).int(),
        **make_processor()(pictures, return_tensors="pt"),
    ).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits[written[:, 1:]], tokens[:, 1:][written[:, 1:]], reduction="sum")


LOOK = Demo(
    look_task.problems,
    look_task.lesson,
    1.0,
    make_look_tokenizer,
    HERE / "start.safetensors",
    make_model,
    loss_of,
    make_processor,
)

if __name__ == "__main__":
    sys.exit(main([str(HERE), *sys.argv[1:]], LOOK))
