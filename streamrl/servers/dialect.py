"""What a server engine is asked and what it answers, as values: each dialect translates, and none of them does I/O.

`ServerEngine` sends the calls and hands the answers back to the dialect that built them.
"""

from __future__ import annotations

import math
import uuid
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, get_args

from typing_extensions import override

from streamrl.config import RunConfig
from streamrl.engine import Finish, MemoryTag, PauseMode, Request, Runs
from streamrl.errors import ConfigError, DataError, Refused, WeightsError, WireError
from streamrl.http import Call
from streamrl.servers.launch import Launch, Startable

if TYPE_CHECKING:  # a process that only keeps servers does without torch
    from streamrl.weight_sync.tensors import Version

PROBE: Final = "Two plus 34 is thirty-six; naïve?"
"""Text whose token ids tell whether a server has the tokenizer of the run."""
TOKENIZE_PROBE: Final = Call(
    "POST",
    "/tokenize",
    {"prompt": PROBE, "add_special_tokens": False},
    repeatable=True,
    missing_ok=True,
    optional=True,
)
"""Asks vLLM, and servers that speak its dialect, for the token ids of `PROBE`."""
_FINISHES: Final[tuple[Finish, ...]] = get_args(Finish)
_LOWEST: Final = -9000.0
_OTHER_KINDS: Final = "use engine.kind vllm or sglang"


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one message of a response's stream brought.

    Attributes:
        tokens: sampled since the message before, and `logprobs` with them, one each.
        finish: set on the last message.
        runs: version runs of the whole response, set on the last message by servers that tell; the others leave None,
            and so does an abort without them.
        prompt_tokens: as the server counted them, when it said.
    """

    tokens: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    finish: Finish | None = None
    runs: Runs | None = None
    prompt_tokens: int | None = None


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
    """What a server says of itself at connect.

    Attributes:
        version: of the server's software, as it prints it.
        model: path or name of the model that it loaded.
        context: longest prompt plus response in tokens; None when it does not say.
        vocabulary: tokens of the model; None when it does not say.
        can_update: whether weights can be replaced (development routes and our plug-in are there).
        missing: what is missing for that, in words, with the flag or variable that mends it; empty when nothing, or
            when nothing could mend it (a kind of server whose weights stay as they are).
        probe: ids of `PROBE` by the server's own tokenizer, without special tokens; None when it cannot be asked.
    """

    version: str
    model: str
    context: int | None = None
    vocabulary: int | None = None
    can_update: bool = True
    missing: str = ""
    probe: tuple[int, ...] | None = None


class Dialect(Startable):
    """Pure translation between `Engine` and one kind of server. No method waits, sends or keeps state.

    Methods that return calls return them in the order in which they are sent, each after the success of the one before.
    Methods that read an answer raise `WireError` when it is not what the server should say. What is not abstract is, as
    it stands here, what a server does that cannot do it.

    Args:
        config: the run.
    """

    guarded: ClassVar[str]
    """A path that answers 401 or 403 without the right key, and changes nothing."""
    merges: ClassVar[bool] = False
    """Whether its servers merge a version that is an adapter by themselves; the others load it beside the weights."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        # A server may have served another run, whose versions had the same numbers.
        self._salt = uuid.uuid4().hex

    @override
    def launch(self, *, model: str, port: int, seed: int) -> Launch:
        del model, port, seed
        raise ConfigError(f"streamrl starts no {self.kind} servers", "set engine.url to one that runs")

    @abstractmethod
    def about(self) -> Sequence[Call]:
        """Calls whose answers `read_about` needs."""

    @abstractmethod
    def read_about(self, answers: Sequence[Any]) -> ServerInfo:
        """Understand the answers to `about`, in their order (parsed JSON, text where it is none, None for 404)."""

    @abstractmethod
    def generation(self, request: Request, *, version: int) -> Call:
        """Ask for one response, streamed as server-sent events; `version` isolates the prefix cache."""

    @abstractmethod
    def chunk(self, message: Any, *, received: int) -> Chunk:
        """Understand one event of the stream, parsed from JSON; `received` tokens came before it.

        Raises:
            WireError: missing or non-finite log-probabilities, counts that do not fit, or no such message.
            DataError: the server refuses the request itself.
        """

    def abort(self, request_id: str | None, *, paused: bool = False) -> Sequence[Call]:
        """End one request, or all; `paused`: the server stands still, and some need another way then.

        Empty: to hang up does it.
        """
        del request_id, paused
        return ()

    def pause(self, mode: PauseMode) -> Sequence[Call]:
        """Stop decoding. Empty: it cannot, and weights change when its last request has ended."""
        del mode
        return ()

    def resume(self) -> Sequence[Call]:
        """Go on; harmless when nothing was paused."""
        return ()

    def prefetch(self, version: Version) -> Sequence[Call]:
        """Bring the files near and check names and shapes while the server generates; empty when nothing is to be done.

        An error answer means `WeightsError`, and nothing was changed.
        """
        del version
        return ()

    def update(self, version: Version) -> Sequence[Call]:
        """Replace the weights and name the version, while the server is paused.

        A refusal (4xx) of the first call means that nothing was changed. After any other failure nobody knows, and
        `prefetch` and `update` are sent once more while the server is still paused; if that fails it counts as dead.

        Raises:
            WeightsError: the version cannot reach such a server.
            Refused: such a server takes none.
        """
        del version
        raise Refused(f"the weights of this {self.kind} server stay as they are")

    def sleep(self, level: Literal[0, 1, 2]) -> Sequence[Call]:
        """Give memory back.

        Raises:
            Refused: the server has no such level.
        """
        del level
        raise Refused(f"an {self.kind} server cannot sleep", _OTHER_KINDS)

    def wake(self, tags: Sequence[MemoryTag]) -> Sequence[Call]:
        """Undo `sleep`."""
        del tags
        return ()

    def load_adapter(self, name: str, folder: Path) -> Call:
        """Load a LoRA adapter.

        Raises:
            Refused: the server cannot.
        """
        raise Refused(f"adapter {name!r} in {folder}: an {self.kind} server loads none", _OTHER_KINDS)

    def unload_adapter(self, name: str) -> Call:
        """Forget a LoRA adapter."""
        raise Refused(f"adapter {name!r}: an {self.kind} server has none")

    @abstractmethod
    def metrics(self) -> Call:
        """Ask for the server's metrics."""

    @abstractmethod
    def read_metrics(self, answer: Any) -> ServerMetrics:
        """Understand the answer to `metrics`."""


def read_finish(reason: Any) -> Finish | None:
    """Why a response ended, as most servers say it; None while it goes on.

    Raises:
        WireError: for another reason.
    """
    if reason is None:
        return None
    for known in _FINISHES:
        if reason == known:
            return known
    raise WireError(f"a response ended for an unknown reason: {reason!r}")


def read_spans(spans: Any, total: int) -> Runs:
    """Runs of versions from spans `{version, start, end}`.

    They cover the tokens without a gap. A label that is no decimal number is the model that the server started with.

    Raises:
        WireError: they do not, or are no spans.
    """
    runs: Runs = []
    end = 0
    try:
        for span in spans:
            label, start, stop = str(span["version"]), int(span["start"]), int(span["end"])
            if start != end or stop < start:
                raise WireError(f"the version spans {spans} leave gaps")
            number = int(label) if label.isascii() and label.isdecimal() else 0
            if stop > start and (not runs or runs[-1][1] != number):
                runs.append((start, number))
            end = stop
    except (KeyError, TypeError, ValueError) as error:
        raise WireError(f"no version spans: {error!r}") from error
    if end != total:
        raise WireError(f"the version spans cover {end} tokens of {total}")
    return runs


def read_logprobs(values: Sequence[Any]) -> list[float]:
    """Log-probabilities of sampled tokens. vLLM writes -9999 for one that is missing or not finite.

    Raises:
        WireError: one is not finite, or no number.
    """
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in values):
        raise WireError("a log-probability is no number")
    if any(not math.isfinite(value) or value <= _LOWEST for value in values):
        raise WireError("a sampled token has no finite log-probability")
    return [float(value) for value in values]


def stream_error(error: Any) -> WireError | DataError:
    """What an error in the midst of a stream means: with a code from 400 to 499 the request is at fault."""
    code = error.get("code") if isinstance(error, Mapping) else None
    said = str(error.get("message", error) if isinstance(error, Mapping) else error)[:500]
    if isinstance(code, int) and 400 <= code < 500:
        return DataError(f"the server refuses the request: {said}")
    return WireError(f"the server failed while it answered: {said}")


def read_prometheus(text: str, fields: Mapping[str, str]) -> ServerMetrics:
    """Sum the finite samples of Prometheus' text format over the engines of a server; of `cache_use` it is the mean.

    `fields` are those of `ServerMetrics` by the name of the metric.
    """
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


def describe_version(version: Version) -> dict[str, Any]:
    """Describe a version to our plug-in inside a server; `streamrl_engine.files.Source.parse` reads it.

    Raises:
        WeightsError: the version has no files.
    """
    from streamrl.weight_sync.manifest import folder_name

    if version.folder is None or not version.parts:
        raise WeightsError(f"version {version.number} has no files that a server could read")
    source: dict[str, Any] = {
        "folder": str(version.folder),
        "parts": {name: list(files) for name, files in version.parts.items()},
    }
    if version.sources:  # for a server on a host that does not see the folder
        source["url"] = f"{version.sources[0].rstrip('/')}/{folder_name(*version.pair)}"
    return source
