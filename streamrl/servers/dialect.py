"""What a server engine is asked and what it answers, as values: each dialect translates, and none of them does I/O."""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, get_args

import msgspec
import orjson
from typing_extensions import override

from streamrl.config import RunConfig
from streamrl.engine import Finish, MemoryTag, Request, Runs
from streamrl.errors import ConfigError, DataError, NotFetched, StreamrlError, WeightsError, WireError
from streamrl.http import BadAnswer, Call
from streamrl.servers.environments import find_environment, on_cpu
from streamrl.servers.launch import LOOPBACK, Launch, LaunchProfile, Startable, merged

if TYPE_CHECKING:  # a process that only keeps servers does without torch
    from streamrl.weight_sync.tensors import Version

PROBE: Final = "Two plus 34 is thirty-six; naïve?"  # its token ids tell whether a server has the run's tokenizer
TOKENIZE_PROBE: Final = Call(
    "POST", "/tokenize", {"prompt": PROBE, "add_special_tokens": False}, repeatable=True, optional=True
)
IMPOSSIBLE: Final = -100  # added to the logit of a token that is never sampled; servers take no more
IMAGES: Final = "STREAMRL_IMAGE_PROCESSOR"  # our plug-in reads it, and has images read as the learner reads them
BUSY: Final = "busy"  # a server fetches the files of a version still
NOT_FETCHED: Final = "not fetched: "  # what our plug-in says when the files of a version did not come
_FINISHES: Final[tuple[Finish, ...]] = get_args(Finish)
_LOWEST: Final = -9000.0  # vLLM writes -9999 for a log-probability that is missing or not finite
# a sample of Prometheus, whose labels may hold any text
_SAMPLE: Final = re.compile(r"^([\w:]+)(?:\{.*\})? (\d+(?:\.\d*)?(?:e[+-]?\d+)?)(?!\S)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one message of a response's stream brought."""

    tokens: Sequence[int] = ()  # sampled since the message before, with one log-probability each
    logprobs: Sequence[float] = ()
    finish: Finish | None = None  # set on the last message
    runs: Runs | None = None  # of the whole response, on the last message; None from servers that do not tell
    cached_tokens: int | None = None  # of the prompt, the ones whose keys and values it still had, when it said
    prompt_tokens: int | None = None  # as the server counts those of its images, when it said


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
    """Pure translation to and from one kind of server. No method waits, sends or keeps state.

    Calls are sent in the order in which they are returned, each after the success of the one before. Methods that read
    an answer raise `WireError` when it is not what the server should say. A `fixed` server is asked for no change.
    """

    guarded: ClassVar[str] = "/v1/models"  # a path that answers 401 or 403 without the right key, and changes nothing
    spare: ClassVar[int] = 1  # places of its context that no prompt may take: the token it samples, what it keeps free
    adapters: ClassVar[str] = ""  # where the routes for adapters are
    fixed: ClassVar[bool] = False  # its weights cannot be replaced
    profile: ClassVar[LaunchProfile]  # of a kind that streamrl starts
    pause: Sequence[Call] = ()  # stops decoding, and keeps the requests
    resume: Sequence[Call] = ()
    label: Call  # asks for the name of the weights in force, which `update` gave: `weight_version` of the answer
    metrics: Call

    def __init__(self, config: RunConfig) -> None:
        self._config = config

    @override
    def launch(self, *, model: str, port: int, seed: int, host: str = LOOPBACK, key: str | None = None) -> Launch:
        engine, cpu = self._config.engine, on_cpu(self._config.engine)
        environment = find_environment(engine.environment, self.profile.kind)
        flags = {**self.flags(model=model, port=port, seed=seed, cpu=cpu), "host": host}
        return self.profile.launch(environment, flags, self.environ(model, cpu=cpu), key)

    def flags(self, *, model: str, port: int, seed: int, cpu: bool) -> dict[str, Any]:
        """Those of a server on the loopback interface with all that streamrl needs of it; the user's win."""
        # The seed is not one of each request: sampled again it would repeat, and vLLM samples such requests one by one.
        engine = self._config.engine
        flags: dict[str, Any] = {
            **self.profile.flags_for(model=model, port=port, seed=seed, cpu=cpu, sleeps=self._sleeps),
            **self.profile.quantised(self._config.weights.quantize),
            "dtype": engine.dtype,
            "stream-interval": engine.stream_interval,
            **self.needed_flags(model, cpu=cpu),
        }
        return merged(flags, engine.flags)

    def needed_flags(self, model: str, *, cpu: bool) -> dict[str, Any]:
        """What its kind needs besides its profile."""
        raise NotImplementedError

    def environ(self, model: str, *, cpu: bool) -> dict[str, str]:
        environ = self.profile.environ_for(model, cpu=cpu, sleeps=self._sleeps, plugin=True)
        if sees(model):
            environ[IMAGES] = orjson.dumps({"path": model} | self._config.model.image_processor).decode()
        return environ

    @property
    def _sleeps(self) -> bool:
        return self._config.rollout.placement == "colocated"

    @staticmethod
    def salt(request: Request, version: int, life: str) -> str:
        """The salt under which the keys and values of a request are found, in one life of its server."""
        # Never newer than the weights: a server may be behind the version that its sample begins with, and other
        # samples of that version must not find what the older weights computed.
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

        `version` keeps prefix caches of different weights apart, `salt` those of lives of the server; `adapter` is the
        name of a loaded one.
        """

    @abstractmethod
    def chunk(self, message: Any, *, received: int) -> Chunk:
        """Understand one event of the stream, parsed from JSON; `received` tokens came before it.

        `WireError`: also non-finite log-probabilities and counts that do not fit. `DataError`: it refuses the request.
        """

    def score(self, model: str, tokens: Sequence[int], start: int) -> Call:
        """Ask for the log-probabilities, at temperature 1, of `tokens` from `start` (1 or more) on."""
        raise NotImplementedError

    def read_scores(self, answer: Any, tokens: Sequence[int]) -> list[float]:
        """Understand the answer to `score`; `tokens` are those from `start` on. Impossible ones may have any value."""
        raise NotImplementedError

    def abort(self, request_id: str) -> Sequence[Call]:
        """End a request; empty when closing the connection is enough."""
        del request_id
        return ()

    def prefetch(self, version: Version) -> Sequence[Call]:
        """Fetch the files and check names and shapes while the server generates; asked again while it is `BUSY`."""
        raise NotImplementedError

    def read_prefetch(self, answer: Any) -> str:
        """Understand the answer to a call of `prefetch`: empty, `BUSY`, or why the version is refused."""
        raise NotImplementedError

    def update(self, version: Version, label: str) -> Sequence[Call]:
        """Replace the weights and name them `NUMBER` or `NUMBER.ANYTHING`, while the server is paused.

        A refusal (4xx) of the first call means that nothing was changed; any other failure is the server's death.
        """
        raise NotImplementedError

    def sleep(self, level: Literal[0, 1]) -> Sequence[Call]:
        """Stop decoding, and at level 1 free memory."""
        raise NotImplementedError

    def wake(self, tags: Sequence[MemoryTag]) -> Sequence[Call]:
        raise NotImplementedError

    def load_adapter(self, name: str, folder: Path) -> Call:
        """Load a version that is an adapter beside the weights."""
        return Call("POST", f"{self.adapters}/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})

    def unload_adapter(self, name: str) -> Call:
        body = {"lora_name": name}
        return Call("POST", f"{self.adapters}/unload_lora_adapter", body, repeatable=True, optional=True)

    @abstractmethod
    def read_metrics(self, answer: Any) -> ServerMetrics: ...


def described(model: str) -> dict[str, Any]:
    """The model's own configuration; nothing where no folder has it."""
    path = Path(model) / "config.json"
    if not path.parent.is_dir():
        return {}
    try:
        found: dict[str, Any] = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", "model.path must be a Hugging Face model") from error
    return found


def folder_of(model: str) -> Path | None:
    """Where the configuration of a model is; None for one of the hub that has not been fetched."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(model, "config.json")
    except ValueError:  # no name that the hub has
        return None
    return Path(found).parent if isinstance(found, str) else None


def sees(model: str) -> bool:
    """Whether a model has an image side."""
    return (folder := folder_of(model)) is not None and "vision_config" in described(str(folder))


def unexpanded(request: Request) -> list[int]:
    """The tokens of a request with one token for each image, which servers replace by what they count themselves."""
    tokens: list[int] = request.tokens.tolist()
    found: list[int] = []
    end = 0
    for image in request.images:
        found += [*tokens[end : image.begin], image.placeholder]
        end = image.begin + image.count
    return found + tokens[end:]


@contextmanager
def reading(problem: str) -> Iterator[None]:
    """A `WireError` that begins with `problem` for an answer whose form is not the one that is read in this block."""
    try:
        yield
    except StreamrlError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError, StopIteration) as error:
        raise WireError(f"{problem}: {error!r}") from error


def read_finish(reason: Any) -> Finish | None:
    """Translate the usual names of finish reasons; None while the response goes on. `WireError` for an unknown one."""
    finish = next((known for known in _FINISHES if known == reason), None)
    if finish is None and reason is not None:
        raise WireError(f"a response ended for an unknown reason: {reason!r}")
    return finish


def read_cached(message: Mapping[str, Any]) -> int | None:
    """Return how many tokens of the prompt were cached, from a usage of OpenAI's form; None when it does not say."""
    details = (message.get("usage") or {}).get("prompt_tokens_details")
    return read_count(details.get("cached_tokens")) if isinstance(details, Mapping) else None


def read_count(value: Any) -> int | None:
    return max(0, value) if isinstance(value, int) else None


def read_probe(answer: Any) -> tuple[int, ...] | None:
    """Return the ids of `PROBE` from the answer of `/tokenize`."""
    tokens = answer.get("tokens") if isinstance(answer, Mapping) else None
    return tuple(tokens) if isinstance(tokens, list) else None


def read_release(version: str) -> tuple[int, ...]:
    """Return the first three numbers of a version, if it has any."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def read_spans(spans: Any, total: int, finish: Finish | None) -> Runs | None:
    """Turn spans `{version, start, end}` into runs; they have to cover all tokens without a gap, and versions grow.

    A label that begins with no decimal number stands for the model that the server started with.
    """
    if finish is None or (spans is None and finish == "abort"):
        return None
    runs: Runs = []
    end = 0
    with reading("no version spans"):
        for span in spans or ():
            label, start, stop = str(span["version"]), int(span["start"]), int(span["end"])
            digits = label.partition(".")[0]
            number = int(digits) if digits.isascii() and digits.isdecimal() else 0
            if start != end or stop < start or (runs and number < runs[-1][1]):
                raise WireError(f"the version spans {spans} leave gaps or go back")
            if stop > start and (not runs or runs[-1][1] != number):
                runs.append((start, number))
            end = stop
    if end != total:
        raise WireError(f"the version spans cover {end} tokens of {total}")
    return runs


def read_logprobs(values: Sequence[Any]) -> list[float]:
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in values):
        raise WireError("a log-probability is not a number")
    if any(not math.isfinite(value) or value <= _LOWEST for value in values):
        raise WireError("a sampled token has no finite log-probability")
    return [float(value) for value in values]


def raise_error(message: Any) -> None:
    """Raise the error that a message of a stream is: `DataError` with a code from 400 to 499, else `BadAnswer`."""
    error = message.get("error") if isinstance(message, Mapping) else None
    if not error:
        return
    code = error.get("code") if isinstance(error, Mapping) else None
    said = str(error.get("message", error) if isinstance(error, Mapping) else error)[:500]
    if isinstance(code, int) and 400 <= code < 500:
        raise DataError(f"the server refuses the request: {said}")
    raise BadAnswer(f"the server failed while it answered: {said}", status=code if isinstance(code, int) else 500)


def read_prometheus(text: str, fields: Mapping[str, str]) -> ServerMetrics:
    """Sum the finite samples over a server's engines; `cache_use` is their mean. `fields`: metric name to field."""
    found: dict[str, list[float]] = {}
    for name, value in _SAMPLE.findall(text):
        if name in fields and math.isfinite(number := float(value)):
            found.setdefault(fields[name], []).append(number)
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
