"""`reward test` and `rescore` with reward models: whose servers are asked, and when Redis is."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from streamrl.queues import embedded, open_ledgers
from tests.archive_kit import archived, closed
from tests.http_kit import answering

from .run_kit import cli, data_of, make_run

HERE = Path(__file__).parent
ASKS = ("reward_model", "--arg", "model=critic")
STARTED = "reward_models={critic: {kind: vllm, model: m, variables: {HF_TOKEN: secret}}}"
GONE = "redis.url=redis://127.0.0.1:9"
TEMPLATE = ("--arg", "path=/score", "--arg", "body={text: '{response}'}", "--arg", "value=score")


@pytest.fixture
def server() -> Iterator[str]:
    """A reward model that finds everything half good; its URL."""
    with answering(lambda request: (200, b'{"score": 0.5}')) as url:
        yield url


@pytest.fixture
def samples(tmp_path: Path) -> str:
    path = tmp_path / "samples.jsonl"
    path.write_bytes(orjson.dumps({"prompt": "2+2=", "response": "4", "answer": "4"}))
    return str(path)


def kept_run(folder: Path, *settings: str) -> Path:
    """A run with one archived group of four responses."""
    config = make_run(folder, *settings)
    asyncio.run(archived(folder, config, closed(1)))
    return folder


def rescore(run_dir: Path, *arguments: str):
    return cli("rescore", "--run", str(run_dir), "--into", "new", *arguments)


def test_redis_is_asked_only_for_servers_that_the_run_starts(tmp_path: Path):
    run_dir = kept_run(tmp_path / "run", STARTED, GONE, "redis.patience=1")
    done = rescore(run_dir, "--reward", "exact_match")
    assert done.returncode == 0, done.stderr
    asked = rescore(run_dir, "--reward", *ASKS, "--force")
    assert asked.returncode == 69, asked.stderr
    assert len(list((run_dir / "rescored" / "new").glob("groups-*"))) == 1, "scores that were there are there"


def test_a_model_with_a_url_is_asked_without_the_redis_of_the_run(tmp_path: Path, server: str, samples: str):
    models = f"reward_models={{critic: {{kind: template, url: ['{server}']}}, other: {{model: m}}}}"
    run_dir = kept_run(tmp_path / "run", models, GONE, "redis.patience=1")
    done = rescore(run_dir, "--reward", *ASKS, *TEMPLATE, "--json")
    assert done.returncode == 0, done.stderr
    assert data_of(done.stdout, "streamrl.rescore/2")["comparison"]["new"]["mean"] == 0.5
    tried = cli("reward", "test", *ASKS, *TEMPLATE, "--set", models, "--sample", samples, "--json")
    assert tried.returncode == 0, tried.stderr
    assert data_of(tried.stdout, "streamrl.reward.test/1")["mean"] == 0.5


def test_servers_of_no_run_are_refused_before_anything_waits_for_them(samples: str):
    done = cli("reward", "test", *ASKS, "--set", STARTED, "--sample", samples)
    assert (done.returncode, done.stdout) == (2, "")
    assert "reward_models.critic has no url" in done.stderr
    assert "--run DIR" in done.stderr
    assert cli("reward", "test", "exact_match", "--set", STARTED, "--sample", samples).returncode == 0


async def test_servers_that_a_run_has_started_are_asked(tmp_path: Path, server: str, samples: str):
    rewards = "rewards=[{use: reward_model, args: {model: critic, text: server}}]"
    config = make_run(tmp_path / "run", STARTED, rewards, f"plugin_paths=[{HERE}]")
    await archived(tmp_path / "run", config, closed(1))
    async with embedded.running(config.redis, tmp_path / "run"), open_ledgers(config, tmp_path / "run") as ledgers:
        fields = {"url": server, "server": "ready", "host": socket.gethostname()}
        await ledgers.roles.beat("reward_model.critic.0", fields, 100)
        arguments = ("reward", "test", "--run", str(tmp_path / "run"), "--sample", samples, "--json")
        done = await asyncio.to_thread(cli, *arguments)
        data = data_of(done.stdout, "streamrl.reward.test/1")
        assert data["rewards"] == ["reward_model"]
        assert "score" in str(data["samples"][0]), "it answers, though not as vLLM does"
        assert "has none" not in done.stdout
        plugin = ("--reward", "rescore_rewards:verl_like", "--adapter", "verl")  # which may ask any of the models
        assert (await asyncio.to_thread(rescore, tmp_path / "run", *plugin)).returncode == 0
    about = (tmp_path / "run" / "rescored" / "new" / "rescored.json").read_text()
    assert "critic" in about
    assert "secret" not in about
    refused = await asyncio.to_thread(cli, *arguments, "--set", "seed=1")
    assert (refused.returncode, "--file" in refused.stderr) == (2, True)
