"""Several ranks write one version: the files are the whole tensors, and a rank that fails costs one version."""

import threading
import time

import pytest
import torch
from sync_kit import folders, same, tensors

from streamrl.config import DeltaConfig, WeightsConfig
from streamrl.errors import CannotCreate, DeadlineExceeded, WeightsError
from streamrl.weight_sync.manifest import decode
from streamrl.weight_sync.publisher import Publisher
from streamrl.weight_sync.rank_writer import RankReport, RankWriter, draft_name, report_name, write_report
from streamrl.weight_sync.tensors import map_version

SHAPES = {"embed.weight": (61, 8), "few": (2, 5), "one": (1, 9), "norm": (17,), "empty": (0, 4), "bias": (16,)}


def model(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def rows(whole, rank, world):
    """This rank's rows, as FSDP2 cuts them; an empty tensor belongs to rank 0."""
    found = []
    for name, tensor in whole.items():
        piece = -(-len(tensor) // world)
        part = tensor[rank * piece : (rank + 1) * piece]
        if len(part) or (rank == 0 and not len(tensor)):
            found.append((name, part.clone()))
    return found


class Team:
    """Rank 0's publisher, and the other ranks, each in a thread as in a process of its own."""

    def __init__(self, config, run_dir, world):
        self.world = world
        self.publisher = Publisher(config, "r", run_dir)
        self.others = [RankWriter(config, run_dir, rank) for rank in range(1, world)]
        self.delivered = {}

    def publish(self, version, whole, *, absent=(), epoch=1):
        base = self.publisher.next_base()
        shapes = {name: list(tensor.shape) for name, tensor in whole.items()}

        def deliver(writer, rank):
            self.delivered[rank] = writer.deliver((epoch, version), base, rows(whole, rank, self.world), shapes)

        threads = [
            threading.Thread(target=deliver, args=(writer, rank))
            for rank, writer in enumerate(self.others, 1)
            if rank not in absent
        ]
        for thread in threads:
            thread.start()
        try:
            return decode(
                self.publisher.publish(
                    epoch=epoch, version=version, step=version, tensors=rows(whole, 0, self.world), shapes=shapes,
                    world=self.world, base=base,
                )
            )  # fmt: skip
        finally:
            for thread in threads:
                thread.join(30)
                assert not thread.is_alive()


@pytest.mark.parametrize("transport", ["shm", "directory"])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_the_files_of_all_ranks_are_the_whole_tensors(tmp_path, transport, world):
    config = WeightsConfig(transport=transport, shard_bytes=512)
    team = Team(config, tmp_path, world)
    whole = model(1)
    manifest = team.publish(1, whole)
    folder = team.publisher.root / manifest.folder
    assert same(map_version(folder, manifest).tensors, whole)
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ["manifest.json", *(shard.file for shard in manifest.shards)]
    )
    parts = {entry.name: len(entry.parts) for entry in manifest.tensors}
    assert parts["embed.weight"] == world
    assert parts["one"] == 1
    assert parts["few"] == min(2, world)
    assert {shard.file[:4] for shard in manifest.shards} == {f"r{rank:03}" for rank in range(world)}
    assert all(entry.hashes == [] for entry in manifest.tensors)
    team.publisher.close(unlink=True)


def test_a_rank_that_does_not_come_is_a_failed_version_and_no_hang(tmp_path):
    config = WeightsConfig(transport="directory", deadline=0.3, shard_bytes=512)
    team = Team(config, tmp_path, 3)
    team.publish(1, model(1))
    with pytest.raises(DeadlineExceeded, match="part-002"):
        team.publish(2, model(2), absent=(2,))
    assert folders(team.publisher) == ["v-1-1"]
    assert team.delivered[1]
    assert team.publish(3, model(3)).base is None
    assert folders(team.publisher) == ["v-1-1", "v-1-3"]


def test_waiting_for_a_rank_ends_with_the_publisher(tmp_path):
    config = WeightsConfig(transport="directory", deadline=600)
    team = Team(config, tmp_path, 2)
    closing = threading.Timer(0.1, lambda: team.publisher.close(unlink=False))
    closing.start()
    with pytest.raises(DeadlineExceeded):
        team.publish(1, model(1), absent=(1,))
    assert folders(team.publisher) == []


@pytest.mark.parametrize("kind", [CannotCreate, WeightsError])
def test_what_a_rank_could_not_write_is_told_with_its_reason(tmp_path, monkeypatch, kind):
    config = WeightsConfig(transport="directory", deadline=60, shard_bytes=64)
    team = Team(config, tmp_path, 2)
    team.publish(1, model(1))
    original = RankWriter._full

    def fails(self, path, bucket):
        if self._rank == 1 and path.name.endswith("00001.safetensors"):
            raise kind("no room there", "make some")
        return original(self, path, bucket)

    monkeypatch.setattr(RankWriter, "_full", fails)
    with pytest.raises(kind, match="rank 1: no room there") as caught:
        team.publish(2, model(2))
    assert caught.value.hint == "make some"
    assert not team.delivered[1]
    assert folders(team.publisher) == ["v-1-1"]
    monkeypatch.undo()
    team.publish(3, model(3))


def test_a_rank_whose_version_was_given_up_goes_on(tmp_path):
    config = WeightsConfig(transport="directory", deadline=0.2)
    publisher = Publisher(config, "r", tmp_path)
    late = RankWriter(config, tmp_path, 1)
    assert not late.deliver((1, 1), None, rows(model(1), 1, 2), {})  # there never is a draft
    with pytest.raises(DeadlineExceeded):
        publisher.publish(epoch=1, version=2, step=0, tensors=rows(model(1), 0, 2), world=2)
    late.refuse((1, 2), DeadlineExceeded("late"))  # the draft is gone
    assert folders(publisher) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda part: part.__class__(part.name, part.dtype, [1, 8], part.whole, 0, ""), "496 values|together"),
        (lambda part: part.__class__(part.name, "F16", part.shape, part.whole, 0, ""), "another"),
        (lambda part: part.__class__(part.name, part.dtype, part.shape, [9, 9], 0, ""), "another"),
        (lambda part: part.__class__(part.name, part.dtype, part.shape, part.whole, 7, ""), "not the report"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(tmp_path, monkeypatch, change, message):
    config = WeightsConfig(transport="directory", shard_bytes=1 << 20)
    team = Team(config, tmp_path, 2)
    original = RankWriter.write

    def lies(self, *arguments, **options):
        report = original(self, *arguments, **options)
        if self._rank == 0:
            return report
        return RankReport(rank=1, shards=report.shards, parts=[change(report.parts[0]), *report.parts[1:]])

    monkeypatch.setattr(RankWriter, "write", lies)
    with pytest.raises(WeightsError, match=message):
        team.publish(1, model(1))
    assert folders(team.publisher) == []


def test_a_report_that_is_none_is_refused(tmp_path):
    config = WeightsConfig(transport="directory", deadline=30)
    publisher = Publisher(config, "r", tmp_path)
    draft = publisher.root / draft_name((1, 1))

    def nonsense():
        while not draft.exists():
            time.sleep(0.001)
        (draft / ".x").write_bytes(b"{}")
        (draft / ".x").rename(draft / report_name(1))

    thread = threading.Thread(target=nonsense)
    thread.start()
    with pytest.raises(WeightsError, match="no report"):
        publisher.publish(epoch=1, version=1, step=0, tensors=tensors().items(), world=2)
    thread.join(10)


def test_a_report_of_another_rank_is_refused(tmp_path):
    from streamrl.weight_sync.rank_writer import take_report

    write_report(tmp_path, RankReport(rank=2))
    (tmp_path / report_name(2)).rename(tmp_path / report_name(1))
    with pytest.raises(WeightsError, match="rank 1"):
        take_report(tmp_path, 1)


def test_ranks_decide_alone_whether_a_delta_pays(tmp_path):
    """Rank 1 changed everything, rank 0 almost nothing: one writes changes, the other whole files."""
    config = WeightsConfig(transport="directory", shard_bytes=512, delta=DeltaConfig(enabled=True, max_density=0.1))
    team = Team(config, tmp_path, 2)
    first = model(1)
    team.publish(1, first)
    second = {name: tensor.clone() for name, tensor in first.items()}
    second["embed.weight"][0, 0] += 1
    for name, tensor in second.items():
        tensor[-(-len(first[name]) // 2) :] += 1
    manifest = team.publish(2, second)
    kinds = {shard.file: shard.kind for shard in manifest.shards}
    assert {kind for file, kind in kinds.items() if file.startswith("r000")} == {"delta"}
    assert {kind for file, kind in kinds.items() if file.startswith("r001")} == {"full"}
    assert manifest.base == (1, 1)
    assert all(len(entry.hashes) == len(entry.parts) for entry in manifest.tensors)
