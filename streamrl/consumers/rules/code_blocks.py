"""The program in a response: fenced code blocks of Markdown."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

_FENCES: Final = "`~"
_SHORTEST: Final = 3
_LIST_MARK: Final = re.compile(r"^([-*+]|[0-9]{1,9}[.)])[ \t]+(?=```|~~~)")


@dataclass(frozen=True, slots=True)
class CodeBlock:
    """A fenced block: its language in small letters (empty: none is named) and the text between the fences."""

    language: str
    text: str


def code_blocks(text: str) -> list[CodeBlock]:
    """Return the closed fenced blocks of `text`; one that is still open at the end was cut off and is none.

    A fence is a line of at least three backticks or tildes; it is closed by one of the same character that is at least
    as long. Lines of the block lose the white space that stands before the fence, as in an item of a list, where the
    fence may also stand right behind the mark of the item. Time grows with the length of the text only.
    """
    blocks: list[CodeBlock] = []
    fence, language, indent = "", "", 0
    lines: list[str] = []
    for line in text.splitlines(keepends=True):
        words = line.strip()
        if not fence:
            words = _LIST_MARK.sub("", words)
        marks = _marks(words)
        if not fence:
            info = words[len(marks) :].strip()
            if marks and not (marks[0] == "`" and "`" in info):
                fence, lines, indent = marks, [], len(line.rstrip()) - len(words)
                language = info.split(maxsplit=1)[0].lower() if info else ""
        elif marks == words and marks.startswith(fence):
            blocks.append(CodeBlock(language, "".join(_outdented(lines, indent))))
            fence = ""
        else:
            lines.append(line)
    return blocks


def _outdented(lines: list[str], indent: int) -> list[str]:
    """Return lines without the white space at their start, at most so many characters.

    Where the first has less, only the fence was indented: then they stay as they are.
    """
    blanks = [len(line) - len(line.lstrip(" \t")) for line in lines]
    first = next((blank for line, blank in zip(lines, blanks, strict=True) if line.strip()), 0)
    if first < indent:
        return lines
    return [line[min(indent, blank) :] for line, blank in zip(lines, blanks, strict=True)]


def program_in(text: str, languages: Collection[str], *, fenced: bool) -> str | None:
    """Return the last block in one of the languages, or None.

    Args:
        text: the response.
        languages: names as they stand after the fence, in small letters; empty for blocks that name none.
        fenced: without a block there is no program; otherwise the whole text is one then.
    """
    blocks = code_blocks(text)
    found = [block.text for block in blocks if block.language in languages]
    if found:
        return found[-1]
    return None if fenced or blocks else text


def _marks(words: str) -> str:
    """Return the fence that a line begins with, or nothing."""
    if not words or words[0] not in _FENCES:
        return ""
    length = len(words) - len(words.lstrip(words[0]))
    return words[:length] if length >= _SHORTEST else ""
