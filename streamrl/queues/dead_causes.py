"""Dead letters by cause: what differs from sample to sample in the words of one error is left out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from streamrl.queues.records import DeadLetter

_OF_ONE_SAMPLE: Final = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[-+]?\d+(?:[.,]\d+)*")
_KIND: Final = re.compile(r"^([\w. ]{1,60}):")
_REWARD: Final = re.compile(r"\[([^\]]*)\]$")


@dataclass(frozen=True, slots=True)
class DeadCause:
    """Dead letters of one cause, oldest first; `groups` are those that died as a whole of it."""

    letters: tuple[DeadLetter, ...]

    @property
    def newest(self) -> DeadLetter:
        """The last letter that has a traceback, else the last one."""
        return next((letter for letter in reversed(self.letters) if letter.detail), self.letters[-1])

    @property
    def samples(self) -> int:
        """Samples that died of it."""
        return sum(letter.sample is not None for letter in self.letters)

    @property
    def groups(self) -> int:
        """Groups that died as a whole of it."""
        return len(self.letters) - self.samples


def by_cause(letters: Sequence[DeadLetter]) -> list[DeadCause]:
    """Letters with the same stage and the same words, numbers and quotations apart; the largest cause first."""
    found: dict[tuple[str, str], list[DeadLetter]] = {}
    for letter in letters:
        found.setdefault((letter.stage, _OF_ONE_SAMPLE.sub("...", letter.why)), []).append(letter)
    return sorted((DeadCause(tuple(alike)) for alike in found.values()), key=lambda cause: -len(cause.letters))


def same_kind(letters: Sequence[DeadLetter]) -> bool:
    """Whether all died at one stage of one kind of error, of one reward: `ValueError: ... [my_reward]`."""
    return len({(letter.stage, _kind(letter.why)) for letter in letters}) == 1


def _kind(why: str) -> tuple[str, str]:
    kind, reward = _KIND.match(why), _REWARD.search(why)
    return (kind[1] if kind else _OF_ONE_SAMPLE.sub("...", why)), (reward[1] if reward else "")
