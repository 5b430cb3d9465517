"""What is accepted as an image from outside, and the form in which it goes on."""

from __future__ import annotations

import base64
import hashlib
import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some
from PIL import Image

from streamrl.config import ImagesConfig
from streamrl.errors import DataError
from streamrl.images.encoded import accept, data_url, decode, from_url, images_of, known
from tests.vision_kit import picture

LIMITS = ImagesConfig()


def written(image: Image.Image, **options: Any) -> bytes:
    data = io.BytesIO()
    image.save(data, **{"format": "PNG", **options})
    return data.getvalue()


def pixels(data: bytes) -> np.ndarray:
    return np.asarray(decode(data))


@pytest.mark.parametrize("options", [{}, {"format": "JPEG", "quality": 90}, {"format": "WEBP", "lossless": True}])
def test_plain_files_keep_their_bytes(options):
    data = picture(1, 50, 30, **options)
    image = accept(data, LIMITS)
    assert image.data == data
    assert image.sha256 == hashlib.sha256(data).hexdigest()
    assert (image.width, image.height) == (50, 30)
    assert known(image.sha256, image.data) == image
    assert accept(image.data, LIMITS) == image


def test_other_forms_become_one_of_eight_bits_in_rgb():
    red = Image.new("RGB", (3, 2), (200, 30, 10))
    assert pixels(accept(written(red, format="BMP"), LIMITS).data).tolist() == np.asarray(red).tolist()
    cmyk = accept(written(Image.new("CMYK", (2, 2), (0, 255, 255, 0)), format="TIFF"), LIMITS)
    assert pixels(cmyk.data).tolist() == [[[255, 0, 0]] * 2] * 2
    grey = accept(written(Image.new("L", (2, 1), 77)), LIMITS)
    assert pixels(grey.data).tolist() == [[[77] * 3] * 2]


def test_sixteen_bits_are_scaled_and_not_cut_off():
    levels = np.asarray([[0, 255, 256, 32768, 65535]], dtype=np.uint16)
    found = pixels(accept(written(Image.fromarray(levels)), LIMITS).data)
    assert found[0, :, 0].tolist() == [0, 0, 1, 128, 255]


def test_sixteen_bits_in_the_other_order_of_bytes_are_the_same():
    """As scanners write them: a TIFF that begins with MM."""
    fields = [(256, 3), (257, 1), (258, 16), (259, 1), (262, 1), (273, 122), (277, 1), (278, 1), (279, 6)]
    entries = b"".join(struct.pack(">HHIHH", tag, 3, 1, value, 0) for tag, value in fields)
    levels = struct.pack(">3H", 0, 32768, 65535)
    image = b"MM\0*" + struct.pack(">I", 8) + struct.pack(">H", len(fields)) + entries + bytes(4) + levels
    assert pixels(accept(image, LIMITS).data)[0, :, 0].tolist() == [0, 128, 255]


def test_what_is_transparent_becomes_white():
    image = Image.new("RGBA", (2, 1), (10, 20, 30, 255))
    image.putpixel((1, 0), (10, 20, 30, 0))
    assert pixels(accept(written(image), LIMITS).data)[0].tolist() == [[10, 20, 30], [255, 255, 255]]
    palette = Image.new("P", (2, 1), 0)
    palette.putpalette([1, 2, 3, 4, 5, 6])
    palette.putpixel((1, 0), 1)
    found = pixels(accept(written(palette, transparency=1), LIMITS).data)[0].tolist()
    assert found == [[1, 2, 3], [255, 255, 255]]


def test_a_photograph_is_turned_upright():
    image = Image.new("RGB", (4, 2), "black")
    image.putpixel((0, 0), (255, 255, 255))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    turned = accept(written(image, exif=exif), LIMITS)
    assert (turned.width, turned.height) == (2, 4)
    assert pixels(turned.data)[0, 1].tolist() == [255, 255, 255]


def test_one_pixel_is_an_image():
    image = accept(written(Image.new("RGB", (1, 1), "red")), LIMITS)
    assert (image.width, image.height) == (1, 1)


@pytest.mark.parametrize(
    ("side", "said"),
    [(5_000, "5000 x 5000 pixels, images.pixels is 16,777,216"), (20_000, "400000000 pixels.* decompression bomb")],
)
def test_a_bomb_is_refused_by_what_it_says_of_itself(side, said):
    """So many pixels in a few bytes: nothing of them is made."""
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")
    with pytest.raises(DataError, match=said):
        accept(bomb, LIMITS)


def test_broken_notes_on_a_photograph_are_a_clear_error():
    """EXIF that ends within its first field: Pillow raises an error of `struct`."""
    data, note = picture(6), b"MM\0*"
    chunk = struct.pack(">I", len(note)) + b"eXIf" + note + struct.pack(">I", zlib.crc32(b"eXIf" + note))
    with pytest.raises(DataError, match="cannot be decoded"):
        accept(data[:33] + chunk + data[33:], LIMITS)


def test_an_animation_is_refused_with_its_frames():
    frames = [Image.new("RGB", (4, 4), color) for color in ("red", "green", "blue")]
    for kind in ("GIF", "WEBP", "PNG"):
        data = written(frames[0], format=kind, save_all=True, append_images=frames[1:])
        with pytest.raises(DataError, match="3 frames"):
            accept(data, LIMITS)


@pytest.mark.parametrize("data", [b"", b"hello", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"%PDF-1.4", b"\x89PNG"])
def test_what_is_no_image_is_refused(data):
    with pytest.raises(DataError, match="no image of a known format"):
        accept(data, LIMITS)


@pytest.mark.parametrize("options", [{}, {"format": "JPEG"}, {"format": "WEBP"}])
def test_an_image_that_is_cut_off_is_refused(options):
    data = picture(2, 64, 64, **options)
    with pytest.raises(DataError, match="image"):
        accept(data[: len(data) // 2], LIMITS)


@given(some.binary(max_size=64), some.integers(0, 200))
def test_damage_is_a_clear_error_or_an_image(noise, place):
    data = bytearray(picture(3, 16, 16))
    data[place : place + len(noise)] = noise
    try:
        image = accept(bytes(data), LIMITS)
    except DataError:
        return
    assert pixels(image.data).shape == (image.height, image.width, 3)


def test_bytes_have_a_limit():
    data = picture(4)
    with pytest.raises(DataError, match=r"images\.largest is 10") as refused:
        accept(data, ImagesConfig(largest=10))
    assert f"{len(data):,} bytes" in str(refused.value)


def test_urls_hold_the_bytes_and_are_never_fetched():
    for options in ({}, {"format": "JPEG"}, {"format": "WEBP"}):
        data = picture(5, **options)
        url = data_url(data)
        assert url.startswith(f"data:image/{options.get('format', 'png').lower()};base64,")
        assert from_url(url) == data
    for url in ("http://127.0.0.1/a.png", "file:///etc/passwd", "/etc/passwd", "data:image/png,abc", None, 3):
        with pytest.raises(DataError, match="no data: URL"):
            from_url(url)
    with pytest.raises(DataError, match="base64 is broken"):
        from_url("data:image/png;base64," + base64.b64encode(b"abc").decode() + "!")


def test_parts_of_a_message():
    part = accept(picture(), LIMITS).part
    messages = [{"content": [{"type": "text", "text": "a"}, part]}, {"content": "text"}, {"content": [part, "b"]}]
    assert images_of(messages) == [part, part]
