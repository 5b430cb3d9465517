"""From a judge's answer to a number: the votes in it, the verdict in each vote, one number of all. No I/O.

Whatever cannot be read raises `Unreadable`; it never becomes a number.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from streamrl.consumers.models.template import at, way_of
from streamrl.errors import DataError, PluginError, WireError

Combine = Literal["mean", "median", "majority"]

_MOST_TEXT: Final = 20_000
"""Characters at the end of a vote that are read: verdicts are at the end, and patterns take time."""
_MOST_OBJECTS: Final = 512
_MARKUP: Final = " \t*_`\"'.,:;!#>()"
"""Characters that may surround a choice on its line."""


class Unreadable(DataError):
    """A vote, or all of them together, gives no number. The judge asks again by itself (`tries`)."""


@dataclass(frozen=True, slots=True)
class Vote:
    """One text of a judge. `cut`: off at its limit. `text` is None for the reason `why`."""

    text: str | None
    cut: bool = False
    why: str = ""


@dataclass(slots=True)
class Ballot:
    """The votes on one sample. `last` says why the last `unreadable` one was so; `tokens` is their cost."""

    values: list[float] = field(default_factory=list)
    unreadable: int = 0
    last: str = ""
    tokens: int = 0


def votes_of(answer: Mapping[str, Any], most: int) -> list[Vote]:
    """At most `most` votes in the answer of a chat endpoint; `WireError` if it has none, or another shape."""
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices:
        raise WireError(f"an answer without choices: {str(answer)[:200]}")
    return [_vote(choice) for choice in choices[:most]]


def _vote(choice: Any) -> Vote:
    message = choice.get("message") if isinstance(choice, Mapping) else None
    if not isinstance(message, Mapping):
        raise WireError(f"a choice without a message: {str(choice)[:200]}")
    text, finish = message.get("content"), choice.get("finish_reason")
    if text is not None and not isinstance(text, str):
        raise WireError(f"a message whose content is not text: {str(message)[:200]}")
    if message.get("refusal"):
        return Vote(None, why=f"the judge refuses: {str(message['refusal'])[:100]}")
    return Vote(text or None, finish == "length", f"no text (finish_reason {finish})")


class Parser:
    """Reads the verdict in a vote, by `regex`, `json_path`, `choices`, or `regex` and `choices`. See `Judge`."""

    def __init__(
        self,
        *,
        regex: str | None = None,
        json_path: str | None = None,
        choices: Mapping[str, float] | None = None,
        bounds: Sequence[float] | None = None,
        cut_off: Literal["fail", "read"] = "fail",
    ) -> None:
        if regex is None and json_path is None and choices is None:
            raise PluginError("nothing says how the verdict is read", "give regex, json_path or choices")
        if json_path is not None and (regex is not None or choices is not None):
            raise PluginError("json_path excludes regex and choices")
        if cut_off not in {"fail", "read"}:
            raise PluginError(f"cut_off is {cut_off!r}", "it is fail or read")
        self.regex = None if regex is None else _compiled(regex)
        self.group: str | int = "score" if self.regex is not None and "score" in self.regex.groupindex else 1
        self._way = None if json_path is None else way_of(json_path, "json_path")
        self._choices = None if choices is None else _choices(choices)
        self._bounds = _bounds(bounds, needed=choices is None)
        self._reads_cut = cut_off == "read"

    def read(self, vote: Vote) -> float:
        """The number in a vote; `Unreadable`: there is none, or it is out of bounds. A pattern may take long."""
        text = self.text_of(vote)
        if self._way is not None:
            return self._within(self._in_json(text, self._way), text)
        last_line = text.strip().rpartition("\n")[2]
        return self.verdict(last_line if self.regex is None else _matched(self.regex, self.group, text), text)

    def text_of(self, vote: Vote) -> str:
        if vote.text is None:
            raise Unreadable(vote.why)
        text = vote.text[-_MOST_TEXT:]
        if vote.cut and not self._reads_cut:
            raise Unreadable(f"it was cut off at max_tokens: {_end(text)}")
        return text

    def verdict(self, word: str | None, text: str) -> float:
        """The number that `word` stands for; `Unreadable`: it is no verdict, or the pattern did not match."""
        if word is None:
            raise Unreadable(f"the regex does not match: {_end(text)}")
        word = word.strip()
        if self._choices is not None:
            found = self._choices.get(_plain(word))
            if found is None:
                raise Unreadable(f"{word[:50]!r} is none of {', '.join(self._choices)}")
            return self._within(found, text)
        try:
            number = float(word)
        except ValueError:
            raise Unreadable(f"{word[:50]!r} is not a number") from None
        return self._within(number, text)

    def _within(self, number: float, text: str) -> float:
        low, high = self._bounds
        if not low <= number <= high:  # also NaN
            raise Unreadable(f"{number:g} is not within {low:g} to {high:g}: {_end(text)}")
        return number

    def _in_json(self, text: str, way: Sequence[str]) -> float:
        try:
            found = at(_last_object(text), way)
        except LookupError:
            raise Unreadable(f"no JSON object with {'.'.join(way)}: {_end(text)}") from None
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise Unreadable(f"{'.'.join(way)} is {str(found)[:50]!r}, not a number")
        try:
            return float(found)
        except OverflowError:
            raise Unreadable(f"{'.'.join(way)} is not a finite number") from None


def combined(values: Sequence[float], how: Combine) -> float:
    """One number of several votes; `Unreadable`: there is no `majority`."""
    if how == "mean":
        return math.fsum(values) / len(values)
    if how == "median":
        return statistics.median(values)
    (first, most), *others = Counter(values).most_common(2)
    if others and others[0][1] == most:
        raise Unreadable(f"the votes are split: {', '.join(f'{value:g}' for value in values)}")
    return first


def _compiled(regex: str) -> re.Pattern[str]:
    try:
        pattern = re.compile(regex)
    except re.error as error:
        raise PluginError(f"regex {regex!r}: {error}") from error
    if "score" not in pattern.groupindex and pattern.groups != 1:
        raise PluginError(
            f"regex {regex!r} has {pattern.groups} groups", "one group, or one named score: Score: (?P<score>[0-9]+)"
        )
    return pattern


def _choices(choices: Mapping[str, float]) -> dict[str, float]:
    found: dict[str, float] = {}
    for word, number in choices.items():
        if not isinstance(word, str):
            raise PluginError(
                f"choice {word!r} is not text", "write it in quotes: YAML reads yes and no as true and false"
            )
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise PluginError(f"choice {word!r} is worth {number!r}", "give a number")
        if not _plain(word) or _plain(word) in found:
            raise PluginError(f"choice {word!r} cannot be told from another, or is empty")
        found[_plain(word)] = float(number)
    if not found:
        raise PluginError("choices are empty")
    return found


def _bounds(bounds: Sequence[float] | None, *, needed: bool) -> tuple[float, float]:
    if bounds is None:
        if needed:
            raise PluginError("bounds are missing", "bounds: [0, 10] are the lowest and highest number of the judge")
        return -math.inf, math.inf
    if len(bounds) != 2 or not all(type(bound) in {int, float} for bound in bounds):
        raise PluginError(f"bounds are {bounds!r}", "bounds: [lowest, highest]")
    low, high = map(float, bounds)
    if not -math.inf < low < high < math.inf:
        raise PluginError(f"bounds are {bounds!r}", "bounds: [lowest, highest], both finite")
    return low, high


def _plain(word: str) -> str:
    return word.strip().strip(_MARKUP).casefold()


def _matched(pattern: re.Pattern[str], group: str | int, text: str) -> str | None:
    last = None
    for last in pattern.finditer(text):  # noqa: B007 (the last one counts)
        pass
    return None if last is None else last[group]


def _last_object(text: str) -> Any:
    """The last JSON object that is inside no other one; None: there is none."""
    decoder, found, place = json.JSONDecoder(), None, text.find("{")
    for _ in range(_MOST_OBJECTS):
        if place < 0:
            break
        try:
            found, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            end = place + 1
        place = text.find("{", end)
    return found


def _end(text: str) -> str:
    return f"...{text[-100:]!r}" if len(text) > 100 else repr(text)
