"""The tool task: the number of a key, which only a tool knows, plus 1.

```
<|user|>ab+1<|assistant|><tool_call>{"name": "look_up", "arguments": {"key": "ab"}}</tool_call><eos>
<|tool|>47<|assistant|>48<eos>
```
The table is drawn anew for each prompt, so there is nothing to learn by heart: an answer without a call is right once
in 72 times, at best. A problem is held out if `crc32` of its key and its number is a multiple of 20.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from typing import Any, Final

from streamrl.demo.task import CHARACTERS, EOS, FIRST_CHARACTER, Lesson, encode

LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"
ENTRIES: Final = 3
ROLES: Final = ("<|user|>", "<|assistant|>", "<|tool|>", "<|system|>")
WORDS: Final = ("<tool_call>", '{"name": "look_up", "arguments": {"key": "', '"}}', "</tool_call>")
"""Texts that are one token, so that a call is as cheap as an answer; any other text is one token per character."""
SPECIAL: Final = {text: FIRST_CHARACTER + len(CHARACTERS) + at for at, text in enumerate((*ROLES, *WORDS))}

TEMPLATE: Final = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}"
    '{% if message.role == "assistant" %}{{ eos_token }}{% endif %}{% endfor %}'
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""The schemas of tools are left out: this model is taught its only tool, and has no room for JSON."""

SHARE_RIGHT, SHARE_GUESSED = 0.4, 0.25


def held_out(key: str, number: int) -> bool:
    return zlib.crc32(f"{key}={number}".encode()) % 20 == 0


def draw(source: random.Random) -> tuple[str, int]:
    """A key and its number, of two digits as the next and the one before, which begin with the same digit."""
    key = source.choice(LETTERS) + source.choice(LETTERS)
    return key, 10 * source.randint(1, 9) + source.randint(1, 8)


def problems(seed: int, *, evaluation: bool) -> Iterator[dict[str, Any]]:
    """Yield distinct problems without end, from one side of the split; `numbers` is the table of the tool."""
    source, seen = random.Random(seed), set[tuple[str, int]]()
    while True:
        key, number = draw(source)
        if held_out(key, number) != evaluation or (key, number) in seen:
            continue
        seen.add((key, number))
        others = {source.choice(LETTERS) + source.choice(LETTERS): source.randint(10, 99) for _ in range(ENTRIES - 1)}
        yield {
            "messages": [{"role": "user", "content": f"{key}+1"}],
            "answer": str(number + 1),
            "numbers": {**others, key: number},
        }


def lesson(source: random.Random) -> Lesson:
    """One chat. The policy looks up and adds 1 (right), looks up and subtracts 1, or guesses without a call."""
    while True:
        key, number = draw(source)
        if not held_out(key, number):
            break
    opened, rule = [SPECIAL["<|assistant|>"]], source.random()
    turns: list[tuple[list[int], bool]] = [([SPECIAL["<|user|>"], *encode(f"{key}+1"), *opened], False)]
    if rule < SHARE_GUESSED:
        turns.append(([*encode(str(source.randint(10, 99))), EOS], True))
    else:
        answer = number + 1 if rule < SHARE_GUESSED + SHARE_RIGHT else number - 1
        begin, name, end, close = (SPECIAL[text] for text in WORDS)
        turns += [
            ([begin, name, *encode(key), end, close, EOS], True),
            ([SPECIAL["<|tool|>"], *encode(str(number)), *opened], False),
            ([*encode(str(answer)), EOS], True),
        ]
    ids = [token for tokens, _ in turns for token in tokens]
    return ids, [sampled for tokens, sampled in turns for _ in tokens]
