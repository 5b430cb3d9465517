"""Samples with images for the tests of the learner, and what plain transformers makes of each of their branches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

from streamrl import wire
from streamrl.config import ImagesConfig, ModelConfig, RunConfig
from streamrl.images.encoded import EncodedImage, accept
from streamrl.images.vision import Vision, vision_of
from streamrl.learner.batch import TrainSample
from streamrl.learner.tree import Tree, spans
from streamrl.wire import NOTHING, PROMPT
from tests.vision_kit import picture

IMAGES = [accept(picture(seed, *size), ImagesConfig()) for seed, size in enumerate([(40, 32), (60, 30), (32, 32)])]
TEXT = 256  # ids below are plain bytes in the tokenizers of `vision_kit`


def vision_config(model: Path, *, ranks: int = 1, attention: str = "sdpa", **learner: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": str(model), "context": 512, "attention": attention},
            "learner": {"lr": 1e-2, "threads": 1, "ranks": ranks, "collective_deadline": 90, **learner},
            "engine": {"kind": "vllm"},
        }
    )


class Samples:
    """Samples of one model; `names` are indices of `IMAGES`."""

    def __init__(self, model: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        found = vision_of(ModelConfig(path=str(model)), self.tokenizer)
        assert found is not None
        self.vision: Vision = found
        self.random = np.random.default_rng(0)

    def ids(self, text: str, shown: Sequence[int] = ()) -> np.ndarray[Any, Any]:
        content = [{"type": "text", "text": text}, *[{"type": "image"} for _ in shown]]
        chat = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        whole = self.vision.expand(chat, [IMAGES[number].size for number in shown])
        return np.asarray(self.tokenizer(whole, add_special_tokens=False)["input_ids"], dtype=np.int32)

    def sample(self, group: int, text: str, shown: Sequence[int], count: int, tree: Tree | None = None) -> TrainSample:
        """A response of random tokens to a prompt that shows these images."""
        images: list[EncodedImage] = [IMAGES[number] for number in shown]
        media = [name for names in (tree.media if tree else ()) for name in names]
        images += [image for image in IMAGES if image.sha256 in media]
        return TrainSample(
            group_id=group,
            prompt=self.ids(text, shown),
            tokens=self.random.integers(0, TEXT, count).astype(np.int32),
            logprobs=self.random.normal(-5.6, 0.1, count).astype(np.float32),
            steps=np.zeros(count, dtype=np.int64),
            reward=0.0,
            advantages=self.random.normal(size=count).astype(np.float32),
            tree=tree,
            images=tuple(IMAGES[number].sha256 for number in shown),
            blobs={image.sha256: image.data for image in images},
        )

    def tree(self) -> Tree:
        """A tool shows an image, two answers to it, and a branch with a prompt of its own that shows another."""
        shown, other, none = self.ids("t", [1]), self.ids("own", [2, 0]), np.zeros(0, dtype=np.int32)
        return Tree(
            parents=(PROMPT, 0, 1, 1, NOTHING, 4),
            sampled=(4, 0, 3, 2, 0, 5),
            observed=(none, shown, none, none, other, none),
            rewards=(0.0,) * 6,
            media=((), (IMAGES[1].sha256,), (), (), (IMAGES[2].sha256, IMAGES[0].sha256), ()),
        )

    def batch(self) -> list[TrainSample]:
        """Shared prompts with images, a group of text alone, one image, and an episode whose tool shows one."""
        prompt = self.sample(0, "q", [0, 1], 7)
        return [
            prompt,
            replace(self.sample(0, "q", [0, 1], 9), prompt=prompt.prompt),
            replace(self.sample(0, "q", [0, 1], 3), prompt=prompt.prompt),
            self.sample(1, "text alone", [], 6),
            self.sample(1, "text alone", [], 4),
            self.sample(2, "one", [2], 5),
            self.sample(3, "ep", [0], 14, self.tree()),
        ]

    def plain(self, model: Any, sample: TrainSample) -> torch.Tensor:
        """Log-probabilities, each branch alone in a pass of transformers, placeholders left out."""
        found = torch.zeros(len(sample.tokens))
        for span, names in zip(spans(sample.tree, sample.prompt, sample.tokens), branch_images(sample), strict=True):
            ids = torch.from_numpy(span.ids).long()[None]
            shown = [self.vision.pixels(name, sample.blobs[name]) for name in names]
            options = (
                {key: torch.from_numpy(array) for key, array in self.vision.joined(shown).items()} if shown else {}
            )
            if shown and self.vision.axes > 1:
                options["mm_token_type_ids"] = (ids == self.vision.token_id).int()
            logits = model(input_ids=ids, **options).logits[0].float()
            logits = logits.index_fill(-1, torch.tensor(self.vision.forbidden), -torch.inf)
            at = torch.from_numpy(span.at)
            chosen = torch.log_softmax(logits, dim=-1)[at - 1, ids[0, at]]
            found = found.index_put((torch.from_numpy(span.targets),), chosen)
        return found


def branch_images(sample: TrainSample) -> list[list[str]]:
    if sample.tree is None:
        return [list(sample.images)]
    found = []
    for branch in sample.tree.branches:
        own = [] if branch.own_prompt else list(sample.images)
        found.append([*own, *(name for turn in branch.turns for name in sample.tree.media[turn])])
    return found


def plain_model(path: Path, attention: str = "sdpa") -> Any:
    return AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32, attn_implementation=attention).eval()


def wired(sample: TrainSample, **values: Any) -> wire.Sample:
    """As it comes over the wire, all images small."""
    return wire.Sample(
        tokens=wire.pack_int32(sample.tokens),
        logprobs=wire.pack_float32(sample.logprobs),
        runs=[(0, 3)],
        finish="stop",
        **values,
    )
