"""The archive holds the small images of a group once, beside its prompt."""

from __future__ import annotations

import dataclasses
import hashlib

import msgspec

from streamrl import wire
from streamrl.archive.reader import RecordedGroup, read_archive
from tests.archive_kit import archived, closed, configured
from tests.vision_kit import picture

FIRST, SECOND, THIRD = picture(1), picture(2), picture(3)


def name(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def shown(payload: bytes, *images: bytes) -> bytes:
    """The response with a tool's answer of these images before it."""
    sample = wire.decode(payload, wire.Sample)
    count = len(sample.token_ids)
    observed = wire.Turn(role="tool", observed=wire.pack_int32([1]), media=[name(image) for image in images])
    turns = [observed, wire.Turn(parent=0, sampled=count, finish="stop")]
    return wire.encode(msgspec.structs.replace(sample, v=3, turns=turns, blobs=list(images)))


def group():
    plain = closed(7, samples=3)
    prompt = wire.decode(plain.prompt, wire.Prompt)
    plain.samples.update({
        0: (shown(plain.samples[0][0], SECOND), plain.samples[0][1]),
        1: (shown(plain.samples[1][0], SECOND, THIRD), plain.samples[1][1]),
    })  # fmt: skip
    asked = msgspec.structs.replace(prompt, v=3, images=[name(FIRST)], blobs=[FIRST])
    return dataclasses.replace(plain, prompt=wire.encode(asked))


async def test_each_image_of_a_group_is_there_once(tmp_path):
    await archived(tmp_path, configured(), group())
    (kept,) = read_archive(tmp_path)
    assert kept.prompt.blobs == [FIRST, SECOND, THIRD]
    assert all(sample.response.blobs == [] for sample in kept.samples)
    assert [sample.response.images for sample in kept.samples] == [[name(SECOND)], [name(SECOND), name(THIRD)], []]


def test_groups_without_images_keep_their_bytes():
    plain = closed(8)
    recorded = RecordedGroup.of(plain)
    assert recorded.prompt == plain.prompt
    assert recorded.samples == [plain.samples[number] for number in sorted(plain.samples)]
