"""Open files and memory are compared with what a run needs before anything starts."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from streamrl.config import RunConfig
from streamrl.errors import CannotCreate
from streamrl.runtime.limits import check_files, check_memory, free_memory, memory, open_files
from streamrl.servers import environments

GIB = 1 << 30


def config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate(sections)


def limited(limit: str, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run Python under a limit of the shell."""
    command = ["bash", "-c", f'{limit}; exec "$@"', "bash", sys.executable, *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=False)


def test_too_few_open_files_are_said_before_anything_starts(tmp_path: Path):
    """Redis would end at its start, and be started again without end."""
    (tmp_path / "run.yaml").write_text("name: t\n")
    shown = limited("ulimit -n 32", "-m", "streamrl", "up", "run.yaml", "--dry-run", folder=tmp_path)
    assert "check  open files: FAILED: a process may open 32 files here (ulimit -n), " in shown.stdout, shown.stderr
    shown = limited("ulimit -Sn 32", "-m", "streamrl", "up", "run.yaml", "--dry-run", folder=tmp_path)
    assert "for a process, 112 needed (redis)" in shown.stdout, "the soft limit is ours to raise"


def test_a_role_raises_its_soft_limit(tmp_path: Path):
    code = """
import asyncio, resource
from pathlib import Path
from streamrl.runtime.roles import serve
asyncio.run(serve("feeder", 0, Path("nowhere")))
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
print("SOFT", soft == min(hard, 1 << 16) if hard != resource.RLIM_INFINITY else soft >= 1 << 16)
"""
    assert "SOFT True" in limited("ulimit -Sn 100", "-c", code, folder=tmp_path).stdout


JUDGED = {"reward_models": {"j": {"kind": "openai", "model": "j", "url": ["http://a:1"]}},
          "rewards": [{"use": "judge", "args": {"model": "j"}}]}  # fmt: skip


def test_what_opens_files(monkeypatch: pytest.MonkeyPatch):
    small = open_files(config(), 0)
    many = open_files(config(rollout={"replicas": 20}, reward_worker={"replicas": 20}), 0)
    assert many["redis"].least - small["redis"].least == 38 * 8
    assert many["supervisor"].least > small["supervisor"].least
    served = open_files(config(engine={"kind": "vllm", "servers": 4, "slots": 256}), 0)
    assert served["rollout"].least <= small["rollout"].least, "slots are an upper bound"
    assert served["rollout"].most - served["rollout"].least == 4 * 256, "each response in flight is a connection"
    assert served["engine"].most == small["rollout"].least, "only those that take the weights open their files"
    large = open_files(config(learner={"ranks": 8}), 140 * GIB)
    assert large["learner"].least > 3 * 560, "files of three versions"
    assert "redis" not in open_files(config(redis={"url": "redis://elsewhere:1"}), 0)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    with pytest.raises(CannotCreate, match=r"may open 64 files here .*, redis of this run needs 112") as caught:
        check_files(config(), 0)
    assert (caught.value.exit_code, "LimitNOFILE" in caught.value.hint) == (73, True)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, resource.RLIM_INFINITY))
    assert check_files(config(reward_worker={"concurrency": 1000}), 0).startswith("any number")


def test_files_that_a_run_may_never_open_are_a_warning(monkeypatch: pytest.MonkeyPatch):
    """A rule opens nothing for a sample; a judge a connection for each, when so many come at the same time."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4096, 4096))
    worker = {"reward_worker": {"concurrency": 4096}}
    for rule in ("exact_match", "number_match"):
        assert check_files(config(**worker, rewards=[{"use": rule}]), 0).endswith("needed (redis)")
    asked = check_files(config(**worker, **JUDGED), 0)
    assert "4096 for a process, 112 needed (redis); WARNING: reward may come to need 4160: raise the hard" in asked
    programs = check_files(config(**worker, rewards=[{"use": "exact_match"}, {"use": "my_rewards:run"}]), 0)
    assert "WARNING: reward may come to need 4160" in programs, "nobody knows what it opens"
    served = check_files(config(engine={"kind": "vllm", "servers": 16, "slots": 256}), 0)
    assert "WARNING: rollout may come to need 4160" in served


def test_what_takes_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(environments, "has_gpu", lambda: False)
    base = memory(config(), 0).least
    assert base == (2 * 128 + 2 * 40) << 20, "learner and replica with torch; reward worker and feeder without"
    assert memory(config(reward_worker={"replicas": 32}), 0).least - base == 31 * 40 << 20
    own = {"weights": {"transport": "directory"}}
    trained = memory(config(**own), 4 * GIB)
    assert trained.least - base == (3 + 1) * 4 * GIB, "weights and two moments; the engine's weights"
    assert trained.most == trained.least
    assert memory(config(), 4 * GIB).least - trained.least == 3 * 4 * GIB, "versions in /dev/shm"
    lora = memory(config(**own, learner={"lora": {"rank": 8}}), 4 * GIB)
    assert lora.least - base == 2 * 4 * GIB
    half = config(**own, engine={"dtype": "bfloat16"}, rollout={"replicas": 3})
    assert memory(half, 4 * GIB).least - memory(half, 0).least == 3 * 4 * GIB + 3 * 2 * GIB
    pulled = memory(config(weights={"transport": "http"}), 4 * GIB)
    assert pulled.least - trained.least == 3 * 4 * GIB
    assert pulled.most - pulled.least == 2 * 4 * GIB, "the folder of the replica"
    deltas = memory(config(weights={"transport": "http", "delta": {"enabled": True}}), 4 * GIB)
    assert (deltas.least - trained.least, deltas.most) == (4 * GIB, pulled.most)
    monkeypatch.setattr(environments, "has_gpu", lambda: True)
    assert memory(config(**own), 4 * GIB).least - base == 3 * 4 * GIB, "copies for a checkpoint"
    assert memory(config(**own, learner={"lora": {"rank": 8}}), 4 * GIB).least - base == 4 * GIB, "rows that are read"
    away = memory(config(**own, learner={"offload": ["parameters"]}), 4 * GIB)
    assert away.least - base == (3 + 4) * 4 * GIB, "weights, gradients and moments stay on the host"


def test_memory_that_a_run_may_never_take_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(environments, "has_gpu", lambda: True)
    pulled = config(weights={"transport": "http"})
    found = check_memory(pulled, 5 * GIB // 4, machine(tmp_path, "0::/\n"))
    assert "9216 MiB free, 8016 MiB needed; WARNING: it may come to need 10576 MiB: raise the limit" in found


def machine(root: Path, groups: str, **files: str) -> Path:
    """A root of a file system with these control groups; 8 GiB are free, and 1 GiB of swap."""
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {8 << 20} kB\nSwapFree: {1 << 20} kB\n")
    (root / "proc" / "self" / "cgroup").write_text(groups)
    for name, text in files.items():
        path = root / "sys" / "fs" / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_memory_that_is_free_here(tmp_path: Path):
    assert free_memory(machine(tmp_path / "plain", "0::/\n")) == 9 * GIB
    outer = {
        "pod/memory.max": str(4 * GIB),
        "pod/memory.current": str(3 * GIB),
        "pod/memory.stat": f"anon 5\ninactive_file {2 * GIB}\n",
        "pod/box/memory.max": "max",
        "pod/box/memory.current": str(GIB),
    }
    assert free_memory(machine(tmp_path / "two", "0::/pod/box\n", **outer)) == 3 * GIB
    inner = {
        "memory/docker/memory.limit_in_bytes": str(2 * GIB),
        "memory/docker/memory.usage_in_bytes": str(GIB),
        "memory/docker/memory.stat": "total_inactive_file 0\n",
        "memory/memory.limit_in_bytes": str((1 << 63) - 4096),
        "memory/memory.usage_in_bytes": "7",
        "memory/memory.stat": "",
    }
    old = machine(tmp_path / "one", "3:cpu:/\n4:memory:/docker\n0::/\n", **inner)
    assert free_memory(old) == GIB
    assert free_memory(tmp_path / "nothing") is None
    with pytest.raises(CannotCreate, match=r"1024 MiB of memory are free, this run needs \d+ MiB"):
        check_memory(config(), GIB, old)
    assert "not known" in check_memory(config(), GIB, tmp_path / "nothing")
