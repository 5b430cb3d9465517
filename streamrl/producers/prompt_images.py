"""The images of the lines of a data set: read, checked, and put into their messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from streamrl.errors import DataError
from streamrl.images.encoded import EncodedImage, accept, from_url, is_shown, url_of
from streamrl.images.store import ImageStore
from streamrl.images.vision import Vision

_KEPT: Final = 16  # of files that several lines in a row may name
_LONGEST_NAME: Final = 200
_HINT: Final = 'name files from the directory of the data file, or write data: URLs: {"images": ["a.png"]}'


class PromptImages:
    """Of a data set; files are named from `folder`. A line has them in `images`, or in its messages as `image_url`.

    `images` are those of the placeholders in the text of `prompt`, or of the parts `{"type": "image"}` of `messages`,
    in this order.
    """

    def __init__(self, folder: Path, vision: Vision | None, store: ImageStore) -> None:
        self._folder, self._vision, self._store = folder, vision, store
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
            raise DataError("`images` must be a list", _HINT)
        shown, left = [], iter(given or [])
        if messages is None:
            shown = [self._image(each) for each in left]
        else:
            messages = [{**message, "content": self._content(message["content"], left, shown)} for message in messages]
            if unused := sum(1 for _ in left):
                raise DataError(f"{unused} of the `images` without a place", 'write {"type": "image"} into a message')
        kept = {key: value for key, value in record.items() if key not in ("images", "messages")}
        return {**kept, **({} if messages is None else {"messages": messages})}, shown

    def keep(self, images: list[EncodedImage]) -> list[bytes]:
        """Keep the large ones, and return the small ones, which travel."""
        return self._store.keep({image.sha256: image.data for image in images}) if images else []

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
                raise DataError("an image that is no text", _HINT)
            if given.startswith("data:") or "://" in given:
                return accept(from_url(given), self._store.limits)
            return self._file(given)
        except DataError as error:
            name = str(given) if len(str(given)) <= _LONGEST_NAME else f"{str(given)[:32]}..."
            raise DataError(f"{error.message}: {name}", error.hint) from error

    def _read(self, name: str) -> EncodedImage:
        try:
            data = (self._folder / name).read_bytes()
        except (OSError, ValueError) as error:
            raise DataError(f"an image that cannot be read: {getattr(error, 'strerror', error)}", _HINT) from error
        return accept(data, self._store.limits)


def _given(part: Mapping[str, Any], left: Iterator[Any]) -> Any:
    if part["type"] == "image_url":
        return url_of(part)
    try:
        return next(left)
    except StopIteration:
        raise DataError("more places for images than `images`", _HINT) from None


def _shows(message: Mapping[str, Any]) -> bool:
    return isinstance(message["content"], list) and any(map(is_shown, message["content"]))
