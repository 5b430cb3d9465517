"""Requests with images for engines, and what a plain forward pass makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from streamrl.config import ImagesConfig, ModelConfig
from streamrl.engine import Completion, Request, RequestImage
from streamrl.images.encoded import EncodedImage, accept
from streamrl.producers.tokenizer import Tokenizer
from tests.vision_kit import picture

IMAGES = [
    accept(picture(seed, *size), ImagesConfig()) for seed, size in enumerate([(40, 32), (60, 30), (32, 32), (64, 64)])
]
SHOWN: list[list[int]] = [[0, 1], [1, 0], [], [3], [0, 1], [2], [0, 1, 2, 3]]
"""Places in `IMAGES` of what each request shows."""


class Seeing:
    """A tiny vision-language model on disk, its requests and their judge."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForImageTextToText

        self.tokenizer = Tokenizer.load(ModelConfig(path=str(folder)))
        assert self.tokenizer.vision is not None
        self.vision = self.tokenizer.vision
        self.model = AutoModelForImageTextToText.from_pretrained(folder).eval()

    def request(self, name: str, text: str, images: Sequence[EncodedImage], most: int = 12, **options: Any) -> Request:
        content = [{"type": "text", "text": text}, *({"type": "image"} for _ in images)]
        sizes = [(image.width, image.height) for image in images]
        chat = self.tokenizer.chat_text([{"role": "user", "content": content}])
        ids = np.asarray(self.tokenizer.plain_ids(self.vision.expand(chat, sizes)), dtype=np.int32)
        return self.with_images(Request(name, ids, most, forbidden=self.vision.forbidden, **options), images)

    def with_images(self, request: Request, images: Sequence[EncodedImage]) -> Request:
        from dataclasses import replace

        spans = self.vision.spans(request.tokens.tolist(), [(image.width, image.height) for image in images])
        shown = [
            RequestImage(image.sha256, image.data, begin, count, self.vision.token_id)
            for image, (begin, count) in zip(images, spans, strict=True)
        ]
        return replace(request, images=tuple(shown))

    def requests(self, **options: Any) -> list[Request]:
        return [
            self.request(str(number), "q" * (1 + number % 3), [IMAGES[place] for place in places], **options)
            for number, places in enumerate(SHOWN)
        ]

    def worst_error(self, requests: Sequence[Request], done: Sequence[Completion]) -> float:
        """The largest error of a log-probability, against a forward pass that finds the positions itself."""
        return max(self.error(request, each) for request, each in zip(requests, done, strict=True))

    def error(self, request: Request, done: Completion) -> float:
        logprobs = self.logprobs(request, done)
        return float((logprobs - torch.from_numpy(done.logprobs)).abs().max())

    def logprobs(self, request: Request, done: Completion) -> torch.Tensor:
        row = torch.tensor([[*request.tokens.tolist(), *done.tokens.tolist()]])
        shown: dict[str, Any] = {}
        if request.images:
            pixels = self.vision.joined([self.vision.pixels(image.sha256, image.data) for image in request.images])
            shown = {key: torch.from_numpy(array) for key, array in pixels.items()}
            if self.vision.axes > 1:
                shown["mm_token_type_ids"] = (row == self.vision.token_id).int()
        with torch.no_grad():
            logits = self.model(input_ids=row, **shown).logits[0].float()
        logits[:, list(self.vision.forbidden)] = -torch.inf
        places = slice(len(request.tokens) - 1, -1)
        return torch.log_softmax(logits, -1)[places].gather(1, torch.tensor(done.tokens).long()[:, None])[:, 0]
