"""SGLang 0.5.20 to 0.5.23 as a `Dialect`: `/generate` streamed, weights through our plug-in inside the server.

Weights need one call, which the scheduler carries out whole: our hook there (plugin/streamrl_engine/sglang.py) opens
the server's update session, checks, copies, names the version and closes the session again. So the death of whoever
called leaves nothing half done, and a version that is refused leaves the old weights.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
import struct
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

import orjson

from streamrl.config import RunConfig
from streamrl.errors import DataError, Refused, StreamrlError, WireError
from streamrl.http import Call
from streamrl.producers.engines.contract import Finish, MemoryTag, PauseMode, Request, Runs
from streamrl.producers.servers.command_line import merged
from streamrl.producers.servers.dialect import PROBE, About, Chunk, Figures, Launch
from streamrl.producers.servers.environments import on_cpu
from streamrl.producers.servers.plugin_source import describe_version
from streamrl.producers.servers.sglang_launch import LOADER, PLUGIN, launch_server, wants_memory_saver
from streamrl.weight_sync.tensors import Version

OLDEST: Final = (0, 5, 20)
_RETRACT: Final = Call("POST", "/pause_generation", {"mode": "retract"}, repeatable=True)
_FINISHES: Final[Mapping[str, Finish]] = {"stop": "stop", "length": "length", "abort": "abort"}


class SglangDialect:
    """See `Dialect`.

    Request ids are hashed to 32 digits on the way out: SGLang aborts every request whose id begins with the one named.
    Whoever sends requests uses no id twice: two seconds after a response has ended SGLang aborts its id once more.

    Args:
        config: the run.
    """

    kind: ClassVar[str] = "sglang"
    merges: ClassVar[bool] = False

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        # A server may have served another run, whose versions had the same numbers.
        self._salt = uuid.uuid4().hex

    def launch(self, *, model: str, port: int, seed: int) -> Launch:
        """See `Dialect.launch`."""
        return launch_server(self._config, model=model, port=port, seed=seed)

    def ready(self) -> Call:
        """See `Dialect.ready`.

        503 also while the server is paused. Never `/health`: it samples a token, takes a second, blocks for 20 s while
        the server is paused, and marks it as unhealthy afterwards.
        """
        return Call("GET", "/ready", repeatable=True)

    def about(self) -> Sequence[Call]:
        """See `Dialect.about`."""
        probe = {"model": "", "prompt": PROBE, "add_special_tokens": False}
        return [
            Call("GET", "/server_info", repeatable=True),
            Call("GET", "/model_info", repeatable=True),
            Call("POST", "/tokenize", probe, repeatable=True, optional=True),
        ]

    def read_about(self, answers: Sequence[Any]) -> About:
        """See `Dialect.read_about`. It never tells its vocabulary, and its tokenizer only when it has one."""
        if len(answers) != 3 or not all(isinstance(answer, Mapping) for answer in answers[:2]):
            raise WireError(
                "the server does not answer /server_info and /model_info as SGLang does", "is engine.kind right?"
            )
        server, model, probe = answers
        version = str(server.get("version", ""))
        context = server.get("context_length")
        ranks = server.get("tp_size", 1)
        if ranks != self._config.engine.tensor_parallel:
            raise Refused(
                f"this SGLang server runs with --tp-size {ranks}, and each rank is sent its weights",
                f"set engine.tensor_parallel to {ranks}",
            )
        missing = _missing(server, version)
        return About(
            version=version,
            model=str(model.get("model_path", "")),
            context=context if isinstance(context, int) else None,
            can_update=not missing,
            missing=missing,
            probe=_token_ids(probe),
        )

    def generation(self, request: Request, *, version: int) -> Call:
        """See `Dialect.generation`."""
        room = self._config.model.context - len(request.tokens)
        sampling = {
            "max_new_tokens": max(1, min(request.max_new_tokens, room)),
            "temperature": request.temperature,
            # Said in full: what is left out comes from the model's generation_config.json, and any cut of the
            # distribution would falsify the log-probabilities.
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "skip_special_tokens": False,
        }
        body: dict[str, Any] = {
            "rid": _rid(request.id),
            "input_ids": request.tokens.tolist(),
            "sampling_params": sampling,
            "return_logprob": True,
            "logprob_start_len": -1,
            "stream": True,
            "cache_salt": f"{self._salt}-w{version}",
        }
        if request.adapter is not None:
            body["lora_path"] = request.adapter
        return Call("POST", "/generate", body)

    def chunk(self, message: Any, *, received: int) -> Chunk:
        """See `Dialect.chunk`.

        Messages are cumulative unless the server runs with `--incremental-streaming-output`, and a cumulative one may
        already hold more than it counts; the count says which of its tokens are new.
        """
        if isinstance(message, Mapping) and "error" in message:
            raise _refusal(message["error"])
        try:
            return _chunk(message["output_ids"], message["meta_info"], received)
        except StreamrlError:
            raise
        except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise WireError(f"no message of SGLang's /generate: {error!r}") from error

    def abort(self, request_id: str | None, *, paused: bool = False) -> Sequence[Call]:
        """See `Dialect.abort`.

        A request that is being decoded ends with the next step. A paused server makes none, but one that was put back
        into the queue ends at once: so all are put back first. The others will find their keys and values in the cache.
        """
        body = {"abort_all": True} if request_id is None else {"rid": _rid(request_id)}
        abort = Call("POST", "/abort_request", body, repeatable=True)
        return [_RETRACT, abort] if paused else [abort]

    def pause(self, mode: PauseMode) -> Sequence[Call]:
        """See `Dialect.pause`.

        To compute anew, requests are put back into the queue and the cache is emptied, where they would find what the
        old weights computed for them. Never SGLang's own mode `abort`: it polls once a second, and hangs for ever in a
        server that is paused already. The first abort lets running requests end with all they have, the second takes
        those that the pause overtook.
        """
        if mode == "keep":
            return [Call("POST", "/pause_generation", {"mode": "in_place"}, repeatable=True)]
        if mode == "recompute":
            return [_RETRACT, Call("POST", "/flush_cache", repeatable=True)]
        abort = Call("POST", "/abort_request", {"abort_all": True}, repeatable=True)
        return [abort, _RETRACT, abort]

    def resume(self) -> Sequence[Call]:
        """See `Dialect.resume`."""
        return [Call("POST", "/continue_generation", {"torch_empty_cache": False}, repeatable=True)]

    def prefetch(self, version: Version) -> Sequence[Call]:
        """See `Dialect.prefetch`: nothing, because SGLang looks at weights only while no request runs or it is paused.

        The files are mostly on its host already, and the checks need their headers and one pass over the bytes. A
        server on another host fetches them while it stands still.
        """
        del version
        return []

    def update(self, version: Version) -> Sequence[Call]:
        """See `Dialect.update`. May be repeated: the same bytes are copied again.

        Raises:
            WeightsError: the version has no files.
        """
        manifest = orjson.dumps(describe_version(version))
        body = {
            "serialized_named_tensors": [_frame(manifest)] * self._config.engine.tensor_parallel,
            "load_format": LOADER,
            # The salt of the next requests keeps them away from what old weights computed. A flush would be refused
            # while requests run, after the weights were replaced.
            "flush_cache": False,
            "weight_version": str(version.number),
        }
        return [Call("POST", "/update_weights_from_tensor", body, repeatable=True)]

    def sleep(self, level: Literal[0, 1, 2]) -> Sequence[Call]:
        """See `Dialect.sleep`.

        The server dies of giving memory back while it decodes, so what runs is put back into the queue before.
        """
        if level == 0:
            return self.pause("keep")
        if on_cpu(self._config.engine):
            raise Refused(
                f"SGLang on a CPU cannot sleep at level {level}: it answers that it did and frees nothing",
                "use level 0, or stop the server",
            )
        if not wants_memory_saver(self._config):
            raise Refused(
                f"this SGLang server cannot sleep at level {level}: it was not started for that",
                "rollout.placement: colocated, or `enable-memory-saver: true` in engine.flags",
            )
        release = {"tags": ["kv_cache", "weights"]}
        return [_RETRACT, Call("POST", "/release_memory_occupation", release, repeatable=True)]

    def wake(self, tags: Sequence[MemoryTag]) -> Sequence[Call]:
        """See `Dialect.wake`. Decoding goes on when the keys and values are back."""
        calls = []
        if not on_cpu(self._config.engine) and wants_memory_saver(self._config):
            calls.append(Call("POST", "/resume_memory_occupation", {"tags": list(tags)}, repeatable=True))
        return [*calls, *self.resume()] if "kv_cache" in tags else calls

    def load_adapter(self, name: str, folder: Path) -> Call:
        """See `Dialect.load_adapter`. SGLang refuses a name or a folder that it has loaded already."""
        engine, alone = self._config.engine, self._config.learner.lora.alone
        if not (engine.url or alone or "enable-lora" in merged({}, engine.flags)):
            raise Refused(
                "this SGLang server was not started for LoRA adapters",
                "engine.flags: {enable-lora: true, max-lora-rank: 64, lora-target-modules: all}",
            )
        return Call("POST", "/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})

    def unload_adapter(self, name: str) -> Call:
        """See `Dialect.unload_adapter`. The answer comes when no request uses the adapter any more."""
        return Call("POST", "/unload_lora_adapter", {"lora_name": name})

    def figures(self) -> Call:
        """See `Dialect.figures`.

        `/v1/loads`, not `/metrics`: it is true at the moment of the question, `/metrics` is as old as up to 40 decode
        steps. It counts neither tokens nor preemptions; a preempted request shows as a waiting one.
        """
        return Call("GET", "/v1/loads", query={"include": "core"}, repeatable=True)

    def read_figures(self, answer: Any) -> Figures:
        """See `Dialect.read_figures`."""
        try:
            loads = answer["loads"]
            return Figures(
                running=sum(int(load["num_running_reqs"]) for load in loads),
                waiting=sum(int(load["num_waiting_reqs"]) for load in loads),
                cache_use=min(1.0, max(float(load["token_usage"]) for load in loads)),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"/v1/loads does not answer as SGLang does: {error!r}") from error


def _rid(request_id: str) -> str:
    return hashlib.blake2b(request_id.encode(), digest_size=16).hexdigest()


def _token_ids(answer: Any) -> tuple[int, ...] | None:
    tokens = answer.get("tokens") if isinstance(answer, Mapping) else None
    whole = isinstance(tokens, list) and all(isinstance(token, int) for token in tokens)
    return tuple(tokens) if whole and tokens is not None else None


def _missing(server: Mapping[str, Any], version: str) -> str:
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    if numbers and numbers < OLDEST:
        return f"SGLang {version} is older than 0.5.20: it does not say which weights sampled which token"
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
    unsaid = spans is None and finish == "abort"
    runs = None if finish is None or unsaid else _runs(spans or (), total)
    return Chunk(fresh, logprobs, finish, runs, meta.get("prompt_tokens"))


def _refusal(error: Any) -> WireError | DataError:
    message, code = (error.get("message"), error.get("code")) if isinstance(error, Mapping) else (error, None)
    if isinstance(code, int) and 400 <= code < 500:
        return DataError(f"SGLang refuses the request: {message}")
    return WireError(f"SGLang failed: {message}")


def _finish(reason: Any) -> Finish | None:
    if reason is None:
        return None
    if not isinstance(reason, Mapping) or reason.get("type") not in _FINISHES:
        raise WireError(f"SGLang ended a response for a reason that nobody knows: {reason!r}")
    code = reason.get("status_code")
    if isinstance(code, int) and code >= 400:
        raise _refusal({"message": reason.get("message"), "code": code})
    return _FINISHES[reason["type"]]


def _fresh(items: Sequence[Any], total: int, received: int) -> list[Any]:
    """What is new in a list that holds either all `total` items (or more, not counted yet) or the last of them."""
    new = total - received
    if new < 0 or len(items) < new:
        raise WireError(f"SGLang counts {total} tokens, {received} came before, and sent {len(items)}")
    return list(items[received:total]) if len(items) >= total else list(items[len(items) - new :])


def _logprobs(entries: Sequence[Any], tokens: Sequence[int]) -> list[float]:
    values = []
    for (value, named, *_), token in zip(entries, tokens, strict=True):
        if named != token:
            raise WireError(f"SGLang's log-probability of token {named} came with token {token}")
        if not isinstance(value, float | int) or not math.isfinite(value):
            raise WireError(f"SGLang's log-probability of token {token} is {value}")
        values.append(float(value))
    return values


def _runs(spans: Sequence[Mapping[str, Any]], total: int) -> Runs:
    runs: Runs = []
    end = 0
    for span in spans:
        if span["start"] != end or span["end"] < end:
            raise WireError(f"SGLang's version spans have a gap: {spans}")
        end = span["end"]
        version = int(span["version"]) if str(span["version"]).isdecimal() else 0
        if span["end"] > span["start"] and (not runs or runs[-1][1] != version):
            runs.append((span["start"], version))
    if end != total:
        raise WireError(f"SGLang's version spans end at {end}, the response has {total} tokens")
    return runs


def _frame(manifest: bytes) -> str:
    """Return a manifest as SGLang's server wants to be sent tensors: `[(name, tensor)]`, with the manifest as the name.

    The server unpickles what it gets through a list of allowed globals. That is its own business: here nothing is
    pickled and nothing unpickled. These are constant bytes around JSON, the opcodes of a list with one pair: a string
    and `torch.ByteTensor()`, which is empty. No tensor, shared memory or file descriptor travels.
    """
    frame = b"\x80\x02]X" + struct.pack("<I", len(manifest)) + manifest + b"ctorch\nByteTensor\n)R\x86a."
    return base64.b64encode(frame).decode()
