"""Where a model comes from is known before anything starts: a directory, the cache of the hub, or the hub, soon."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import orjson
import pytest

from streamrl.config import RunConfig
from streamrl.errors import ConfigError, Unreachable
from streamrl.runfile import load
from streamrl.runtime import model_checks
from streamrl.runtime.model_checks import check_models
from tests.http_kit import answering

NAME = "somebody/a-model-that-is-in-no-cache"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Answers `HEAD /OWNER/NAME/resolve/main/config.json` with its `status`."""
    found = SimpleNamespace(status=200)
    with answering(lambda _: (found.status, b"{}"), X_Repo_Commit="0" * 40, ETag='"1"') as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        yield found


def run(*overrides: str) -> RunConfig:
    return load(None, [f"model.path={NAME}", *overrides], {}).config


def test_a_model_of_the_hub(hub: SimpleNamespace):
    assert check_models(run()) == f"{NAME} (from the hub)"


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_model_that_the_hub_does_not_have_or_give(hub: SimpleNamespace, status: int):
    hub.status = status
    with pytest.raises(ConfigError, match=rf"model\.path {NAME}: the hub has no such model, .*HTTP {status}"):
        check_models(run())


def test_a_hub_that_is_broken_is_not_reachable(hub: SimpleNamespace):
    hub.status = 500
    with pytest.raises(Unreachable, match="HTTP 500"):
        check_models(run())


def test_without_network_the_hint_says_what_to_do(monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        with pytest.raises(
            Unreachable, match=f"{NAME} is not complete on this machine, and the hub is not reachable"
        ) as caught:
            check_models(run())
    assert "set model.path to a directory" in caught.value.hint
    assert "streamrl init --template sort" in caught.value.hint


def test_a_hub_that_says_nothing_is_waited_for_briefly(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(model_checks, "DEADLINE", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(Unreachable, match="not reachable"):
            check_models(run())


def test_offline_the_cache_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE forbids"):
        check_models(run())
    cached(tmp_path, monkeypatch, "config.json", "model.safetensors")
    assert check_models(run()) == f"{NAME} (from the local cache of the hub)"


def cached(folder: Path, monkeypatch: pytest.MonkeyPatch, *files: str) -> Path:
    """A cache of the hub that has these files of the model; the folder that they are in."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    snapshot = folder / f"models--{NAME.replace('/', '--')}" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    for file in files:
        (snapshot / file).write_text("{}")
    return snapshot


@pytest.mark.parametrize("kind", ["model.safetensors", "pytorch_model.bin"])
def test_a_download_that_was_interrupted_is_no_model_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: SimpleNamespace, kind: str
):
    """Small files come first; without the weights a role fails an hour after the preflight has said yes."""
    snapshot = cached(tmp_path, monkeypatch, "config.json", "tokenizer_config.json")
    assert check_models(run()) == f"{NAME} (from the hub)"
    parts = [f"{Path(kind).stem}-{part}-of-2{Path(kind).suffix}" for part in (1, 2)]
    (snapshot / f"{kind}.index.json").write_bytes(orjson.dumps({"weight_map": dict(zip("ab", parts, strict=True))}))
    (snapshot / parts[0]).write_text("")
    assert check_models(run()) == f"{NAME} (from the hub)", "the second half of the weights is not there"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=f"model.path {NAME} is not complete in the local cache of the hub"):
        check_models(run())
    (snapshot / parts[1]).write_text("")
    assert check_models(run()) == f"{NAME} (from the local cache of the hub)"


def test_a_tokenizer_in_the_cache_needs_no_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: SimpleNamespace
):
    cached(tmp_path, monkeypatch, "tokenizer_config.json")
    found = check_models(run(f"model.tokenizer={NAME}"))
    assert found == f"{NAME} (from the hub), {NAME} (from the local cache of the hub)"


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["model.tokenizer=nowhere"], "model.tokenizer"),
        (["learner.reference.kind=frozen", "learner.reference.path=nowhere"], "learner.reference.path"),
        (
            ["learner.advantage.use=gae", "learner.critic.kind=model", "learner.critic.path=nowhere"],
            "learner.critic.path",
        ),
    ],
)
def test_every_model_of_the_run_is_looked_for(hub: SimpleNamespace, overrides: list[str], key: str):
    with pytest.raises(ConfigError, match=f"{key} nowhere does not exist"):
        check_models(run(*overrides))


def test_a_model_that_the_run_does_not_use_is_not(hub: SimpleNamespace):
    assert check_models(run("learner.reference.path=nowhere", "learner.critic.path=nowhere"))
