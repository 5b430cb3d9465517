"""What a server engine is asked and what it answers, as values: each dialect translates, and none of them does I/O.

Their caller sends the calls and hands the answers back to the dialect that built them.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, get_args

import msgspec
from typing_extensions import override

from streamrl.config import RunConfig
from streamrl.engine import Finish, MemoryTag, Request, Runs
from streamrl.errors import DataError, NotFetched, StreamrlError, WeightsError, WireError
from streamrl.http import BadAnswer, Call
from streamrl.servers.launch import LOOPBACK, Launch, Startable

if TYPE_CHECKING:  # a process that only keeps servers does without torch
    from streamrl.weight_sync.tensors import Version

PROBE: Final = "Two plus 34 is thirty-six; naïve?"
"""Text whose token ids tell whether a server has the tokenizer of the run."""
TOKENIZE_PROBE: Final = Call(
    "POST", "/tokenize", {"prompt": PROBE, "add_special_tokens": False}, repeatable=True, optional=True
)
"""Asks vLLM, and servers that speak its dialect, for the token ids of `PROBE`."""
BUSY: Final = "busy"
"""A server fetches the files of a version still."""
NOT_FETCHED: Final = "not fetched: "
"""What our plug-in says when the files of a version did not come."""
_FINISHES: Final[tuple[Finish, ...]] = get_args(Finish)
_LOWEST: Final = -9000.0  # vLLM writes -9999 for a log-probability that is missing or not finite


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one message of a response's stream brought."""

    tokens: Sequence[int] = ()  # sampled since the message before, with one log-probability each
    logprobs: Sequence[float] = ()
    finish: Finish | None = None  # set on the last message
    runs: Runs | None = None  # of the whole response, on the last message; None from servers that do not tell
    cached_tokens: int | None = None  # of the prompt, the ones whose keys and values it still had, when it said
    counts_follow: bool = False  # on the last message: one more, without tokens, says what was counted


@dataclass(frozen=True, slots=True)
class ServerMetrics:
    """What a server's own metrics say; counters grow from the start of the server."""

    running: int = 0
    waiting: int = 0
    cache_use: float = 0.0
    tokens_sampled: int = 0
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server says of itself at connect; None: it does not say."""

    version: str  # of the server's software, as it prints it
    model: str  # path or name
    context: int | None = None  # longest prompt plus response in tokens
    probe: tuple[int, ...] | None = None  # ids of `PROBE` by its own tokenizer, without special tokens


class Dialect(Startable):
    """Pure translation between `Engine` and one kind of server. No method waits, sends or keeps state.

    Calls are sent in the order in which they are returned, each after the success of the one before. Methods that read
    an answer raise `WireError` when it is not what the server should say. The defaults are those of a `fixed` server,
    which is asked for no change.
    """

    kind: ClassVar[str]
    guarded: ClassVar[str]
    """A path that answers 401 or 403 without the right key, and changes nothing."""
    spare: ClassVar[int] = 1
    """Places of its context that no prompt may take: the token that it samples, and what it keeps free."""
    fixed: ClassVar[bool] = False
    """Its weights cannot be replaced."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config

    @override
    def launch(self, *, model: str, port: int, seed: int, host: str = LOOPBACK, key: str | None = None) -> Launch:
        raise NotImplementedError  # the configuration wants engine.url

    @staticmethod
    def salt(request: Request, version: int, life: str) -> str:
        """The salt under which the keys and values of a request are found, in one life of its server.

        The salt is never newer than the weights. A server may be behind the version that its pool named to the sample,
        and samples that begin with that version must not find what the older weights computed.
        """
        oldest = version if request.cache_version is None else min(version, request.cache_version)
        return f"{life}-w{oldest}"

    @abstractmethod
    def about(self) -> Sequence[Call]:
        """Return the calls whose answers `read_about` needs."""

    @abstractmethod
    def read_about(self, answers: Sequence[Any]) -> ServerInfo:
        """Understand the answers to `about`, in their order: parsed JSON, text where it is none, None for an error.

        `Refused`: the server cannot take part; the message names the flag or variable to set.
        """

    @abstractmethod
    def generation(self, request: Request, *, version: int, salt: str = "", adapter: str | None = None) -> Call:
        """Ask for one response, which fits the context, as server-sent events.

        `version` keeps prefix caches of different weights apart, `salt` those of different lives of the server.
        `adapter` is the name of a loaded adapter that is the version in force.
        """

    @abstractmethod
    def chunk(self, message: Any, *, received: int) -> Chunk:
        """Understand one event of the stream, parsed from JSON; `received` tokens came before it.

        Raises:
            WireError: missing or non-finite log-probabilities, counts that do not fit, or no such message.
            DataError: the server refuses the request itself.
        """

    def score(self, model: str, tokens: Sequence[int], start: int) -> Call:
        """Ask for the log-probabilities of `tokens` from `start` on, which is at least 1; `model` by its served name.

        They go in as a prompt, to whose log-probabilities no kind of server applies a temperature.
        """
        raise NotImplementedError

    def read_scores(self, answer: Any, tokens: Sequence[int]) -> list[float]:
        """Understand the answer to `score`; `tokens` are those from `start` on. An impossible one may have any value.

        `WireError`: it has no log-probabilities, or those of other tokens.
        """
        raise NotImplementedError

    def abort(self, request_id: str) -> Sequence[Call]:
        """End a request; empty when closing the connection is enough."""
        del request_id
        return ()

    def pause(self) -> Sequence[Call]:
        """Stop decoding and keep the requests."""
        return ()

    def resume(self) -> Sequence[Call]:
        return ()

    def prefetch(self, version: Version) -> Sequence[Call]:
        """Fetch the files and check names and shapes while the server generates; a failure changes nothing.

        To be asked again for as long as the answer is `BUSY`.
        """
        del version
        return ()

    def read_prefetch(self, answer: Any) -> str:
        """Understand the answer to a call of `prefetch`: empty, `BUSY`, or why the version is refused."""
        del answer
        return ""

    def label(self) -> Call:
        """Ask for the name of the weights in force, which `update` gave: `weight_version` of the answer."""
        raise NotImplementedError

    def update(self, version: Version, label: str) -> Sequence[Call]:
        """Replace the weights and name them `NUMBER` or `NUMBER.ANYTHING`, while the server is paused.

        A refusal (4xx) of the first call means that nothing was changed. After any other failure the state is unknown,
        and the server counts as dead.

        `WeightsError`: the version cannot reach such a server.
        """
        raise NotImplementedError

    def sleep(self, level: Literal[0, 1]) -> Sequence[Call]:
        """Stop decoding, and at level 1 free memory; `Refused` when the server cannot."""
        raise NotImplementedError

    def wake(self, tags: Sequence[MemoryTag]) -> Sequence[Call]:
        del tags
        return ()

    def load_adapter(self, name: str, folder: Path) -> Call:
        """Load a version that is an adapter beside the weights."""
        raise NotImplementedError

    def unload_adapter(self, name: str) -> Call:
        raise NotImplementedError

    @abstractmethod
    def metrics(self) -> Call: ...
    @abstractmethod
    def read_metrics(self, answer: Any) -> ServerMetrics: ...


def read_finish(reason: Any) -> Finish | None:
    """Translate the usual names of finish reasons; None while the response goes on. `WireError` for an unknown one."""
    if reason is None:
        return None
    for known in _FINISHES:
        if reason == known:
            return known
    raise WireError(f"a response ended for an unknown reason: {reason!r}")


def read_cached(usage: Mapping[str, Any]) -> int | None:
    """Return how many tokens of the prompt were cached, from a usage of OpenAI's form; None when it does not say."""
    details = usage.get("prompt_tokens_details")
    return read_count(details.get("cached_tokens")) if isinstance(details, Mapping) else None


def read_count(value: Any) -> int | None:
    return max(0, value) if isinstance(value, int) else None


def read_spans(spans: Any, total: int) -> Runs:
    """Turn spans `{version, start, end}` into runs; they have to cover all tokens without a gap, and versions grow.

    A label that begins with no decimal number stands for the model that the server started with.
    """
    runs: Runs = []
    end = 0
    try:
        for span in spans:
            label, start, stop = str(span["version"]), int(span["start"]), int(span["end"])
            if start != end or stop < start:
                raise WireError(f"the version spans {spans} leave gaps")
            digits = label.partition(".")[0]
            number = int(digits) if digits.isascii() and digits.isdecimal() else 0
            if runs and number < runs[-1][1]:
                raise WireError(f"the version spans {spans} go back")
            if stop > start and (not runs or runs[-1][1] != number):
                runs.append((start, number))
            end = stop
    except (KeyError, TypeError, ValueError) as error:
        raise WireError(f"no version spans: {error!r}") from error
    if end != total:
        raise WireError(f"the version spans cover {end} tokens of {total}")
    return runs


def read_logprobs(values: Sequence[Any]) -> list[float]:
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in values):
        raise WireError("a log-probability is not a number")
    if any(not math.isfinite(value) or value <= _LOWEST for value in values):
        raise WireError("a sampled token has no finite log-probability")
    return [float(value) for value in values]


def stream_error(error: Any) -> BadAnswer | DataError:
    """Classify an error within a stream: with a code from 400 to 499 the request is at fault."""
    code = error.get("code") if isinstance(error, Mapping) else None
    said = str(error.get("message", error) if isinstance(error, Mapping) else error)[:500]
    if isinstance(code, int) and 400 <= code < 500:
        return DataError(f"the server refuses the request: {said}")
    return BadAnswer(f"the server failed while it answered: {said}", status=code if isinstance(code, int) else 500)


def read_prometheus(text: str, fields: Mapping[str, str]) -> ServerMetrics:
    """Sum the finite samples over a server's engines; `cache_use` is their mean. `fields`: metric name to field."""
    found: dict[str, list[float]] = {}
    for line in text.splitlines():
        name = line.split("{", 1)[0].split(" ", 1)[0]
        if name not in fields:
            continue
        rest = line.rsplit("}", 1)[-1] if "{" in line else line[len(name) :]
        try:
            value = float(rest.split()[0])
        except (ValueError, IndexError):
            continue
        if math.isfinite(value):
            found.setdefault(fields[name], []).append(value)
    use = found.pop("cache_use", [0.0])
    counts = {field: int(sum(values)) for field, values in found.items()}
    return ServerMetrics(cache_use=min(sum(use) / len(use), 1.0), **counts)


def refusal(version: Version, problem: str) -> StreamrlError:
    """Why our plug-in does not take a version: its files did not come, which is no fault of theirs, or they are bad."""
    if NOT_FETCHED in problem:
        return NotFetched(f"the server did not get the files of version {version.number}: {problem}")
    return WeightsError(f"the server refuses version {version.number}: {problem}")


def describe_version(version: Version) -> dict[str, Any]:
    """Describe a version to our plug-in inside a server; `streamrl_engine.files.Source` reads it."""
    from streamrl.weight_sync.manifest import folder_name

    if version.folder is None and not version.sources:
        raise WeightsError(f"version {version.number} has no files that a server could read")
    source: dict[str, Any] = {
        "folder": "" if version.folder is None else str(version.folder),
        "files": list(version.files),
        "structure": version.structure,
    }
    if version.sources:  # for a server on a host that does not see the folder
        source["url"] = f"{version.sources[0].rstrip('/')}/{folder_name(*version.pair)}"
        source["proofs"] = version.proofs
    if version.lane is not None:
        source["lane"] = msgspec.structs.asdict(version.lane)
    return source
