"""Engines, servers and the way of the weights, looked at before anything starts; each mistake says how to mend it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import orjson
import pytest

from streamrl.config import RunConfig
from streamrl.errors import CannotCreate, ConfigError, Unreachable
from streamrl.runtime.limits import shared_memory_copies
from streamrl.runtime.preflight import check_engine, check_way
from streamrl.servers import environments, launch
from streamrl.servers.launch import PLUGIN
from streamrl.servers.sglang import SglangDialect
from streamrl.servers.vllm import VllmDialect
from tests.http_kit import answering


def config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate(sections)


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A whole environment of vLLM for CPUs, as far as anybody can see from outside."""
    folder = tmp_path / "engines" / "vllm"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").write_text("")
    (folder / environments.MARKER).write_bytes(orjson.dumps({"version": "0.32.0", "cpu": True}))
    monkeypatch.setenv(environments.VARIABLE, str(folder.parent))
    return folder


def test_engines_that_need_nothing_of_the_machine():
    assert "transformers" in check_engine(config())


def test_an_environment_is_named_with_its_version(environment: Path):
    found = check_engine(config(engine={"kind": "vllm", "servers": 2, "device": "cpu"}))
    assert found == f"vllm 0.32.0 in {environment}, 2 of them"
    (environment / environments.MARKER).unlink()
    assert "unknown version" in check_engine(config(engine={"kind": "vllm"}))


def test_a_missing_environment_names_the_command_that_makes_it(environment: Path, tmp_path: Path):
    with pytest.raises(ConfigError) as caught:
        check_engine(config(engine={"kind": "sglang", "environment": tmp_path / "gone"}))
    assert "streamrl engines install sglang" in caught.value.hint


def test_an_environment_for_another_machine_is_refused(environment: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(environments, "has_gpu", lambda: True)
    with pytest.raises(ConfigError, match="made for CPUs, this run generates on a GPU") as caught:
        check_engine(config(engine={"kind": "vllm", "device": "cuda"}))
    assert "--gpu" in caught.value.hint
    (environment / environments.MARKER).write_bytes(orjson.dumps({"version": "0.32.1", "cpu": False}))
    with pytest.raises(ConfigError, match="made for GPUs, this run generates on the CPU"):
        check_engine(config(engine={"kind": "vllm", "device": "cpu"}))


@pytest.mark.parametrize(("kind", "dialect"), [("vllm", VllmDialect), ("sglang", SglangDialect)])
@pytest.mark.parametrize(
    ("device", "said"), [("cuda", "no NVIDIA GPU"), ("cuda:1", "no NVIDIA GPU"), ("gpu", "auto, cpu")]
)
def test_a_gpu_that_is_not_there_is_refused_by_every_kind(
    environment: Path, monkeypatch: pytest.MonkeyPatch, kind: str, dialect: Any, device: str, said: str
):
    """Never served from a CPU in silence: that is a hundred times slower than what was asked for."""
    monkeypatch.setattr(environments, "has_gpu", lambda: False)
    asked = config(engine={"kind": kind, "device": device, "environment": environment})
    for start in (lambda: check_engine(asked), lambda: dialect(asked).launch(model="owner/name", port=1, seed=0)):
        with pytest.raises(ConfigError, match=f"engine.device .*{device}") as caught:
            start()
        assert said in f"{caught.value.message} {caught.value.hint}"
    elsewhere = config(engine={"kind": kind, "device": "cuda", "url": ["http://gpu-host:8000"]})
    assert not environments.on_cpu(elsewhere.engine)


@pytest.mark.parametrize("flag", ["port", "--host", "model_path"])
def test_flags_that_streamrl_needs_for_itself_are_refused(environment: Path, flag: str):
    with pytest.raises(ConfigError, match="which streamrl chooses"):
        check_engine(config(engine={"kind": "vllm", "device": "cpu", "flags": {flag: "1"}}))


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_the_plug_in_of_every_engine_is_there(kind: str):
    assert (PLUGIN / "streamrl_engine" / f"{kind}.py").is_file()


def test_an_installation_without_the_plug_in_is_found(
    environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(launch, "PLUGIN", tmp_path / "plugin")
    with pytest.raises(ConfigError, match="without its plug-in for vllm"):
        check_engine(config(engine={"kind": "vllm", "device": "cpu"}))


@pytest.fixture
def server() -> Iterator[tuple[str, list[tuple[str, str | None]]]]:
    """A server that wants the key `sesame`; yields its URL and what it was asked."""
    asked: list[tuple[str, str | None]] = []

    def answer(request: BaseHTTPRequestHandler) -> tuple[int, bytes]:
        key = request.headers.get("Authorization")
        asked.append((request.path, key))
        there = request.path in {"/model_info", "/v1/models"}
        return (200 if there else 404) if key == "Bearer sesame" else 401, b""

    with answering(answer) as url:
        yield url, asked


def test_servers_that_run_already_are_asked_once_each(server: Any, tmp_path: Path):
    url, asked = server
    key = tmp_path / "key"
    key.write_text("sesame\n")
    assert check_engine(config(engine={"kind": "sglang", "url": [url], "api_key_file": key})) == url
    assert asked == [("/model_info", "Bearer sesame")]
    for wrong in ({}, {"api_key_file": tmp_path / "other"}):
        (tmp_path / "other").write_text("friend")
        with pytest.raises(ConfigError, match="refuses our key"):
            check_engine(config(engine={"kind": "vllm", "url": [url], **wrong}))
    elsewhere = f"{url}/elsewhere"
    with pytest.raises(ConfigError, match=f"server at {elsewhere} is not of kind sglang: it has no /model_info"):
        check_engine(config(engine={"kind": "sglang", "url": [elsewhere], "api_key_file": key}))
    with pytest.raises(ConfigError, match="api_key_file"):
        check_engine(config(engine={"kind": "vllm", "url": [url], "api_key_file": tmp_path / "gone"}))


def test_a_server_that_is_not_there(unused_port: int):
    with pytest.raises(Unreachable, match=f"no server answers at http://127.0.0.1:{unused_port}"):
        check_engine(config(engine={"kind": "vllm", "url": [f"http://127.0.0.1:{unused_port}"]}))


@pytest.fixture
def unused_port() -> Iterator[int]:
    """A port that refuses connections: bound, and nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def test_the_way_of_the_weights(unused_port: int):
    assert check_way(config()) == "shm, float32"
    assert "every 5" in check_way(config(weights={"delta": {"enabled": True, "every": 5}, "dtype": "bfloat16"}))
    assert check_way(config(weights={"transport": "http"})).startswith("http")
    with pytest.raises(CannotCreate, match=f"port {unused_port}"):
        check_way(config(weights={"transport": "http", "port": unused_port}))
    with pytest.raises(CannotCreate, match=r"192\.0\.2\.1"):
        check_way(config(weights={"transport": "collective", "host": "192.0.2.1"}))
    with pytest.raises(ConfigError, match=r"weights\.host nowhere\.invalid is unknown"):
        check_way(config(weights={"transport": "http", "host": "nowhere.invalid"}))
    url = "memory://weights"
    assert check_way(config(weights={"transport": "http", "url": url, "host": "192.0.2.1"})).startswith(url)


@pytest.mark.parametrize(
    ("transport", "deltas", "replicas", "copies"),
    [
        ("shm", False, 4, 3),
        ("directory", False, 4, 0),
        ("http", False, 2, 7),
        ("shm", True, 1, 5),
        ("directory", True, 2, 4),
    ],
)
def test_copies_in_shared_memory(transport: str, deltas: bool, replicas: int, copies: int):
    weights = {"transport": transport, "delta": {"enabled": deltas}}
    assert shared_memory_copies(config(weights=weights, rollout={"replicas": replicas})) == copies


@pytest.mark.parametrize(
    ("kind", "quantize", "there"),
    [
        ("vllm", "int8", True),
        ("vllm", "fp8_channel", True),
        ("vllm", "fp8_block", False),
        ("sglang", "fp8_block", False),
    ],
)
def test_quantised_rollouts_are_for_what_the_engine_can_do_there(kind, quantize, there, tmp_path, monkeypatch):
    monkeypatch.setattr(environments, "has_gpu", lambda: False)
    asked = config(engine={"kind": kind}, weights={"quantize": "fp8_block"}, model={"path": str(tmp_path / "none")})
    monkeypatch.setattr(environments, "has_gpu", lambda: True)
    with pytest.raises((ConfigError, Unreachable), match="none"):
        check_way(asked)
    monkeypatch.setattr(environments, "has_gpu", lambda: False)
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    asked = config(engine={"kind": kind}, weights={"quantize": quantize}, model={"path": str(tmp_path)})
    if there:
        assert check_way(asked) == f"shm, float32, {quantize} for the engines"
    else:
        with pytest.raises(ConfigError, match=f"{kind} has no kernel for it on a CPU"):
            check_way(asked)
    assert shared_memory_copies(asked) == 5
    monkeypatch.setattr(environments, "has_gpu", lambda: True)
    assert f"{quantize} for the engines" in check_way(asked)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    with pytest.raises(ConfigError, match="mixture of experts"):
        check_way(asked)
    (tmp_path / "config.json").write_text('{"model_type": "unheard of"}')
    with pytest.raises(ConfigError, match="cannot be read"):
        check_way(asked)
