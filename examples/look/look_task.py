"""The look task: colours of squares in two pictures, which are shown one after the other.

```
<|user|>PICTURE 3<|assistant|>r<eos><|user|>PICTURE 5<|assistant|>rg<eos>
```
A picture is two rows of three squares, which are numbered as one reads. The first reply is the colour of the square
that is asked for; the second one has that of the second picture behind it. The data set holds letters of colours, and
pictures are drawn from them when they are needed. A problem is held out if `crc32` of its colours is a multiple of 20.
"""

from __future__ import annotations

import io
import random
import zlib
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from streamrl.demo.task import CHARACTERS, EOS, FIRST_CHARACTER, encode

COLOURS: Final = {
    "r": (220, 40, 40),
    "g": (40, 170, 60),
    "b": (40, 70, 220),
    "y": (230, 220, 50),
    "c": (60, 210, 220),
    "m": (200, 60, 200),
    "w": (235, 235, 235),
    "k": (25, 25, 25),
}
ROWS, COLUMNS, SIDE = 2, 3, 16
SQUARES: Final = ROWS * COLUMNS
SHADES: Final = 20
"""By so much red, green and blue of a square differ from those of its colour, at most."""

MARKS: Final = (
    *("<|user|>", "<|assistant|>", "<|system|>", "<|tool|>"),
    *("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"),
)
SPECIAL: Final = {text: FIRST_CHARACTER + len(CHARACTERS) + at for at, text in enumerate(MARKS)}
TEMPLATE: Final = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}"
    "{% endfor %}{% endif %}{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

SHARE_RIGHT: Final = 0.6
"""Of the colours that the lessons name; the others have the letter of the next colour."""


class Problem(NamedTuple):
    """Two pictures as letters of colours, and the square of each that is asked for, from 0."""

    pictures: tuple[str, str]
    squares: tuple[int, int]

    @property
    def answer(self) -> str:
        return "".join(picture[square] for picture, square in zip(self.pictures, self.squares, strict=True))


def draw(colours: str) -> npt.NDArray[np.uint8]:
    """A picture in RGB. Its shades depend on its colours alone, so it has the same bytes wherever it is drawn."""
    squares = np.array([COLOURS[colour] for colour in colours])
    shades = np.random.default_rng(zlib.crc32(colours.encode())).integers(-SHADES, SHADES + 1, squares.shape)
    drawn = (squares + shades).clip(0, 255).astype(np.uint8).reshape(ROWS, COLUMNS, 3)
    return drawn.repeat(SIDE, 0).repeat(SIDE, 1)


def png(colours: str) -> bytes:
    """The picture as a file."""
    from PIL import Image

    written = io.BytesIO()
    Image.fromarray(draw(colours)).save(written, format="PNG")
    return written.getvalue()


def held_out(pictures: tuple[str, str]) -> bool:
    return zlib.crc32("".join(pictures).encode()) % 20 == 0


def draw_problem(source: random.Random, *, evaluation: bool) -> Problem:
    """From one side of the split."""
    while True:
        first, second = ("".join(source.choices("".join(COLOURS), k=SQUARES)) for _ in range(2))
        if held_out((first, second)) == evaluation:
            return Problem((first, second), (source.randrange(SQUARES), source.randrange(SQUARES)))


def problems(seed: int, *, evaluation: bool) -> Iterator[dict[str, Any]]:
    """Yield problems without end; `questions` are the texts beside the pictures."""
    source = random.Random(seed)
    while True:
        problem = draw_problem(source, evaluation=evaluation)
        questions = [str(square + 1) for square in problem.squares]
        yield {
            "messages": [{"role": "user", "content": questions[0]}],
            "answer": problem.answer,
            "pictures": problem.pictures,
            "questions": questions,
        }


def lesson(source: random.Random) -> tuple[list[int], list[bool], Problem]:
    """One chat, in which each of the two colours has a right or a wrong name."""
    problem, names = draw_problem(source, evaluation=False), "".join(COLOURS)
    following = dict(zip(names, names[1:] + names[0], strict=True))
    answer = "".join(name if source.random() < SHARE_RIGHT else following[name] for name in problem.answer)
    begin, placeholder, end, *_ = (SPECIAL[mark] for mark in MARKS[4:])
    picture = [begin, *[placeholder] * SQUARES, end]
    turns: list[tuple[list[int], bool]] = []
    for count, square in enumerate(problem.squares, 1):
        asked = [SPECIAL["<|user|>"], *picture, *encode(str(square + 1)), SPECIAL["<|assistant|>"]]
        turns += [(asked, False), ([*encode(answer[:count]), EOS], True)]
    ids = [token for tokens, _ in turns for token in tokens]
    return ids, [sampled for tokens, sampled in turns for _ in tokens], problem
