"""Anchors and deltas: every version is bit for bit the weights, late joiners too, and what is kept is bounded."""

import asyncio
import shutil

import pytest
import sync_kit
import torch
from sync_kit import Replica, Stream, folders, rebuilt

from streamrl.config import DeltaConfig, WeightsConfig
from streamrl.errors import CannotCreate
from streamrl.weight_sync.manifest import decode, versions
from streamrl.weight_sync.publisher import Publisher


class Training:
    """A real AdamW in float32 on a small network; its weights as bfloat16."""

    def __init__(self, lr=1e-6):
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.net = torch.nn.Sequential(torch.nn.Linear(96, 160), torch.nn.Tanh(), torch.nn.Linear(160, 64))
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.normal_(std=0.02)
        self.adamw = torch.optim.AdamW(self.net.parameters(), lr=lr)

    def step(self):
        self.adamw.zero_grad()
        self.net(torch.randn(32, 96)).sub(torch.randn(32, 64)).square().mean().backward()
        self.adamw.step()

    def weights(self):
        return {name: tensor.detach().bfloat16() for name, tensor in self.net.named_parameters()}


def bits(tensors):
    return {name: tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}


def configure(**delta):
    return WeightsConfig(
        transport="directory",
        dtype="bfloat16",
        shard_bytes=16384,
        delta=DeltaConfig(**{"enabled": True, "max_density": 0.3, **delta}),
    )


def publish(publisher, version, weights):
    return decode(sync_kit.publish(publisher, version, weights))


async def test_steps_of_adamw_arrive_bit_for_bit(tmp_path):
    """By three ways: a replica that follows, one that begins anew each time, and one that joins at the end."""
    config = configure(every=6)
    publisher, stream, training = Publisher(config, "r", tmp_path), Stream(), Training()
    replica = Replica(stream, config, tmp_path)
    stop = asyncio.Event()
    following = asyncio.create_task(replica.follower.run(stop))
    expected, kinds, sizes, densities = {}, [], [], []
    for version in range(1, 17):
        weights = training.weights()
        expected[version] = bits(weights)
        manifest = publish(publisher, version, weights)
        await stream.put(b"" + (publisher.root / manifest.folder / "manifest.json").read_bytes())
        await replica.until(version)
        kinds.append(publisher.manifest.kind)
        sizes.append(publisher.manifest.total_bytes)
        densities.append(publisher.density)
        assert bits(await rebuilt(publisher.root, tmp_path, manifest.pair)) == expected[version]
        training.step()
    assert {pair[1]: bits(tensors) for pair, tensors in replica.applied} == expected
    assert replica.follower.refused == 0
    assert [place for place, kind in enumerate(kinds, 1) if kind == "full"] == [1, 7, 13]
    assert densities[0] is None
    deltas = [density for density in densities[1:] if density is not None]
    assert max(deltas) < 0.1
    assert max(size for size, kind in zip(sizes, kinds, strict=True) if kind == "delta") < 0.2 * sizes[0]
    late = Replica(stream, config, tmp_path)
    joining = asyncio.create_task(late.follower.run(stop))
    await late.until(1)
    assert bits(late.applied[0][1]) == expected[16]
    stop.set()
    await asyncio.wait_for(asyncio.gather(following, joining), 20)


def test_what_is_kept_is_the_newest_chain_and_the_version_before(tmp_path):
    publisher, training = Publisher(configure(every=3), "r", tmp_path), Training()
    seen = []
    for version in range(1, 9):
        publish(publisher, version, training.weights())
        seen.append([int(name.split("-")[2]) for name in folders(publisher)])
        assert publisher.holds_newest()
        training.step()
    # Anchors are 1, 4 and 7; the chain before an anchor goes when the version after it is written.
    assert seen == [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4], [4, 5], [4, 5, 6], [4, 5, 6, 7], [7, 8]]


def test_a_new_learner_keeps_the_chain_of_the_newest_version_and_begins_with_an_anchor(tmp_path):
    config, training = configure(every=5), Training()
    first = Publisher(config, "r", tmp_path)
    for version in range(1, 9):
        publish(first, version, training.weights())
        training.step()
    assert folders(first) == ["v-1-6", "v-1-7", "v-1-8"]
    second = Publisher(config, "r", tmp_path)
    assert folders(second) == ["v-1-6", "v-1-7", "v-1-8"]
    assert publish(second, 9, training.weights()).base is None
    publish(second, 10, training.weights())
    assert folders(second) == ["v-1-10", "v-1-9"]


def test_deltas_that_are_as_large_as_an_anchor_end_the_chain(tmp_path):
    """Density just below the limit, version after version: what must be kept stays below three times the weights."""
    publisher = Publisher(configure(every=1000, max_density=1.0), "r", tmp_path)
    torch.manual_seed(0)
    weights = {"w": torch.randn(4096).bfloat16()}
    most, kinds = 0, []
    for version in range(1, 30):
        publish(publisher, version, weights)
        kinds.append(publisher.manifest.kind)
        most = max(most, sum(path.stat().st_size for path in publisher.root.rglob("0*")))
        changed = torch.rand(4096) < 0.35
        weights = {"w": torch.where(changed, torch.randn(4096).bfloat16(), weights["w"])}
    assert kinds.count("full") > 3
    assert most <= 3.1 * 8192


def test_a_failed_version_and_one_whose_files_are_gone_are_followed_by_an_anchor(tmp_path, monkeypatch):
    publisher, training = Publisher(configure(), "r", tmp_path), Training()
    publish(publisher, 1, training.weights())
    training.step()
    with monkeypatch.context() as patched:
        patched.setattr(Publisher, "_delta", lambda *_: (_ for _ in ()).throw(CannotCreate("full")))
        with pytest.raises(CannotCreate):
            publish(publisher, 2, training.weights())
    assert publish(publisher, 3, training.weights()).base is None
    training.step()
    assert publish(publisher, 4, training.weights()).base == (1, 3)
    shutil.rmtree(publisher.root / "v-1-3")
    assert not publisher.holds_newest()
    assert publish(publisher, 5, training.weights()).base is None
    assert publisher.holds_newest()


async def test_too_many_changes_go_whole_and_count_as_an_anchor(tmp_path):
    publisher, training = Publisher(configure(max_density=0.3), "r", tmp_path), Training(lr=1e-2)
    publish(publisher, 1, training.weights())
    training.step()
    manifest = publish(publisher, 2, training.weights())
    assert manifest.base is None
    assert publisher.manifest.kind == "full"
    assert publisher.density > 0.5
    assert publish(publisher, 3, training.weights()).base == (1, 2)  # and nothing has changed since
    assert publisher.density == 0
    assert bits(await rebuilt(publisher.root, tmp_path, (1, 3))) == bits(training.weights())


def test_one_version_may_have_another_model(tmp_path):
    """Names or shapes that changed cannot be a delta, whatever the plan was."""
    publisher = Publisher(configure(), "r", tmp_path)
    publish(publisher, 1, {"a": torch.zeros(8)})
    assert publish(publisher, 2, {"a": torch.zeros(9)}).base is None
    assert publish(publisher, 3, {"b": torch.zeros(9)}).base is None


def test_the_catalogue_shows_what_can_be_read(tmp_path):
    publisher, training = Publisher(configure(), "r", tmp_path), Training()
    publish(publisher, 1, training.weights())
    (publisher.root / "v-9-1").mkdir()
    (publisher.root / "v-9-1" / "manifest.json").write_bytes(b"no manifest")
    assert list(versions(publisher.root)) == [(1, 1)]
    assert versions(tmp_path / "nowhere") == {}
