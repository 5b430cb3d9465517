"""SGLang 0.5.20 to 0.5.23 as a `Dialect`: `/generate` streamed, weights through our plug-in inside the server.

New weights are one call, which the scheduler carries out whole: our hook there (plugin/streamrl_engine/sglang.py) opens
the server's update session, checks, copies, names the version and closes the session again. So the death of the caller
leaves nothing half done, and a refused version leaves the old weights.
"""

from __future__ import annotations

import base64
import os
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import orjson
from typing_extensions import override

from streamrl.config import RunConfig
from streamrl.config.sampling import SGLANG_MASK
from streamrl.cores import THREADS
from streamrl.engine import Finish, MemoryTag, Request
from streamrl.errors import ConfigError, Refused, StreamrlError, WireError
from streamrl.http import Call
from streamrl.servers.dialect import (
    BUSY,
    PROBE,
    Chunk,
    Dialect,
    ServerInfo,
    ServerMetrics,
    describe_version,
    read_count,
    read_finish,
    read_logprobs,
    read_spans,
    stream_error,
)
from streamrl.servers.environments import find_environment, on_cpu
from streamrl.servers.launch import LOOPBACK, PLUGIN, SGLANG, Launch, adapters_in_flight, merged

if TYPE_CHECKING:  # a process that only keeps servers does without torch
    from streamrl.weight_sync.tensors import Version

LOADER: Final = "streamrl_engine.sglang.load"
FETCH: Final = "streamrl_fetch "
OLDEST: Final = (0, 5, 20)
TELLS_CUTS: Final = (0, 5, 23)
_BYTES: Final = {"float32": 4, "bfloat16": 2}


class SglangDialect(Dialect):
    """Speaks to SGLang.

    Request ids must have one length, because SGLang aborts every request whose id begins with the given one. No id may
    be used twice: two seconds after a response has ended SGLang aborts its id once more.
    """

    kind: ClassVar[str] = "sglang"
    guarded: ClassVar[str] = "/model_info"
    spare: ClassVar[int] = 7

    @override
    def launch(self, *, model: str, port: int, seed: int, host: str = LOOPBACK, key: str | None = None) -> Launch:
        engine = self._config.engine
        cpu = on_cpu(engine)
        environment = find_environment(engine.environment, "sglang")
        flags = {**self.flags(model=model, port=port, seed=seed, cpu=cpu), "host": host}
        return SGLANG.launch(environment, flags, self.environ(model, cpu=cpu), key)

    def flags(self, *, model: str, port: int, seed: int, cpu: bool) -> dict[str, Any]:
        """Those of a server on the loopback interface with all that streamrl needs of it; the user's win."""
        config, engine = self._config, self._config.engine
        flags: dict[str, Any] = {
            **SGLANG.flags_for(model=model, port=port, seed=seed, cpu=cpu, sleeps=_wants_memory_saver(config)),
            **SGLANG.quantised(config.weights.quantize),
            "dtype": engine.dtype,
            "context-length": config.model.context,
            "max-running-requests": engine.slots,
            "stream-interval": engine.stream_interval,
            # Without it each message holds the whole response so far.
            "incremental-streaming-output": True,
            # Token ids are all that travels.
            "skip-tokenizer-init": not config.reads_text,
            "sampling-defaults": "openai",
            "custom-weight-loader": LOADER,
            "tp-size": engine.tensor_parallel,
        }
        if config.model.tokenizer is not None:
            flags["tokenizer-path"] = config.model.tokenizer
        tokens = _cache_tokens(config, model)
        if tokens is not None:
            flags["max-total-tokens"] = tokens
        if config.learner.lora.alone:
            flags |= {
                "enable-lora": True,
                "max-lora-rank": config.learner.lora.rank,
                "lora-target-modules": "all",
                "max-loras-per-batch": adapters_in_flight(config.max_staleness),
            }
        if cpu:
            flags["lora-backend"] = "torch_native"  # the default is written for accelerators
        return merged(flags, engine.flags)

    def environ(self, model: str, *, cpu: bool) -> dict[str, str]:
        engine = self._config.engine
        environ = SGLANG.environ_for(model, cpu=cpu, sleeps=_wants_memory_saver(self._config), plugin=True)
        if cpu:
            # A replica has its share of the cores there.
            environ[THREADS] = str(engine.threads or os.environ.get(THREADS, "1"))
            if engine.tensor_parallel > 1:
                # It wants a NUMA node for each rank, or to be told which cores are whose: here all share all.
                cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
                environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join([cores] * engine.tensor_parallel)
        return environ

    @override
    def ready(self) -> Call:
        return SGLANG.ready

    @override
    def about(self) -> Sequence[Call]:
        probe = {"model": "", "prompt": PROBE, "add_special_tokens": False}
        return [
            Call("GET", "/server_info", repeatable=True),
            Call("GET", "/model_info", repeatable=True),
            Call("POST", "/tokenize", probe, repeatable=True, optional=True),
        ]

    @override
    def read_about(self, answers: Sequence[Any]) -> ServerInfo:
        # SGLang tells its tokenizer only when it has one.
        server, model, probe = answers
        if not (isinstance(server, Mapping) and isinstance(model, Mapping)):
            raise WireError("the server does not answer /server_info and /model_info as SGLang does")
        version = str(server.get("version", ""))
        context = server.get("context_length")
        ranks = server.get("tp_size", 1)
        if ranks != self._config.engine.tensor_parallel:
            raise Refused(
                f"this SGLang server runs with --tp-size {ranks}, and each rank is sent its weights",
                f"set engine.tensor_parallel to {ranks}",
            )
        if missing := _missing(server, version, TELLS_CUTS if self._config.sampling.cuts else OLDEST):
            raise Refused(f"this SGLang server cannot take part: {missing}", "see docs/guides/engines.md")
        return ServerInfo(
            version=version,
            model=str(model.get("model_path", "")),
            context=context if isinstance(context, int) else None,
            probe=_token_ids(probe),
        )

    @override
    def generation(self, request: Request, *, version: int, salt: str = "", adapter: str | None = None) -> Call:
        sampling: dict[str, Any] = {
            "max_new_tokens": request.max_new_tokens,
            "min_new_tokens": min(request.min_tokens, request.max_new_tokens),
            "temperature": request.temperature,
            # All parameters are given: omitted ones come from the model's generation_config.json.
            "top_p": request.top_p,
            "top_k": request.top_k or -1,
            "min_p": request.min_p,
            "stop": [] if request.min_tokens else list(request.stop),  # it would end a response before that
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "skip_special_tokens": False,
        }
        if request.json_schema:
            sampling["json_schema"] = request.json_schema
        body: dict[str, Any] = {
            "rid": request.id,
            "input_ids": request.tokens.tolist(),
            "sampling_params": sampling,
            "return_logprob": True,
            "logprob_start_len": -1,
            "stream": True,
            "cache_salt": self.salt(request, version, salt),
        }
        if request.cuts and 0 < request.top_k <= SGLANG_MASK:
            # Then it also tells the log-probabilities of what it sampled from, and with each token what that was.
            body["return_sampling_mask"] = True
        if adapter is not None:
            body["lora_path"] = adapter
        return Call("POST", "/generate", body)

    @override
    def chunk(self, message: Any, *, received: int) -> Chunk:
        # Messages are cumulative unless the server runs with `--incremental-streaming-output`, and a cumulative one may
        # already hold more than it counts; the count says which of its tokens are new.
        if isinstance(message, Mapping) and "error" in message:
            raise stream_error(message["error"])
        try:
            return _chunk(message["output_ids"], message["meta_info"], received)
        except StreamrlError:
            raise
        except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise WireError(f"no message of SGLang's /generate: {error!r}") from error

    @override
    def score(self, model: str, tokens: Sequence[int], start: int) -> Call:
        body = {
            "input_ids": tokens,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": start - 1,
        }
        return Call("POST", "/generate", body, repeatable=True)

    @override
    def read_scores(self, answer: Any, tokens: Sequence[int]) -> list[float]:
        try:
            entries = answer["meta_info"]["input_token_logprobs"][-len(tokens) :]
            found = [(int(entry[1]), float(entry[0])) for entry in entries]
        except (LookupError, TypeError, ValueError) as error:
            raise WireError(f"SGLang answered without log-probabilities of a prompt: {error!r}") from error
        # It calls the last token of its vocabulary 0; the value belongs to the right token.
        if len(found) != len(tokens) or any(
            said not in (token, 0) for (said, _), token in zip(found, tokens, strict=True)
        ):
            raise WireError("SGLang answered with the log-probabilities of other tokens")
        return [value for _, value in found]

    @override
    def abort(self, request_id: str) -> Sequence[Call]:
        return [Call("POST", "/abort_request", {"rid": request_id}, repeatable=True)]

    @override
    def pause(self) -> Sequence[Call]:
        return [Call("POST", "/pause_generation", {"mode": "in_place"}, repeatable=True)]

    @override
    def resume(self) -> Sequence[Call]:
        return [Call("POST", "/continue_generation", {"torch_empty_cache": False}, repeatable=True)]

    @override
    def prefetch(self, version: Version) -> Sequence[Call]:
        # A setting that our plug-in takes for itself. All else that reaches the schedulers waits for running requests.
        # The plug-in checks what it has fetched within the update.
        setting = FETCH + orjson.dumps(describe_version(version)).decode()
        return [Call("POST", "/set_internal_state", {"server_args": {setting: 1}}, repeatable=True)]

    @override
    def read_prefetch(self, answer: Any) -> str:
        if not isinstance(answer, list):
            raise WireError(f"SGLang answered a setting with {answer!r}")
        return "" if all(answer) else BUSY

    @override
    def label(self) -> Call:
        return Call("GET", "/model_info", repeatable=True)

    @override
    def update(self, version: Version, label: str) -> Sequence[Call]:
        # It may be repeated: the same bytes are copied again.
        manifest = orjson.dumps(describe_version(version))
        body = {
            "serialized_named_tensors": [_frame(manifest)] * self._config.engine.tensor_parallel,
            "load_format": LOADER,
            # The salt of the next requests keeps them away from what old weights computed. A flush would be refused
            # while requests run, after the weights were replaced.
            "flush_cache": False,
            "weight_version": label,
        }
        return [Call("POST", "/update_weights_from_tensor", body, repeatable=True)]

    @override
    def sleep(self, level: Literal[0, 1]) -> Sequence[Call]:
        # The server dies of freeing memory while it decodes, so running requests are put back into the queue before.
        if level == 0:
            return self.pause()
        if on_cpu(self._config.engine):
            raise Refused(
                "SGLang on a CPU cannot free its memory: it reports success and frees nothing", "use sleep level 0"
            )
        if not _wants_memory_saver(self._config):
            raise Refused(
                "this SGLang server cannot free its memory: it was not started for that",
                "rollout.placement: colocated, or `enable-memory-saver: true` in engine.flags",
            )
        return SGLANG.sleep

    @override
    def wake(self, tags: Sequence[MemoryTag]) -> Sequence[Call]:
        # Decoding goes on when the keys and values are back.
        calls = []
        if not on_cpu(self._config.engine) and _wants_memory_saver(self._config):
            calls.append(Call("POST", "/resume_memory_occupation", {"tags": list(tags)}, repeatable=True))
        return [*calls, *self.resume()] if "kv_cache" in tags else calls

    @override
    def load_adapter(self, name: str, folder: Path) -> Call:
        return Call("POST", "/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})

    @override
    def unload_adapter(self, name: str) -> Call:
        return Call("POST", "/unload_lora_adapter", {"lora_name": name})

    @override
    def metrics(self) -> Call:
        # `/v1/loads`, not `/metrics`: it is true at the moment of the question, `/metrics` is as old as up to 40 decode
        # steps. It counts neither tokens nor preemptions; a preempted request shows as a waiting one.
        return Call("GET", "/v1/loads", query={"include": "core"}, repeatable=True)

    @override
    def read_metrics(self, answer: Any) -> ServerMetrics:
        try:
            loads = answer["loads"]
            return ServerMetrics(
                running=sum(int(load["num_running_reqs"]) for load in loads),
                waiting=sum(int(load["num_waiting_reqs"]) for load in loads),
                # Exact, not `token_usage`, which is rounded: a change is a sign of life.
                cache_use=max(
                    int(load["num_used_tokens"]) / max(1, int(load["max_total_num_tokens"])) for load in loads
                ),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"/v1/loads does not answer as SGLang does: {error!r}") from error


def _token_ids(answer: Any) -> tuple[int, ...] | None:
    tokens = answer.get("tokens") if isinstance(answer, Mapping) else None
    whole = isinstance(tokens, list) and all(isinstance(token, int) for token in tokens)
    return tuple(tokens) if whole and tokens is not None else None


def _missing(server: Mapping[str, Any], version: str, oldest: tuple[int, ...]) -> str:
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    if numbers and numbers < oldest:
        what = "which weights sampled which token" if numbers < OLDEST else "from which distribution, cut by `sampling`"
        return f"SGLang {version} is older than {'.'.join(map(str, oldest))}: it does not say {what}"
    if LOADER not in (server.get("custom_weight_loader") or []):
        return f"the server was started without --custom-weight-loader {LOADER} and PYTHONPATH={PLUGIN}"
    if server.get("dp_size", 1) != 1:
        return "the server runs with --dp-size over 1: give each replica a server of its own"
    return ""


def _chunk(tokens: Sequence[Any], meta: Mapping[str, Any], received: int) -> Chunk:
    total, spans = int(meta["completion_tokens"]), meta.get("weight_versions")
    finish = _finish(meta.get("finish_reason"))
    fresh = [int(token) for token in _fresh(tokens, total, received)]
    logprobs = _logprobs(_fresh(meta.get("output_token_logprobs") or [], total, received), fresh)
    if cut := meta.get("output_token_sampling_logprobs"):
        logprobs = read_logprobs(_fresh(cut, total, received))
    unsaid = finish is None or (spans is None and finish == "abort")
    runs = None if unsaid else read_spans(spans or (), total)
    return Chunk(fresh, logprobs, finish, runs, read_count(meta.get("cached_tokens")))


def _finish(reason: Any) -> Finish | None:
    if reason is None:
        return None
    if not isinstance(reason, Mapping):
        raise WireError(f"SGLang ended a response for an unknown reason: {reason!r}")
    finish = read_finish(reason["type"])
    if isinstance(code := reason.get("status_code"), int) and code >= 400:
        raise stream_error({"message": reason.get("message"), "code": code})
    return finish


def _fresh(items: Sequence[Any], total: int, received: int) -> list[Any]:
    """Return the new items of a list that holds either all `total` items (or more, not counted yet) or the last."""
    new = total - received
    if new < 0 or len(items) < new:
        raise WireError(f"SGLang counts {total} tokens, {received} came before, and sent {len(items)}")
    return list(items[received:total]) if len(items) >= total else list(items[len(items) - new :])


def _logprobs(entries: Sequence[Any], tokens: Sequence[int]) -> list[float]:
    for (_, named, *_), token in zip(entries, tokens, strict=True):
        if named != token:
            raise WireError(f"SGLang's log-probability of token {named} came with token {token}")
    return read_logprobs([entry[0] for entry in entries])


def _frame(manifest: bytes) -> str:
    """Return a manifest as SGLang's server wants to be sent tensors: `[(name, tensor)]`, with the manifest as the name.

    The server unpickles it through a list of allowed globals; nothing is pickled here. These are constant bytes around
    JSON, the opcodes of a list with one pair: a string and `torch.ByteTensor()`, which is empty. No tensor, shared
    memory or file descriptor travels.
    """
    frame = b"\x80\x02]X" + struct.pack("<I", len(manifest)) + manifest + b"ctorch\nByteTensor\n)R\x86a."
    return base64.b64encode(frame).decode()


def _wants_memory_saver(config: RunConfig) -> bool:
    """Whether the servers can free memory: we start them so when asked; of servers at `engine.url` it is assumed."""
    engine = config.engine
    asked = "enable-memory-saver" in merged({}, engine.flags)
    return bool(engine.url) or asked or config.rollout.placement == "colocated"


def _cache_tokens(config: RunConfig, model: str) -> int | None:
    """Tokens that `engine.kv_cache` has room for: at least one response, at most twice what all slots can hold.

    None when the model is not a folder, because the size of a token is then unknown.
    """
    path = Path(model) / "config.json"
    if not Path(model).is_dir():
        return None
    try:
        shape = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", "model.path must be a Hugging Face model") from error
    shape = shape.get("text_config", shape)
    try:
        heads = int(shape.get("num_attention_heads") or shape["n_head"])
        width = int(shape.get("head_dim") or int(shape.get("hidden_size") or shape["n_embd"]) // heads)
        layers = int(shape.get("num_hidden_layers") or shape["n_layer"])
    except (KeyError, TypeError, ValueError):
        return None
    kept = int(shape.get("num_key_value_heads") or heads)
    token = 2 * layers * kept * width * _BYTES[config.engine.dtype]
    context = config.model.context
    most = 2 * config.engine.slots * context
    return max(context + 1, min(most, config.engine.kv_cache * config.engine.tensor_parallel // token))
