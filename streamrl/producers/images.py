"""Images on their way in: those of the lines of a data set, and what tools, environments and agents show a sample.

From outside come files and parts of OpenAI, `image_url` with a `data:` URL. Inside there is one form,
`EncodedImage.part`: so messages, records and digests stay small. The bytes are kept here, by their hash.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

from streamrl.config import RunConfig
from streamrl.engine import RequestImage
from streamrl.errors import DataError, RetryLater
from streamrl.images.encoded import (
    EncodedImage,
    accept,
    data_url,
    from_url,
    images_of,
    is_image,
    is_shown,
    known,
    url_of,
)
from streamrl.images.store import ImageStore
from streamrl.images.vision import Vision
from streamrl.wire import Int32Array, Prompt

_PAUSE: Final = 1.0  # before a lease goes back
_Found = TypeVar("_Found")
_HINT: Final = "take a vision-language model for model.path, or leave the images out"
_KEPT: Final = 16  # of files that several lines in a row may name
_FILES: Final = 'name files from the directory of the data file, or write data: URLs: {"images": ["a.png"]}'


class PromptImages:
    """Of a data set; files are named from `folder`. A line has them in `images`, or in its messages as `image_url`.

    `images` are those of the placeholders in the text of `prompt`, or of the parts `{"type": "image"}` of `messages`,
    in this order.
    """

    def __init__(self, folder: Path, vision: Vision | None, store: ImageStore) -> None:
        self._folder, self._vision, self.store = folder, vision, store
        self._file = lru_cache(_KEPT)(self._read)

    def of(self, record: dict[str, Any]) -> tuple[dict[str, Any], list[EncodedImage]]:
        """The line with its images as they are inside, and these in the order in which they stand in its tokens.

        `DataError`: one cannot be used, they do not fit the line, or the model takes text alone.
        """
        messages, given = record.get("messages"), record.get("images")
        if not given and not any(map(_shows, messages or ())):
            return record, []
        if self._vision is None:
            raise DataError("images, and the model takes text alone", "set model.path to a vision-language model")
        if not isinstance(given or [], list):
            raise DataError("`images` must be a list", _FILES)
        shown, left = [], iter(given or [])
        if messages is None:
            shown = [self._image(each) for each in left]
        else:
            messages = [{**message, "content": self._content(message["content"], left, shown)} for message in messages]
            if unused := sum(1 for _ in left):
                raise DataError(f"{unused} of the `images` without a place", 'write {"type": "image"} into a message')
        kept = {key: value for key, value in record.items() if key not in ("images", "messages")}
        return {**kept, **({} if messages is None else {"messages": messages})}, shown

    def _content(self, content: Any, left: Iterator[Any], shown: list[EncodedImage]) -> Any:
        if not isinstance(content, list):
            return content
        parts = []
        for part in content:
            if is_shown(part):
                shown.append(self._image(_given(part, left)))
            parts.append(shown[-1].part if is_shown(part) else part)
        return parts

    def _image(self, given: object) -> EncodedImage:
        """From a path or a `data:` URL."""
        try:
            if not isinstance(given, str) or not given:
                raise DataError("an image that is no text", _FILES)
            if given.startswith("data:") or "://" in given:
                return accept(from_url(given), self.store.limits)
            return self._file(given)
        except DataError as error:
            raise DataError(f"{error.message}: {str(given)[:200]}", error.hint) from error

    def _read(self, name: str) -> EncodedImage:
        try:
            with (self._folder / name).open("rb") as file:
                data = file.read(self.store.limits.largest + 1)
        except (OSError, ValueError) as error:
            raise DataError(f"an image that cannot be read: {getattr(error, 'strerror', error)}", _FILES) from error
        return accept(data, self.store.limits)


def _given(part: Mapping[str, Any], left: Iterator[Any]) -> Any:
    if part["type"] == "image_url":
        return url_of(part)
    try:
        return next(left)
    except StopIteration:
        raise DataError("more places for images than `images`", _FILES) from None


def _shows(message: Mapping[str, Any]) -> bool:
    return isinstance(message.get("content"), list) and any(map(is_shown, message["content"]))


class SampleImages:
    def __init__(self, config: RunConfig, prompt: Prompt, vision: Vision | None, store: ImageStore | None) -> None:
        self._prompt, self._vision, self._store = prompt, vision, store or ImageStore(config.images)
        self.sees = vision is not None
        self._known: dict[str, EncodedImage] = {}
        self._urls: dict[str, EncodedImage] = {}
        self._decoding = asyncio.Lock()

    async def open(self) -> None:
        """Fetch those of the prompt. `DataError`: one is missing; `RetryLater`: no store, or another processor."""
        prompt = self._prompt
        if self._vision is None:
            if prompt.images:
                raise DataError("a prompt with images, and the model takes text alone", _HINT)
            return
        if prompt.processor not in ("", self._vision.fingerprint):
            ours = f"this worker has {self._vision.fingerprint}: install the same transformers on all hosts"
            await self._later(f"the images were counted by the image processor {prompt.processor}, {ours}")
        await self.fetch(prompt.images, prompt.blobs)

    async def fetch(self, names: Collection[str], travelled: Iterable[bytes]) -> None:
        if missing := [name for name in names if name not in self._known]:
            found = await self._stored(self._store.read, missing, travelled)
            self._known |= {name: known(name, data) for name, data in found.items()}

    async def canonical(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages with all images in the form of inside. `DataError`: one cannot be used."""
        return [
            {**message, "content": [await self._canonical(part) for part in message["content"]]}
            if _shows(message)
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
        spans = vision.spans(ids.tolist(), [image.size for image in shown]) if shown else []
        images = (
            RequestImage(image.sha256, image.data, begin, count, vision.token_id)
            for image, (begin, count) in zip(shown, spans, strict=True)
        )
        return {"images": tuple(images), "forbidden": vision.forbidden}

    def travelling(self, names: Iterable[str]) -> list[bytes]:
        """The bytes of the small ones among these images, each once."""
        return list(filter(self._store.travels, (self._known[name].data for name in dict.fromkeys(names))))

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
                image = self._urls[url] = await self._stored(self._accept, url)
                self._known[image.sha256] = image
        return self._urls[url].part

    def _accept(self, url: str) -> EncodedImage:
        image = accept(from_url(url), self._store.limits)
        self._store.keep({image.sha256: image.data})
        return image

    async def _stored(self, call: Callable[..., _Found], *args: Any) -> _Found:
        try:
            return await asyncio.to_thread(call, *args)
        except OSError as error:
            return await self._later(f"the store of images is away or full: {error}")

    async def _later(self, why: str) -> NoReturn:
        await asyncio.sleep(_PAUSE)  # this process may have it again at once
        raise RetryLater(why)

    def _outside(self, part: Any) -> Any:
        if not is_image(part):
            return part
        image = self._known[part["sha256"]]
        url = data_url(image.data)
        self._urls[url] = image  # an agent sends it back
        return {"type": "image_url", "image_url": {"url": url}}
