"""A run in the background: `up --detach`, looked at, scaled and ended from anywhere that reaches its Redis."""

from __future__ import annotations

import shutil
from pathlib import Path

import orjson
import psutil
import pytest

from tests.redis_kit import ForeignRedis
from tests.waits import until

from .run_kit import UNHURRIED, cli, data_of, process

FOREVER = ("--set", "learner.steps=100000", "--set", "evaluation.final_prompts=0", "--set", UNHURRIED)


def states(*arguments: str, env: dict[str, str] | None = None, cwd: Path) -> dict[str, str]:
    data = data_of(cli("status", "--json", *arguments, env=env, cwd=cwd).stdout, "streamrl.status/1")
    return {role["name"]: role["state"] for role in data["roles"]}


def left(folder: Path) -> list[str]:
    """Processes of a run."""
    found = []
    for one in psutil.process_iter(["pid", "cmdline"]):
        words = one.info["cmdline"] or []
        if any(str(folder) in word for word in words):
            found.append(" ".join(words))
    return found


@pytest.mark.slow
def test_a_run_of_another_machine_is_seen_scaled_and_ended(tiny: Path, tmp_path: Path, redis: ForeignRedis):
    place = tmp_path / "there"
    flags = ["--set", f"redis.url={redis.url}", "--set", f"redis.password_file={redis.password_file}"]
    run_dir = place / "runs" / "tiny"
    place.mkdir()
    begun = process("up", str(tiny / "run.yaml"), "--detach", *flags, *FOREVER, cwd=place)
    assert begun.returncode == 0, begun.stderr
    assert "goes on in the background" in begun.stderr
    far = ["--run", f"{redis.url}#tiny"]
    env = {"STREAMRL_REDIS__PASSWORD_FILE": str(redis.password_file)}
    here = tmp_path / "here"
    here.mkdir()

    def roles() -> dict[str, str]:
        return states(*far, env=env, cwd=here)

    until(lambda: set(roles().values()) == {"ready"}, "all roles are ready")
    assert set(roles()) == {"learner.0", "rollout.0", "reward.0", "feeder.0"}
    assert cli("lag", *far, env=env, cwd=here).returncode == 0
    second = cli("up", str(tiny / "run.yaml"), *flags, *FOREVER, cwd=here)
    assert second.returncode == 78, second.stderr
    assert "running already: supervised by process" in second.stderr
    shutil.rmtree(here / "runs")
    scaled = cli("scale", "rollout=2", "reward=3", *far, env=env, cwd=here)
    assert scaled.returncode == 0, scaled.stderr
    assert "rollout: 2 asked for, 1 there" in scaled.stdout
    more = {"learner.0", "rollout.0", "rollout.1", "reward.0", "reward.1", "reward.2", "feeder.0"}
    until(lambda: set(roles()) == more and set(roles().values()) == {"ready"}, "the new ones are ready")
    until(lambda: "rollout.1 " in cli("logs", "rollout.1", *far, env=env, cwd=here).stdout, "their logs are there")
    assert cli("scale", "rollout=1", "reward=1", *far, env=env, cwd=here).returncode == 0
    until(lambda: set(roles()) == more - {"rollout.1", "reward.1", "reward.2"}, "they have left")
    ended = cli("down", *far, env=env, cwd=here)
    assert ended.returncode == 0, ended.stderr
    assert "has ended" in ended.stderr
    until(lambda: not left(run_dir), "nothing is left")
    audit = data_of(cli("audit", "--json", "--run", str(run_dir)).stdout, "streamrl.audit/2")
    assert (audit["lost"], audit["twice"]) == (0, 0)
    assert audit["trained"] > 0
    secret = redis.password_file.read_text().strip()
    assert all(secret not in file.read_text() for file in (run_dir / "logs").iterdir())
    assert secret not in (run_dir / "run.json").read_text()
    again = cli("down", *far, env=env, cwd=here)
    assert again.returncode == 0
    assert "no living supervisor" in again.stderr
    assert list(here.iterdir()) == []


@pytest.mark.slow
def test_a_run_with_its_own_redis_is_left_and_ended(tiny: Path, tmp_path: Path):
    begun = process("up", str(tiny / "run.yaml"), "--detach", *FOREVER, cwd=tmp_path)
    assert begun.returncode == 0, begun.stderr
    until(lambda: set(states(cwd=tmp_path).values()) == {"ready"}, "all roles are ready")
    second = cli("up", str(tiny / "run.yaml"), "--detach", *FOREVER, cwd=tmp_path)
    assert second.returncode == 78
    assert "is running already" in second.stderr
    ended = cli("down", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    run_dir = tmp_path / "runs" / "tiny"
    until(lambda: not left(run_dir), "nothing is left")
    assert cli("down", cwd=tmp_path).returncode == 0
    done = process("up", "--resume", "--detach", "--run", str(run_dir), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    hurried = cli("down", "--now", cwd=tmp_path)
    assert hurried.returncode == 0, hurried.stderr
    until(lambda: not left(run_dir), "nothing is left")


def test_what_cannot_be_scaled_or_found(tiny: Path, tmp_path: Path):
    assert cli("up", str(tiny / "run.yaml"), "--prepare", cwd=tmp_path).returncode == 0
    for item, words in {
        "rollout": "is not ROLE=N",
        "rollout=0": "N of 1 or more",
        "rollout=x": "is not ROLE=N",
        "learner=2": "cannot be scaled",
        "nobody=2": "these can: rollout, reward",
    }.items():
        done = cli("scale", item, cwd=tmp_path)
        assert done.returncode == 2, item
        assert words in done.stderr
    done = cli("scale", "rollout=2", cwd=tmp_path)
    assert done.returncode == 78
    assert "no living supervisor" in done.stderr
    assert "no living supervisor" in cli("down", cwd=tmp_path).stderr
    assert cli("status", "--run", "redis://127.0.0.1:1", cwd=tmp_path).returncode == 2
    assert cli("status", "--run", "redis://127.0.0.1:1#tiny", cwd=tmp_path).returncode == 69


def test_a_detached_run_that_does_not_start_says_why(tiny: Path, tmp_path: Path):
    done = process("up", str(tiny / "run.yaml"), "--detach", "--on", "nowhere", cwd=tmp_path)
    assert done.returncode == 2
    (tmp_path / "r").mkdir()
    assert cli("up", str(tiny / "run.yaml"), "--prepare", "--run", str(tmp_path / "r")).returncode == 0
    (tmp_path / "r" / "run.json").write_bytes(orjson.dumps({"config": {"name": 7}}))
    done = process("up", "--resume", "--detach", "--run", str(tmp_path / "r"), cwd=tmp_path)
    assert done.returncode == 78
