"""Prompts with images: what a line may name, what travels, and which faults are named with file and line."""

from __future__ import annotations

import base64
import hashlib
import io
import zlib

import numpy as np
import orjson
import pytest
from PIL import Image

from streamrl.config import ImagesConfig, ModelConfig, RunConfig
from streamrl.errors import DataError, Refused
from streamrl.images.encoded import accept, from_url
from streamrl.images.encoded import decode as opened
from streamrl.images.store import ImageStore
from streamrl.producers.admission import AdmissionTerms, Admitter
from streamrl.producers.dataset import PromptLimits
from streamrl.producers.order import fingerprint_of
from streamrl.producers.tokenizer import Tokenizer
from streamrl.queues import open_ledgers
from streamrl.wire import SCHEMA, Prompt, decode
from tests.producers.test_dataset import examine_prompts, load_prompts
from tests.vision_kit import KINDS, make_vision_model, picture

LIMITS = PromptLimits(max_prompt_tokens=900, context=1000)
PART = {"type": "image"}


def text(words):
    return {"type": "text", "text": words}


def user(*parts):
    return {"role": "user", "content": list(parts)}


def name(data):
    return hashlib.sha256(data).hexdigest()


def url(data):
    return "data:image/png;base64," + base64.b64encode(data).decode()


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request, tmp_path_factory):
    return Tokenizer.load(ModelConfig(path=str(make_vision_model(tmp_path_factory.mktemp("m"), request.param))))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return Tokenizer.load(ModelConfig(path=str(make_vision_model(tmp_path_factory.mktemp("m"), "qwen2_vl"))))


@pytest.fixture
def write(tmp_path):
    def write(*records, **files):
        for file, data in files.items():
            (tmp_path / f"{file}.png").write_bytes(data)
        path = tmp_path / "data.jsonl"
        path.write_bytes(b"".join(orjson.dumps(record) + b"\n" for record in records))
        return path

    return write


def loaded(path, tokenizer, **options):
    return [decode(prompt, Prompt) for prompt in load_prompts(path, tokenizer, LIMITS, **options).prompts]


def test_images_may_be_files_urls_or_parts_of_messages(tokenizer, write):
    """All three forms of the same line are the same prompt; its tokens and pixels are those of transformers."""
    one, two = picture(1), picture(2, 100, 30)
    asked = [text("which "), PART, text("or "), PART]
    path = write(
        {"messages": [user(*asked)], "images": ["one.png", url(two)], "answer": "x", "level": 3},
        {"messages": [user(asked[0], shown(one), asked[2], shown(two))]},
        {"messages": [user(asked[0], shown(one), *asked[2:])], "images": ["two.png"]},
        one=one,
        two=two,
    )
    prompts = loaded(path, tokenizer)
    assert len({prompt.tokens for prompt in prompts}) == 1
    for prompt in prompts:
        assert (prompt.images, prompt.blobs) == ([name(one), name(two)], [one, two])
        assert (prompt.v, prompt.processor) == (SCHEMA, tokenizer.vision.fingerprint)
        part = {"type": "image", "sha256": name(one), "width": 40, "height": 32}
        assert prompt.messages[0]["content"][:2] == [asked[0], part]
        sizes = [(40, 32), (100, 30)]
        ids = prompt.token_ids.tolist()
        assert sum(count for _, count in tokenizer.vision.spans(ids, sizes)) >= 8
        assert prompt.text.count(tokenizer.vision.token) == 2, "the text for people has one for each"
    assert (prompts[0].answer, prompts[0].metadata) == ("x", {"level": 3})


def shown(data):
    return {"type": "image_url", "image_url": {"url": url(data)}}


def test_a_text_has_the_placeholders_of_its_images(tokenizer, write):
    mark = tokenizer.vision.token
    path = write({"prompt": f"see {mark} and {mark}", "images": ["a.png", "a.png"]}, {"prompt": "none"}, a=picture())
    both, none = loaded(path, tokenizer)
    assert both.images == [name(picture())] * 2
    assert both.blobs == [picture()]
    assert both.text == f"see {mark} and {mark}"
    tokenizer.vision.spans(both.token_ids.tolist(), [(40, 32)] * 2)
    assert (none.v, none.images, none.processor) == (1, [], tokenizer.vision.fingerprint)  # tools may show some


def test_large_images_are_files_and_each_file_is_read_once(qwen, write, tmp_path, monkeypatch):
    small, large = picture(1), picture(2, 400, 400)
    store = ImageStore.of(RunConfig.model_validate({"name": "t", "images": {"inline": 1000}}), tmp_path / "run")
    path = write(*[{"messages": [user(PART, PART)], "images": ["s.png", "l.png"]}] * 3, s=small, l=large)
    reads = []
    read = type(path).open
    monkeypatch.setattr(type(path), "open", lambda self, mode: reads.append(self.name) or read(self, mode))
    prompts = loaded(path, qwen, store=store)
    assert sorted(name for name in reads if name.endswith("png")) == ["l.png", "s.png"]
    assert [prompt.blobs for prompt in prompts] == [[small]] * 3
    (kept,) = (tmp_path / "run" / "images").iterdir()
    assert (kept.name, kept.read_bytes()) == (name(large), large)


def encoded(image, kind="PNG", **options):
    written = io.BytesIO()
    image.save(written, kind, **options)
    return written.getvalue()


def test_odd_images_become_rgb_and_tiny_ones_work(tokenizer, write):
    levels = Image.fromarray(np.full((20, 20), 40_000, np.uint16))
    files = {"cmyk": encoded(Image.new("CMYK", (20, 20)), "JPEG"), "deep": encoded(levels), "tiny": picture(0, 1, 1)}
    path = write(*({"messages": [user(PART)], "images": [f"{file}.png"]} for file in files), **files)
    for prompt in loaded(path, tokenizer):
        assert opened(prompt.blobs[0]).mode == "RGB"


BAD = {
    "a missing file": ({"messages": [user(PART)], "images": ["no.png"]}, "that cannot be read: No such file"),
    "not an image": ({"messages": [user(PART)], "images": ["text.png"]}, "no image of a known format: text.png"),
    "a file without end": ({"messages": [user(PART)], "images": ["/dev/zero"]}, "8,388,609 bytes: /dev/zero"),
    "an animation": (
        {"messages": [user(PART)], "images": ["moves.png"]},
        r"2 frames \(PNG\): moves\.png",
    ),
    "a bomb": ({"messages": [user(PART)], "images": ["huge.png"]}, "too large: .*400000000 pixels.*: huge.png"),
    "too many pixels": (
        {"messages": [user(PART)], "images": ["wide.png"]},
        "5000 x 5000 pixels, .* 16,777,216: wide.png",
    ),
    "more parts": ({"messages": [user(PART, PART)], "images": ["a.png"]}, "more places for images than `images`"),
    "more images": ({"messages": [user(PART)], "images": ["a.png"] * 3}, "2 of the `images` without a place"),
    "parts alone": ({"messages": [user(PART)]}, "more places for images than `images`"),
    "more in a text": ({"prompt": "<|image_pad|><|image_pad|>", "images": ["a.png"]}, "2 placeholders .* for 1 images"),
    "fewer in a text": ({"prompt": "no", "images": ["a.png"]}, "0 placeholders .* for 1 images"),
    "a text alone": ({"prompt": "<|image_pad|>"}, "1 placeholders .* for 0 images"),
    "in a message": ({"messages": [user(PART, text("<|image_pad|>"))], "images": ["a.png"]}, "2 placeholders"),
    "an address": ({"messages": [user(PART)], "images": ["http://a/b.png"]}, "no data: URL in base64: http://a/b.png"),
    "no text": ({"messages": [user(PART)], "images": [7]}, "an image that is no text: 7"),
    "no list": ({"messages": [user(PART)], "images": "a.png"}, "`images` must be a list"),
    "too thin": (
        {"messages": [user(PART)], "images": ["thin.png"]},
        "1 x 300 pixels that the model refuses",
    ),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_line_is_named(bad, qwen, write):
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    record, why = BAD[bad]
    moves = encoded(frames[0], save_all=True, append_images=frames[1:])
    fine = {"messages": [user(PART)], "images": ["a.png"]}
    files = {
        "a": picture(),
        "text": b"no image",
        "moves": moves,
        "huge": sized(20_000),
        "wide": sized(5000),
        "thin": picture(0, 1, 300),
    }
    path = write(fine, record, fine, record, **files)
    with pytest.raises(DataError, match=rf"data\.jsonl:2: .*{why}") as fault:
        loaded(path, qwen)
    assert "(also 4)" in fault.value.message
    with pytest.raises(DataError, match=why):
        examine_prompts(path, lambda: qwen, LIMITS, 100)


def sized(side):
    """A PNG that says that it is so large."""
    head = picture()[12:16] + side.to_bytes(4) * 2 + picture()[24:29]
    return picture()[:12] + head + zlib.crc32(head).to_bytes(4) + picture()[33:]


def test_a_model_of_text_refuses_images_and_only_them(qwen, write):
    bare = Tokenizer(qwen.backend, "text")
    with pytest.raises(DataError, match=r"data\.jsonl:1: images, and the model takes text alone"):
        loaded(write({"prompt": "a", "images": ["a.png"]}, a=picture()), bare)
    with pytest.raises(DataError, match=r"data\.jsonl:1: images, and the model takes text alone"):
        loaded(write({"messages": [user(shown(picture()))]}), bare)
    (prompt,) = loaded(write({"prompt": "a", "images": []}), bare)
    assert prompt.metadata == {"images": []}


def test_the_fingerprint_covers_images_and_their_processor(qwen, write):
    path = write({"messages": [user(PART)], "images": ["a.png"]}, a=picture(1))
    before = load_prompts(path, qwen, LIMITS)
    (path.parent / "a.png").write_bytes(picture(2))
    assert load_prompts(path, qwen, LIMITS).fingerprint != before.fingerprint, "other bytes under the same name"
    assert fingerprint_of(before).endswith(f" {qwen.vision.fingerprint}")
    text = Tokenizer(qwen.backend, "text")
    assert " " not in fingerprint_of(load_prompts(write({"prompt": "a"}), text, LIMITS))


async def test_a_run_is_not_resumed_with_another_processor(redis_run, qwen, write):
    data = load_prompts(write({"messages": [user(PART)], "images": ["a.png"]}, a=picture(1)), qwen, LIMITS)
    async with open_ledgers(RunConfig(name="t", redis=redis_run.config), redis_run.run_dir) as ledgers:

        def admitter():
            terms = AdmissionTerms(fingerprint_of(data), 1, 1, 4, 4, 1)
            return Admitter(ledgers.train, terms, lambda _: data.prompts[0])

        await admitter().admit(0, limit=1, end=None)
        await admitter().locate()
        data.processor = "0" * 16
        with pytest.raises(Refused, match="another image processor"):
            await admitter().locate()


def test_what_was_accepted_is_accepted_again(qwen, write):
    """A prompt's blobs are canonical: nothing changes on the way back through a data: URL."""
    (prompt,) = loaded(write({"messages": [user(PART)], "images": ["a.png"]}, a=picture(1)), qwen)
    again = accept(from_url(url(prompt.blobs[0])), ImagesConfig())
    assert [again.sha256] == prompt.images
