"""How servers are started: their flags as words of a command line, and where they find our plug-in."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

from streamrl.errors import ConfigError
from streamrl.http import Call

PLUGIN: Final = Path(__file__).parent / "plugin"
"""For the PYTHONPATH of vLLM and SGLang servers."""
SGLANG_CPU: Final = PLUGIN / "sglang_cpu"
"""What SGLang needs besides on a CPU."""
_NOT_GIVEN: Final = {
    "host": "a server that streamrl starts listens on the loopback interface: it has routes that no key guards",
    "port": "streamrl finds a free port for each server",
    "api-key": "a command line can be read by everybody on the machine, and such a server listens to this host alone",
}
_MOST_ADAPTERS: Final = 8
"""Servers keep room for each of them from their start on; requests with more wait for others to end."""
_NOT_GIVEN["admin-api-key"] = _NOT_GIVEN["api-key"]


@dataclass(frozen=True, slots=True)
class Launch:
    """A command line, and the variables that are added to the environment."""

    argv: Sequence[str]
    environ: Mapping[str, str]


class Startable(ABC):
    """A kind of server that can be started; `kind` is its name in `streamrl engines install`."""

    kind: ClassVar[str]

    @abstractmethod
    def launch(self, *, model: str, port: int, seed: int) -> Launch:
        """Return how a server is started on the loopback interface with all that streamrl needs of it.

        `seed` (0 to 2**31 - 1) is that of its sampling: no two servers of a run may draw the same numbers. The caller
        adds devices, the log and the variables of the configuration. `ConfigError`: the environment is missing, or
        streamrl starts no servers of this kind.
        """

    @abstractmethod
    def ready(self) -> Call:
        """A cheap call that answers 200 when the server can take requests; it must not disturb a pause."""


def merged(flags: Mapping[str, Any], given: Mapping[str, Any], *, section: str = "engine") -> dict[str, Any]:
    """Return our flags, overridden by the user's (underscores are dashes); `ConfigError` for reserved flags."""
    named = {_dashed(name): value for name, value in given.items()}
    if name := next((name for name in named if name in _NOT_GIVEN), None):
        raise ConfigError(
            f"{section}.flags.{name} cannot be set: {_NOT_GIVEN[name]}",
            f"leave it out, or start the server yourself and set {section}.url",
        )
    return {**flags, **named}


def words(flags: Mapping[str, Any]) -> Iterator[str]:
    """Yield the words: True is a bare flag, False and None leave it out, a list is several words, a mapping is JSON."""
    for name, value in flags.items():
        if value is None or value is False:
            continue
        yield f"--{name}"
        if isinstance(value, list | tuple):
            yield from map(str, value)
        elif isinstance(value, Mapping):
            yield json.dumps(value)
        elif value is not True:
            yield str(value)


def python_path(*first: Path) -> str:
    return os.pathsep.join(path for path in (*map(str, first), os.environ.get("PYTHONPATH", "")) if path)


def adapters_in_flight(max_staleness: int) -> int:
    """Adapters that requests may use at one moment: the newest version, and those that older requests began with."""
    return min(max_staleness + 2, _MOST_ADAPTERS)


def _dashed(flag: str) -> str:
    first, dot, rest = flag.lstrip("-").partition(".")  # vLLM's `--hf-overrides.rope_theta` names a key behind the dot
    return first.replace("_", "-") + dot + rest
