"""What a checkpoint must have for this learner to go on from it."""

from __future__ import annotations

import msgspec
import pytest
import torch

from streamrl.errors import Refused
from streamrl.learner.checkpoint import FORMAT, Checkpoints, InvalidCheckpoint, Meta, shard_name
from streamrl.learner.checkpoint_files import RankState, WriteProgress
from streamrl.learner.ranks import rows_of
from streamrl.learner.takeover import check_fit


class Weights:
    """A part with tensors."""

    def __init__(self, **tensors):
        self.tensors = tensors

    def shard_state(self):
        return {name: tensor.clone() for name, tensor in self.tensors.items()}

    def load_shard_state(self, tensors):
        if {n: t.shape for n, t in tensors.items()} != {n: t.shape for n, t in self.tensors.items()}:
            raise Refused("of another model")
        self.tensors = dict(tensors)


class Coefficient:
    """A part with a number."""

    def __init__(self, value):
        self.value = value

    def state(self):
        return {"value": self.value}

    def load_state(self, state):
        self.value = state["value"]


META = Meta(epoch=1, step=4, version=5, model="here", format=FORMAT)


def parts(fill=1.0):
    return {
        "actor": Weights(weight=torch.full((5, 2), fill), updates=torch.tensor(7)),
        "kl": Coefficient(0.1 + fill),
        "critic": Weights(weight=torch.arange(4.0) * fill),
    }


def state_of(ranks, held):
    models = {name: part for name, part in held.items() if isinstance(part, Weights)}
    return RankState(ranks, models, {name: part for name, part in held.items() if name not in models})


def written(ranks, folder, held):
    """Save and wait; the meta data with what the parts say."""
    state = state_of(ranks, held)
    folder.mkdir(exist_ok=True)
    state.save(folder)
    while state.saved() is WriteProgress.WRITING:
        pass
    assert state.saved() is WriteProgress.WRITTEN
    meta = state.describe(META)
    return msgspec.json.decode(msgspec.json.encode(msgspec.structs.replace(meta, shards=state.shards)), type=Meta)


def test_all_parts_come_back(one_rank, tmp_path):
    meta = written(one_rank, tmp_path, parts(2.5))
    assert (meta.parts, meta.world) == (["actor", "critic", "kl"], 1)
    found = parts(0.0)
    state_of(one_rank, found).load(tmp_path, meta)
    expected = parts(2.5)
    for name in ("actor", "critic"):
        ours, theirs = found[name].tensors, expected[name].tensors
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert found["kl"].value == expected["kl"].value


def test_training_may_go_on_while_the_copy_is_written(one_rank, tmp_path):
    held = parts()
    state = state_of(one_rank, held)
    state.save(tmp_path)
    held["actor"].tensors["weight"].fill_(99.0)
    while state.saved() is WriteProgress.WRITING:
        pass
    found = parts(0.0)
    state_of(one_rank, found).load(tmp_path, state.describe(META))
    assert torch.equal(found["actor"].tensors["weight"], torch.ones(5, 2))


@pytest.mark.parametrize(
    ("lacks", "word"), [("critic", "no state of critic"), ("kl", "no state of kl"), ("actor", "no state of actor")]
)
def test_a_checkpoint_that_lacks_a_part_is_refused(one_rank, tmp_path, lacks, word):
    held = parts()
    del held[lacks]
    meta = written(one_rank, tmp_path, held)
    with pytest.raises(Refused, match=word):
        state_of(one_rank, parts()).load(tmp_path, meta)
    with pytest.raises(Refused, match=f"state of {lacks}, which this learner does not have"):
        state_of(one_rank, held).load(tmp_path, written(one_rank, tmp_path, parts()))


def test_a_checkpoint_of_another_model_is_refused(one_rank, tmp_path):
    meta = written(one_rank, tmp_path, {"actor": Weights(weight=torch.ones(3, 2))})
    with pytest.raises(Refused, match="another model"):
        state_of(one_rank, {"actor": Weights(weight=torch.ones(2, 3))}).load(tmp_path, meta)


def test_a_missing_file_is_an_error(one_rank, tmp_path):
    meta = written(one_rank, tmp_path, parts())
    (tmp_path / shard_name(0, 1)).unlink()
    with pytest.raises(InvalidCheckpoint):
        state_of(one_rank, parts()).load(tmp_path, meta)


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"format": 1}, "format 1, this version of streamrl reads and writes"),
        ({"format": FORMAT + 1}, f"format {FORMAT + 1}"),
        ({"kind": "recording"}, "is of a recording"),
        ({"model": "there"}, "trained from model there, model.path is here"),
    ],
)
def test_what_a_learner_cannot_go_on_from_is_refused(changed, word):
    check_fit(META, "model", "here")
    with pytest.raises(Refused, match=word) as error:
        check_fit(msgspec.structs.replace(META, **changed), "model", "here")
    assert error.value.hint


def test_meta_data_of_the_first_format_is_known_as_such():
    """It had no `format`; nothing of it is guessed."""
    old = {"epoch": 1, "step": 2, "version": 3, "world": 1, "shards": []}
    assert msgspec.json.decode(msgspec.json.encode(old), type=Meta).format == 1


def test_a_shard_that_cannot_be_written_is_a_failure_and_the_next_one_counts(one_rank, tmp_path):
    state = state_of(one_rank, parts())
    assert state.saved() is WriteProgress.FAILED  # nothing was begun
    for folder, expected in ((tmp_path / "none", WriteProgress.FAILED), (tmp_path, WriteProgress.WRITTEN)):
        state.save(folder)
        while state.saved() is WriteProgress.WRITING:
            pass
        assert state.saved() is expected


@pytest.mark.parametrize("damage", ["missing", "short"])
def test_a_shard_that_rank_0_does_not_find_is_no_checkpoint(one_rank, tmp_path, damage):
    checkpoints = Checkpoints(tmp_path)
    draft = checkpoints.begin(META.position)
    meta = written(one_rank, draft, parts())
    shard = draft / shard_name(0, 1)
    if damage == "missing":
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises((OSError, InvalidCheckpoint)):
        checkpoints.finish(meta)
    assert checkpoints.positions() == []


def test_rows_of_a_rank_are_equal_pieces():
    for size in (0, 1, 2, 5, 61, 64):
        for world in (1, 2, 3, 7):
            pieces = [rows_of(size, rank, world) for rank in range(world)]
            rows = torch.arange(size)
            assert torch.cat([rows[piece] for piece in pieces]).tolist() == rows.tolist()
            assert [len(rows[piece]) for piece in pieces] == [
                len(chunk) for chunk in [*rows.chunk(world), *[rows[:0]] * world][:world]
            ]
