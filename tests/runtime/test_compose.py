"""The compose file: against the published schema, the command line and the plan."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from streamrl.config import RunConfig
from streamrl.errors import ConfigError
from streamrl.runfile import load
from streamrl.runtime.placement.compose import FILE, gang, render
from streamrl.runtime.plan import processes
from tests.cli.run_kit import cli

SCHEMA = json.loads((Path(__file__).parents[1] / "data" / "compose.json").read_text())
JUDGE = {
    "reward_models": {"judge": {"model": "m", "servers": 2}},
    "rewards": [{"use": "reward_model", "args": {"model": "judge"}}],
}
RUNS: dict[str, dict[str, Any]] = {
    "replicas": {"rollout": {"replicas": 3}, "reward_worker": {"replicas": 2}},
    "ranks": {"learner": {"ranks": 2, "groups_per_step": 8}},
    "devices": {"engine": {"kind": "vllm"}, "cluster": {"resources": {"engine": {"gpus": 1, "cpus": 4}}}},
    "reward model": JUDGE,
    "redis elsewhere": {"redis": {"url": "rediss://queue.example:6380/1"}},
    "recording": {"recording": {"mode": "write"}},
}
every_run = pytest.mark.parametrize("more", RUNS.values(), ids=RUNS)


def rendered(overrides: list[str] | None = None, **more: Any) -> dict[str, Any]:
    config = RunConfig.model_validate({"name": "My.run", **more})
    [(name, text)] = render(config, Path("/a/work/run.yaml"), Path("/a/compose/my-run"), overrides or []).items()
    assert name == FILE
    document: dict[str, Any] = yaml.safe_load(text)
    return document


def roles(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: one for name, one in document["services"].items() if name not in {"redis", "prepare", "reward-net"}}


@every_run
def test_the_file_fits_its_schema(more: dict[str, Any]):
    jsonschema.validate(rendered(**more), SCHEMA)


def test_a_key_that_nobody_knows_would_be_found():
    document = rendered()
    document["services"]["learner"]["restarts"] = 3
    with pytest.raises(jsonschema.ValidationError, match="restarts"):
        jsonschema.validate(document, SCHEMA)


@every_run
def test_there_are_as_many_services_as_the_plan_has_processes(more: dict[str, Any]):
    document = rendered(**more)
    found: dict[str, list[int]] = {}
    for service in roles(document).values():
        if "entrypoint" in service:  # the gang
            found["learner"] = list(range(int(service["environment"]["WORLD_SIZE"])))
            continue
        options = dict(zip(service["command"][2::2], service["command"][3::2], strict=True))
        model = options.get("--model")
        kind = f"reward_model.{model}" if model else service["command"][1]
        found.setdefault(kind, []).append(int(options.get("--index", 0)))
    plan = processes(RunConfig.model_validate(more))
    assert {kind: sorted(indices) for kind, indices in found.items()} == {
        kind: list(range(count)) for kind, count in plan.items()
    }
    assert ("redis" in document["services"]) == ("redis" not in more)


@every_run
def test_the_commands_are_understood(more: dict[str, Any]):
    document = rendered(**more)
    for service in roles(document).values():
        if "command" in service:
            done = cli(*service["command"][:4], "--index", "x", *service["command"][6:])
            assert "is no number" in done.stderr, "the other options were understood"
    words = document["services"]["prepare"]["command"]
    settings = [word for before, word in itertools.pairwise(words) if before == "--set"]
    config = load(None, settings, {}).config
    assert config.redis.password_file == Path("/run/secrets/redis-password")
    assert config.weights.transport == "directory"
    assert config.redis.url == (None if "redis" in more else "redis://redis:6379/0")


@every_run
def test_what_is_checked_before_the_start_is_seen_as_the_role_sees_it(more: dict[str, Any]):
    document = rendered(**more)
    for service in roles(document).values():
        assert [service.get(key) for key in ("image", "volumes", "secrets", "gpus")] == [
            document["services"]["prepare"].get(key) for key in ("image", "volumes", "secrets", "gpus")
        ]
    assert (document["services"]["prepare"].get("gpus") == "all") == ("cluster" in more)


@every_run
def test_a_network_that_is_shared_belongs_to_a_service_that_never_ends(more: dict[str, Any]):
    services = rendered(**more)["services"]
    shared = {name for name, service in services.items() if service.get("network_mode") == "service:reward-net"}
    needed = {name for name in services if name.startswith("reward-") and name != "reward-net"}
    assert shared == (needed if more is JUDGE else set())
    assert bool(shared) == ("reward-net" in services)
    if shared:
        owner = services["reward-net"]
        assert (owner["restart"], owner["entrypoint"]) == ("always", ["sleep", "infinity"])
        assert "ports" not in owner


@pytest.mark.parametrize(("ranks", "cores"), [(1, 4), (2, 8)])
def test_the_container_of_the_ranks_has_the_cores_of_all_of_them(ranks: int, cores: int):
    asked = {"resources": {"learner": {"cpus": 4}}}
    learner = rendered(learner={"ranks": ranks, "groups_per_step": 8}, cluster=asked)["services"]["learner"]
    assert (learner["cpus"], learner["environment"]["OMP_NUM_THREADS"]) == (cores, "3")


def test_a_dollar_in_a_setting_is_no_variable():
    words = rendered(["data.prompt_key=$HOME"])["services"]["prepare"]["command"]
    assert "data.prompt_key=$$HOME" in words
    assert rendered()["name"] == "streamrl-my-run"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"rollout": {"placement": "colocated"}, "engine": {"kind": "vllm"}}, "shares the devices of one host"),
        ({**JUDGE, "engine": {"kind": "sglang"}}, "servers of sglang and vllm"),
        ({"redis": {"url": "redis://me:secret@q:6379"}}, "has a password"),
    ],
)
def test_what_cannot_run_there_is_refused(more: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        rendered(**more)


PLAYED = """#!/bin/bash
[ "$*" = "run learner --run /runs/current --index $RANK" ] && [ "$LOCAL_RANK" = "$RANK" ] || exit 99
case "$PLAY-$RANK" in
    end-*) exit 0 ;;
    fail-1) exit 9 ;;
esac
trap 'echo "drained $RANK"; exit 0' TERM
echo "ready $RANK"
while :; do read -rt 1 <> <(:); done
"""


@pytest.fixture
def programs(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "streamrl").write_text(PLAYED)
    (tmp_path / "streamrl").chmod(0o755)
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}


@pytest.mark.parametrize(("play", "code"), [("end", 0), ("fail", 9)])
def test_the_ranks_end_together(programs: dict[str, str], play: str, code: int):
    with subprocess.Popen(
        ["bash", "-uc", gang(3)], env={**programs, "PLAY": play}, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            assert process.wait(20) == code
        finally:
            with contextlib.suppress(ProcessLookupError):  # all may have ended by themselves
                os.killpg(process.pid, signal.SIGKILL)  # as the end of its first process ends a container


def test_the_signal_to_end_goes_to_all_ranks(programs: dict[str, str]):
    with subprocess.Popen(
        ["bash", "-uc", gang(3)], env={**programs, "PLAY": "work"}, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert sorted(process.stdout.readline() for _ in range(3)) == ["ready 0\n", "ready 1\n", "ready 2\n"]
        process.terminate()
        assert process.wait(20) == 0
        assert sorted(process.stdout) == ["drained 0\n", "drained 1\n", "drained 2\n"]


def test_the_shell_is_sound(tmp_path: Path):
    services = rendered(learner={"ranks": 2, "groups_per_step": 8})["services"]
    for shell, words in (("sh", services["redis"]["command"]), ("bash", services["learner"]["entrypoint"])):
        script = tmp_path / shell
        script.write_text(f"#!/bin/{shell}\n" + words[2].replace("$$", "$"))
        shellcheck = Path(sys.executable).with_name("shellcheck")
        done = subprocess.run([shellcheck, str(script)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_the_command_writes_beside_the_run_file(tmp_path: Path):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"name": "demo"}))
    done = cli("render", "compose", "run.yaml", "--into", "out", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"out/{FILE}\n"), done.stderr
    services = yaml.safe_load((tmp_path / "out" / FILE).read_text())["services"]
    assert services["learner"]["volumes"] == ["..:/work:ro", "runs:/runs"]
    assert services["prepare"]["command"][1] == "/work/run.yaml"
