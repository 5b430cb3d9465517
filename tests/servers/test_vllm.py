"""What `VllmDialect` sends, and what it makes of answers recorded from vLLM 0.32.0."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
from pathlib import Path
from typing import Any, get_args

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.config import Quantize, RunConfig
from streamrl.engine import Request
from streamrl.errors import ConfigError, DataError, Refused, WeightsError, WireError
from streamrl.http import BadAnswer
from streamrl.servers import environments
from streamrl.servers.dialect import BUSY, Dialect, read_spans
from streamrl.servers.launch import PLUGIN
from streamrl.servers.sglang import SglangDialect
from streamrl.servers.vllm import VllmDialect
from streamrl.weight_sync.manifest import LanePlace
from streamrl.weight_sync.quantize import quantization_config
from streamrl.weight_sync.tensors import Version

FIRST = orjson.loads(
    b'{"request_id":"generate-tokens-r1","usage":{"prompt_tokens":4,"total_tokens":5,"completion_tokens":1},'
    b'"output_mode":"tokens","choices":[{"index":0,"finish_reason":null,"stop_reason":null,"token_ids":[10],'
    b'"routed_experts":null,"sampling_mask":null,"weight_versions":null,"logprobs":{"content":[{"token_id":10,'
    b'"logprob":-1.7845609188079834,"rank":1,"top_logprobs":[{"token_id":10,"logprob":-1.7845609188079834,"rank":1}]}]}}]}'
)
LAST = orjson.loads(
    b'{"request_id":"generate-tokens-r1","usage":null,"output_mode":"tokens","choices":[{"index":0,'
    b'"finish_reason":"length","stop_reason":null,"token_ids":[305,253],"routed_experts":null,"sampling_mask":null,'
    b'"weight_versions":[{"version":"default","start":0,"end":1},{"version":"17","start":1,"end":3}],"logprobs":{'
    b'"content":[{"token_id":305,"logprob":-4.669588088989258,"rank":18,"top_logprobs":[]},{"token_id":253,'
    b'"logprob":-2.760396718978882,"rank":4,"top_logprobs":[]}]}}]}'
)
USAGE = orjson.loads(
    b'{"request_id":"generate-tokens-r1","usage":{"prompt_tokens":4,"total_tokens":7,"completion_tokens":3},'
    b'"output_mode":"tokens","choices":[]}'
)
ABORTED = orjson.loads(
    b'{"request_id":"generate-tokens-r1","usage":null,"output_mode":"tokens","choices":[{"index":0,"finish_reason":'
    b'"abort","stop_reason":null,"token_ids":[],"weight_versions":[],"logprobs":{"content":[]}}]}'
)
METRICS = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="/tmp/a} b 7"} 3.0
vllm:num_requests_waiting{engine="0",model_name="policy"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="policy",reason="capacity"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="policy"} 0.25
vllm:generation_tokens_total{engine="0",model_name="policy"} 255.0
vllm:num_preemptions_total{engine="0",model_name="policy"} 1.0
vllm:num_preemptions_created{engine="0",model_name="policy"} 1.795181498e+09
vllm:e2e_request_latency_seconds_bucket{engine="0",le="+Inf"} NaN
process_open_fds 12
"""
SETTINGS = {
    "model_config": {"logprobs_mode": "processed_logprobs"},
    "weight_transfer_config": {"backend": "streamrl"},
    "parallel_config": {"worker_extension_cls": "streamrl_engine.vllm.WorkerExt"},
}
MODELS = {
    "data": [
        {"id": "policy-3", "root": "/a/adapter", "parent": "policy"},
        {"id": "policy", "root": "/a/model", "parent": None, "max_model_len": 256},
    ]
}
ROUTES = {"paths": {"/inference/v1/generate": {}, "/update_weights": {}}}
PROBE = {"count": 3, "max_model_len": 256, "tokens": [5, 6, 7], "token_strs": None}


def dialect(**sections: Any) -> VllmDialect:
    base: dict[str, Any] = {
        "model": {"path": "m", "context": 256},
        "sampling": {"max_new_tokens": 64},
        "data": {"max_prompt_tokens": 64},
        "engine": {"kind": "vllm"},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return VllmDialect(RunConfig.model_validate(base))


def asked(limit: int = 32, prompt: int = 4, **more: Any) -> Request:
    return Request("r1", np.arange(prompt, dtype=np.int32), limit, **more)


def changed(message: dict[str, Any], **values: Any) -> dict[str, Any]:
    found = copy.deepcopy(message)
    found["choices"][0].update(values)
    return found


def test_a_request_is_tokens_a_salt_and_log_probabilities_of_what_was_sampled() -> None:
    call = dialect().generation(asked(temperature=0.5), version=17)
    assert (call.method, call.path, call.repeatable) == ("POST", "/inference/v1/generate", False)
    assert call.body is not None
    assert call.body["token_ids"] == [0, 1, 2, 3]
    assert call.body["cache_salt"].endswith("-w17")
    assert call.body["stream"] is True
    plain = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": None, "stop": [], "min_tokens": 0, "detokenize": False}
    assert call.body["sampling_params"] == {"max_tokens": 32, "temperature": 0.5, "logprobs": 0, **plain}
    assert "model" not in call.body
    orjson.dumps(call.body)


def test_a_request_says_how_its_tokens_are_drawn_and_what_ends_it() -> None:
    options = {"top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": 5}
    body = dialect().generation(asked(stop=("END",), min_tokens=40, **options), version=1).body
    assert body is not None
    guided = dialect().generation(asked(json_schema='{"type": "object"}'), version=1).body
    assert guided is not None
    assert guided["sampling_params"]["structured_outputs"] == {"json": '{"type": "object"}'}
    told = {**options, "stop": ["END"], "detokenize": True, "min_tokens": 32}  # no more than it may have
    assert told.items() <= body["sampling_params"].items()


def test_versions_of_another_life_have_other_salts() -> None:
    """A server that goes on after a run keeps the keys and values of its weights, and numbers begin anew."""
    salts = [dialect().generation(asked(), version=1, salt=life).body["cache_salt"] for life in "aab"]  # type: ignore[index]
    assert salts[0] == salts[1] != salts[2]


@pytest.mark.parametrize("kind", [VllmDialect, SglangDialect])
def test_later_turns_of_a_sample_may_use_what_the_weights_of_its_first_turn_computed(kind: type[Dialect]) -> None:
    each, sticky = kind(RunConfig()), dataclasses.replace(asked(), cache_version=3)
    first, later, fresh = (each.generation(one, version=4) for one in (sticky, sticky, asked()))
    assert first.body["cache_salt"] == later.body["cache_salt"] != fresh.body["cache_salt"]  # type: ignore[index]
    assert first.body["cache_salt"] == each.generation(asked(), version=3).body["cache_salt"]  # type: ignore[index]


@pytest.mark.parametrize("kind", [VllmDialect, SglangDialect])
def test_a_server_with_older_weights_than_its_sample_begins_with_leaves_nothing_for_the_newer(
    kind: type[Dialect],
) -> None:
    each, sticky = kind(RunConfig()), dataclasses.replace(asked(), cache_version=3)
    behind, level = (each.generation(sticky, version=version).body["cache_salt"] for version in (2, 3))  # type: ignore[index]
    assert behind != level
    assert behind == each.generation(asked(), version=2).body["cache_salt"]  # type: ignore[index]


def test_an_adapter_is_a_model() -> None:
    call = dialect().generation(asked(), version=0, adapter="policy-3")
    assert call.body is not None
    assert call.body["model"] == "policy-3"


def test_a_stream_is_understood_message_by_message() -> None:
    first = dialect().chunk(FIRST, received=0)
    assert (first.tokens, first.logprobs, first.finish, first.runs) == ([10], [-1.7845609188079834], None, None)
    last = dialect().chunk(LAST, received=1)
    assert (last.tokens, last.finish) == ([305, 253], "length")
    assert last.runs == [(0, 0), (1, 17)]
    usage = dialect().chunk(USAGE, received=3)
    assert (usage.tokens, usage.finish, usage.cached_tokens) == ((), None, None)
    counted = {**USAGE, "usage": {**USAGE["usage"], "prompt_tokens_details": {"cached_tokens": 3}}}
    assert dialect().chunk(counted, received=3).cached_tokens == 3


def test_an_aborted_request_may_have_nothing() -> None:
    done = dialect().chunk(ABORTED, received=0)
    assert (done.tokens, done.finish, done.runs) == ([], "abort", [])


def test_only_an_abort_may_come_without_versions() -> None:
    assert dialect().chunk(changed(LAST, weight_versions=None, finish_reason="abort"), received=1).runs is None
    with pytest.raises(WireError, match="0 tokens of 3"):
        dialect().chunk(changed(LAST, weight_versions=None), received=1)


@pytest.mark.parametrize("value", [-9999.0, -9000.0, float("nan"), float("-inf"), float("inf")])
def test_a_log_probability_that_says_nothing_is_an_error(value: float) -> None:
    with pytest.raises(WireError, match="finite"):
        dialect().chunk(changed(FIRST, logprobs={"content": [{"token_id": 10, "logprob": value}]}), received=0)


@pytest.mark.parametrize(
    "values",
    [
        {"logprobs": None},
        {"logprobs": {"content": []}},
        {"logprobs": {"content": [{"token_id": 11, "logprob": -1.0}]}},
        {"logprobs": {"content": [{"token_id": 10}]}},
        {"token_ids": ["x"]},
        {"token_ids": None},
        {"finish_reason": "repetition"},
        {"finish_reason": "stop", "weight_versions": [{"version": "1", "start": 0, "end": 2}]},
        {"finish_reason": "stop", "weight_versions": [{"version": "1", "start": 1, "end": 1}]},
        {"finish_reason": "stop", "weight_versions": [{"start": 0, "end": 1}]},
        {"finish_reason": "stop", "weight_versions": 3},
    ],
)
def test_a_chunk_that_does_not_fit_is_an_error(values: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        dialect().chunk(changed(FIRST, **values), received=0)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["choices", "usage", "token_ids", "logprobs", "error"]), inner, max_size=4
            )
        ),
        max_leaves=12,
    )
)
def test_no_message_is_answered_with_any_other_error(message: Any) -> None:
    with contextlib.suppress(WireError, DataError, BadAnswer):
        dialect().chunk(message, received=0)


def test_errors_within_a_stream_tell_the_request_from_the_server() -> None:
    refused = {"error": {"message": "Token id 5000 is out of vocabulary", "type": "BadRequestError", "code": 400}}
    with pytest.raises(DataError, match="out of vocabulary"):
        dialect().chunk(refused, received=0)
    with pytest.raises(BadAnswer, match="EngineCore"):
        dialect().chunk({"error": {"message": "EngineCore encountered an issue.", "code": 500}}, received=0)


@pytest.mark.parametrize(
    ("spans", "runs"),
    [
        ([("default", 0, 3)], [(0, 0)]),
        ([("3", 0, 1), ("3", 1, 3)], [(0, 3)]),
        ([("3", 0, 0), ("4", 0, 3)], [(0, 4)]),
        ([("v1", 0, 2), ("²", 2, 3)], [(0, 0)]),
        ([("5.run-a", 0, 2), ("12.run-a", 2, 3)], [(0, 5), (2, 12)]),
    ],
)
def test_version_spans_become_runs(spans: list[tuple[str, int, int]], runs: list[tuple[int, int]]) -> None:
    assert read_spans(named(spans), 3, "stop") == runs


def named(spans: list[tuple[str, int, int]]) -> list[dict[str, Any]]:
    return [{"version": version, "start": start, "end": end} for version, start, end in spans]


@pytest.mark.parametrize(
    "spans",
    [
        [("16", 0, 2)],
        [("16", 0, 1), ("17", 2, 3)],
        [("16", 1, 3)],
        [("16", 0, 3), ("17", 3, 2)],
        [("16", 0, 2), ("17", 2, 4)],
        [("17", 0, 2), ("16", 2, 3)],
    ],
)
def test_spans_that_do_not_sum_to_the_tokens_are_refused(spans: list[tuple[str, int, int]]) -> None:
    with pytest.raises(WireError, match="spans"):
        read_spans(named(spans), 3, "stop")


def test_controls() -> None:
    talk = dialect()
    (one,) = talk.abort("r1")
    assert one.body == {"request_ids": ["generate-tokens-r1"]}
    (pause,) = talk.pause
    assert (pause.path, pause.query) == ("/pause", {"mode": "keep", "clear_cache": "false"})
    assert [call.path for call in talk.resume] == ["/resume"]
    assert talk.wake(("weights", "kv_cache"))[0].query == {}
    assert talk.wake(("kv_cache",))[0].query == {"tags": "kv_cache"}
    assert talk.unload_adapter("a").optional
    assert talk.load_adapter("a", Path("/x")).body == {"lora_name": "a", "lora_path": "/x"}


def test_an_update_names_files_and_version() -> None:
    version = Version((2, 17), 9, {}, Path("/dev/shm/v"), ("a", "b"))
    source = {"folder": "/dev/shm/v", "files": ["a", "b"], "structure": version.structure}
    (check,) = dialect().prefetch(version)
    assert check.body == {"method": "streamrl_check", "kwargs": {"source": source}}
    start, replace, finish = dialect().update(version, "17.run-a")
    assert (start.path, replace.path, finish.path) == (
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
    )
    assert replace.body == {"update_info": {"source": source}}
    assert finish.body == {"weight_version": "17.run-a"}
    served = Version((2, 17), 9, {}, None, ("a",), ("http://h:1/",), ((4, "f0"),), LanePlace("h", 2, 1.5))
    found = dialect().prefetch(served)[0].body
    assert found is not None
    source = found["kwargs"]["source"]
    assert (source["folder"], source["url"]) == ("", "http://h:1/v-2-17")
    assert source["proofs"] == ((4, "f0"),)
    assert source["lane"] == {"host": "h", "port": 2, "stall": 1.5}
    results = [{"results": each} for each in (["", ""], [BUSY, BUSY], ["no foo", "no foo"])]
    assert [dialect().read_prefetch(answer) for answer in results] == ["", BUSY, "no foo"]
    with pytest.raises(WireError):
        dialect().read_prefetch(None)
    assert not any(call.repeatable for call in (start, replace, finish))
    with pytest.raises(WeightsError, match="no files"):
        dialect().prefetch(Version((1, 1), 1, {}))


def test_sleep_keeps_the_requests() -> None:
    assert [dialect().sleep(level)[0].query["level"] for level in (0, 1)] == ["0", "1"]
    assert dialect().sleep(0)[0].query["mode"] == "keep"


def test_metrics_are_read() -> None:
    found = dialect().read_metrics(METRICS)
    assert (found.running, found.waiting, found.cache_use) == (3, 2, 0.25)
    assert (found.tokens_sampled, found.preemptions) == (255, 1)
    two = METRICS + METRICS.replace('engine="0"', 'engine="1"').replace("0.25", "0.75")
    assert dialect().read_metrics(two).cache_use == 0.5
    assert dialect().read_metrics(two).running == 6
    with pytest.raises(WireError):
        dialect().read_metrics(None)


@given(st.text())
def test_no_metrics_break_the_reader(text: str) -> None:
    dialect().read_metrics(text)


def answers(**values: Any) -> list[Any]:
    found: dict[str, Any] = {
        "version": {"version": "0.32.0"},
        "models": MODELS,
        "routes": ROUTES,
        "probe": PROBE,
        "settings": {"vllm_config": SETTINGS},
    }
    return list({**found, **values}.values())


def test_a_server_that_has_everything() -> None:
    about = dialect().read_about(answers())
    assert (about.version, about.model, about.context, about.probe) == ("0.32.0", "/a/model", 256, (5, 6, 7))
    assert len(dialect(engine={"kind": "vllm", "url": ["http://x"]}).about()) == len(answers())


@pytest.mark.parametrize(
    ("values", "flag"),
    [
        ({"routes": {"paths": {"/inference/v1/generate": {}}}, "settings": None}, "VLLM_SERVER_DEV_MODE=1"),
        ({"settings": {"vllm_config": {**SETTINGS, "weight_transfer_config": None}}}, "--weight-transfer-config"),
        ({"settings": {"vllm_config": {**SETTINGS, "parallel_config": {}}}}, "--worker-extension-cls"),
    ],
)
def test_what_is_missing_is_named(values: dict[str, Any], flag: str) -> None:
    with pytest.raises(Refused, match=flag):
        dialect().read_about(answers(**values))


def test_a_server_that_cannot_serve_the_run_is_refused() -> None:
    with pytest.raises(Refused, match="--enable-scale-out"):
        dialect().read_about(answers(routes={"paths": {"/update_weights": {}}}))
    raw = {"vllm_config": {**SETTINGS, "model_config": {"logprobs_mode": "raw_logprobs"}}}
    assert dialect().read_about(answers(settings=raw))
    with pytest.raises(Refused, match="--logprobs-mode processed_logprobs"):
        dialect(sampling={"max_new_tokens": 64, "temperature": 0.5}).read_about(answers(settings=raw))
    for ignore, refused in ((["strict"], True), (["temperature", "top_p", "top_k", "min_p"], False)):
        agent = dialect(episode={"agent": {"command": "agent", "ignore": ignore}})  # its calls say how they are drawn
        with pytest.raises(Refused, match="an agent") if refused else contextlib.nullcontext():
            agent.read_about(answers(settings=raw))
    logits = {"vllm_config": {**SETTINGS, "model_config": {"logprobs_mode": "processed_logits"}}}
    with pytest.raises(Refused, match="returns processed_logits"):
        dialect().read_about(answers(settings=logits))
    with pytest.raises(Refused, match=r"0\.31\.1rc2 is older than 0\.32"):
        dialect().read_about(answers(version={"version": "0.31.1rc2"}))
    for newer in ("0.32.0+cpu", "0.33.1.dev7+gabc", "1.0", "dev"):
        assert dialect().read_about(answers(version={"version": newer})).version == newer
    for wrong in ({"version": None}, {"version": "x"}, {"models": {"data": []}}, {"models": None}, {"probe": {}}):
        if wrong == {"probe": {}}:
            assert dialect().read_about(answers(**wrong)).probe is None
            continue
        with pytest.raises(WireError, match="not a vLLM server"):
            dialect().read_about(answers(**wrong))


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    return tmp_path


def flags_of(argv: Any) -> dict[str, str]:
    words = list(argv)
    return {
        word.removeprefix("--"): (words[place + 1] if place + 1 < len(words) else "")
        for place, word in enumerate(words)
        if word.startswith("--")
    }


def test_a_server_of_our_own_on_a_cpu(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "has_gpu", lambda: False)
    monkeypatch.setenv("PYTHONPATH", "/mine")
    engine = {
        "environment": str(environment),
        "slots": 32,
        "stream_interval": 8,
        "threads": 3,
        "kv_cache": "1GiB",
        "tensor_parallel": 2,
        "flags": {"max-num-seqs": 5, "enable-lora": True, "enforce-eager": False, "lora-modules": ["a=b", "c=d"]},
    }
    launch = dialect(engine={"kind": "vllm", **engine}).launch(model="/m", port=4242, seed=99)
    assert list(launch.argv[:3]) == [str(environment / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"]
    flags = flags_of(launch.argv)
    assert (flags["model"], flags["host"], flags["port"], flags["seed"]) == ("/m", "127.0.0.1", "4242", "99")
    assert (flags["max-model-len"], flags["stream-interval"], flags["tensor-parallel-size"]) == ("256", "8", "2")
    assert flags["kv-cache-memory-bytes"] == str(1 << 30)
    assert flags["logprobs-mode"] == "processed_logprobs"
    assert orjson.loads(flags["weight-transfer-config"]) == {"backend": "streamrl"}
    assert flags["max-num-seqs"] == "5"
    assert "enable-prompt-tokens-details" in flags
    assert "enable-lora" in flags
    assert "enforce-eager" not in flags
    assert list(launch.argv[-3:]) == ["--lora-modules", "a=b", "c=d"]
    assert launch.environ["PYTHONPATH"] == f"{PLUGIN}{os.pathsep}/mine"
    assert launch.environ["VLLM_SERVER_DEV_MODE"] == "1"
    assert launch.environ["OMP_NUM_THREADS"] == "3"


def test_a_server_for_quantised_versions_reads_no_others(environment: Path) -> None:
    engine = {"kind": "vllm", "environment": str(environment), "device": "cpu"}
    for kind in get_args(Quantize):
        flags = flags_of(dialect(engine=engine, weights={"quantize": kind}).launch(model="/m", port=1, seed=0).argv)
        assert flags["load-format"] == "dummy"
        assert orjson.loads(flags["hf-overrides"]) == {"quantization_config": quantization_config(kind)}
    plain = dialect(engine=engine).launch(model="/m", port=1, seed=0)
    assert not {"load-format", "hf-overrides"} & set(flags_of(plain.argv))


@pytest.mark.parametrize("engine", [{}, {"flags": {"logprobs-mode": "raw_logprobs"}}, {"url": ["http://x"]}])
def test_a_server_is_asked_for_its_settings_unless_all_are_ours(engine: dict[str, Any]) -> None:
    mine = dialect(engine={"kind": "vllm", **engine})
    asked = [call.path for call in mine.about()]
    assert asked[4:] == (["/server_info"] if engine else [])
    assert mine.read_about(answers()[: len(asked)])


def test_a_server_of_our_own_on_a_gpu(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "has_gpu", lambda: True)
    engine = {"kind": "vllm", "environment": str(environment)}
    flags = flags_of(dialect(engine=engine).launch(model="/m", port=1, seed=0).argv)
    assert not {"enforce-eager", "kv-cache-memory-bytes", "enable-sleep-mode"} & set(flags)
    shared = dialect(engine=engine, rollout={"placement": "colocated"}).launch(model="/m", port=1, seed=0)
    assert "enable-sleep-mode" in flags_of(shared.argv)
    with pytest.raises(ConfigError, match="bin/python"):
        dialect(engine={**engine, "environment": "/nowhere"}).launch(model="/m", port=1, seed=0)
