"""Encoded images from outside: what is accepted, and the one form in which they go on.

Whoever opens an image later (an engine, the learner, a reward) gets the bytes that `accept` returned: one frame in
8-bit RGB, the right way up. Files that already are that keep their bytes.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from streamrl.config import ImagesConfig
from streamrl.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

_FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_KEPT: Final = frozenset({"PNG", "JPEG", "WEBP"})
_SIXTEEN: Final = ("I;16", "I;16L", "I;16B", "I;16N", "I")
_UPRIGHT: Final = (None, 1)
_ORIENTATION: Final = 0x0112  # tag of EXIF
_MARK: Final = ";base64,"
_BEGINNINGS: Final = (b"\x89PNG\r\n", b"\xff\xd8\xff", b"RIFF", b"GIF8", b"BM", b"II*\0", b"MM\0*")


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """One image as it travels; `sha256` in hexadecimal is its name, sizes are in pixels."""

    sha256: str
    data: bytes
    width: int
    height: int

    @property
    def size(self) -> tuple[int, int]:
        return self.width, self.height

    @property
    def part(self) -> dict[str, Any]:
        """As a part of a chat message; `images_of` finds it there."""
        return {"type": "image", "sha256": self.sha256, "width": self.width, "height": self.height}


def accept(data: bytes, limits: ImagesConfig) -> EncodedImage:
    """Check an image from outside. `DataError`: it is none, broken, animated or too large (`images`)."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    if len(data) > limits.largest:
        raise DataError(f"an image of {len(data):,} bytes", f"images.largest is {limits.largest:,}")
    try:
        with warnings.catch_warnings():  # Pillow warns of a size that is checked below
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data), formats=_FORMATS)
        width, height = image.size
        if width * height > limits.pixels:
            what = f"an image of {width} x {height} pixels, images.pixels is {limits.pixels:,}"
            raise DataError(what, "make it smaller, or raise images.pixels")
        if (frames := getattr(image, "n_frames", 1)) != 1:
            raise DataError(f"an image with {frames} frames ({image.format})", "give one frame as an image of its own")
        turned = image.getexif().get(_ORIENTATION) not in _UPRIGHT
        image.load()
        if image.format not in _KEPT or image.mode != "RGB" or turned:
            data = in_png(ImageOps.exif_transpose(image))
    except DataError:  # it is a ValueError
        raise
    except UnidentifiedImageError as error:
        what = f"{len(data):,} bytes that are no image of a known format"
        raise DataError(what, f"known are {', '.join(_FORMATS)}") from error
    except Image.DecompressionBombError as error:
        raise DataError(f"an image that is too large: {error}", f"images.pixels is {limits.pixels:,}") from error
    except Exception as error:  # Pillow's readers also let errors of `struct` and `zlib` through
        raise DataError(f"an image that cannot be decoded: {error}") from error
    return known(hashlib.sha256(data).hexdigest(), data)


def known(name: str, data: bytes) -> EncodedImage:
    """What `accept` returned, again; only the size is read."""
    from PIL import Image

    return EncodedImage(name, data, *Image.open(io.BytesIO(data)).size)


def blank(width: int, height: int) -> EncodedImage:
    """A white image, to try out something that sees."""
    from PIL import Image

    data = in_png(Image.new("RGB", (width, height), "white"))
    return EncodedImage(hashlib.sha256(data).hexdigest(), data, width, height)


def decode(data: bytes) -> Image:
    """The pixels of what `accept` returned."""
    from PIL import Image

    image = Image.open(io.BytesIO(data))
    image.load()
    return image


def is_encoded(value: object) -> bool:
    """Whether these may be the bytes of an image; `accept` knows."""
    return isinstance(value, bytes | bytearray | memoryview) and bytes(value[:6]).startswith(_BEGINNINGS)


def in_png(image: Image) -> bytes:
    written = io.BytesIO()
    in_rgb(image).save(written, format="PNG", compress_level=1)
    return written.getvalue()


def in_rgb(image: Image) -> Image:
    """8-bit RGB: 16 bits are scaled, and what is transparent becomes white."""
    from PIL import Image

    if image.mode in _SIXTEEN:
        return image.convert("I").point(lambda level: level / 256).convert("L").convert("RGB")
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        white.alpha_composite(image.convert("RGBA"))
        return white.convert("RGB")
    return image.convert("RGB")


def from_url(url: object) -> bytes:
    """The bytes of a `data:` URL; nothing is ever fetched for a message."""
    if not isinstance(url, str) or not url.startswith("data:") or _MARK not in url[:128]:
        raise DataError("an image that is no data: URL in base64", "send data:image/png;base64,...")
    try:
        return base64.b64decode(url.partition(_MARK)[2], validate=True)
    except binascii.Error as error:
        raise DataError(f"an image whose base64 is broken: {error}") from error


def is_image(part: object) -> bool:
    """Whether a part of a message is an image as it is inside."""
    return isinstance(part, Mapping) and part.get("type") == "image"


def is_shown(part: object) -> bool:
    """Whether a part of a message is an image, from outside or as it is inside."""
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def url_of(part: Mapping[str, Any]) -> Any:
    """Of an `image_url`, which should be a text."""
    url = part.get("image_url")
    return url.get("url") if isinstance(url, Mapping) else url


def suffix_of(data: bytes) -> str:
    """The format of what `accept` returned, as files are named after it."""
    return "png" if data[:4] == b"\x89PNG" else "webp" if data[:4] == b"RIFF" else "jpeg"


def data_url(data: bytes) -> str:
    return f"data:image/{suffix_of(data)}{_MARK}{base64.b64encode(data).decode()}"


def images_of(messages: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The images in chat messages, in the order in which they stand in the tokens."""
    return [
        part for each in messages if isinstance(parts := each.get("content"), list) for part in parts if is_image(part)
    ]


def names_of(messages: Iterable[Mapping[str, Any]]) -> list[str]:
    return [part["sha256"] for part in images_of(messages)]
