"""Ranks of one learner with a run directory each and a store between them, as processes that are killed."""

from __future__ import annotations

import signal

import pytest
import torch

from streamrl.learner.checkpoint import Checkpoints
from streamrl.learner.checkpoint_files import open_shards
from streamrl.queues.ledgers import open_ledgers
from streamrl.runfile import LoadedConfig, save
from streamrl.weight_sync.files import release_memory, store_of
from streamrl.weight_sync.manifest import versions
from streamrl.weight_sync.tensors import map_version

pytestmark = pytest.mark.timeout(240)


class Apart:
    """Starts both ranks, each with the run directory of its host."""

    def __init__(self, run, folder):
        self.run, self.folder, self.starts = run, folder, 0
        self.made = []

    def start(self, hosts, faults=(None, None), **checkpoint):
        run = self.run
        self.starts += 1
        environ = {"WORLD_SIZE": "2", "STREAMRL_RENDEZVOUS": f"file://{self.folder}/meet-{self.starts}"}
        pids = []
        for rank, (host, fault) in enumerate(zip(hosts, faults, strict=True)):
            run.run_dir = self.folder / host
            self.made.append(run.run_dir)
            config = run.configure(ranks=2, steps=6, weights={"transport": "http"})
            config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update=checkpoint)})
            save(LoadedConfig(config=config, origins={}), run.run_dir / "run.json")
            run.config = config
            pids.append(run.start(fault, name=f"learner.{rank}", environ={**environ, "RANK": str(rank)}))
        run.run_dir = self.folder / hosts[0]
        return pids

    def log(self, host, rank):
        return (self.folder / host / f"learner.{rank}.log").read_text()

    def close(self):
        for run_dir in self.made:
            release_memory(run_dir)


@pytest.fixture
def apart(run, tmp_path):
    made = Apart(run, tmp_path)
    yield made
    run.kill()
    made.close()


async def state(run):
    async with open_ledgers(run.config, run.run_dir) as ledgers:
        return await ledgers.train.state()


async def test_without_a_store_the_learner_is_refused_at_the_start(run, apart):
    for rank, pid in enumerate(apart.start(["a", "b"])):
        assert await run.wait(pid) == 78
        assert "the ranks of the learner do not share" in apart.log("ab"[rank], rank)
    assert not list((apart.folder / "a" / "checkpoints").glob("*"))


async def test_hosts_that_are_lost_lose_nothing(run, apart, tmp_path):
    store = f"dir::file://{tmp_path}/store"  # no directory to us
    async with run.play():
        died = "streamrl.learner.checkpoint:Checkpoints.send:after:2"
        first, second = apart.start(["a", "b"], (None, died), store=store)
        assert await run.wait(second) == -signal.SIGKILL
        assert await run.wait(first) in {69, 75}, run.log()
        # The shard of the second checkpoint is there, its meta data is not: the first one is what counts.
        names = {f"{path.parent.name}/{path.name}" for path in (tmp_path / "store").rglob("*")}
        assert "ckpt-1-4/rank-1-of-2.safetensors" in names
        assert sorted(name for name in names if "meta.json" in name) == ["ckpt-1-2/meta.json"]
        found = await state(run)
        assert (found.checkpoint, found.retired) == ("1-2", 8)
        for host, rank in zip("cd", apart.start(["c", "d"], store=store), strict=True):
            assert await run.wait(rank) == 0, apart.log(host, "cd".index(host))
    checkpoints = Checkpoints.of(run.config, run.run_dir)
    meta = checkpoints.greatest(None, 0)
    assert (meta.position, meta.world, meta.bases) == ((2, 6), 2, [(1, 2)])
    assert (await run.audit()).trained == 24
    assert "ckpt-1-4" not in checkpoints.root.names(), "what a dead learner left is removed"
    assert list((tmp_path / "store").rglob("model/config.json"))
    kept = sorted(path.relative_to(tmp_path / "d") for path in (tmp_path / "d").rglob("*.safetensors"))
    assert {path.parts[:2] for path in kept} == {("fetched", "ckpt-1-2")}, "what it began with, nothing that grows"


async def test_versions_are_whole_on_the_host_that_serves_them(run, apart, tmp_path):
    """No rank but rank 0 has a folder that replicas can ask."""
    async with run.play():
        for rank, pid in enumerate(apart.start(["a", "b"], store=f"file://{tmp_path}/store")):
            assert await run.wait(pid) == 0, apart.log("ab"[rank], rank)
    assert "version not published" not in run.log()
    root = store_of("http", run.run_dir).root
    newest = max(versions(root).items())[1]
    tensors = map_version(root / newest.folder, newest).tensors
    prefix = "actor/weight/"
    checkpoints = Checkpoints.of(run.config, run.run_dir)
    with open_shards(checkpoints.fetch(checkpoints.greatest(None, 0)), 2) as shards:
        trained = {name.removeprefix(prefix): shards.read(name) for name in shards.names if name.startswith(prefix)}
    assert set(tensors) == set(trained)
    assert all(torch.equal(tensors[name], tensor.to(tensors[name].dtype)) for name, tensor in trained.items())
