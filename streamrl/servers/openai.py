"""Any server with an OpenAI-style completions API that returns token ids and log-probabilities, as a `Dialect`.

Such a server runs already; streamrl starts none, and its weights stay as they are. `engine.flags` says what it can do:

```
model: NAME                 the model asked for; left out when not given
processed-logprobs: true    its log-probabilities are those at the temperature of the request
```
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

from typing_extensions import override

from streamrl.config import RunConfig
from streamrl.engine import Request
from streamrl.errors import ConfigError, WireError
from streamrl.http import Call
from streamrl.servers import vllm
from streamrl.servers.dialect import (
    TOKENIZE_PROBE,
    Chunk,
    Dialect,
    ServerInfo,
    ServerMetrics,
    raise_error,
    read_cached,
    read_count,
    read_finish,
    read_logprobs,
    read_probe,
    read_prometheus,
    reading,
)

_FLAGS: Final = frozenset({"model", "processed-logprobs"})
_FIGURES: Final[Mapping[str, str]] = {
    **vllm.FIGURES,
    "sglang:num_running_reqs": "running",
    "sglang:num_queue_reqs": "waiting",
    "sglang:generation_tokens_total": "tokens_sampled",
}


class OpenaiDialect(Dialect):
    """Speaks to a server with completions of OpenAI's form."""

    kind = "openai"
    fixed: ClassVar[bool] = True
    ready = Call("GET", "/v1/models", repeatable=True)  # all such servers have this route, and it samples nothing
    metrics = Call("GET", "/metrics", repeatable=True, optional=True)

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        flags = config.engine.flags
        if unknown := sorted(set(flags) - _FLAGS):
            said = f"engine.flags of an openai server: {', '.join(unknown)} is not known"
            raise ConfigError(said, f"known: {', '.join(sorted(_FLAGS))}")
        self._model: str | None = flags.get("model")

    @override
    def about(self) -> Sequence[Call]:
        return [self.ready, Call("GET", "/version", repeatable=True, optional=True), TOKENIZE_PROBE]

    @override
    def read_about(self, answers: Sequence[Any]) -> ServerInfo:
        models, version, probe = answers
        with reading("no list of models at /v1/models"):
            known = [str(entry["id"]) for entry in models["data"]]
            entry = next((entry for entry in models["data"] if self._model in {None, entry["id"]}), None)
        if entry is None:
            raise ConfigError(f"the server has no model {self._model!r}", f"engine.flags.model: {', '.join(known)}")
        return ServerInfo(
            version=str(version.get("version", "")) if isinstance(version, Mapping) else "",
            model=str(entry["id"]),
            context=read_count(entry.get("max_model_len")),
            probe=read_probe(probe),
        )

    @override
    def generation(self, request: Request, *, version: int, salt: str = "", adapter: str | None = None) -> Call:
        del version, salt, adapter
        if request.images:
            said = "a server of kind openai is sent tokens alone, and the model of this run sees images"
            raise ConfigError(said, "set engine.kind to vllm, sglang or hf, or model.path to a model for text")
        body: dict[str, Any] = {
            "prompt": request.tokens.tolist(),
            "max_tokens": request.max_new_tokens,
            "temperature": request.temperature,
            # All parameters are given: servers take omitted ones from the model's generation_config.json.
            "top_p": request.top_p,
            "top_k": request.top_k or -1,
            "min_p": request.min_p,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "logprobs": 1,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
            "request_id": request.id,
            "stream": True,
        }
        asked = {"stop": list(request.stop) or None, "min_tokens": request.min_tokens or None, "seed": request.seed}
        body |= {name: value for name, value in asked.items() if value is not None}
        if self._model is not None:
            body["model"] = self._model
        return Call("POST", "/v1/completions", body)

    @override
    def chunk(self, message: Any, *, received: int) -> Chunk:
        del received
        raise_error(message)
        with reading("no chunk of a completion with token ids and log-probabilities"):
            cached = read_cached(message)
            if not message["choices"]:
                return Chunk(cached_tokens=cached)
            choice = message["choices"][0]
            content = choice.get("logprobs") or {}
            logprobs = read_logprobs(content.get("token_logprobs") or ())
            ids = choice.get("token_ids")
            if ids is None:  # then in the place of texts
                ids = [str(text).removeprefix("token_id:") for text in content.get("tokens") or ()]
            if len(ids) != len(logprobs):
                raise WireError(f"{len(ids)} token ids came with {len(logprobs)} log-probabilities")
            finish = read_finish(choice.get("finish_reason"))
            return Chunk([int(token) for token in ids], logprobs, finish, cached_tokens=cached)

    @override
    def read_metrics(self, answer: Any) -> ServerMetrics:
        # The metrics of vLLM and SGLang are understood; other servers report none.
        return read_prometheus(answer, _FIGURES) if isinstance(answer, str) else ServerMetrics()
