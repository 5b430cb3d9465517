"""Held-out groups are in the archive before they are retired, once, also after a death of the feeder."""

from __future__ import annotations

from producer_kit import Hands, until

from streamrl.archive.reader import archive_files, read_archive
from streamrl.config import ArchiveConfig
from streamrl.producers.feeder import run_feeder


async def evaluated(run, ledgers, until_there: int, version: int) -> None:
    """One life of the feeder, in which held-out groups are answered and scored."""
    learner, hands = Hands(ledgers.train), Hands(ledgers.evaluation)
    await learner.fence()
    await ledgers.train.finish_step(learner.nonce, 0, version, b"{}")
    async with run.running(run_feeder, "feeder.0", ledgers) as (role, _):
        while role.status.get("evaluated", 0) < until_there:
            await hands.answer(version=version)
            await hands.score(lambda group_id, sample: float(group_id))
        await until(lambda: role.status.get("accuracy_version") == version)
        assert role.status["archive_lost"] == 0


async def test_evaluated_groups_are_archived(run):
    run.evaluate(prompts=3, samples=2).set(None, archive=ArchiveConfig().model_dump())
    async with run.open() as ledgers:
        await evaluated(run, ledgers, 3, version=1)
        await evaluated(run, ledgers, 6, version=2)
    groups = list(read_archive(run.run_dir, evaluation=True))
    assert [group.group_id for group in groups] == [0, 1, 2, 3, 4, 5]
    assert all(group.prompt.evaluation for group in groups)
    assert [[sample.score.value for sample in group.samples] for group in groups] == [[float(n)] * 2 for n in range(6)]
    assert archive_files(run.run_dir) == []
    assert len(archive_files(run.run_dir, evaluation=True)) == 2


async def test_a_group_that_was_evaluated_before_a_roll_back_is_not_archived_anew(run):
    """Redis forgets groups 1 and 2, and they are generated again: the file and the archive keep the first ones."""
    run.evaluate(prompts=3, samples=1).set(None, archive=ArchiveConfig().model_dump())
    async with run.open() as ledgers:
        await evaluated(run, ledgers, 3, version=1)
        before = {group.group_id: group.raw for group in read_archive(run.run_dir, evaluation=True)}
        await ledgers.connection.read("HSET", ledgers.evaluation.keys.state, "cursor", "1")
        await evaluated(run, ledgers, 6, version=2)
    after = {group.group_id: group.raw for group in read_archive(run.run_dir, evaluation=True)}
    assert set(after) == {0, 1, 2, 3, 4, 5}
    assert {group_id: after[group_id] for group_id in before} == before
