"""A run that is prepared again where its directory is not, and roles that join it there."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from streamrl.commands import rundir
from streamrl.commands.rundir import RunDirectory, join_run
from streamrl.errors import ConfigError
from streamrl.runfile import RUN_DIGEST, load
from streamrl.runtime.control import find_published, publish
from streamrl.runtime.launch import prepare_run
from streamrl.weight_sync.files import read_token
from tests.redis_kit import ForeignRedis


@pytest.fixture
def run_file(tmp_path: Path, redis: ForeignRedis, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"dtype": "float32"}')
    (tmp_path / "model" / "model.safetensors").write_bytes(b"x" * 1000)
    (tmp_path / "train.jsonl").write_text('{"prompt": "2+2=", "answer": "4"}\n')
    file = tmp_path / "run.yaml"
    url, password = redis.url, redis.password_file
    file.write_text(f"{{name: t, weights: {{transport: http}}, redis: {{url: '{url}', password_file: {password}}}}}")
    monkeypatch.setenv("STREAMRL_REDIS__PASSWORD_FILE", str(redis.password_file))
    monkeypatch.setattr(rundir, "_JOIN_SECONDS", 0.0)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return file


def prepare(run_file: Path, pod: str, digest: str, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> str:
    """`up --prepare` in a pod of its own; returns the token of the weights."""
    monkeypatch.setenv(RUN_DIGEST, digest)
    loaded = load(run_file, overrides, environ={})
    folder = run_file.parent / pod
    prepare_run(loaded, folder, published=asyncio.run(find_published(loaded.config)))
    asyncio.run(publish(loaded.config, folder, digest))
    return read_token(folder)


def test_a_run_that_is_prepared_anew_goes_on(run_file: Path, redis: ForeignRedis, monkeypatch: pytest.MonkeyPatch):
    token = prepare(run_file, "first", "a", monkeypatch)
    with pytest.raises(ConfigError, match="Redis has run t with other values: seed was 0 and is 1"):
        prepare(run_file, "second", "b", monkeypatch, "seed=1")
    with pytest.raises(ConfigError, match=r"model\.image_processor was .* and is .*'size'"):
        prepare(run_file, "second", "b", monkeypatch, "model.image_processor={size: {longest_edge: 9}}")
    with pytest.raises(ConfigError, match=r"rendered before learner\.lr changed"):
        prepare(run_file, "third", "a", monkeypatch, "learner.lr=1e-4")
    assert prepare(run_file, "fourth", "a", monkeypatch) == token
    assert prepare(run_file, "fifth", "b", monkeypatch, "learner.lr=1e-4") == token


def test_a_role_joins_the_configuration_of_its_manifests(
    run_file: Path, redis: ForeignRedis, monkeypatch: pytest.MonkeyPatch
):
    def joined(digest: str) -> RunDirectory:
        monkeypatch.setenv(RUN_DIGEST, digest)
        return join_run(f"{redis.url}#t")

    with pytest.raises(ConfigError, match="knows no run t after"):
        joined("a")
    token = prepare(run_file, "pod", "a", monkeypatch)
    with pytest.raises(ConfigError, match="knows no run t of these manifests after"):
        joined("b")
    assert joined("a").config.learner.lr != 1e-4
    prepare(run_file, "pod", "b", monkeypatch, "learner.lr=1e-4")
    run = joined("b")
    assert (run.config.learner.lr, read_token(run.path)) == (1e-4, token)
    monkeypatch.delenv(RUN_DIGEST)
    assert join_run(f"{redis.url}#t").config == run.config, "by hand any configuration will do"
