"""SGLang 0.5.20 to 0.5.23 as a `Dialect`: `/generate` streamed, weights through our plug-in inside the server.

New weights are one call, which the scheduler carries out whole: our hook there (plugin/streamrl_engine/sglang.py) opens
the server's update session, checks, copies, names the version and closes the session again. So the death of the caller
leaves nothing half done, and a refused version leaves the old weights.
"""

from __future__ import annotations

import base64
import os
import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import orjson
from typing_extensions import override

from streamrl.config import RunConfig
from streamrl.config.sampling import SGLANG_MASK
from streamrl.cores import THREADS
from streamrl.engine import Finish, MemoryTag, Request
from streamrl.errors import ConfigError, Refused, WireError
from streamrl.http import Call
from streamrl.images.encoded import data_url
from streamrl.servers.dialect import (
    BUSY,
    IMPOSSIBLE,
    PROBE,
    Chunk,
    Dialect,
    ServerInfo,
    ServerMetrics,
    describe_version,
    described,
    folder_of,
    raise_error,
    read_count,
    read_finish,
    read_logprobs,
    read_probe,
    read_release,
    read_spans,
    reading,
    sees,
    unexpanded,
)
from streamrl.servers.environments import on_cpu
from streamrl.servers.launch import PLUGIN, SGLANG, LaunchProfile, adapters_in_flight

if TYPE_CHECKING:  # a process that only keeps servers does without torch
    from streamrl.weight_sync.tensors import Version

LOADER: Final = "streamrl_engine.sglang.load"
FETCH: Final = "streamrl_fetch "
OLDEST: Final = (0, 5, 20)
TELLS_CUTS: Final = (0, 5, 23)
_BYTES: Final = {"float32": 4, "bfloat16": 2}


class SglangDialect(Dialect):
    """Request ids must have one length, because SGLang aborts every request whose id begins with the given one.

    No id may be used twice: two seconds after a response has ended SGLang aborts its id once more.
    """

    kind = "sglang"
    guarded: ClassVar[str] = "/model_info"
    spare: ClassVar[int] = 7
    profile: ClassVar[LaunchProfile] = SGLANG
    ready = SGLANG.ready
    pause = (Call("POST", "/pause_generation", {"mode": "in_place"}, repeatable=True),)
    resume = (Call("POST", "/continue_generation", {"torch_empty_cache": False}, repeatable=True),)
    label = Call("GET", "/model_info", repeatable=True)
    # `/v1/loads`, not `/metrics`: it is true at the moment of the question, `/metrics` is as old as up to 40 decode
    # steps. It counts neither tokens nor preemptions; a preempted request shows as a waiting one.
    metrics = Call("GET", "/v1/loads", query={"include": "core"}, repeatable=True)

    @override
    def needed_flags(self, model: str, *, cpu: bool) -> dict[str, Any]:
        config, engine = self._config, self._config.engine
        shows = sees(model)
        if shows and not (family := str(described(str(folder_of(model)))["model_type"])).startswith("qwen"):
            raise ConfigError(f"SGLang has no image processor for models of kind {family}", "set engine.kind to vllm")
        flags: dict[str, Any] = {
            "context-length": config.model.context,
            "max-running-requests": engine.slots,
            # Without it each message holds the whole response so far.
            "incremental-streaming-output": True,
            # Token ids are all that travels.
            "skip-tokenizer-init": not (config.reads_text or shows),
            "sampling-defaults": "openai",
            "custom-weight-loader": LOADER,
            "tp-size": engine.tensor_parallel,
        }
        if config.model.tokenizer is not None:
            flags["tokenizer-path"] = config.model.tokenizer
        if (tokens := _cache_tokens(config, model)) is not None:
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
        return flags

    @override
    def environ(self, model: str, *, cpu: bool) -> dict[str, str]:
        engine = self._config.engine
        environ = super().environ(model, cpu=cpu)
        if cpu:
            # A replica has its share of the cores there.
            environ[THREADS] = str(engine.threads or os.environ.get(THREADS, "1"))
            if engine.tensor_parallel > 1:
                # It wants a NUMA node for each rank, or to be told which cores are whose: here all share all.
                cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
                environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join([cores] * engine.tensor_parallel)
        return environ

    @override
    def about(self) -> Sequence[Call]:
        probe = {"model": "", "prompt": PROBE, "add_special_tokens": False}
        tokenize = Call("POST", "/tokenize", probe, repeatable=True, optional=True)
        return [Call("GET", "/server_info", repeatable=True), self.label, tokenize]

    @override
    def read_about(self, answers: Sequence[Any]) -> ServerInfo:
        # SGLang tells its tokenizer only when it has one.
        server, model, probe = answers
        if not (isinstance(server, Mapping) and isinstance(model, Mapping)):
            raise WireError("the server does not answer /server_info and /model_info as SGLang does")
        version = str(server.get("version", ""))
        if (ranks := server.get("tp_size", 1)) != self._config.engine.tensor_parallel:
            said = f"this SGLang server runs with --tp-size {ranks}, and each rank is sent its weights"
            raise Refused(said, f"set engine.tensor_parallel to {ranks}")
        if missing := _missing(server, version, TELLS_CUTS if self._config.sampling.cuts else OLDEST):
            raise Refused(f"this SGLang server cannot take part: {missing}", "see docs/guides/engines.md")
        name, context = str(model.get("model_path", "")), read_count(server.get("context_length"))
        return ServerInfo(version, name, context, read_probe(probe))

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
        if request.forbidden:
            sampling["logit_bias"] = dict.fromkeys(map(str, request.forbidden), IMPOSSIBLE)
        if request.json_schema:
            sampling["json_schema"] = request.json_schema
        body: dict[str, Any] = {
            "rid": request.id,
            "input_ids": unexpanded(request),
            "sampling_params": sampling,
            "return_logprob": True,
            "logprob_start_len": -1,
            "stream": True,
            "cache_salt": self.salt(request, version, salt),
        }
        if request.images:
            body["image_data"] = [data_url(image.data) for image in request.images]
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
        raise_error(message)
        with reading("no message of SGLang's /generate"):
            return _chunk(message["output_ids"], message["meta_info"], received)

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
        with reading("SGLang answered without the log-probabilities of these tokens"):
            entries = answer["meta_info"]["input_token_logprobs"][-len(tokens) :]
            # It calls the last token of its vocabulary 0; the value belongs to the right token.
            if any(int(entry[1]) not in (token, 0) for entry, token in zip(entries, tokens, strict=True)):
                raise WireError("SGLang answered with the log-probabilities of other tokens")
            return [float(entry[0]) for entry in entries]

    @override
    def abort(self, request_id: str) -> Sequence[Call]:
        return [Call("POST", "/abort_request", {"rid": request_id}, repeatable=True)]

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
    def update(self, version: Version, label: str) -> Sequence[Call]:
        # It may be repeated: the same bytes are copied again.
        forget = {"forget_images": True} if self._config.learner.train_vision else {}
        manifest = orjson.dumps(describe_version(version) | forget)
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
        return SGLANG.sleep if level else self.pause

    @override
    def wake(self, tags: Sequence[MemoryTag]) -> Sequence[Call]:
        # Decoding goes on when the keys and values are back.
        come_back = Call("POST", "/resume_memory_occupation", {"tags": list(tags)}, repeatable=True)
        calls = () if on_cpu(self._config.engine) else (come_back,)
        return [*calls, *self.resume] if "kv_cache" in tags else calls

    @override
    def read_metrics(self, answer: Any) -> ServerMetrics:
        with reading("/v1/loads does not answer as SGLang does"):
            loads = answer["loads"]
            return ServerMetrics(
                running=sum(int(load["num_running_reqs"]) for load in loads),
                waiting=sum(int(load["num_waiting_reqs"]) for load in loads),
                # Exact, not `token_usage`, which is rounded: a change is a sign of life.
                cache_use=max(int(one["num_used_tokens"]) / max(1, int(one["max_total_num_tokens"])) for one in loads),
            )


def _missing(server: Mapping[str, Any], version: str, oldest: tuple[int, ...]) -> str:
    if (numbers := read_release(version)) and numbers < oldest:
        what = "which weights sampled which token" if numbers < OLDEST else "from which distribution, cut by `sampling`"
        return f"SGLang {version} is older than {'.'.join(map(str, oldest))}: it does not say {what}"
    if LOADER not in (server.get("custom_weight_loader") or []):
        return f"the server was started without --custom-weight-loader {LOADER} and PYTHONPATH={PLUGIN}"
    if server.get("dp_size", 1) != 1:
        return "the server runs with --dp-size over 1: give each replica a server of its own"
    return ""


def _chunk(tokens: Sequence[Any], meta: Mapping[str, Any], received: int) -> Chunk:
    total, finish = int(meta["completion_tokens"]), _finish(meta.get("finish_reason"))
    fresh = [int(token) for token in _fresh(tokens, total, received)]
    entries = _fresh(meta.get("output_token_logprobs") or [], total, received)
    if (named := [entry[1] for entry in entries]) != fresh:
        raise WireError(f"SGLang's log-probabilities of tokens {named} came with tokens {fresh}")
    cut = meta.get("output_token_sampling_logprobs")
    logprobs = read_logprobs(_fresh(cut, total, received) if cut else [entry[0] for entry in entries])
    runs = read_spans(meta.get("weight_versions"), total, finish)
    cached, prompt = read_count(meta.get("cached_tokens")), read_count(meta.get("prompt_tokens"))
    return Chunk(fresh, logprobs, finish, runs, cached, prompt)


def _finish(reason: Any) -> Finish | None:
    if reason is None:
        return None
    finish = read_finish(reason["type"])
    if isinstance(code := reason.get("status_code"), int) and code >= 400:
        raise_error({"error": {"message": reason.get("message"), "code": code}})
    return finish


def _fresh(items: Sequence[Any], total: int, received: int) -> list[Any]:
    """Return the new items of a list that holds either all `total` items (or more, not counted yet) or the last."""
    new = total - received
    if new < 0 or len(items) < new:
        raise WireError(f"SGLang counts {total} tokens, {received} came before, and sent {len(items)}")
    return list(items[received:total]) if len(items) >= total else list(items[len(items) - new :])


def _frame(manifest: bytes) -> str:
    """Return a manifest as SGLang's server wants to be sent tensors: `[(name, tensor)]`, with the manifest as the name.

    The server unpickles it through a list of allowed globals. These are constant bytes around JSON, the opcodes of a
    list with one pair: a string and `torch.ByteTensor()`, which is empty.
    """
    frame = b"\x80\x02]X" + struct.pack("<I", len(manifest)) + manifest + b"ctorch\nByteTensor\n)R\x86a."
    return base64.b64encode(frame).decode()


def _cache_tokens(config: RunConfig, model: str) -> int | None:
    """Tokens that `engine.kv_cache` has room for, from one response to twice all slots; None: no folder tells it."""
    shape = described(model)
    shape = shape.get("text_config", shape)
    try:
        heads = int(shape.get("num_attention_heads") or shape["n_head"])
        width = int(shape.get("head_dim") or int(shape.get("hidden_size") or shape["n_embd"]) // heads)
        layers = int(shape.get("num_hidden_layers") or shape["n_layer"])
    except (KeyError, TypeError, ValueError):
        return None
    engine, context = config.engine, config.model.context
    token = 2 * layers * int(shape.get("num_key_value_heads") or heads) * width * _BYTES[engine.dtype]
    return max(context + 1, min(2 * engine.slots * context, engine.kv_cache * engine.tensor_parallel // token))
