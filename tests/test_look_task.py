"""The look task: its lessons are what transformers makes of its chats, and its pictures show the answers."""

from __future__ import annotations

import io
import itertools
import random
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from streamrl.config import ImagesConfig, ModelConfig
from streamrl.images.encoded import accept
from streamrl.images.vision import vision_of

EXAMPLE = Path(__file__).parent.parent / "examples" / "look"


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch):
    """The modules `look_task` and `prepare` of the example."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    for name in ("look_task", "prepare"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import look_task
    import prepare

    yield look_task, prepare
    for name in ("look_task", "prepare"):
        del sys.modules[name]


def test_a_lesson_is_the_chat_as_template_and_processor_write_it(look, tmp_path: Path):
    task, prepare = look
    backend = prepare.make_look_tokenizer()
    for part in (prepare.make_model(), backend, prepare.make_processor()):
        part.save_pretrained(tmp_path)
    assert {text: backend.convert_tokens_to_ids(text) for text in task.SPECIAL} == task.SPECIAL
    vision = vision_of(ModelConfig(path=str(tmp_path)), backend)
    assert vision is not None
    assert vision.forbidden == tuple(sorted(task.SPECIAL[f"<|{kind}_pad|>"] for kind in ("image", "video")))
    source, names = random.Random(0), "".join(task.COLOURS)
    right = 0
    for _ in range(50):
        ids, written, problem = task.lesson(source)
        answer = backend.decode([token for token, sampled in zip(ids, written, strict=True) if sampled])
        first, second, end = answer.split("<eos>")
        assert (len(first), len(second), end) == (1, 2, "")
        assert second.startswith(first)
        for said, name in zip(second, problem.answer, strict=True):
            assert (names.index(said) - names.index(name)) % len(names) in (0, 1)
            right += said == name
        images = [accept(task.png(colours), ImagesConfig()) for colours in problem.pictures]
        messages = []
        for image, square, reply in zip(images, problem.squares, (first, second), strict=True):
            messages.append({"role": "user", "content": [image.part, {"type": "text", "text": str(square + 1)}]})
            messages.append({"role": "assistant", "content": reply})
        text = backend.apply_chat_template(messages, tokenize=False)
        expanded = vision.expand(text, [(image.width, image.height) for image in images])
        assert backend(expanded, add_special_tokens=False)["input_ids"] == ids
        drawn = prepare.make_processor()([task.draw(colours) for colours in problem.pictures], return_tensors="np")
        joined = vision.joined([vision.pixels(image.sha256, image.data) for image in images])
        assert all(np.array_equal(joined[name], drawn[name]) for name in joined)
    assert 45 <= right <= 75, "of 100 colours, 60 are to have their own names"


def test_a_picture_is_small_the_same_each_time_and_shows_the_answer(look):
    task, _ = look
    names, colours = list(task.COLOURS), list(task.COLOURS.values())
    for evaluation in (False, True):
        for row in itertools.islice(task.problems(3, evaluation=evaluation), 30):
            assert task.held_out(tuple(row["pictures"])) == evaluation
            assert row["messages"][0]["content"] == row["questions"][0]
            for letter, shown, question in zip(row["answer"], row["pictures"], row["questions"], strict=True):
                data = task.png(shown)
                assert data == task.png(shown)
                assert len(data) < 300
                down, across = divmod(int(question) - 1, task.COLUMNS)
                seen = np.asarray(Image.open(io.BytesIO(data)), dtype=int)[down * task.SIDE + 8, across * task.SIDE + 8]
                assert names[int(np.argmin([np.abs(seen - colour).max() for colour in colours]))] == letter


def test_the_starting_model_is_small():
    assert (EXAMPLE / "start.safetensors").stat().st_size < 1_000_000
