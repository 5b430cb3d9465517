"""The sort task: a digit string and `=`, answered by the digits in ascending order.

Lengths are log-normal (median 7, 90 % below 18, at most 40), so responses differ in length as in real tasks. A prompt
is held out if `crc32(prompt) % 20 == 0`, so the split needs no list and is the same on every machine.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Iterator
from typing import TypeAlias

LONGEST = 40
CHARACTERS = "".join(chr(code) for code in range(32, 127)) + "\n"
PAD, BOS, EOS, FIRST_CHARACTER = 0, 1, 2, 3
VOCABULARY = 128
SHARE_RIGHT = 0.4

Lesson: TypeAlias = tuple[list[int], list[bool]]
"""Ids of what the warm start shows to the model, and which of them it is to write."""


def held_out(prompt: str) -> bool:
    return zlib.crc32(prompt.encode()) % 20 == 0


def draw_digits(source: random.Random) -> str:
    while True:
        length = round(source.lognormvariate(math.log(7), 0.75))
        if 2 <= length <= LONGEST:
            return "".join(source.choice("0123456789") for _ in range(length))


def problems(seed: int, *, evaluation: bool) -> Iterator[dict[str, str]]:
    """Yield distinct problems `{"prompt", "answer"}` without end, from one side of the split."""
    source, seen = random.Random(seed), set[str]()
    while True:
        digits = draw_digits(source)
        prompt = digits + "="
        if held_out(prompt) == evaluation and prompt not in seen:
            seen.add(prompt)
            yield {"prompt": prompt, "answer": "".join(sorted(digits))}


def lesson(source: random.Random) -> Lesson:
    """A prompt with the answer of one of the two rules; the wrong one is more frequent."""
    while held_out(prompt := (digits := draw_digits(source)) + "="):
        pass
    answer = sorted(digits, reverse=source.random() >= SHARE_RIGHT)
    return [*encode(prompt + "".join(answer)), EOS], [False] * len(prompt) + [True] * (len(answer) + 1)


def encode(text: str) -> list[int]:
    return [FIRST_CHARACTER + CHARACTERS.index(character) for character in text]
