"""The images of one sample: those of its prompt, and what tools, environments and agents show.

From outside come parts of OpenAI, `image_url` with a `data:` URL. Inside there is one form, `EncodedImage.part`: so
messages, records and digests stay small. The bytes are kept here, by their hash.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from streamrl.config import RunConfig
from streamrl.engine import RequestImage
from streamrl.errors import DataError
from streamrl.images.encoded import (
    EncodedImage,
    accept,
    data_url,
    from_url,
    image_parts,
    images_of,
    is_shown,
    known,
    url_of,
)
from streamrl.images.store import ImageStore
from streamrl.images.vision import Vision
from streamrl.wire import Int32Array, Prompt

_HINT: Final = "take a vision-language model for model.path, or leave the images out"


class SampleImages:
    def __init__(self, config: RunConfig, prompt: Prompt, vision: Vision | None, store: ImageStore | None) -> None:
        self._prompt, self._vision, self._store = prompt, vision, store or ImageStore.nowhere(config.images)
        self._known: dict[str, EncodedImage] = {}
        self._urls: dict[str, EncodedImage] = {}
        self._decoding = asyncio.Lock()

    @property
    def sees(self) -> bool:
        return self._vision is not None

    async def open(self) -> None:
        """Fetch the images of the prompt. `DataError`: one is missing, or another processor counted their tokens."""
        prompt = self._prompt
        if self._vision is None:
            if prompt.images:
                raise DataError("a prompt with images, and the model takes text alone", _HINT)
            return
        if prompt.processor not in ("", self._vision.fingerprint):
            what = f"the images of this run were counted by the image processor {prompt.processor}"
            hint = "give all hosts the same model.path and model.image_processor, and the same version of transformers"
            raise DataError(f"{what}, this worker has {self._vision.fingerprint}", hint)
        await self.fetch(prompt.images, prompt.blobs)

    async def fetch(self, names: Collection[str], travelled: Iterable[bytes]) -> None:
        if missing := [name for name in names if name not in self._known]:
            found = await asyncio.to_thread(self._store.read, missing, travelled)
            self._known |= {name: known(name, data) for name, data in found.items()}

    async def canonical(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages with all images in the form of inside. `DataError`: one cannot be used."""
        return [
            {**message, "content": [await self._canonical(part) for part in message["content"]]}
            if isinstance(message.get("content"), list) and any(map(is_shown, message["content"]))
            else message
            for message in messages
        ]

    def outside(self, messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages with all images as parts of OpenAI, for programs that read them elsewhere."""
        return [
            {**message, "content": [self._outside(part) for part in message["content"]]}
            if images_of([message])
            else {**message}
            for message in messages
        ]

    def of_request(self, ids: Int32Array, names: Iterable[str]) -> dict[str, Any]:
        """What `engine.Request` has of the images in its tokens. `DataError`: not these images are there."""
        vision = self._vision
        if vision is None:
            return {}
        shown = [self._known[name] for name in names]
        spans = vision.spans(ids.tolist(), [(image.width, image.height) for image in shown]) if shown else []
        images = (
            RequestImage(image.sha256, image.data, begin, count, vision.token_id)
            for image, (begin, count) in zip(shown, spans, strict=True)
        )
        return {"images": tuple(images), "forbidden": vision.forbidden}

    def travelling(self, names: Iterable[str]) -> list[bytes]:
        """The bytes of the small ones among these images, each once."""
        found = (self._known[name].data for name in dict.fromkeys(names))
        return [data for data in found if len(data) <= self._store.limits.inline]

    async def _canonical(self, part: Any) -> Any:
        if not is_shown(part):
            return part
        if self._vision is None:
            raise DataError(f"a message has a part of type {part['type']!r}, this model takes text", _HINT)
        if part["type"] == "image":
            if part.get("sha256") not in self._known:
                raise DataError("an image that this sample does not have", "show it as image_url, with a data: URL")
            return self._known[part["sha256"]].part
        url = str(url_of(part))
        async with self._decoding:  # an agent repeats all images in each call: each is decoded once
            if url not in self._urls:
                image = self._urls[url] = await asyncio.to_thread(self._accept, url)
                self._known[image.sha256] = image
        return self._urls[url].part

    def _accept(self, url: str) -> EncodedImage:
        image = accept(from_url(url), self._store.limits)
        self._store.keep({image.sha256: image.data})
        return image

    def _outside(self, part: Any) -> Any:
        if not any(image_parts([part])):
            return part
        return {"type": "image_url", "image_url": {"url": data_url(self._known[part["sha256"]].data)}}
