"""The protocol of vLLM 0.32 and 0.33: token ids in and out, weights in place through our plug-in inside the server."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from typing_extensions import override

from streamrl.engine import MemoryTag, Request
from streamrl.errors import Refused, WireError
from streamrl.http import Call
from streamrl.servers.dialect import (
    TOKENIZE_PROBE,
    Chunk,
    Dialect,
    ServerInfo,
    ServerMetrics,
    describe_version,
    read_cached,
    read_finish,
    read_logprobs,
    read_prometheus,
    read_spans,
    stream_error,
)
from streamrl.servers.environments import find_environment, on_cpu
from streamrl.servers.launch import LOOPBACK, PLUGIN, VLLM, Launch, adapters_in_flight, merged

if TYPE_CHECKING:  # a process that only keeps servers does without torch
    from streamrl.weight_sync.tensors import Version

BACKEND: Final = "streamrl"
EXTENSION: Final = "streamrl_engine.vllm.WorkerExt"
MODEL: Final = "policy"
OLDEST: Final = (0, 32)

_PREFIX: Final = "generate-tokens-"
_RANKS: Final = (8, 16, 32, 64, 128, 256, 320, 512)
_GENERATE: Final = "/inference/v1/generate"
_FIGURES: Final = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "cache_use",
    "vllm:generation_tokens_total": "tokens_sampled",
    "vllm:num_preemptions_total": "preemptions",
}


class VllmDialect(Dialect):
    """Written against 0.32.0; the routes and fields that it uses are the same in 0.33."""

    kind: ClassVar[str] = "vllm"
    guarded: ClassVar[str] = "/v1/models"

    @override
    def launch(self, *, model: str, port: int, seed: int, host: str = LOOPBACK, key: str | None = None) -> Launch:
        engine = self._config.engine
        cpu = on_cpu(engine)
        flags = {**self.flags(model=model, port=port, seed=seed, cpu=cpu), "host": host}
        return VLLM.launch(find_environment(engine.environment, "vllm"), flags, self.environ(model, cpu=cpu), key)

    def flags(self, *, model: str, port: int, seed: int, cpu: bool) -> dict[str, Any]:
        """Those of a server on the loopback interface with all that streamrl needs of it; the user's win.

        The seed is one of the server and not of each request: a request that goes on at another server would draw the
        numbers again that it drew before, and vLLM samples requests with a seed one by one.
        """
        engine = self._config.engine
        flags: dict[str, Any] = {
            **VLLM.flags_for(model=model, port=port, seed=seed, cpu=cpu, sleeps=self._sleeps),
            **VLLM.quantised(self._config.weights.quantize),
            "served-model-name": MODEL,
            "enable-scale-out": True,
            "worker-extension-cls": EXTENSION,
            "weight-transfer-config": f'{{"backend":"{BACKEND}"}}',
            "dtype": engine.dtype,
            "max-model-len": self._config.model.context,
            "max-num-seqs": engine.slots,
            "stream-interval": engine.stream_interval,
            # Those of the distribution that was sampled from, whatever a request's temperature; at 1 they are the same.
            "logprobs-mode": "processed_logprobs",
            # Without it a response does not say how many tokens of its prompt were cached.
            "enable-prompt-tokens-details": True,
        }
        if self._config.model.tokenizer:
            flags["tokenizer"] = self._config.model.tokenizer
        if engine.tensor_parallel > 1:
            flags["tensor-parallel-size"] = engine.tensor_parallel
        if self._config.learner.lora.alone:
            rank = next(rank for rank in _RANKS if rank >= self._config.learner.lora.rank)
            most = adapters_in_flight(self._config.max_staleness)
            flags |= {"enable-lora": True, "max-lora-rank": rank, "max-loras": most}
        if cpu:
            flags["kv-cache-memory-bytes"] = engine.kv_cache
        return merged(flags, engine.flags)

    @property
    def _sleeps(self) -> bool:
        return self._config.rollout.placement == "colocated"

    def environ(self, model: str, *, cpu: bool) -> dict[str, str]:
        environ = VLLM.environ_for(model, cpu=cpu, sleeps=self._sleeps, plugin=True)
        environ |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
        if cpu and (threads := self._config.engine.threads):
            environ["OMP_NUM_THREADS"] = str(threads)
        return environ

    @override
    def ready(self) -> Call:
        return VLLM.ready

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
        info = more[0] if more else None
        try:
            release = str(version["version"])
            model = next(entry for entry in models["data"] if not entry.get("parent"))
            name, context = str(model.get("root") or model["id"]), model.get("max_model_len")
            routes = schema["paths"] if schema else None
            settings = info["vllm_config"] if info else None
            tokens = tuple(int(token) for token in probe["tokens"]) if probe else None
        except (KeyError, TypeError, ValueError, AttributeError, StopIteration) as error:
            raise WireError(f"this is not a vLLM server: {error!r} in its description of itself") from error
        if (numbers := tuple(int(number) for number in re.findall(r"\d+", release)[:2])) and numbers < OLDEST:
            raise Refused(
                f"vLLM {release} is older than 0.32: it does not say which weights sampled which token",
                "streamrl engines install vllm, or start another server at engine.url",
            )
        if routes is not None and _GENERATE not in routes:
            raise Refused("this vLLM server does not take token ids", "start it with --enable-scale-out")
        if missing := _missing(routes, settings):
            raise Refused(f"this vLLM server cannot take part without {missing}", "see docs/guides/engines.md")
        if settings is not None:
            self._check_logprobs(settings["model_config"]["logprobs_mode"])
        return ServerInfo(release, name, context, tokens)

    def _check_logprobs(self, mode: str) -> None:
        draw, episode = self._config.sampling, self._config.episode
        calls = episode.run is not None or (episode.agent is not None and episode.agent.draws)
        changed = draw.temperature != 1.0 or draw.cuts or draw.min_tokens or calls
        if mode != "processed_logprobs" and (changed or mode != "raw_logprobs"):
            raise Refused(
                f"this vLLM server returns {mode}, which are not the log-probabilities of what `sampling` or an agent"
                " draws from",
                "start it with --logprobs-mode processed_logprobs",
            )

    @override
    def generation(self, request: Request, *, version: int, salt: str = "", adapter: str | None = None) -> Call:
        guided = {"structured_outputs": {"json": request.json_schema}} if request.json_schema else {}
        body: dict[str, Any] = {
            "request_id": request.id,
            "token_ids": request.tokens.tolist(),
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
        if adapter is not None:
            body["model"] = adapter
        return Call("POST", _GENERATE, body)

    @override
    def chunk(self, message: Any, *, received: int) -> Chunk:
        if isinstance(message, dict) and "error" in message:
            raise stream_error(message["error"])
        try:
            choices = message["choices"]
            usage = message.get("usage") or {}
            cached = read_cached(usage)
            if not choices:
                return Chunk(cached_tokens=cached)
            choice = choices[0]
            tokens = [int(token) for token in choice["token_ids"] or ()]
            content = (choice["logprobs"] or {}).get("content") or ()
            values = [entry["logprob"] for entry in content]
            named = [int(entry["token_id"]) for entry in content]
            reason = choice["finish_reason"]
            spans = choice["weight_versions"]
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise WireError(f"no chunk of a vLLM response: {error!r}") from error
        if named != tokens:
            raise WireError(f"{len(tokens)} tokens and log-probabilities of {len(named)} others in one chunk")
        logprobs, finish = read_logprobs(values), read_finish(reason)
        unsaid = finish is None or (spans is None and finish == "abort")
        runs = None if unsaid else read_spans(spans or (), received + len(tokens))
        # vLLM says what was cached only in the message after the last token.
        return Chunk(tokens, logprobs, finish, runs, cached, counts_follow=finish is not None)

    @override
    def score(self, model: str, tokens: Sequence[int], start: int) -> Call:
        body = {"model": model, "prompt": tokens, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        return Call("POST", "/v1/completions", body, repeatable=True)

    @override
    def read_scores(self, answer: Any, tokens: Sequence[int]) -> list[float]:
        try:
            entries = answer["choices"][0]["prompt_logprobs"][-len(tokens) :]
            return [float(entry[str(token)]["logprob"]) for token, entry in zip(tokens, entries, strict=True)]
        except (LookupError, TypeError, ValueError) as error:
            raise WireError(f"vLLM answered without the log-probabilities of these tokens: {error!r}") from error

    @override
    def abort(self, request_id: str) -> Sequence[Call]:
        return (Call("POST", "/abort_requests", {"request_ids": [_PREFIX + request_id]}, repeatable=True),)

    @override
    def pause(self) -> Sequence[Call]:
        # With clear_cache the requests would lose their keys and values and compute them anew.
        return (Call("POST", "/pause", query={"mode": "keep", "clear_cache": "false"}, repeatable=True),)

    @override
    def resume(self) -> Sequence[Call]:
        return (Call("POST", "/resume", repeatable=True),)

    @override
    def prefetch(self, version: Version) -> Sequence[Call]:
        # Our plug-in opens the files, and checks names, shapes and whole fused groups once for each structure.
        return (self._rpc("streamrl_check", {"source": describe_version(version)}),)

    @override
    def read_prefetch(self, answer: Any) -> str:
        try:
            return next(filter(None, answer["results"]), "")
        except (KeyError, TypeError) as error:
            raise WireError(f"vLLM answered a check of the weights with {answer!r}") from error

    @override
    def label(self) -> Call:
        return Call("GET", "/weight_info", repeatable=True)

    @override
    def update(self, version: Version, label: str) -> Sequence[Call]:
        # After a failure in the midst of it the model samples no more until the whole sequence, for this or another
        # version, has succeeded while the server is still paused; a server that is resumed without that dies.
        return (
            Call("POST", "/start_weight_update"),
            Call("POST", "/update_weights", {"update_info": {"source": describe_version(version)}}),
            Call("POST", "/finish_weight_update", {"weight_version": label}),
        )

    @override
    def sleep(self, level: Literal[0, 1]) -> Sequence[Call]:
        # A server on a CPU keeps its memory.
        engine = self._config.engine
        asleep = self._sleeps or engine.flags.get("enable-sleep-mode") or engine.url
        if level > 0 and not asleep and not on_cpu(engine):
            raise Refused("this vLLM server keeps its memory", "engine.flags.enable-sleep-mode: true")
        return (Call("POST", "/sleep", query={"level": str(level), "mode": "keep"}, repeatable=True),)

    @override
    def wake(self, tags: Sequence[MemoryTag]) -> Sequence[Call]:
        # Decoding goes on when nothing sleeps any more.
        only = {"tags": tags[0]} if len(set(tags)) == 1 else {}
        return (Call("POST", "/wake_up", query=only, repeatable=True),)

    @override
    def load_adapter(self, name: str, folder: Path) -> Call:
        return Call("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})

    @override
    def unload_adapter(self, name: str) -> Call:
        return Call("POST", "/v1/unload_lora_adapter", {"lora_name": name}, repeatable=True, optional=True)

    @override
    def metrics(self) -> Call:
        return Call("GET", "/metrics", repeatable=True)

    @override
    def read_metrics(self, answer: Any) -> ServerMetrics:
        if not isinstance(answer, str):
            raise WireError("the metrics of vLLM are text")
        return read_prometheus(answer, _FIGURES)

    @staticmethod
    def _rpc(method: str, kwargs: Mapping[str, Any]) -> Call:
        return Call("POST", "/collective_rpc", {"method": method, "kwargs": kwargs}, repeatable=True)


def _missing(routes: Any, settings: Any) -> str:
    if routes is not None and "/update_weights" not in routes:
        return "the routes for new weights: start the server with VLLM_SERVER_DEV_MODE=1 in its environment"
    if settings is None:
        return ""
    transfer = settings.get("weight_transfer_config") or {}
    if transfer.get("backend") != BACKEND or (settings.get("parallel_config") or {}).get("worker_extension_cls") != (
        EXTENSION
    ):
        return (
            f"the plug-in of streamrl: start the server with PYTHONPATH={PLUGIN}, --worker-extension-cls {EXTENSION}"
            f' and --weight-transfer-config \'{{"backend":"{BACKEND}"}}\''
        )
    return ""
