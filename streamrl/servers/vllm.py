"""The protocol of vLLM 0.32 and 0.33: token ids in and out, weights in place through our plug-in inside the server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import orjson
from typing_extensions import override

from streamrl.engine import MemoryTag, Request
from streamrl.errors import Refused, WireError
from streamrl.http import Call
from streamrl.images.encoded import data_url
from streamrl.servers.dialect import (
    IMPOSSIBLE,
    TOKENIZE_PROBE,
    Chunk,
    Dialect,
    ServerInfo,
    ServerMetrics,
    describe_version,
    raise_error,
    read_cached,
    read_count,
    read_finish,
    read_logprobs,
    read_probe,
    read_prometheus,
    read_release,
    read_spans,
    reading,
    unexpanded,
)
from streamrl.servers.launch import PLUGIN, VLLM, LaunchProfile, adapters_in_flight

if TYPE_CHECKING:  # a process that only keeps servers does without torch
    from streamrl.weight_sync.tensors import Version

BACKEND: Final = "streamrl"
EXTENSION: Final = "streamrl_engine.vllm.WorkerExt"
OLDEST: Final = (0, 32)

_PREFIX: Final = "generate-tokens-"
_RANKS: Final = (8, 16, 32, 64, 128, 256, 320, 512)
_GENERATE: Final = "/inference/v1/generate"
FIGURES: Final = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "cache_use",
    "vllm:generation_tokens_total": "tokens_sampled",
    "vllm:num_preemptions_total": "preemptions",
}


class VllmDialect(Dialect):
    """Written against 0.32.0; the routes and fields that it uses are the same in 0.33."""

    kind = "vllm"
    adapters: ClassVar[str] = "/v1"
    profile: ClassVar[LaunchProfile] = VLLM
    ready = VLLM.ready
    # With clear_cache the requests would lose their keys and values and compute them anew.
    pause = (Call("POST", "/pause", query={"mode": "keep", "clear_cache": "false"}, repeatable=True),)
    resume = (Call("POST", "/resume", repeatable=True),)
    label = Call("GET", "/weight_info", repeatable=True)
    metrics = Call("GET", "/metrics", repeatable=True)

    @override
    def needed_flags(self, model: str, *, cpu: bool) -> dict[str, Any]:
        engine = self._config.engine
        flags: dict[str, Any] = {
            "served-model-name": "policy",
            "enable-scale-out": True,
            "worker-extension-cls": EXTENSION,
            "weight-transfer-config": f'{{"backend":"{BACKEND}"}}',
            "max-model-len": self._config.model.context,
            "max-num-seqs": engine.slots,
            # Those of the distribution that was sampled from, whatever a request's temperature; at 1 they are the same.
            "logprobs-mode": "processed_logprobs",
            # Without it a response does not say how many tokens of its prompt were cached.
            "enable-prompt-tokens-details": True,
        }
        if self._config.model.tokenizer:
            flags["tokenizer"] = self._config.model.tokenizer
        if engine.tensor_parallel > 1:
            flags["tensor-parallel-size"] = engine.tensor_parallel
        if self._config.model.image_processor:
            flags["mm-processor-kwargs"] = orjson.dumps(self._config.model.image_processor).decode()
        if self._config.learner.lora.alone:
            rank = next(rank for rank in _RANKS if rank >= self._config.learner.lora.rank)
            most = adapters_in_flight(self._config.max_staleness)
            flags |= {"enable-lora": True, "max-lora-rank": rank, "max-loras": most}
        if cpu:
            flags["kv-cache-memory-bytes"] = engine.kv_cache
        return flags

    @override
    def environ(self, model: str, *, cpu: bool) -> dict[str, str]:
        environ = super().environ(model, cpu=cpu)
        environ |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
        if cpu and (threads := self._config.engine.threads):
            environ["OMP_NUM_THREADS"] = str(threads)
        return environ

    @override
    def about(self) -> Sequence[Call]:
        calls = (
            Call("GET", "/version", repeatable=True),
            Call("GET", "/v1/models", repeatable=True),
            Call("GET", "/openapi.json", repeatable=True, optional=True),
            TOKENIZE_PROBE,
        )
        if not (self._config.engine.url or self._config.engine.flags):
            return calls  # all settings are ours
        # The answer takes five seconds, because vLLM also collects what is installed on its machine.
        query = {"config_format": "json"}
        return *calls, Call("GET", "/server_info", query=query, repeatable=True, optional=True)

    @override
    def read_about(self, answers: Sequence[Any]) -> ServerInfo:
        # A server that hides the list of its routes (0.33 can) is assumed to have them.
        version, models, schema, probe, *more = answers
        with reading("this is not a vLLM server"):
            release = str(version["version"])
            model = next(entry for entry in models["data"] if not entry.get("parent"))
            name, context = str(model.get("root") or model["id"]), read_count(model.get("max_model_len"))
            routes = schema["paths"] if schema else None
            settings = more[0]["vllm_config"] if more and more[0] else None
        if (numbers := read_release(release)) and numbers < OLDEST:
            said = f"vLLM {release} is older than 0.32: it does not say which weights sampled which token"
            raise Refused(said, "streamrl engines install vllm, or start another server at engine.url")
        if routes is not None and _GENERATE not in routes:
            raise Refused("this vLLM server does not take token ids", "start it with --enable-scale-out")
        if missing := _missing(routes, settings):
            raise Refused(f"this vLLM server cannot take part without {missing}", "see docs/guides/engines.md")
        if settings is not None:
            self._check_logprobs(settings["model_config"]["logprobs_mode"])
        return ServerInfo(release, name, context, read_probe(probe))

    def _check_logprobs(self, mode: str) -> None:
        draw, episode = self._config.sampling, self._config.episode
        calls = episode.run is not None or (episode.agent is not None and episode.agent.draws)
        changed = draw.temperature != 1.0 or draw.cuts or draw.min_tokens or calls
        if mode != "processed_logprobs" and (changed or mode != "raw_logprobs"):
            said = f"this vLLM server returns {mode}, which are not those of what `sampling` or an agent draws from"
            raise Refused(said, "start it with --logprobs-mode processed_logprobs")

    @override
    def generation(self, request: Request, *, version: int, salt: str = "", adapter: str | None = None) -> Call:
        guided = {"structured_outputs": {"json": request.json_schema}} if request.json_schema else {}
        body: dict[str, Any] = {
            "request_id": request.id,
            "token_ids": unexpanded(request),
            "sampling_params": {
                "max_tokens": request.max_new_tokens,
                "min_tokens": min(request.min_tokens, request.max_new_tokens),
                "temperature": request.temperature,
                "top_p": request.top_p,
                "top_k": request.top_k,
                "min_p": request.min_p,
                "seed": request.seed,
                "stop": list(request.stop),
                "logprobs": 0,
                "detokenize": bool(request.stop),
                **guided,
            },
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            # Blocks of keys and values that older weights computed are not found under another salt.
            "cache_salt": self.salt(request, version, salt),
        }
        if request.forbidden:
            body["sampling_params"]["logit_bias"] = dict.fromkeys(map(str, request.forbidden), IMPOSSIBLE)
        if request.images:
            # Known by their hash: an image that it has processed before it does not process again.
            parts = [(data_url(image.data), image.sha256) for image in request.images]
            body["content_parts"] = [{"type": "image_url", "url": url, "uuid": name} for url, name in parts]
        if adapter is not None:
            body["model"] = adapter
        return Call("POST", _GENERATE, body)

    @override
    def chunk(self, message: Any, *, received: int) -> Chunk:
        raise_error(message)
        with reading("no chunk of a vLLM response"):
            cached, prompt = read_cached(message), read_count((message.get("usage") or {}).get("prompt_tokens"))
            if not message["choices"]:
                return Chunk(cached_tokens=cached, prompt_tokens=prompt)
            choice = message["choices"][0]
            tokens = [int(token) for token in choice["token_ids"] or ()]
            content = (choice["logprobs"] or {}).get("content") or ()
            logprobs = read_logprobs([entry["logprob"] for entry in content])
            if [int(entry["token_id"]) for entry in content] != tokens:
                raise WireError(f"{len(tokens)} tokens and log-probabilities of {len(logprobs)} others in one chunk")
            finish = read_finish(choice["finish_reason"])
            runs = read_spans(choice["weight_versions"], received + len(tokens), finish)
            return Chunk(tokens, logprobs, finish, runs, cached, prompt)

    @override
    def score(self, model: str, tokens: Sequence[int], start: int) -> Call:
        body = {"model": model, "prompt": tokens, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        return Call("POST", "/v1/completions", body, repeatable=True)

    @override
    def read_scores(self, answer: Any, tokens: Sequence[int]) -> list[float]:
        with reading("vLLM answered without the log-probabilities of these tokens"):
            entries = answer["choices"][0]["prompt_logprobs"][-len(tokens) :]
            return [float(entry[str(token)]["logprob"]) for token, entry in zip(tokens, entries, strict=True)]

    @override
    def abort(self, request_id: str) -> Sequence[Call]:
        return (Call("POST", "/abort_requests", {"request_ids": [_PREFIX + request_id]}, repeatable=True),)

    @override
    def prefetch(self, version: Version) -> Sequence[Call]:
        # Our plug-in opens the files, and checks names, shapes and whole fused groups once for each structure.
        body = {"method": "streamrl_check", "kwargs": {"source": describe_version(version)}}
        return (Call("POST", "/collective_rpc", body, repeatable=True),)

    @override
    def read_prefetch(self, answer: Any) -> str:
        with reading(f"vLLM answered a check of the weights with {answer!r}"):
            return next(filter(None, answer["results"]), "")

    @override
    def update(self, version: Version, label: str) -> Sequence[Call]:
        # After a failure in the midst of it the model samples no more until the whole sequence, for this or another
        # version, has succeeded while the server is still paused; a server that is resumed without that dies.
        calls = (
            Call("POST", "/start_weight_update"),
            Call("POST", "/update_weights", {"update_info": {"source": describe_version(version)}}),
            Call("POST", "/finish_weight_update", {"weight_version": label}),
        )
        if not self._config.learner.train_vision:
            return calls
        # What the image side made of an image is kept by its hash alone.
        return *calls, Call("POST", "/reset_encoder_cache", repeatable=True)

    @override
    def sleep(self, level: Literal[0, 1]) -> Sequence[Call]:
        # A server on a CPU keeps its memory.
        return (Call("POST", "/sleep", query={"level": str(level), "mode": "keep"}, repeatable=True),)

    @override
    def wake(self, tags: Sequence[MemoryTag]) -> Sequence[Call]:
        # Decoding goes on when nothing sleeps any more.
        only = {"tags": tags[0]} if len(set(tags)) == 1 else {}
        return (Call("POST", "/wake_up", query=only, repeatable=True),)

    @override
    def read_metrics(self, answer: Any) -> ServerMetrics:
        if not isinstance(answer, str):
            raise WireError("the metrics of vLLM are text")
        return read_prometheus(answer, FIGURES)


def _missing(routes: Any, settings: Any) -> str:
    if routes is not None and "/update_weights" not in routes:
        return "the routes for new weights: start the server with VLLM_SERVER_DEV_MODE=1 in its environment"
    if settings is None:
        return ""
    transfer, parallel = settings.get("weight_transfer_config") or {}, settings.get("parallel_config") or {}
    if transfer.get("backend") != BACKEND or parallel.get("worker_extension_cls") != EXTENSION:
        return (
            f"the plug-in of streamrl: start the server with PYTHONPATH={PLUGIN}, --worker-extension-cls {EXTENSION}"
            f' and --weight-transfer-config \'{{"backend":"{BACKEND}"}}\''
        )
    return ""
