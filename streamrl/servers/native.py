"""The protocol of `streamrl engines serve`: the engine contract itself, over HTTP (messages.py lists the routes)."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import msgspec
import orjson
from typing_extensions import override

from streamrl.config import RunConfig
from streamrl.engine import MemoryTag, Request, Runs
from streamrl.errors import DataError, WeightsError, WireError
from streamrl.http import Call
from streamrl.servers.dialect import Chunk, Dialect, ServerInfo, ServerMetrics, read_count, read_finish, read_logprobs
from streamrl.servers.launch import Launch

if TYPE_CHECKING:  # a process that only keeps servers does without torch
    from streamrl.weight_sync.tensors import Version

SOFTWARE: Final = "streamrl"
_PASSED_ON: Final = ("slots", "attention", "dtype", "device", "threads", "kv_cache")


class NativeDialect(Dialect):
    """Speaks to `streamrl engines serve`.

    A pause belongs to this dialect and carries a lease of `lease.seconds`. Asking for the metrics renews it, which a
    live client does all the time; otherwise the server resumes by itself.
    """

    kind: ClassVar[str] = "hf"
    guarded: ClassVar[str] = "/about"
    merges: ClassVar[bool] = True

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self._owner = uuid.uuid4().hex

    @override
    def launch(self, *, model: str, port: int, seed: int) -> Launch:
        # Runs in the environment of this process.
        config = self._config
        values: dict[str, Any] = {f"engine.{name}": getattr(config.engine, name) for name in _PASSED_ON}
        values |= {
            "seed": seed,
            "model.context": config.model.context,
            "model.tokenizer": config.model.tokenizer,
            "weights.deadline": config.weights.deadline,
            "lease.max_hold": config.lease.max_hold,
        }
        argv = [sys.executable, "-m", "streamrl", "engines", "serve", model, "--port", str(port), "--no-api-key"]
        for key, value in values.items():
            if value is not None:
                argv += ["--set", f"{key}={orjson.dumps(value).decode()}"]
        return Launch(argv, {})

    @override
    def ready(self) -> Call:
        return Call("GET", "/ready", repeatable=True)

    @override
    def about(self) -> Sequence[Call]:
        return (Call("GET", "/about", repeatable=True),)

    @override
    def read_about(self, answers: Sequence[Any]) -> ServerInfo:
        (answer,) = answers
        try:
            if answer["software"] != SOFTWARE:
                raise WireError(f"this is not a `streamrl engines serve`, but {answer['software']!r}")
            probe = answer["probe"]
            return ServerInfo(
                version=str(answer["version"]),
                model=str(answer["model"]),
                context=int(answer["context"]),
                vocabulary=int(answer["vocabulary"]),
                probe=None if probe is None else tuple(int(token) for token in probe),
            )
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, WireError):
                raise
            raise WireError(
                f"this is not a `streamrl engines serve`: {error!r} in its description of itself"
            ) from error

    @override
    def generation(self, request: Request, *, version: int, adapter: str | None = None) -> Call:
        # The server itself keeps newer weights from cached keys and values of older ones, and merges adapters.
        del version, adapter
        body: dict[str, Any] = {
            "id": request.id,
            "tokens": request.tokens.tolist(),
            "max_new_tokens": request.max_new_tokens,
            "temperature": request.temperature,
            "interval": self._config.engine.stream_interval,
        }
        if request.affinity:
            body["affinity"] = request.affinity
        if request.cache_version is not None:
            body["cache_version"] = request.cache_version
        return Call("POST", "/generate", body)

    @override
    def chunk(self, message: Any, *, received: int) -> Chunk:
        try:
            if "error" in message:
                raise _error(message["error"])
            tokens = [_whole(token) for token in message["tokens"]]
            logprobs = read_logprobs(message["logprobs"])
            finish = read_finish(message.get("finish"))
            runs = None if finish is None else _runs(message["runs"])
            prompt = None if finish is None else _whole(message["prompt_tokens"])
            cached = None if finish is None else read_count(message.get("cached_tokens"))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, WireError | DataError):
                raise
            raise WireError(f"no event of a response: {error!r}") from error
        if len(tokens) != len(logprobs):
            raise WireError(f"{len(tokens)} tokens came with {len(logprobs)} log-probabilities")
        if runs is not None and runs and not runs[-1][0] < received + len(tokens):
            raise WireError(f"the runs {runs} are not those of {received + len(tokens)} tokens")
        return Chunk(tokens, logprobs, finish, runs, prompt, cached)

    @override
    def abort(self, request_id: str | None, *, paused: bool = False) -> Sequence[Call]:
        del paused
        return (Call("POST", "/abort", {"id": request_id}, repeatable=True),)

    @override
    def pause(self) -> Sequence[Call]:
        body = {"owner": self._owner, "seconds": self._config.lease.seconds}
        return (Call("POST", "/pause", body, repeatable=True),)

    @override
    def resume(self) -> Sequence[Call]:
        # The pause of another owner stays, until its own lease ends.
        return (Call("POST", "/resume", {"owner": self._owner}, repeatable=True),)

    @override
    def prefetch(self, version: Version) -> Sequence[Call]:
        return (Call("POST", "/weights/prefetch", self._named(version), repeatable=True),)

    @override
    def update(self, version: Version) -> Sequence[Call]:
        # A server on another host pulls the version from where the learner's host serves it.
        return (Call("POST", "/weights/update", self._named(version), repeatable=True),)

    def _named(self, version: Version) -> dict[str, Any]:
        if version.folder is None:
            raise WeightsError("a version that lies in memory only cannot reach a server")
        return {
            "run": self._config.name,
            "pair": list(version.pair),
            "step": version.step,
            "folder": str(version.folder.absolute()),
            "files": list(version.files),
            "parts": {name: list(files) for name, files in version.parts.items()},
            "sources": list(version.sources),
            "deltas": self._config.weights.delta.enabled,
            "adapter": None if version.adapter is None else msgspec.to_builtins(version.adapter),
        }

    @override
    def sleep(self, level: Literal[0, 1]) -> Sequence[Call]:
        return (Call("POST", "/sleep", {"level": level}, repeatable=True),)

    @override
    def wake(self, tags: Sequence[MemoryTag]) -> Sequence[Call]:
        return (Call("POST", "/wake", {"tags": list(tags)}, repeatable=True),)

    @override
    def metrics(self) -> Call:
        return Call("GET", "/figures", query={"owner": self._owner}, repeatable=True)

    @override
    def read_metrics(self, answer: Any) -> ServerMetrics:
        try:
            return ServerMetrics(
                running=_whole(answer["running"]),
                waiting=_whole(answer["waiting"]),
                cache_use=min(max(float(answer["cache_use"]), 0.0), 1.0),
                tokens_sampled=_whole(answer["tokens_sampled"]),
                preemptions=_whole(answer["preemptions"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"invalid metrics: {error!r}") from error


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r} is not an integer")
    return value


def _runs(value: Any) -> Runs:
    return [(_whole(first), _whole(version)) for first, version in value]


def _error(said: Any) -> Exception:
    kind, message = str(said["kind"]), str(said["message"])
    if kind == "data":
        return DataError(message, str(said.get("hint", "")))
    return WireError(f"the server failed while it answered ({kind}): {message}")
