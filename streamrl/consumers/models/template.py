"""Requests to any other server: a JSON body with placeholders, and the path of the score in the answer.

```yaml
args:
  model: mine
  path: /score
  body: {question: "{prompt}", reply: "{response}", reference: "{answer}", level: "{metadata.level}"}
  value: result.score
```

A string that is exactly one placeholder becomes the value itself (a list stays a list); a placeholder within a longer
string becomes text. `{{` and `}}` stand for braces.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import orjson

from streamrl.consumers.models.dialects import finite_number
from streamrl.consumers.reward import RewardSample
from streamrl.consumers.transcript import transcript
from streamrl.errors import DataError, PluginError, WireError

_PLACEHOLDER: Final = re.compile(r"\{\{|\}\}|\{([^{}]*)\}")


def fence(sample: RewardSample) -> str:
    """Twelve digits for delimiters around a response: a hash of it, so that it cannot contain them."""
    said = f"{sample.prompt.text}\0{sample.text}\0{sample.messages if sample.turns or sample.completion[1:] else ''}"
    return hashlib.blake2b(said.encode(errors="replace"), digest_size=6).hexdigest()


_VALUES: Final[Mapping[str, Callable[[RewardSample], Any]]] = {
    "prompt": lambda sample: sample.prompt.text,
    "response": lambda sample: transcript(sample, fence(sample)),
    "text": lambda sample: sample.text,
    "messages": lambda sample: sample.messages,
    "answer": lambda sample: sample.prompt.answer,
    "metadata": lambda sample: sample.prompt.metadata,
    "finish": lambda sample: sample.finish,
    "group_id": lambda sample: sample.group_id,
    "gid": lambda sample: sample.group_id,  # its name up to 0.1
    "index": lambda sample: sample.index,
    "fence": fence,
}
_METADATA: Final = "metadata."


class Body:
    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body
        self.placeholders = frozenset(_placeholders(body))

    def filled(self, sample: RewardSample) -> dict[str, Any]:
        look = functools.cache(lambda name: _value(name, sample))
        return {key: _filled(value, look) for key, value in self._body.items()}


class Template(Body):
    def __init__(self, body: Mapping[str, Any], value: str) -> None:
        super().__init__(body)
        self._way = way_of(value, "value")

    def read(self, answer: Mapping[str, Any]) -> float:
        """The score in an answer; `WireError`: it is missing, or not a finite number."""
        try:
            found = at(answer, self._way)
        except LookupError as error:
            raise WireError(f"an answer without {'.'.join(self._way)}: {str(answer)[:200]}") from error
        return finite_number(found, ".".join(self._way))


def way_of(path: str, arg: str) -> list[str]:
    """Split a path such as `data.0.score`; `PluginError`: a step is empty."""
    way = path.split(".")
    if not all(way):
        raise PluginError(f"{arg} {path!r} has an empty step", "write it with dots: result.score, data.0.score")
    return way


def at(value: Any, way: Sequence[str]) -> Any:
    """Follow a path of keys and list indices; `LookupError` if it leads nowhere."""
    try:
        for step in way:
            value = value[int(step)] if isinstance(value, list) else value[step]
    except (TypeError, ValueError) as error:
        raise LookupError(step) from error
    return value


def _placeholders(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [name for inner in value.values() for name in _placeholders(inner)]
    if isinstance(value, list | tuple):
        return [name for inner in value for name in _placeholders(inner)]
    if not isinstance(value, str):
        return []
    if "{" in (rest := _PLACEHOLDER.sub("", value)) or "}" in rest:
        raise PluginError(f"a brace is alone in {value!r}", "write {{ or }} for a brace that is one")
    names = [match[1] for match in _PLACEHOLDER.finditer(value) if match[1] is not None]
    for name in names:
        if name not in _VALUES and not (name.startswith(_METADATA) and name != _METADATA):
            close = difflib.get_close_matches(name, _VALUES, n=1)
            hint = f"did you mean {{{close[0]}}}?" if close else f"known: {', '.join(_VALUES)}, metadata.KEY"
            raise PluginError(f"nothing is known by the name {{{name}}}", hint)
    return names


def _filled(value: Any, look: Callable[[str], Any]) -> Any:
    if isinstance(value, Mapping):
        return {key: _filled(inner, look) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_filled(inner, look) for inner in value]
    if not isinstance(value, str):
        return value
    whole = _PLACEHOLDER.fullmatch(value)
    if whole is not None and whole[1] is not None:
        return look(whole[1])
    return _PLACEHOLDER.sub(lambda match: match[0][0] if match[1] is None else as_text(look(match[1])), value)


def as_text(value: Any) -> str:
    """The value within text: strings as they are, others as JSON."""
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def _value(name: str, sample: RewardSample) -> Any:
    if name.startswith(_METADATA):
        key = name.removeprefix(_METADATA)
        if key not in sample.prompt.metadata:
            raise DataError(f"line {sample.prompt.line} of the data set has no {key!r}, which the reward's body needs")
        return sample.prompt.metadata[key]
    found = _VALUES[name](sample)
    if name == "answer" and found is None:
        raise DataError(f"line {sample.prompt.line} of the data set has no answer, which the reward's body needs")
    return found
