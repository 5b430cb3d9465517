"""Job scripts: checked by shellcheck, and run by a played Slurm with a real run in them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from streamrl.config import RunConfig
from streamrl.errors import ConfigError
from streamrl.runtime.placement.slurm import render
from tests.cli.conftest import tiny  # noqa: F401  (a fixture)
from tests.cli.run_kit import cli, data_of
from tests.redis_kit import ForeignRedis
from tests.waits import until

BASE = {"name": "demo", "learner": {"ranks": 4, "groups_per_step": 8}, "redis": {"url": "redis://q:6379"}}
PLAYED = Path(__file__).parent / "played_slurm.py"


def scripts(**more: Any) -> dict[str, str]:
    return render(RunConfig.model_validate({**BASE, **more}), Path("/shared/my run.yaml"), Path("/shared/my run"))


@pytest.mark.parametrize("more", [{}, {"redis": {**BASE["redis"], "password_file": "/s/p w"}}])
def test_scripts_are_sound(more: dict[str, Any], tmp_path: Path):
    for name, text in scripts(**more).items():
        (tmp_path / name).write_text(text)
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([shellcheck, *map(str, tmp_path.iterdir())], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_each_role_has_its_job():
    found = scripts(rollout={"replicas": 3}, cluster={"resources": {"rollout": {"gpus": 2, "cpus": 8}}})
    assert set(found) == {"learner.sbatch", "rollout.sbatch", "reward.sbatch", "feeder.sbatch", "submit.sh"}
    assert "#SBATCH --array=0-2\n" in found["rollout.sbatch"]
    assert "#SBATCH --gpus-per-task=2\n" in found["rollout.sbatch"]
    assert "#SBATCH --ntasks=4\n" in found["learner.sbatch"]
    assert re.findall(r"sbatch --parsable (.*)", found["submit.sh"]) == [
        "learner.sbatch", "rollout.sbatch", "reward.sbatch", "feeder.sbatch"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"redis": {}}, "reached on one node only"),
        ({"redis": {"url": "redis://q:6379/0?password=secret"}}, r"redis://q:6379/0\?\*\*\* has a password"),
        ({"rollout": {"placement": "colocated"}, "engine": {"kind": "vllm"}}, "shares the devices of one host"),
    ],
)
def test_what_cannot_run_there_is_refused(more: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        scripts(**more)


def test_what_the_run_file_says_of_the_weights_counts(tmp_path: Path):
    found = []
    for more in ("{dtype: bfloat16}", "{transport: directory}"):
        (tmp_path / "run.yaml").write_text(f"{{name: demo, redis: {{url: 'redis://q:6379'}}, weights: {more}}}")
        assert cli("render", "slurm", "run.yaml", cwd=tmp_path).returncode == 0
        found.append((tmp_path / "slurm" / "demo" / "submit.sh").read_text())
    assert "--prepare --set weights.transport=http --set weights.host=0.0.0.0\n" in found[0]
    assert "--prepare --set weights.host=0.0.0.0\n" in found[1]


@pytest.fixture
def programs(tmp_path: Path) -> dict[str, str]:
    """The environment of a played Slurm with its state in `state`."""
    for name in ("state", "bin"):
        (tmp_path / name).mkdir()
    for name in ("sbatch", "srun", "scontrol", "scancel", "squeue"):
        (tmp_path / "bin" / name).symlink_to(PLAYED)
    path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PLAYED_SLURM": str(tmp_path / "state")}


def ends_with(codes: list[int], kind: str, folder: Path, env: dict[str, str], **more: Any) -> tuple[int, list[str]]:
    """Run the job of a role that ends with these codes; return that of the job, and what it asked of Slurm."""
    config = RunConfig.model_validate({**BASE, "supervisor": {"max_restarts": 2}, "learner": {}, **more})
    script = folder / "job.sbatch"
    script.write_text(render(config, Path("run.yaml"), folder)[f"{kind}.sbatch"])
    (folder / "slurm").mkdir()
    (folder / "codes").write_text("".join(f"{code}\n" for code in codes))
    role = folder / "bin" / "streamrl"
    role.write_text(f"#!/bin/sh\ncd {folder}\ncode=$(head -n 1 codes)\nsed -i 1d codes\nexit $code\n")
    role.chmod(0o755)
    of = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "x", "SLURM_JOB_NODELIST": "localhost", "SLURM_NTASKS": "1"}
    words = [sys.executable, str(PLAYED), "job", str(script)]
    done = subprocess.run(words, env={**env, **of, "SLURM_ARRAY_TASK_ID": "0"}, timeout=60, check=False)
    asked = (folder / "state" / "log").read_text().splitlines()
    return done.returncode, [line for line in asked if line.startswith(("scontrol requeue", "scancel"))]


AGAIN = "scontrol requeue 7"
RECORDS = {"recording": {"mode": "write"}}


def all_end(kinds: str) -> list[str]:
    names = ",".join(f"streamrl-demo-{kind}" for kind in kinds.split())
    return [f"scancel --me --state=PENDING --name={names}", f"scancel --me --signal=TERM --name={names}"]


@pytest.mark.parametrize(
    ("kind", "more", "codes", "code", "asked"),
    [
        ("learner", {}, [143, 143, 143, 143, 1, 143, 0], 0, [AGAIN] * 6 + all_end("rollout reward feeder")),
        ("recorder", RECORDS, [143, 0], 0, [AGAIN, *all_end("rollout reward feeder")]),
        ("learner", {}, [78], 78, all_end("rollout reward feeder")),
        ("learner", {}, [1, 143, 75, 137], 137, [AGAIN] * 3 + all_end("rollout reward feeder")),
        ("rollout", {}, [0, 0, 0, 1, 1, 1], 1, [AGAIN] * 5),
        ("rollout", {}, [73], 73, []),
    ],
)
def test_a_job_is_queued_again_until_it_ends_for_good(
    kind: str,
    more: dict[str, Any],
    codes: list[int],
    code: int,
    asked: list[str],
    tmp_path: Path,
    programs: dict[str, str],
):
    (tmp_path / "finished.json").touch()
    assert ends_with(codes, kind, tmp_path, programs, **more) == (code, asked)
    assert (tmp_path / "slurm" / "over").exists() == (kind != "rollout")


def test_a_learner_that_was_fenced_leaves_the_roles_to_the_newer_one(tmp_path: Path, programs: dict[str, str]):
    assert ends_with([0], "learner", tmp_path, programs) == (0, [])
    assert not (tmp_path / "slurm" / "over").exists()


def processes_in(folder: Path) -> list[psutil.Process]:
    """Jobs work where they were submitted."""
    return [one for one in psutil.process_iter(["cmdline", "cwd"]) if one.info["cwd"] == str(folder)]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_is_preempted_and_goes_on_to_its_end(
    tiny: Path,  # noqa: F811
    tmp_path: Path,
    redis: ForeignRedis,
    programs: dict[str, str],
):
    """Replica and learner are preempted, then a rank is killed; all come back, and the end of the run ends all jobs.

    A replica that waits for a node never starts then. Submitted once more, the run ends at once.
    """
    state, env = tmp_path / "state", programs
    (state / "full").write_text("streamrl-tiny-rollout")
    settings = [
        f"redis.url={redis.url}",
        f"redis.password_file={redis.password_file}",
        "learner.ranks=2",
        "rollout.replicas=2",
    ]
    settings += ["learner.steps=100", "supervisor.max_restarts=5", "evaluation.every=0", "evaluation.final_prompts=0"]
    flags = [word for setting in settings for word in ("--set", setting)]
    done = cli("render", "slurm", str(tiny / "run.yaml"), "--into", str(tmp_path / "jobs"), *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run_dir = tmp_path / "runs" / "tiny"

    def step(role: str) -> Path | None:
        return next(iter(state.glob(f"job-streamrl-tiny-{role}-*")), None)

    waiting = {"redis", "rollout.1"}

    def running() -> bool:
        status = data_of(cli("status", "--json", "--run", str(run_dir)).stdout, "streamrl.status/1")
        return all(role["state"] == "ready" for role in status["roles"] if role["name"] not in waiting)

    try:
        subprocess.run([tmp_path / "jobs" / "submit.sh"], env=env, check=True, timeout=60)
        until(running, "all roles work")
        second = subprocess.run([tmp_path / "jobs" / "submit.sh"], env=env, capture_output=True, text=True, check=False)
        assert (second.returncode, "queued already" in second.stderr) == (78, True), second.stderr
        for role in ("rollout", "learner"):
            preempted = step(role)
            assert preempted is not None
            os.kill(int(preempted.read_text()), signal.SIGTERM)
        until(lambda: (state / "log").read_text().count("scontrol requeue") == 2, "both are queued again")
        until(lambda: step("learner") is not None and running(), "all roles work again")
        assert not list(run_dir.glob("slurm/*")), "a preemption is no failure"
        words = ["run", "learner", "--run", "../runs/tiny", "--index", "1", "--until-finished"]
        [rank] = [one for one in processes_in(tmp_path / "jobs") if one.info["cmdline"][-7:] == words]
        rank.kill()
        until(lambda: (state / "log").read_text().count("scontrol requeue") == 3, "the learner is queued again")
        until((run_dir / "finished.json").exists, "the run is over", 180)
        until(lambda: not list(state.glob("queued-*")), "all jobs have ended")
        subprocess.run([tmp_path / "jobs" / "submit.sh"], env=env, check=True, timeout=60)
        until(lambda: not list(state.glob("queued-*")), "there is nothing left to do")
        audit = data_of(cli("audit", "--json", "--run", str(run_dir)).stdout, "streamrl.audit/2")
        assert (audit["lost"], audit["twice"]) == (0, 0)
        assert audit["trained"] == 400
    except BaseException:
        for file in sorted(state.glob("output-*")):
            print(f"--- {file.name}\n{file.read_text()[-3000:]}")
        raise
    finally:
        for left in processes_in(tmp_path / "jobs"):
            left.kill()
