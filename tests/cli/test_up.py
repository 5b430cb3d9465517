"""`streamrl up`: what it refuses, its plan, and a whole small run with real roles."""

from __future__ import annotations

import itertools
import re
import signal
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from streamrl.learner.ending import Finished, write_finished
from streamrl.queues.embedded import find_server
from tests.redis_kit import ForeignRedis

from .run_kit import cli, data_of, process
from .test_summary import KEYS


def test_dry_run_prints_plan_checks_and_values_and_makes_nothing(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    done = cli("up", str(tiny / "run.yaml"), "--dry-run", "--set", "learner.ranks=2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    started = [line.split()[1].rstrip(":") for line in done.stdout.splitlines() if line.startswith("start ")]
    assert started == ["redis", "learner.0", "learner.1", "rollout.0", "reward.0", "feeder.0"]
    assert "value  learner.ranks = 2  (--set)" in done.stdout
    assert re.search(r"^threads  learner 1, rollout 1 \(this host has \d+ cores\)$", done.stdout, re.MULTILINE)
    assert list(tmp_path.iterdir()) == []


def test_prepare_makes_the_run_directory_and_starts_nothing(tiny: Path, tmp_path: Path):
    done = cli("up", str(tiny / "run.yaml"), "--prepare", "--run", str(tmp_path / "r"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "r" / "run.json").exists()
    assert not (tmp_path / "r" / "redis").exists()
    again = cli("up", str(tiny / "run.yaml"), "--prepare", "--run", str(tmp_path / "r"), cwd=tmp_path)
    assert again.returncode == 0, again.stderr


def test_up_loads_nothing_heavy_before_the_roles_start(tiny: Path, tmp_path: Path):
    code = (
        "import sys; from streamrl.cli import run; code = run(['up', sys.argv[1], '--prepare', '--run', 'r']);"
        "heavy = ('torch', 'transformers', 'matplotlib', 'aiohttp', 'ray');"
        "print(code, [name for name in heavy if name in sys.modules])"
    )
    command = [sys.executable, "-c", code, str(tiny / "run.yaml")]
    assert subprocess.check_output(command, cwd=tmp_path, text=True) == "0 []\n"


def test_wrong_ways_to_start(tiny: Path, tmp_path: Path):
    run_file = str(tiny / "run.yaml")
    assert cli("up", cwd=tmp_path).returncode == 2
    assert cli("up", run_file, "--fresh", "--resume", cwd=tmp_path).returncode == 2
    assert cli("up", run_file, "--resume", cwd=tmp_path).returncode == 2
    assert cli("up", "--resume", cwd=tmp_path).returncode == 78
    assert cli("up", str(tmp_path / "none.yaml")).returncode == 78
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert cli("up", run_file, "--run", str(tmp_path / "full")).returncode == 73


def test_a_finished_run_says_so_and_trains_and_measures_nothing(tiny: Path, tmp_path: Path):
    file, run_dir = str(tiny / "run.yaml"), tmp_path / "runs" / "tiny"
    assert cli("up", file, "--prepare", cwd=tmp_path).returncode == 0
    assert cli("status", cwd=tmp_path).returncode == 69
    write_finished(run_dir, Finished(reason="steps", step=3, version=4, epoch=1))
    (run_dir / "summary.json").write_text("{}")
    before = (run_dir / "run.json").read_bytes()
    again = cli("up", file, cwd=tmp_path)
    assert (again.returncode, again.stdout) == (0, "")
    assert again.stderr == (
        "run tiny finished at step 3 (steps reached); raise learner.steps to train on, or start anew with --fresh\n"
    )
    resumed = cli("up", "--resume", cwd=tmp_path)
    assert (resumed.returncode, resumed.stderr) == (0, again.stderr)
    changed = cli("up", file, "--set", "learner.lr=0.1", cwd=tmp_path)
    assert (changed.returncode, changed.stderr) == (0, again.stderr)
    assert (run_dir / "run.json").read_bytes() == before
    assert not list((run_dir / "logs").glob("*.jsonl"))
    status = cli("status", "--json", cwd=tmp_path)
    assert (status.returncode, data_of(status.stdout, "streamrl.status/1")["verdict"]) == (0, "finished")
    assert "run tiny: finished" in cli("status", cwd=tmp_path).stdout


@pytest.mark.slow
def test_a_whole_run_ends_with_its_summary_and_can_be_looked_at(tiny: Path, tmp_path: Path):
    done = process("up", str(tiny / "run.yaml"), "--screen", "logs", cwd=tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    run_dir = tmp_path / "runs" / "tiny"
    assert "feeder.0   | ready" in done.stdout
    summary = orjson.loads((run_dir / "summary.json").read_bytes())
    assert list(summary) == KEYS
    assert (summary["steps"], summary["groups_trained"]) == (3, 12)
    assert 0 <= summary["accuracy_before"] <= 1
    assert 0 < summary["train_seconds"] < 60
    assert (run_dir / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "held-out accuracy after" in done.stdout
    commands = [line.strip().split()[1:] for line in done.stdout.partition("next:")[2].splitlines() if line.strip()]
    assert len(commands) == 3
    for command in commands:
        assert cli(*command, cwd=tmp_path).returncode == 0, command
    trained = data_of(cli("trace", "3", "--json", cwd=tmp_path).stdout, "streamrl.trace/1")
    line = orjson.loads((tiny / "train.jsonl").read_bytes().splitlines()[trained["prompt"]["line"]])
    assert (trained["state"], trained["source"], trained["prompt"]["answer"]) == ("trained", "archive", line["answer"])
    assert [list(response["parts"]) for response in trained["responses"]] == [["spread_reward:spread"]] * 4
    assert 1 <= trained["record"]["step"] <= 3
    assert all(response["text"] for response in trained["responses"])
    data = data_of(cli("audit", "--json", cwd=tmp_path).stdout, "streamrl.audit/2")
    assert (data["trained"], data["lost"], data["twice"]) == (12, 0, 0)
    assert data["evaluated"] == summary["groups_evaluated"]
    status = data_of(cli("status", "--json", cwd=tmp_path).stdout, "streamrl.status/1")
    assert (status["verdict"], status["summary"]) == ("finished", summary)

    assert cli("lag", cwd=tmp_path).returncode == 0
    assert cli("logs", "learner", cwd=tmp_path).stdout


@pytest.mark.slow
def test_roles_of_a_prepared_run_meet_at_a_redis_elsewhere(tiny: Path, tmp_path: Path):
    """What the compose file does: TCP, a password in a file, and each role with a command of its own."""
    redis = ForeignRedis(tmp_path / "redis", find_server().executable)
    redis.start()
    run_dir = tmp_path / "run"
    settings = [f"redis.url={redis.url}", f"redis.password_file={redis.password_file}"]
    flags = [part for setting in settings for part in ("--set", setting)]
    kinds = ["learner", "rollout", "reward", "feeder"]
    roles: list[subprocess.Popen[bytes]] = []
    try:
        done = process("up", str(tiny / "run.yaml"), "--prepare", "--run", str(run_dir), *flags, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        for kind in kinds:
            command = [sys.executable, "-m", "streamrl", "run", kind, "--run", str(run_dir)]
            with (tmp_path / f"{kind}.log").open("wb") as log:
                roles.append(subprocess.Popen(command, stdout=log, stderr=log))
        learner, *others = roles
        assert learner.wait(90) == 0, (tmp_path / "learner.log").read_text()
        for role in others:
            role.terminate()
        for role, kind in zip(others, kinds[1:], strict=True):
            assert role.wait(40) == 0, (tmp_path / f"{kind}.log").read_text()
        assert cli("lag", "--run", str(run_dir)).returncode == 0
        data = data_of(cli("audit", "--json", "--run", str(run_dir)).stdout, "streamrl.audit/2")
        assert (data["trained"], data["lost"], data["twice"]) == (12, 0, 0)
        logs = "".join(file.read_text() for file in tmp_path.glob("*.log"))
        assert "theirs" not in logs + (run_dir / "run.json").read_text()
    finally:
        for role in roles:
            role.kill()
            role.wait()
        redis.kill()


@pytest.mark.slow
def test_ctrl_c_drains_and_resume_goes_on_and_ctrl_c_then_skips_the_measurement(tiny: Path, tmp_path: Path):
    plain = [str(tiny / "run.yaml"), "--screen", "plain", "--set", "evaluation.samples=500"]
    command = [sys.executable, "-m", "streamrl", "up", *plain, "--set", "learner.steps=100000"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as up:
        assert up.stdout is not None
        try:
            waiting = {f"{role}.0 ready" for role in ("learner", "rollout", "reward", "feeder")}
            for line in up.stdout:
                waiting = {what for what in waiting if what not in line}
                if not waiting:
                    break
            status = data_of(cli("status", "--json", cwd=tmp_path).stdout, "streamrl.status/1")
            assert (status["verdict"], status["supervised"]) == ("ready", True)
            up.send_signal(signal.SIGINT)
            rest, errors = up.communicate(timeout=60)
        finally:
            up.kill()
    assert up.returncode == 0, rest + errors
    assert "stopped; go on with: streamrl up --resume" in errors
    command = [sys.executable, "-m", "streamrl", "up", *plain, "--resume", "--set", "evaluation.final_prompts=64"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as up:
        assert up.stderr is not None
        try:
            before = list(itertools.takewhile(lambda line: "Ctrl-C skips that" not in line, up.stderr))
            up.send_signal(signal.SIGINT)
            rest, errors = up.communicate(timeout=60)
        finally:
            up.kill()
    assert up.returncode == 0, [*before, rest, errors]
    summary = orjson.loads((tmp_path / "runs" / "tiny" / "summary.json").read_bytes())
    assert summary["accuracy_after"] is None
    assert summary["steps"] >= 3
    assert (tmp_path / "runs" / "tiny" / "curve.png").exists()
    assert "held-out accuracy after" in rest
    assert data_of(cli("audit", "--json", cwd=tmp_path).stdout, "streamrl.audit/2")["twice"] == 0


@pytest.fixture(scope="module")
def unread(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a run of ReMax on a preset has ended, of whose output one line was read; `code` is the exit code."""
    folder = tmp_path_factory.mktemp("unread")
    changes = ["learner.preset=grpo", "learner.advantage.use=remax", "sampling.greedy_baseline=true"]
    options = " ".join(f"--set {change}" for change in [*changes, "evaluation.final_prompts=0"])
    up = f"{sys.executable} -m streamrl up {tiny / 'run.yaml'} --screen plain {options}"
    script = f"{up} 2>&- | head -n 1; echo ${{PIPESTATUS[0]}} > code"
    subprocess.run(["bash", "-c", script], cwd=folder, check=True, timeout=200)
    return folder


@pytest.mark.slow
def test_a_run_goes_on_when_nobody_reads_what_it_shows(unread: Path):
    run_dir = unread / "runs" / "tiny"
    assert (unread / "code").read_text() == "0\n"
    assert (run_dir / "summary.json").exists()
    states = orjson.loads((run_dir / "supervisor.json").read_bytes())["roles"]
    assert {role["state"] for role in states.values()} == {"stopped"}
    assert cli("audit", cwd=unread).returncode == 0


@pytest.mark.slow
def test_remax_on_a_preset_has_a_greedy_response_for_every_prompt(unread: Path):
    """ReMax takes the greedy response of the engine as its baseline."""
    run_dir = unread / "runs" / "tiny"
    assert "preset grpo" in cli("config", "show", "--run", str(run_dir), "--origin").stdout
    steps = [orjson.loads(line) for line in (run_dir / "metrics" / "learner.0.jsonl").read_bytes().splitlines()]
    assert all(sum(line["lengths_trained"].values()) == 4 * 4 for line in steps if "grad_norm" in line)
    assert sorted(group_id for line in steps for group_id, _ in line.get("trained", ())) == list(range(12))


@pytest.mark.slow
def test_a_role_that_cannot_start_fails_the_run(tiny: Path, tmp_path: Path):
    (tiny / "broken.jsonl").write_bytes((tiny / "train.jsonl").read_bytes() + b"no json\n")
    broken = f"data.train={tiny / 'broken.jsonl'}"
    done = process("up", str(tiny / "run.yaml"), "--screen", "plain", "--set", broken, cwd=tmp_path)
    assert done.returncode == 78
    assert "broken.jsonl:65: no JSON" in done.stdout + done.stderr


@pytest.mark.slow
def test_a_run_in_which_all_fail_alike_ends_early_and_after_the_replay_of_all_is_trained(tiny: Path, tmp_path: Path):
    """The data is one epoch of few prompts: there is no more than what died."""
    reward = tiny / "broken_reward.py"
    reward.write_text("def fails(sample):\n    raise ValueError('no judge today')\n")
    changes = ["rewards=[{use: broken_reward:fails}]", "reward_worker.attempts=1", "evaluation.every=0"]
    changes += ["data.epochs=1", "learner.steps=null", "evaluation.final_prompts=0"]
    (tiny / "few.jsonl").write_bytes(b"".join((tiny / "train.jsonl").read_bytes().splitlines(keepends=True)[:16]))
    changes += [f"data.train={tiny / 'few.jsonl'}"]
    options = [part for change in changes for part in ("--set", change)]
    done = process("up", str(tiny / "run.yaml"), "--screen", "plain", *options, cwd=tmp_path, seconds=180)
    text = done.stdout + done.stderr
    assert done.returncode == 78, text
    # The learner may see the end of the data before the feeder has looked at the letters.
    ends = (
        r"(with the same error, and none has a score|nothing was trained: .* most of them): ValueError: no judge today"
    )
    assert re.search(ends, " ".join(text.split())), text
    data = data_of(cli("audit", "--json", cwd=tmp_path).stdout, "streamrl.audit/2")
    assert (data["lost"], data["twice"], data["unproved"], data["faults"]) == (0, 0, [], [])
    assert data["admitted"] == data["dead"] + data["live"] > 0
    assert data["dead_samples"] >= 32
    listed = cli("dead", "ls", cwd=tmp_path).stdout
    assert "no judge today" in listed
    assert listed.count("Traceback") == 1
    reward.write_text("def fails(sample):\n    return float(len(set(sample.tokens.tolist())) % 2)\n")
    replayed = cli("dead", "replay", "all", cwd=tmp_path)
    assert replayed.returncode == 0
    assert len(replayed.stdout.splitlines()) == data["dead"]
    done = process("up", "--resume", "--screen", "plain", cwd=tmp_path, seconds=180)
    assert done.returncode == 0, done.stdout + done.stderr
    data = data_of(cli("audit", "--json", cwd=tmp_path).stdout, "streamrl.audit/2")
    assert (data["admitted"], data["dead"], data["dead_samples"], data["live"], data["lost"]) == (16, 0, 0, 0, 0)
    assert data["trained"] == 16
