"""Going back to an earlier version: the weights of that version under a new number, once, by all ranks, durably."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal

import pytest
import torch
from loop_kit import DEADLINE, stopped

from streamrl.errors import Fenced
from streamrl.learner.chain import Branch, read_versions
from streamrl.queues.ledgers import open_ledgers
from streamrl.queues.rollback import Answer, RollbackDesk, parse
from streamrl.weight_sync.chain import pin
from streamrl.weight_sync.manifest import versions
from streamrl.weight_sync.tensors import map_version

ANSWER = "streamrl.queues.rollback:RollbackDesk.answer"


def tensors(folder, pair):
    manifest = versions(folder)[pair]
    return dict(map_version(folder / manifest.folder, manifest).tensors)


def equal(left, right) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@contextlib.asynccontextmanager
async def desk_of(run):
    async with open_ledgers(run.config, run.run_dir) as ledgers:
        yield RollbackDesk(ledgers.train.connection, ledgers.train.keys)


async def until(desk, *answers: Answer):
    async with asyncio.timeout(DEADLINE):
        while (found := await desk.look()) is None or found.answer not in answers:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return found


async def train_and_stop(run, steps, **options) -> None:
    """Train some steps and stop; the next learner goes on from the checkpoint."""
    run.configure(steps=steps, **options)
    assert await run.learn() == 0, run.log()
    (run.run_dir / "finished.json").unlink()


def pin_newest(run) -> tuple[int, int]:
    pair = max(versions(run.run_dir / "weights"))
    pin(run.run_dir / "weights", run.run_dir, pair)
    return pair


async def test_the_request_waits_for_a_learner_which_goes_back_once_and_makes_it_durable(run):
    async with run.play(), desk_of(run) as desk:
        await train_and_stop(run, 2)
        old = pin_newest(run)
        assert old == (1, 3)
        await train_and_stop(run, 4)
        await desk.ask("one", *old)
        assert (await desk.look()).answer is Answer.WAITING
        run.configure(steps=8)
        pid = run.start(f"{ANSWER}:pause:1")
        await run.until(lambda: stopped(pid))
        new = max(versions(run.run_dir / "weights"))
        assert new == (3, 8)  # 7 is what the checkpoint holds
        assert equal(tensors(run.run_dir / "weights", new), tensors(run.run_dir / "pinned", old))
        assert not equal(tensors(run.run_dir / "weights", (3, 7)), tensors(run.run_dir / "pinned", old))
        os.kill(pid, signal.SIGCONT)
        assert await run.wait(pid) == 0, run.log()
        done = await desk.look()
        assert (done.answer, done.text) == (Answer.DONE, "8")
        assert run.log().count("weights rolled back") == 1
    notes = read_versions(run.run_dir / "checkpoints")
    assert [(note.version, note.step) for note in notes if note.epoch == 3] == [
        (7, 4), (8, 4), (9, 5), (10, 6), (11, 7), (12, 8)
    ]  # fmt: skip
    branch = Branch(notes, {1, 2, 3}, 4, 8)
    assert [branch.step(version) for version in (3, 7, 8, 9)] == [2, 4, 4, 5]
    found = await run.audit()
    assert found.trained == 32


async def test_a_learner_that_dies_before_a_checkpoint_holds_it_is_followed_by_one_that_does_it_again(run):
    async with run.play(), desk_of(run) as desk:
        await train_and_stop(run, 2)
        old = pin_newest(run)
        await desk.ask("one", *old)
        run.configure(steps=6, checkpoint_every=4)
        assert await run.learn(f"{ANSWER}:after:1") == -signal.SIGKILL
        assert (await desk.look()).answer is Answer.SHOWN
        assert await run.learn() == 0, run.log()
        assert (await desk.look()).answer is Answer.DONE
        assert run.log().count("weights rolled back") == 2
    await run.audit()


@pytest.mark.parametrize("damage", ["gone", "torn", "another model"])
async def test_what_cannot_be_loaded_is_refused_and_training_goes_on(run, damage):
    async with run.play(), desk_of(run) as desk:
        await train_and_stop(run, 2)
        old = pin_newest(run)
        folder = run.run_dir / "pinned" / f"v-{old[0]}-{old[1]}"
        if damage == "gone":
            shutil.rmtree(folder)
        elif damage == "torn":
            file = next(folder.glob("r000*"))
            file.write_bytes(file.read_bytes()[:-1])
        else:
            manifest = folder / "manifest.json"
            manifest.write_bytes(manifest.read_bytes().replace(b'"shape":[32,', b'"shape":[16,', 1))
        await desk.ask("one", *old)
        run.configure(steps=4)
        assert await run.learn() == 0, run.log()
        found = await desk.look()
        assert found.answer is Answer.REFUSED
        assert "not pinned" in found.text
        assert "rollback refused" in run.log()
        assert run.newest().step == 4
    await run.audit()


async def test_two_ranks_go_back_together_while_they_train(run, tmp_path):
    """A learner at work: the request is seen at the next step, and a second one after it."""
    run.configure(ranks=2, steps=None)
    environ = {"WORLD_SIZE": "2", "STREAMRL_RENDEZVOUS": f"file://{tmp_path}/meet"}
    async with run.play(), desk_of(run) as desk:
        pids = [run.start(None, name=f"learner.{rank}", environ={**environ, "RANK": str(rank)}) for rank in range(2)]
        await run.until(lambda: len(run.steps()) >= 1)
        pair = None
        while pair is None:
            with contextlib.suppress(Exception):  # it went while it was copied: take the next one
                pair = pin_newest(run)
        for name in ("one", "two"):
            await desk.ask(name, *pair)
            found = await until(desk, Answer.SHOWN, Answer.DONE)
            assert found.id == name
            assert int(found.text) > pair[1]
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        assert [await run.wait(pid) for pid in pids] == [0, 0], run.log() + run.log("learner.1")
        assert run.log().count("weights rolled back") == 2
    await run.audit()


async def test_the_answer_names_a_version_that_engines_can_get(run, tmp_path):
    """The first version with the old weights is lost: they are published again before anything is trained on them."""

    def start(meeting, fault=None):
        environ = {"WORLD_SIZE": "2", "STREAMRL_RENDEZVOUS": f"file://{tmp_path}/{meeting}"}
        faults = (None, fault)
        return [
            run.start(faults[rank], name=f"learner.{rank}", environ={**environ, "RANK": str(rank)}) for rank in range(2)
        ]

    async with run.play(), desk_of(run) as desk:
        run.configure(ranks=2, steps=2)
        assert [await run.wait(pid) for pid in start("first")] == [0, 0], run.log()
        (run.run_dir / "finished.json").unlink()
        old = pin_newest(run)
        await desk.ask("one", *old)
        run.configure(ranks=2, steps=4, weights={"deadline": 1.0})
        pids = start("second", "streamrl.weight_sync.rank_writer:RankWriter.deliver:none:2")
        assert [await run.wait(pid) for pid in pids] == [0, 0], run.log() + run.log("learner.1")
        assert run.log().count("version not published") == 1
        assert (await desk.look()).text == "6"  # 4 is what the checkpoint holds, 5 was lost
    notes = {note.version: note.step for note in read_versions(run.run_dir / "checkpoints")}
    assert [notes[version] for version in (4, 5, 6, 7)] == [2, 2, 2, 3]


def test_nonsense_in_redis_is_no_request():
    assert parse("", "") is None
    assert parse("id 1", "") is None
    assert parse("id 1 x", "") is None
    assert parse(" 1 2", "") is None
    assert parse("id 1 2", "id maybe 3").answer is Answer.WAITING
    assert parse("id 1 2", "other shown 3").answer is Answer.WAITING
    found = parse("id 1 2", "id refused because of that")
    assert (found.epoch, found.version, found.answer, found.text) == (1, 2, Answer.REFUSED, "because of that")


async def test_a_fenced_learner_answers_nothing(run):
    async with open_ledgers(run.config, run.run_dir) as ledgers:
        desk = RollbackDesk(ledgers.train.connection, ledgers.train.keys)
        await ledgers.train.fence("new", 0)
        await desk.ask("one", 1, 2)
        await desk.ask("one", 1, 2)
        with pytest.raises(Fenced):
            await desk.answer("old", "one", Answer.DONE, "3")
        assert (await desk.look()).answer is Answer.WAITING
        await desk.answer("new", "one", Answer.SHOWN, "3")
        await desk.ask("two", 1, 1)  # takes its place
        assert (await desk.look()).answer is Answer.WAITING
