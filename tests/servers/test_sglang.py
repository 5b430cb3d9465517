"""SGLang's dialect on answers that real servers (0.5.23) gave, shortened; a live server is asked in tests/engines."""

from __future__ import annotations

import base64
import contextlib
import io
import pickle
import sys
from pathlib import Path

import numpy as np
import orjson
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamrl.config import RunConfig
from streamrl.engine import Request
from streamrl.errors import ConfigError, DataError, Refused, WeightsError, WireError
from streamrl.http import BadAnswer
from streamrl.servers import dialect as dialects
from streamrl.servers import environments
from streamrl.servers.dialect import BUSY, NOT_FETCHED
from streamrl.servers.launch import PLUGIN
from streamrl.servers.sglang import FETCH, LOADER, SglangDialect
from streamrl.weight_sync.tensors import Version

TRIPLES = [[-4.690021514892578, 2, None], [-4.580459117889404, 22, None], [-4.856745719909668, 74, None]]
LOGPROBS = [triple[0] for triple in TRIPLES]


KEYS = [
    "completion_tokens",
    "output_token_logprobs",
    "finish_reason",
    "weight_versions",
    "type",
    "start",
    "end",
    "version",
]


def dialect(**sections) -> SglangDialect:
    engine = {"kind": "sglang", "device": "cpu", **sections.pop("engine", {})}
    data = {"model": {"path": "m", "context": 64}, "data": {"max_prompt_tokens": 16}, "engine": engine, **sections}
    return SglangDialect(RunConfig.model_validate({"sampling": {"max_new_tokens": 8}, **data}))


def message(tokens, total, triples, finish=None, spans=None):
    meta = {
        "id": "57575e8f26a9875a4550412c6d316a43",
        "finish_reason": finish,
        "prompt_tokens": 10,
        "cached_tokens": 8,
        "weight_version": "17",
        "completion_tokens": total,
        "output_token_logprobs": triples,
        "output_token_logprobs_length": total,
    }
    return {"output_ids": tokens, "meta_info": meta if spans is None else {**meta, "weight_versions": spans}}


# --- requests ---


def test_a_request_says_every_sampling_parameter_and_its_version():
    request = Request("r", np.array([5, 9, 33], np.int32), 8, 0.7)
    call = dialect().generation(request, version=17, salt="life")
    assert (call.method, call.path, call.repeatable) == ("POST", "/generate", False)
    body = orjson.loads(orjson.dumps(call.body))
    assert body["input_ids"] == [5, 9, 33]
    assert body["cache_salt"] == "life-w17"
    assert body["rid"] == "r"
    assert body["return_logprob"] is True
    assert body["stream"] is True
    assert "lora_path" not in body
    sampling = body["sampling_params"]
    assert (sampling["max_new_tokens"], sampling["temperature"], sampling["top_p"], sampling["top_k"]) == (
        8,
        0.7,
        1,
        -1,
    )


def test_a_request_says_how_its_tokens_are_drawn_and_what_ends_it():
    options = {"top_p": 0.9, "top_k": 40, "min_p": 0.1, "stop": ("END",), "min_tokens": 9}
    body = dialect().generation(Request("r", np.array([5], np.int32), 8, **options), version=1).body
    told = {"top_p": 0.9, "top_k": 40, "min_p": 0.1, "stop": [], "min_new_tokens": 8}
    assert told.items() <= body["sampling_params"].items()
    assert body["return_sampling_mask"] is True
    body = dialect().generation(Request("r", np.array([5], np.int32), 8, stop=("END",)), version=1).body
    guided = Request("r", np.array([5], np.int32), 8, json_schema='{"type": "object"}')
    assert dialect().generation(guided, version=1).body["sampling_params"]["json_schema"] == '{"type": "object"}'
    assert "json_schema" not in body["sampling_params"]
    assert body["sampling_params"]["stop"] == ["END"]  # it would end a response before the least length
    for plain in (
        {},
        {"top_p": 0.9},
        {"top_k": 4097},
        {"top_k": 5, "temperature": 0.0},
    ):  # it would refuse, or need not
        body = dialect().generation(Request("r", np.array([5], np.int32), 8, **plain), version=1).body
        assert "return_sampling_mask" not in body


def test_log_probabilities_are_those_of_the_cut_distribution_where_they_are_told():
    whole = message([7, 8], 3, [[-2.0, 7, None], [-3.0, 8, None]])
    assert dialect().chunk(whole, received=1).logprobs == [-2.0, -3.0]
    whole["meta_info"]["output_token_sampling_logprobs"] = [-0.5, -0.25]
    assert dialect().chunk(whole, received=1).logprobs == [-0.5, -0.25]


def test_an_adapter_is_named():
    call = dialect().generation(Request("r", np.array([5], np.int32), 8), version=3, adapter="pol@3")
    assert call.body["lora_path"] == "pol@3"


def test_an_abort_names_the_request():
    (call,) = dialect().abort("r")
    assert call.body == {"rid": "r"}


# --- the stream ---


@pytest.mark.parametrize("incremental", [True, False])
def test_pieces_add_up_to_the_response(incremental):
    tokens = [triple[1] for triple in TRIPLES]
    heard, logprobs, ends = [], [], [1, 1, 3]
    for end in ends:
        begin = len(heard) if incremental else 0
        last = end == 3
        chunk = dialect().chunk(
            message(
                tokens[begin:end],
                end,
                TRIPLES[begin:end],
                {"type": "length", "length": 3} if last else None,
                [{"version": "17", "start": 0, "end": 3}] if last else None,
            ),
            received=len(heard),
        )
        heard += chunk.tokens
        logprobs += chunk.logprobs
        assert chunk.finish == ("length" if last else None)
        assert chunk.cached_tokens == 8
    assert heard == tokens
    assert logprobs == LOGPROBS
    assert chunk.runs == [(0, 17)]


def test_a_cumulative_piece_may_hold_tokens_that_it_does_not_count_yet():
    chunk = dialect().chunk(message([2, 22, 74], 2, TRIPLES), received=1)
    assert (chunk.tokens, chunk.logprobs) == ([22], [LOGPROBS[1]])


def test_the_echo_of_an_abort_in_the_queue_repeats_the_last_token():
    """An incremental server that ends a request which it had put back sends its last token again."""
    finish = {"type": "abort", "message": "Abort in waiting queue"}
    spans = [{"version": "17", "start": 0, "end": 3}]
    chunk = dialect().chunk(message([74], 3, TRIPLES, finish, spans), received=3)
    assert (chunk.tokens, chunk.logprobs, chunk.finish, chunk.runs) == ([], [], "abort", [(0, 17)])
    chunk = dialect().chunk(message([], 0, [], finish), received=0)
    assert (chunk.tokens, chunk.finish, chunk.runs) == ([], "abort", None)
    with pytest.raises(WireError, match="spans"):
        dialect().chunk(message([2, 22, 74], 3, TRIPLES, {"type": "length", "length": 3}, spans[:0]), received=0)


@pytest.mark.parametrize(
    ("spoiled", "received"),
    [
        (message([2, 22], 3, TRIPLES[:2]), 0),  # fewer than it counts
        (message([2, 22, 74], 3, TRIPLES), 4),  # more came before than there ever was
        (message([2, 22, 74], 3, TRIPLES[:2]), 0),  # a log-probability is missing
        (message([2, 22, 74], 3, []), 0),
        (message([2, 22, 75], 3, TRIPLES), 0),  # ... or belongs to another token
        (message([2], 1, [[float("nan"), 2, None]]), 0),
        (message([2], 1, [[float("-inf"), 2, None]]), 0),
        (message([2], 1, [[None, 2, None]]), 0),
        (message([2], 1, TRIPLES[:1], {"type": "tired"}), 0),
        (message([2], 1, TRIPLES[:1], "stop"), 0),
        (message([2], "many", TRIPLES[:1]), 0),
        (message([2], 1, TRIPLES[:1], {"type": "stop"}, "17"), 0),
        ({"output_ids": [2]}, 0),
        ([], 0),
        ("hello", 0),
        (None, 0),
    ],
)
def test_what_cannot_be_a_message_is_refused(spoiled, received):
    with pytest.raises(WireError):
        dialect().chunk(spoiled, received=received)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.sampled_from(["stop", "17", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
    max_leaves=12,
)


@given(st.fixed_dictionaries({"output_ids": JSON, "meta_info": st.dictionaries(st.sampled_from(KEYS), JSON)}) | JSON)
def test_nothing_that_a_server_says_raises_anything_else(said):
    with contextlib.suppress(WireError, DataError):
        chunk = dialect().chunk(said, received=0)
        assert len(chunk.tokens) == len(chunk.logprobs)
        assert np.isfinite(chunk.logprobs).all()


@pytest.mark.parametrize("error", ["gone", {"message": "gone", "code": 500}])
def test_a_server_that_fails_while_it_answers_is_not_the_request_s_fault(error):
    with pytest.raises(BadAnswer, match="gone"):
        dialect().chunk({"error": error}, received=0)


def test_a_refused_request_is_the_request_s_fault():
    error = {"message": "The input (20 tokens) is longer than the model's context length (16 tokens).", "code": 400}
    with pytest.raises(DataError, match="longer than"):
        dialect().chunk({"error": {**error, "type": "invalid_request_error", "retryable": False}}, received=0)
    finish = {"type": "abort", "message": "Input is too long", "status_code": 400, "err_type": "BadRequestError"}
    with pytest.raises(DataError, match="too long"):
        dialect().chunk(message([], 0, [], finish), received=0)
    with pytest.raises(BadAnswer, match="overloaded"):
        dialect().chunk(message([], 0, [], {**finish, "message": "overloaded", "status_code": 503}), received=0)


# --- controls ---


def paths(calls):
    return [(call.path, dict(call.body or {})) for call in calls]


def test_pauses():
    assert paths(dialect().pause) == [("/pause_generation", {"mode": "in_place"})]
    assert [call.path for call in dialect().resume] == ["/continue_generation"]


def test_a_server_on_a_cpu_is_only_paused():
    assert paths(dialect().sleep(0)) == [("/pause_generation", {"mode": "in_place"})]
    assert [call.path for call in dialect().wake(["weights", "kv_cache"])] == ["/continue_generation"]


def test_memory_is_given_back_only_after_requests_were_put_back(monkeypatch):
    monkeypatch.setattr(environments, "has_gpu", lambda: True)
    shared = dialect(engine={"device": "cuda"}, rollout={"placement": "colocated"})
    assert paths(shared.sleep(1)) == [
        ("/pause_generation", {"mode": "retract"}),
        ("/release_memory_occupation", {"tags": ["kv_cache", "weights"]}),
    ]
    assert paths(shared.wake(["weights"])) == [("/resume_memory_occupation", {"tags": ["weights"]})]
    assert [call.path for call in shared.wake(["kv_cache"])] == ["/resume_memory_occupation", "/continue_generation"]


def test_adapters():
    assert dialect().load_adapter("pol@1", Path("/a")).body == {"lora_name": "pol@1", "lora_path": "/a"}
    assert dialect().unload_adapter("pol@1").body == {"lora_name": "pol@1"}


# --- weights ---


def test_an_update_is_one_call_with_a_description_of_the_files():
    version = Version((2, 17), 17, {}, Path("/v"), ("a.st", "b.st"))
    (call,) = dialect(engine={"tensor_parallel": 2}).update(version, "17.run-a")
    assert call.repeatable
    assert call.body["weight_version"] == "17.run-a"
    assert call.body["flush_cache"] is False
    assert call.body["load_format"] == LOADER
    one, other = call.body["serialized_named_tensors"]
    assert one == other
    ((name, tensor),) = _Listed(io.BytesIO(base64.b64decode(one))).load()
    assert orjson.loads(name) == {"folder": "/v", "files": ["a.st", "b.st"], "structure": version.structure}
    assert tensor.numel() == 0
    (fetch,) = dialect().prefetch(version)
    assert fetch.path == "/set_internal_state"
    assert fetch.body == {"server_args": {f"{FETCH}{name}": 1}}
    assert [dialect().read_prefetch(answer) for answer in ([True], [False])] == ["", BUSY]
    with pytest.raises(WireError):
        dialect().read_prefetch({"detail": "?"})


def test_a_server_on_another_host_hears_where_the_files_are_served():
    version = Version((2, 17), 9, {}, Path("/x"), ("a",), ("http://h:1/",))
    (call,) = dialect().update(version, "17.run-a")
    ((name, _),) = _Listed(io.BytesIO(base64.b64decode(call.body["serialized_named_tensors"][0]))).load()
    assert orjson.loads(name)["url"] == "http://h:1/v-2-17"


class _Listed(pickle.Unpickler):
    """As in the server: what is named must be on its list. Of that list the frame needs one entry."""

    def find_class(self, module, name):
        assert (module, name) == ("torch", "ByteTensor")
        return torch.ByteTensor


def test_a_version_without_files_cannot_be_sent():
    with pytest.raises(WeightsError, match="no files"):
        dialect().update(Version((1, 3), 3, {"x": torch.zeros(1)}), "3")


# --- what a server says of itself ---

SERVER = {"version": "0.5.23", "custom_weight_loader": [LOADER], "context_length": 512, "dp_size": 1, "tp_size": 1}
MODEL = {"model_path": "/models/tiny", "weight_version": "default"}


def test_a_server_that_has_all():
    about = dialect().read_about([SERVER, MODEL, {"tokens": [5, 9], "count": 2}])
    assert (about.version, about.model, about.context) == ("0.5.23", "/models/tiny", 512)
    assert about.probe == (5, 9)
    assert dialect().read_about([SERVER, MODEL, None]).probe is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": "0.5.9"}, "0.5.20"),
        ({"custom_weight_loader": []}, "--custom-weight-loader"),
        ({"custom_weight_loader": None}, str(PLUGIN)),
        ({"dp_size": 2}, "--dp-size"),
    ],
)
def test_what_is_missing_is_said_in_words(change, words):
    with pytest.raises(Refused, match=words):
        dialect().read_about([{**SERVER, **change}, MODEL, None])


def test_another_number_of_ranks_is_said_before_weights_are_sent():
    with pytest.raises(ConfigError, match="--tp-size 2") as caught:
        dialect().read_about([{**SERVER, "tp_size": 2}, MODEL, None])
    assert "engine.tensor_parallel to 2" in caught.value.hint
    assert dialect(engine={"tensor_parallel": 2}).read_about([{**SERVER, "tp_size": 2}, MODEL, None])


def test_another_kind_of_server_is_noticed():
    with pytest.raises(WireError, match="as SGLang does"):
        dialect().read_about(["<html>", None, None])


def test_figures():
    load = {
        "num_running_reqs": 3,
        "num_waiting_reqs": 2,
        "num_used_tokens": 25,
        "max_total_num_tokens": 100,
        "gen_throughput": 240.5,
    }
    figures = dialect().read_metrics({"version": "0.5.23", "loads": [load, {**load, "num_used_tokens": 50}]})
    assert (figures.running, figures.waiting, figures.cache_use) == (6, 4, 0.5)
    for spoiled in ({"loads": []}, {"loads": [{}]}, "text", None):
        with pytest.raises(WireError):
            dialect().read_metrics(spoiled)


# --- how one is started ---


@pytest.fixture
def environment(tmp_path):
    python = tmp_path / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    return tmp_path / "env"


def flags(launch):
    words = list(launch.argv)[3:]
    pairs = zip(words, [*words[1:], "--"], strict=True)
    return {word: (None if value.startswith("--") else value) for word, value in pairs if word.startswith("--")}


def test_a_cpu_server_gets_the_shim_and_one_thread(environment, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/mine")
    launch = dialect(engine={"environment": str(environment)}).launch(
        model=str(make_model(tmp_path)), port=4711, seed=9
    )
    said = flags(launch)
    assert list(launch.argv)[:3] == [str(environment / "bin" / "python"), "-m", "sglang.launch_server"]
    assert (said["--port"], said["--host"], said["--random-seed"]) == ("4711", "127.0.0.1", "9")
    assert (said["--context-length"], said["--max-running-requests"], said["--device"]) == ("64", "64", "cpu")
    assert said["--custom-weight-loader"] == LOADER
    assert "--sleep-on-idle" in said
    assert "--incremental-streaming-output" in said
    assert launch.environ["SGLANG_USE_CPU_ENGINE"] == launch.environ["OMP_NUM_THREADS"] == "1"
    assert launch.environ["PYTHONPATH"].split(":") == [str(PLUGIN), str(PLUGIN / "sglang_cpu"), "/mine"]


def test_an_accelerator_gets_none_of_that(environment, tmp_path, monkeypatch):
    monkeypatch.setattr(environments, "has_gpu", lambda: True)
    engine = {"environment": str(environment), "device": "cuda", "tensor_parallel": 2}
    shared = dialect(engine=engine, rollout={"placement": "colocated"})
    launch = shared.launch(model=str(make_model(tmp_path)), port=1, seed=9)
    said = flags(launch)
    assert "--device" not in said
    assert "--enable-memory-saver" in said
    assert said["--tp-size"] == "2"
    assert "sglang_cpu" not in launch.environ["PYTHONPATH"]
    assert "OMP_NUM_THREADS" not in launch.environ
    assert "--enable-memory-saver" not in flags(dialect(engine=engine).launch(model="hub/name", port=1, seed=9))
    blocks = flags(dialect(engine=engine, weights={"quantize": "fp8_block"}).launch(model="hub/name", port=1, seed=9))
    assert blocks["--load-format"] == "dummy"
    assert '"weight_block_size": [128, 128]' in blocks["--json-model-override-args"]


def test_flags_of_the_user_win(environment):
    given = {"max_running_requests": 3, "sleep-on-idle": False, "enable-lora": True, "lora-target-modules": ["q", "k"]}
    launch = dialect(engine={"environment": str(environment), "flags": given}).launch(model="hub/name", port=1, seed=9)
    said = flags(launch)
    assert said["--max-running-requests"] == "3"
    assert "--sleep-on-idle" not in said
    assert "--enable-lora" in said
    assert list(launch.argv)[-3:] == ["--lora-target-modules", "q", "k"]


def make_model(tmp_path, **shape):
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, **shape}
    (folder / "config.json").write_bytes(orjson.dumps(shape))
    return folder


@pytest.mark.parametrize(
    ("kv_cache", "shape", "tokens"),
    [
        # 2 layers x 2 heads x 16 values x 4 bytes, keys and values: 512 bytes a token
        ("100KiB", {}, 200),
        ("1KiB", {}, 65),  # one response at least
        ("1GiB", {}, 2 * 64 * 64),  # all that the slots can hold, twice
        ("100KiB", {"head_dim": 32}, 100),
        ("100KiB", {"num_key_value_heads": None}, 100),
    ],
)
def test_the_cache_holds_what_the_memory_allows(environment, tmp_path, kv_cache, shape, tokens):
    engine = {"environment": str(environment), "kv_cache": kv_cache}
    launch = dialect(engine=engine).launch(model=str(make_model(tmp_path, **shape)), port=1, seed=9)
    assert flags(launch)["--max-total-tokens"] == str(tokens)


def test_a_missing_environment_says_how_to_make_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as missing:
        dialect(engine={"environment": str(tmp_path / "none")}).launch(model="m", port=1, seed=9)
    assert "streamrl engines install sglang" in missing.value.hint
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.setattr(dialects, "find_environment", lambda *_: tmp_path)
    with pytest.raises(ConfigError, match=r"config\.json"):
        dialect().launch(model=str(folder), port=1, seed=9)


def test_the_plug_in_is_whole():
    """SGLang finds the hooks by the entry point, the loader by its name, and Python the shim by its place."""
    points = (PLUGIN / "streamrl_engine-1.0.dist-info" / "entry_points.txt").read_text()
    assert "[sglang.srt.plugins]" in points
    assert "streamrl_engine.sglang:register" in points
    assert "[vllm.general_plugins]" in points
    assert "streamrl_engine.cpu:prepare" in points
    assert (PLUGIN / "sglang_cpu" / "sitecustomize.py").is_file()
    assert (PLUGIN / "sglang_cpu" / "sgl_kernel" / "__init__.py").is_file()
    texts = {module.stem: module.read_text() for module in (PLUGIN / "streamrl_engine").glob("*.py")}
    for text in texts.values():
        assert "streamrl." not in text.replace("streamrl_engine.", "")
    assert f'BUSY = "{BUSY}"' in texts["vllm"]
    assert f'NOT_FETCHED = "{NOT_FETCHED}"' in texts["files"]
    assert f'FETCH = "{FETCH}"' in texts["sglang"]
    assert f'LOADER = "{LOADER}"' in texts["sglang"]
