"""What is wrong before anything runs: one error that says what, where and how to mend it, and nothing is started."""

from __future__ import annotations

import asyncio
import re
import shutil
import socket
from pathlib import Path

import pytest
import torch
import transformers

from streamrl.config import ModelConfig, RunConfig
from streamrl.errors import ConfigError, DataError
from streamrl.learner.model_loading import load_model as load_for_training
from streamrl.producers.engines.model import load_model as load_for_sampling
from streamrl.producers.feeder import run_feeder
from tests.cli.run_kit import cli, process
from tests.producers.producer_kit import save_tokenizer, tiny_model
from tests.redis_kit import Probe

RUN_FILE = """
name: t
model: {path: model, context: 64}
data: {train: train.jsonl, max_prompt_tokens: 16}
sampling: {max_new_tokens: 8}
weights: {transport: directory}
"""


@pytest.fixture
def home(tiny_dir, tmp_path):
    """A directory from which `streamrl up` starts a run."""
    folder = tmp_path / "home"
    shutil.copytree(tiny_dir, folder / "model")
    (folder / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (folder / "run.yaml").write_text(RUN_FILE)
    assert cli("up", "run.yaml", "--dry-run", cwd=folder).returncode == 0
    return folder


def refused(home: Path, code: int, says: str, *settings: str, call=cli) -> None:
    flags = [part for setting in settings for part in ("--set", setting)]
    done = call("up", "run.yaml", *flags, cwd=home)
    assert done.returncode == code, done.stderr
    assert re.fullmatch(r"error: [^\n]+\nhint: [^\n]+\n", done.stderr), done.stderr
    assert says in done.stderr
    assert not (home / "runs").exists()  # nothing was begun


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.mark.parametrize(
    ("setting", "code", "says"),
    [
        ("learner.lrr=1", 78, "did you mean lr"),
        ("learner.lr=fast", 78, "learner.lr"),
        ("model.path=./nowhere", 78, "nowhere does not exist"),
        ("data.train=./nowhere.jsonl", 78, "nowhere.jsonl"),
        ("rewards=[{use: exact_mach}]", 78, "did you mean exact_match"),
        ("redis.url=redis://127.0.0.1:%d", 69, "does not answer: Error 111 connecting to 127.0.0.1"),
    ],
)
def test_up_says_what_is_wrong_and_starts_nothing(home, setting, code, says):
    refused(home, code, says, setting % free_port() if "%d" in setting else setting)


def test_up_as_a_process_has_the_same_code(home):
    refused(home, 78, "did you mean lr", "learner.lrr=1", call=process)


async def test_up_with_a_password_that_is_none_wrong_or_nowhere(home, redis_run):
    with Probe(redis_run.config.url) as probe:
        probe.call("CONFIG", "SET", "requirepass", "right")
    url = f"redis.url={redis_run.config.url}"
    await asyncio.to_thread(refused, home, 78, "NOAUTH", url)
    secret = home / "password"
    for content, says in (
        (None, "password_file"),
        ("", "NOAUTH"),
        ("wrong", "invalid username-password pair"),
        ("\xff", "refuses access"),
    ):
        if content is not None:
            secret.write_text(content)
        await asyncio.to_thread(refused, home, 78, says, url, f"redis.password_file={secret}")
    secret.write_text("right\n")
    again = await asyncio.to_thread(
        cli, "up", "run.yaml", "--dry-run", "--set", url, "--set", f"redis.password_file={secret}", cwd=home
    )
    assert again.returncode == 0, again.stderr


# What only a role can see: the whole data set, the weights.


async def test_the_tokenizer_of_another_model(run, tmp_path):
    """Ids that the model has no embedding for are found before a group is admitted, with file and line."""
    folder = tmp_path / "small"
    config = transformers.Qwen2Config(**{**tiny_model().config.to_dict(), "vocab_size": 64})
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    save_tokenizer(tmp_path / "other")
    run.set("model", path=str(folder), tokenizer=str(tmp_path / "other"))
    async with run.open() as ledgers:
        with pytest.raises(DataError, match=r"train\.jsonl:1: token id 112 .* vocabulary of 64") as caught:
            await run_feeder(run.role("feeder.0", ledgers))
        assert (await ledgers.train.state()).cursor == 0
    assert caught.value.exit_code == 78
    assert "model.tokenizer" in caught.value.hint


def cut_off(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


@pytest.mark.parametrize("damage", [cut_off, no_weights])
def test_a_damaged_model_file(tiny_dir, tmp_path, damage):
    folder = tmp_path / "model"
    shutil.copytree(tiny_dir, folder)
    damage(folder)
    for load, argument in (
        (load_for_training, ModelConfig(path=str(folder))),
        (load_for_sampling, RunConfig(name="t", model=ModelConfig(path=str(folder)))),
    ):
        with pytest.raises(ConfigError, match=str(folder)) as caught:
            load(argument)
        assert caught.value.exit_code == 78
        assert caught.value.hint


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(tmp_path, value):
    """Else the learner would publish what every replica refuses, and the run would wait for ever."""
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = value
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up_proj\.weight .* not finite") as caught:
        load_for_training(ModelConfig(path=str(tmp_path)))
    assert caught.value.exit_code == 78
