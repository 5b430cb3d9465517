"""A run on real Ray clusters: several nodes on this machine, each of them killed as machines die."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import orjson
import psutil
import pytest

import streamrl
from streamrl.config import RunConfig
from streamrl.errors import ConfigError, Refused
from streamrl.queues.embedded import find_server
from streamrl.runtime.instance import RoleState
from streamrl.runtime.placement.ray import RayPlacement
from streamrl.runtime.placement.ray_node import NodeFacts
from tests.cli.conftest import tiny  # noqa: F401  (a fixture)
from tests.cli.run_kit import cli, data_of, process
from tests.needs import need_programs
from tests.redis_kit import ForeignRedis, free_port
from tests.runtime.test_supervisor import Run, unit

ray = pytest.importorskip("ray")
from ray.cluster_utils import Cluster  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head without room for roles; tests add nodes."""
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 100 << 20})
    yield made
    if ray.is_initialized():
        ray.shutdown()
    made.shutdown()


def add(cluster: Any, **resources: float) -> Any:
    return cluster.add_node(num_cpus=4, object_store_memory=100 << 20, resources=resources)


@pytest.fixture
def model(tiny: Path) -> dict[str, Any]:  # noqa: F811
    """Settings with which a node has all that a role looks for."""
    data = {"train": tiny / "train.jsonl", "held_out": None}
    sampling = {"max_new_tokens": 8}
    return {"model": {"path": str(tiny / "model"), "context": 64}, "data": data, "sampling": sampling}


def run_on(cluster: Any, folder: Path, settings: dict[str, Any], *units: Any, **cluster_keys: Any) -> Run:
    run = Run(folder, *units, on="ray")
    place = {"cluster": {"address": cluster.address, **cluster_keys}}
    run.config = run.config.model_validate({**run.config.model_dump(), **place, **settings})
    (folder / "run.json").write_bytes(orjson.dumps({}))
    return run


async def test_a_node_that_dies_loses_its_roles_which_start_elsewhere(
    tmp_path: Path, cluster: Any, model: dict[str, Any]
):
    first = add(cluster)
    async with run_on(cluster, tmp_path, model, unit(tmp_path, "rollout.0", "ready", "serve")) as run:
        await run.until(run.all_ready, 60)
        pid = run.pid("rollout.0")
        add(cluster)
        cluster.remove_node(first, allow_graceful=False)
        await run.until(lambda: run.states("rollout.0").count(RoleState.READY) == 2, 120)
        assert not psutil.pid_exists(pid), "the child of a killed node has ended"


async def test_a_rank_that_dies_ends_its_gang_which_meets_again(tmp_path: Path, cluster: Any, model: dict[str, Any]):
    add(cluster)
    names = ["learner.0", "learner.1"]
    gang = unit(tmp_path, "learner", "ready", "serve", kind="learner", names=names)
    async with run_on(cluster, tmp_path, model, gang) as run:
        await run.until(run.all_ready, 60)
        os.kill(run.pid("learner.1"), signal.SIGKILL)
        await run.until(lambda: all(run.states(name).count(RoleState.READY) == 2 for name in names), 60)


async def test_a_cluster_that_cannot_run_the_roles_says_why(
    tmp_path: Path, cluster: Any, model: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    add(cluster)
    units = [unit(tmp_path, "rollout.0", "ready"), unit(tmp_path, "feeder.0", "ready")]
    many = {"rollout": {"gpus": 8, "cpus": 2}}
    run = run_on(cluster, tmp_path, model, *units, resources=many)
    async with run:
        with pytest.raises(Refused, match="asks for 8 GPU, it has 0"):
            await run.outcome()
    lacking = {**model, "engine": {"kind": "vllm", "environment": tmp_path / "nowhere"}}
    async with run_on(cluster, tmp_path, lacking, unit(tmp_path, "engine.0", "ready"), units[1]) as run:
        with pytest.raises(ConfigError, match=r"Ray node .* cannot run engine: .*nowhere"):
            await run.outcome()
    async with run_on(cluster, tmp_path, {**model, "model": {"path": str(tmp_path), "context": 64}}, *units) as run:
        with pytest.raises(ConfigError, match=r"Ray node .* cannot run feeder: .* is not a model directory"):
            await run.outcome()
    monkeypatch.setattr("streamrl.__version__", "0.0.9")
    async with run_on(cluster, tmp_path, model, *units) as run:
        with pytest.raises(ConfigError, match=r"Ray node .* has streamrl .*, here is 0\.0\.9"):
            await run.outcome()


async def test_the_head_is_restarted_and_the_run_goes_on(
    tmp_path: Path,
    model: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
):
    """Ray keeps the state of the head in a Redis: that of the run will do."""
    redis = ForeignRedis(tmp_path / "redis", find_server().executable)
    redis.start()
    monkeypatch.setenv("RAY_REDIS_ADDRESS", f"127.0.0.1:{redis.port}")
    password = redis.password_file.read_text().strip()
    head = {"num_cpus": 0, "object_store_memory": 100 << 20, "redis_password": password}
    made = Cluster(initialize_head=True, head_node_args=head)
    try:
        made.add_node(num_cpus=4, object_store_memory=100 << 20, redis_password=password)
        units = [unit(tmp_path, "rollout.0", "ready", "serve"), unit(tmp_path, "reward.0", "ready", "serve")]
        async with run_on(made, tmp_path, model, *units) as run:
            await run.until(run.all_ready, 60)
            pids = [run.pid(name) for name in ("rollout.0", "reward.0")]
            made.head_node.kill_gcs_server()
            os.kill(run.pid("reward.0"), signal.SIGTERM)
            made.head_node.start_gcs_server()
            await run.until(lambda: run.states("reward.0").count(RoleState.READY) == 2, 90)
            assert run.pid("rollout.0") == pids[0], "what ran on is untouched"
            assert run.states("rollout.0").count(RoleState.READY) == 1
            os.kill(os.getpid(), signal.SIGTERM)
            outcome = await run.outcome(60)
            assert outcome.reason == "stopped by SIGTERM"
            assert not [pid for pid in pids if psutil.pid_exists(pid)]
    finally:
        ray.shutdown()
        made.shutdown()
        redis.kill()


def start_head(port: int, folder: str) -> subprocess.Popen[bytes]:
    ray_start = [Path(sys.executable).with_name("ray"), "start", "--head", "--block", f"--port={port}", "--num-cpus=4"]
    options = [f"--object-store-memory={100 << 20}", "--include-dashboard=false", f"--temp-dir={folder}"]
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    env |= {
        "RAY_raylet_start_wait_time_s": "120",
        "RAY_AUTH_MODE": "disabled",
    }  # a token of another cluster may lie in the home
    head = subprocess.Popen([*ray_start, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env)
    assert head.stdout is not None
    said = []
    for line in head.stdout:
        said.append(line.decode())
        if "Ray runtime started" in said[-1]:
            return head
    raise AssertionError("".join(said))


def kill_head(head: subprocess.Popen[bytes]) -> None:
    family = [*psutil.Process(head.pid).children(recursive=True), psutil.Process(head.pid)]
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(family, 30)
    head.wait()


async def test_a_head_that_comes_back_without_its_memory_gets_its_roles_again(tmp_path: Path, model: dict[str, Any]):
    """Placement groups and keepers are gone with it; what the old cluster says would end the supervisor itself."""
    folder, port = mkdtemp(prefix="ray-"), free_port()
    head = start_head(port, folder)
    try:
        units = [unit(tmp_path, "rollout.0", "ready", "serve"), unit(tmp_path, "reward.0", "ready", "serve")]
        async with run_on(SimpleNamespace(address=f"127.0.0.1:{port}"), tmp_path, model, *units) as run:
            await run.until(run.all_ready, 120)
            pids = [run.pid(name) for name in ("rollout.0", "reward.0")]
            await asyncio.to_thread(kill_head, head)
            await run.until(lambda: not any(psutil.pid_exists(pid) for pid in pids), 60)
            head = await asyncio.to_thread(start_head, port, folder)
            names = ("rollout.0", "reward.0")
            await run.until(lambda: all(run.states(name).count(RoleState.READY) == 2 for name in names), 150)
            os.kill(os.getpid(), signal.SIGTERM)
            assert (await run.outcome(60)).reason == "stopped by SIGTERM"
    finally:
        ray.shutdown()
        kill_head(head)
        shutil.rmtree(folder, ignore_errors=True)


DRIVER = """
import asyncio, sys
from pathlib import Path
from tests.runtime.test_ray import drive
asyncio.run(drive(Path(sys.argv[1]), *sys.argv[2:]))
"""


async def drive(folder: Path, address: str, settings: str) -> None:
    """A supervisor in a process that the test kills."""
    units = [unit(folder, "rollout.0", "ready", "serve"), unit(folder, "reward.0", "ready", "serve")]
    async with run_on(SimpleNamespace(address=address), folder, orjson.loads(settings), *units) as run:
        await run.until(run.all_ready, 60)
        (folder / "pids").write_text(" ".join(str(run.pid(name)) for name in ("rollout.0", "reward.0")))
        (folder / "reason").write_text((await run.outcome(300)).reason)


@asynccontextmanager
async def driven(folder: Path, address: str, settings: dict[str, Any]) -> AsyncIterator[tuple[Any, list[int]]]:
    """The process of a supervisor whose roles are ready, and their pids."""
    words = [str(folder), address, orjson.dumps(settings, default=str).decode()]
    driver = await asyncio.create_subprocess_exec(sys.executable, "-c", DRIVER, *words)
    try:
        async with asyncio.timeout(90):
            while not (folder / "pids").exists():  # noqa: ASYNC110 (another process writes it)
                await asyncio.sleep(0.1)
        pids = [int(word) for word in (folder / "pids").read_text().split()]
        assert all(psutil.pid_exists(pid) for pid in pids)
        yield driver, pids
    finally:
        if driver.returncode is None:
            driver.kill()
        await driver.wait()


async def test_on_a_ray_of_its_own_roles_are_placed_drained_and_nothing_is_left(
    tmp_path: Path, model: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RAY_TMPDIR", mkdtemp(prefix="ray-"))  # paths of sockets must be short
    async with driven(tmp_path, "local", model) as (driver, pids):
        driver.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(driver.wait(), 60) == 0
        assert (tmp_path / "reason").read_text() == "stopped by SIGTERM"
        told = [line.split()[:2] for line in (tmp_path / "journal").read_text().splitlines()]
        assert [name for name, event in told if event == "term"] == ["rollout.0", "reward.0"]
        assert not [pid for pid in pids if psutil.pid_exists(pid)]


async def test_a_driver_that_is_killed_leaves_nothing_behind_and_another_goes_on(
    tmp_path: Path, cluster: Any, model: dict[str, Any]
):
    add(cluster)
    async with driven(tmp_path, cluster.address, model) as (_, pids):
        pass
    async with asyncio.timeout(60):
        while any(psutil.pid_exists(pid) for pid in pids):  # noqa: ASYNC110 (other processes end)
            await asyncio.sleep(0.1)
    units = [unit(tmp_path, "rollout.0", "ready", "serve"), unit(tmp_path, "reward.0", "ready", "serve")]
    async with run_on(cluster, tmp_path, model, *units) as run:
        await run.until(run.all_ready, 60)


@pytest.mark.parametrize("store", [None, "/store"])
def test_a_recorder_needs_the_run_directory_itself(tmp_path: Path, store: str | None):
    for name in ("run.json", "supervisor.lock"):
        (tmp_path / name).touch()
    config = RunConfig.model_validate({"name": "r", "checkpoint": {"store": store}})
    placement = RayPlacement(config, tmp_path)
    away, here = (NodeFacts(streamrl.__version__, shares, {}) for shares in (False, True))
    placement._check_facts("node", ["recorder", "learner"], here)
    with pytest.raises(ConfigError, match="the recorder would leave its recording there") as error:
        placement._check_facts("node", ["recorder"], away)
    assert "checkpoint.store" not in error.value.hint
    if store is None:
        with pytest.raises(ConfigError, match="the learner would leave its checkpoints there"):
            placement._check_facts("node", ["learner"], away)
    else:
        placement._check_facts("node", ["learner"], away)


def test_a_run_whose_directory_is_on_the_driver_only(tiny: Path, tmp_path: Path):  # noqa: F811
    """The node has a file system of its own where the run directory would be, as another machine has."""
    need_programs("unshare")
    redis = ForeignRedis(tmp_path / "redis", find_server().executable)
    redis.start()
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 100 << 20})
    place = tmp_path / "driver"
    (place / "runs").mkdir(parents=True)
    ray_start = f"ray start --address {made.address} --num-cpus 8 --object-store-memory {100 << 20} --block"
    script = f"mount -t tmpfs tmpfs {place} && PATH={Path(sys.executable).parent}:$PATH exec {ray_start}"
    node = subprocess.Popen(["unshare", "-m", "sh", "-c", script], start_new_session=True, stdout=subprocess.PIPE)
    settings = [f"redis.url={redis.url}", f"redis.password_file={redis.password_file}", "weights.transport=http"]
    settings += [f"cluster.address={made.address}"]
    up = ["up", str(tiny / "run.yaml"), "--on", "ray", "--screen", "logs"]
    flags = [word for setting in settings for word in ("--set", setting)]
    env = {"PYTHONPATH": str(tiny)}
    try:
        assert node.stdout is not None
        assert any(b"Ray runtime started" in line for line in node.stdout), "the node takes part"
        refused = process(*up, *flags, cwd=place, env=env, seconds=100)
        assert refused.returncode == 78, refused.stderr
        assert "the learner would leave its checkpoints there" in refused.stderr
        store = ("--set", f"checkpoint.store={tmp_path / 'store'}")
        done = process(*up, *flags, *store, cwd=place, env=env, seconds=200)
        assert done.returncode == 0, done.stderr + done.stdout
        audit = data_of(cli("audit", "--json", cwd=place).stdout, "streamrl.audit/2")
        assert (audit["trained"], audit["lost"], audit["twice"]) == (12, 0, 0)
        summary = orjson.loads((place / "runs" / "tiny" / "summary.json").read_bytes())
        assert summary["steps"] == 3
        assert summary["accuracy_after"] is not None
        assert summary["groups_evaluated"] > 0
    finally:
        os.killpg(node.pid, signal.SIGKILL)
        node.wait()
        made.shutdown()
        redis.kill()
