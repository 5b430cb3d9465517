"""`streamrl weights`: what is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import orjson
import pytest
import torch

from streamrl.queues import embedded, open_ledgers
from streamrl.runfile import read_saved
from streamrl.weight_sync.manifest import Adapter
from streamrl.weight_sync.publisher import Publisher

from .run_kit import answered, cli, data_of, make_run

SETTINGS = ("weights.transport=directory", "weights.delta.enabled=true", "weights.dtype=bfloat16")


def tensors(version: int) -> dict[str, torch.Tensor]:
    whole = torch.arange(4000).bfloat16()
    whole[:version] = -1.0
    return {"model.a": whole, "model.b": torch.ones(3, 4).bfloat16()}


def make(run_dir: Path) -> None:
    """A run with versions 1 to 4: 1 full, the others deltas; 0 is long gone."""
    config = make_run(run_dir, *SETTINGS)
    publisher = Publisher(config.weights, config.name, run_dir)
    (run_dir / "metrics").mkdir()
    records = [b"torn", orjson.dumps({"epoch": 1, "published": 0, "publish_step": 0})]
    for version in range(1, 5):
        publisher.publish(epoch=1, version=version, step=version - 1, tensors=tensors(version).items())
        manifest = publisher.manifest
        records.append(
            orjson.dumps(
                {"at": 1.7e9 + version, "epoch": 1, "published": version, "publish_bytes": manifest.total_bytes,
                 "publish_kind": manifest.kind, "publish_density": publisher.density}
            )
        )  # fmt: skip
    (run_dir / "metrics" / "learner.0.jsonl").write_bytes(b"\n".join(records) + b"\n")


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    make(tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
async def live(tmp_path: Path):
    run_dir = tmp_path / "run"
    make(run_dir)
    config = read_saved(run_dir / "run.json").config
    async with embedded.running(config.redis, run_dir), open_ledgers(config, run_dir) as ledgers:
        await ledgers.roles.beat("rollout.0", {"version": 3, "state": "ready"}, 60)
        yield run_dir, ledgers


def test_ls_and_show_of_a_stopped_run(stopped: Path):
    where = ("--run", str(stopped))
    data = data_of(cli("weights", "ls", *where, "--json").stdout, "streamrl.weights/1")
    assert [row["version"] for row in data["versions"]] == [4, 3, 2, 1]
    newest = data["versions"][0]
    assert (newest["epoch"], newest["step"], newest["kind"], newest["present"]) == (1, 3, "delta", True)
    assert newest["density"] == pytest.approx(1 / 4012)
    assert data["versions"][-1]["kind"] == "full"
    every = data_of(cli("weights", "ls", "--all", *where, "--json").stdout, "streamrl.weights/1")["versions"]
    assert every[-1] == {
        "version": 0, "epoch": 1, "step": 0, "at": None, "bytes": None, "kind": None, "density": None,
        "present": False, "replicas": [],
    }  # fmt: skip
    table = cli("weights", "ls", *where).stdout
    assert table.splitlines()[0].split()[:3] == ["VERSION", "EPOCH", "STEP"]
    assert "0.02 %" in table
    shown = data_of(cli("weights", "show", "4", *where, "--json").stdout, "streamrl.weights.show/1")
    assert shown["base"] == 3
    assert [tensor["name"] for tensor in shown["tensors"]] == ["model.a", "model.b"]
    assert "model.a  BF16  [4000]" in cli("weights", "show", "1", *where).stdout
    gone = cli("weights", "show", "0", *where)
    assert (gone.returncode, "its files are gone" in gone.stderr) == (0, True)
    never = cli("weights", "show", "99", *where)
    assert (never.returncode, "there never was a version 99" in never.stderr) == (2, True)


def test_a_version_that_is_an_adapter(tmp_path: Path):
    config = make_run(tmp_path / "run", "weights.transport=directory")
    about = Adapter(base="model", rank=2, alpha=4.0, targets=["a"])
    publisher = Publisher(config.weights, config.name, tmp_path / "run")
    publisher.publish(epoch=1, version=1, step=1, tensors=tensors(1).items(), adapter=about)
    assert "LoRA of rank 2, alpha 4, for model" in cli("weights", "show", "1", "--run", str(tmp_path / "run")).stdout


def test_a_run_without_versions(tmp_path: Path):
    make_run(tmp_path / "run", *SETTINGS)
    done = cli("weights", "ls", "--run", str(tmp_path / "run"))
    assert (done.returncode, done.stdout, "no version is here" in done.stderr) == (0, "", True)
    for word, said in (("newest", "no version is here"), ("latest", "latest is not a version")):
        refused = cli("weights", "show", word, "--run", str(tmp_path / "run"))
        assert (refused.returncode, said in refused.stderr) == (2, True)


async def test_ls_says_which_replicas_hold_a_version(live):
    run_dir, _ = live
    rows = await answered("streamrl.weights/1", run_dir, "weights", "ls")
    assert {row["version"]: row["replicas"] for row in rows["versions"]} == {4: [], 3: ["rollout.0"], 2: [], 1: []}


def test_looking_needs_no_torch(stopped: Path):
    program = f"""
import sys
from streamrl.cli import run
assert run(["weights", "ls", "--run", {str(stopped)!r}]) == 0
assert run(["weights", "show", "4", "--run", {str(stopped)!r}]) == 0
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


@pytest.mark.parametrize("command", ["ls", "show"])
def test_help_teaches(command: str):
    done = cli("weights", command, "--help")
    assert done.returncode == 0
    assert "--run" in done.stdout
