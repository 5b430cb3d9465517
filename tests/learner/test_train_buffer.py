"""What is trained next: against a real ledger that is filled as the roles fill it."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from playing import Player, make_config, reward

from streamrl import wire
from streamrl.archive.writer import Archive
from streamrl.config.data import CurriculumConfig
from streamrl.errors import Fenced, Refused
from streamrl.learner.algorithms.recipe import Recipe
from streamrl.learner.checkpoint import FORMAT, Checkpoints, Meta
from streamrl.learner.ending import Finished, is_over, write_finished
from streamrl.learner.groups import GroupOpener
from streamrl.learner.lineage import join
from streamrl.learner.takeover import Start, take_over
from streamrl.learner.train_buffer import Stage, TrainBuffer
from streamrl.queues.ledgers import open_ledgers


@pytest.fixture
async def table(redis_run, tmp_path):
    """A run with a player and no learner."""
    config = make_config(redis_run.config, tmp_path / "model", redis_run.run_dir)
    async with open_ledgers(config, redis_run.run_dir) as ledgers:
        yield Table(config, ledgers, redis_run)


class Table:
    def __init__(self, config, ledgers, redis_run) -> None:
        self.config, self.ledgers, self.redis_run = config, ledgers, redis_run
        self.ledger = ledgers.train
        self.checkpoints = Checkpoints(redis_run.run_dir / "checkpoints")
        self.player = Player(ledgers, config)

    def configure(self, **learner) -> None:
        section = self.config.learner.model_copy(update=learner)
        self.config = self.config.model_copy(update={"learner": section})

    async def buffer(self, check=lambda _: None) -> TrainBuffer:
        start = await self.start()
        opener = GroupOpener(Recipe.of(self.config), check)
        return TrainBuffer(self.ledger, self.config, start, opener, Archive(self.config, self.redis_run.run_dir))

    async def start(self) -> Start:
        return await take_over(self.ledger, self.checkpoints, self.redis_run.run_dir, kind="model", model="tiny")

    async def play(self, times: int = 3) -> None:
        for _ in range(times):
            await self.player.once()

    def save(self, epoch: int, step: int, group_ids) -> Meta:
        """A checkpoint without weights that was trained on `group_ids`."""
        self.checkpoints.begin((epoch, step))
        meta = Meta(
            epoch=epoch,
            step=step,
            format=FORMAT,
            model="tiny",
            version=step,
            trained=join((group_id, group_id) for group_id in group_ids),
            count=len(group_ids),
            world=0,
        )
        self.checkpoints.finish(meta)
        return meta


def set_aside(buffer: TrainBuffer) -> set[int]:
    return {group.group_id for group in buffer._at(Stage.EQUAL_REWARDS)}


def ids(groups) -> list[int]:
    return [group.group_id for group in groups]


def equal(group_id: int) -> bool:
    """Whether the played rewards of a group are all the same."""
    return len({reward(group_id, sample) for sample in range(3)}) == 1


async def test_a_step_from_candidates_to_retirement(table):
    buffer = await table.buffer()
    await table.play()
    await buffer.refresh()
    first = buffer.choose(4, 10**9, last=False)
    assert ids(first) == [0, 1, 2, 3]  # the budget of 8 is full; the four oldest fill the step
    await buffer.start_step(first)
    await buffer.refresh()
    assert ids(buffer.choose(4, 0, last=False)) == [4, 5, 6, 7]
    assert ids(buffer.applied()) == [0, 1, 2, 3]
    await buffer.free_places([0, 1, 2, 3])
    state = await table.ledger.state()
    assert (state.unretired, state.live) == (4, 8)
    await table.play()
    assert (await table.ledger.state()).live == 12  # four places were free
    await buffer.saved("1-1", [0, 1, 2, 3])
    state = await table.ledger.state()
    assert (state.unretired, state.live, state.checkpoint, state.retired) == (0, 8, "1-1", 4)
    await buffer.saved("1-1", [0, 1, 2, 3])  # a repeat changes nothing
    assert (await table.ledger.state()).retired == 4


async def test_what_was_read_is_told_to_a_curriculum_and_to_the_figures(table):
    buffer = await table.buffer()
    await table.play()
    await buffer.refresh()
    assert await table.ledger.outcomes() == {}, "nobody wants to know"
    assert (ids(buffer.take_seen()), buffer.take_seen()) == (list(range(8)), [])
    assert buffer.newest is not None
    assert buffer.newest.group_id == 7
    data = table.config.data.model_copy(update={"curriculum": CurriculumConfig()})
    table.config = table.config.model_copy(update={"data": data})
    for _ in range(2):  # a learner that died after it had told
        buffer = await table.buffer()
        await buffer.refresh()
        buffer.set_equal_aside(8)
        await buffer.drop_equal()
    told = await table.ledger.outcomes()
    assert told.keys() == set(range(8)), "also those that were dropped at once"
    for group_id, outcome in told.items():
        prompt = wire.Prompt(tokens=wire.pack_int32([1 + group_id, 2, 3]), line=group_id)
        scores = [reward(group_id, sample) for sample in range(3)]
        assert msgspec.json.decode(outcome) == [wire.prompt_key(wire.encode(prompt)), scores]
    await table.ledger.forget_outcomes(range(7))
    await table.ledger.forget_outcomes(range(7))
    assert (await table.ledger.outcomes()).keys() == {7}


async def test_a_checkpoint_that_ends_while_a_version_is_published_makes_no_room_for_its_step(table):
    buffer = await table.buffer()

    async def train() -> list[int]:
        await table.play()
        await buffer.refresh()
        await buffer.start_step(buffer.choose(4, 0, last=False))
        return ids(buffer.applied())

    await buffer.free_places(await train())
    trained = await train()
    await buffer.saved(table.save(1, 1, range(4)).name, range(4))
    await buffer.announce(2, b"{}")  # the new version is shown, its step not consumed yet
    await table.play()
    state = await table.ledger.state()
    assert (state.unretired, state.live, state.version) == (0, 8, 2)
    await buffer.free_places(trained)
    await table.play()
    state = await table.ledger.state()
    assert (state.unretired, state.live) == (4, 12)
    again = await table.buffer()  # one that knows the checkpoint only
    await again.free_places([])
    assert (await table.ledger.state()).unretired == 0


async def test_equal_rewards_keep_their_places_until_they_are_dropped(table):
    buffer = await table.buffer()
    await table.play()
    await buffer.refresh()
    assert equal(0)
    lost = [group_id for group_id in range(4) if equal(group_id)]
    assert buffer.set_equal_aside(4) == len(lost)
    await table.play()
    await buffer.refresh()
    assert set_aside(buffer) == set(lost)
    assert not set_aside(buffer) & set(ids(buffer.choose(8, 0, last=True)))
    state = await table.ledger.state()
    assert (state.live, state.cursor, state.dropped) == (8, 8, 0)  # nobody took a place
    assert buffer.untrained == 8 - len(lost)
    again = await table.buffer()  # one that died here loses nothing
    await again.refresh()
    assert ids(again.choose(4, 0, last=True)) == [0, 1, 2, 3]
    again.set_equal_aside(4)
    await again.drop_equal()
    await again.drop_equal()  # a repeat drops nothing
    assert await table.ledger.dropped() == lost
    assert (again.zero_variance, again.dropped, set_aside(again)) == (len(lost), len(lost), set())


async def test_in_strict_order_only_the_oldest_live_groups_are_lost_to_equal_rewards(table):
    table.configure(order="strict")
    buffer = await table.buffer()
    table.player.open_only = {1, 2, 3}
    await table.play()
    await buffer.refresh()
    assert equal(4)
    assert buffer.set_equal_aside(4) == 1  # group 0: 4 is closed, and not among the first four
    await buffer.drop_equal()
    # A new place is there at once, without another reading: what is dropped is not waited for.
    assert ids(buffer.choose(4, 0, last=False)) == [4]


async def test_micro_batches_wait_for_tokens_or_the_last_group(table):
    buffer = await table.buffer()
    table.player.open_only = {2}
    await table.play()
    await buffer.refresh()
    cost = sum(group.cost for group in buffer.choose(8, 0, last=False))
    assert ids(buffer.choose(8, cost, last=False)) == [0, 1, 3, 4, 5, 6, 7]
    assert buffer.choose(8, cost + 1, last=False) == []
    assert ids(buffer.choose(8, cost + 1, last=True)) == [0, 1, 3, 4, 5, 6, 7]
    assert ids(buffer.choose(2, cost + 1, last=False)) == [0, 1]


async def test_strict_order_waits_for_the_oldest_live_group(table):
    table.configure(order="strict")
    buffer = await table.buffer()
    table.player.open_only = {1}
    await table.play()
    await buffer.refresh()
    assert ids(buffer.choose(4, 0, last=False)) == [0, 2, 3]
    await buffer.start_step(buffer.choose(4, 0, last=False))
    assert buffer.choose(1, 0, last=True) == []
    table.player.open_only = set()
    await table.play()
    await buffer.refresh()
    assert ids(buffer.choose(1, 0, last=False)) == [1]


async def test_ids_of_the_chain_come_back_and_are_retired_untrained(table):
    first = await table.buffer()
    await table.play()
    await first.refresh()
    meta = table.save(1, 1, [1, 2])
    again = await table.buffer()
    assert again.durable == {1, 2}
    await again.refresh()
    state = await table.ledger.state()
    assert (state.retired, state.checkpoint) == (2, meta.name)
    assert ids(again.choose(4, 0, last=False)) == [0, 3, 4, 5]


async def test_old_tokens_are_dropped_not_trained(table):
    table.configure(max_token_staleness=2)
    buffer = await table.buffer()
    for version in range(1, 4):
        buffer._branch.note(version, version - 1)
    await table.play()  # sampled by version 0: step 0
    await buffer.refresh()
    await buffer.drop_stale(2)
    assert buffer.dropped == 0
    await buffer.drop_stale(3)
    assert buffer.dropped == 8
    assert await table.ledger.dropped() == list(range(8))
    assert (await table.ledger.state()).live == 0


async def test_a_group_that_kills_learners_is_tried_alone_and_then_dead(table):
    await table.play()
    for _ in range(table.config.learner.max_group_crashes):
        buffer = await table.buffer()
        await buffer.refresh()
        tried = buffer.choose(4, 0, last=False)
        await buffer.start_step([group for group in tried if group.group_id == 0])
    assert ids(tried) == [0]  # from the second time on alone
    buffer = await table.buffer()
    await buffer.refresh()
    letters = [letter for letter in await table.ledger.dead_letters() if letter.sample is None]
    assert [letter.group_id for letter in letters] == [0]
    assert ids(buffer.choose(4, 0, last=False)) == [1, 2, 3, 4]


async def test_computed_and_released_groups_are_not_suspects(table):
    buffer = await table.buffer()
    await table.play()
    await buffer.refresh()
    groups = buffer.choose(2, 0, last=False)
    await buffer.start_step(groups)
    buffer.computed(groups[:1])
    await buffer.clear_crash_counts()
    await buffer.release(groups[1:])
    assert ids(buffer.in_step) == [0]
    again = await table.buffer()
    await again.refresh()
    assert [group.crashes for group in again.choose(4, 0, last=False)] == [0, 0, 0, 0]


async def test_clearing_crash_counts_makes_no_room_with_groups_that_have_gone(table):
    """Redis went back, or retired, after the last reading: what is held then is not what was read."""
    buffer = await table.buffer()
    await table.play()
    await buffer.refresh()
    await buffer.start_step(buffer.choose(4, 0, last=False))
    await buffer.free_places(ids(buffer.applied()))
    groups = buffer.choose(4, 0, last=False)
    await buffer.start_step(groups)
    await table.ledger.connection.read("HSET", table.ledger.keys.state, "held", 0)
    buffer.computed(groups)
    await buffer.clear_crash_counts()
    await table.play()
    state = await table.ledger.state()
    assert (state.unretired, state.live) == (0, 8)


@pytest.mark.parametrize("payload", [b"", b"\x80", b"{}", wire.encode(wire.SampleScore(value=1.0))])
async def test_a_foreign_message_is_a_dead_letter(table, payload):
    table.player.spoil[0, 1] = payload
    buffer = await table.buffer()
    await table.play()
    # The played reward worker scores without looking, so the learner is the first to decode.
    await buffer.refresh()
    letters = [letter for letter in await table.ledger.dead_letters() if letter.sample is None]
    assert [letter.group_id for letter in letters] == [0]
    assert ids(buffer.choose(2, 0, last=False)) == [1, 2]


def refuse_1(samples) -> None:
    if samples[0].group_id == 1:
        raise ValueError("too long")


async def test_a_group_that_does_not_fit_the_model_is_a_dead_letter(table):
    buffer = await table.buffer(refuse_1)
    await table.play()
    await buffer.refresh()
    letters = [letter for letter in await table.ledger.dead_letters() if letter.sample is None]
    assert [(letter.group_id, "too long" in letter.why) for letter in letters] == [(1, True)]


async def test_dead_groups_that_are_to_be_replayed_are_more_data(table):
    table.player.end = 2
    buffer = await table.buffer(refuse_1)
    await table.play()
    assert await buffer.ended()
    ended = Finished(reason="data", step=1, version=1, epoch=1, epochs=1)
    write_finished(table.redis_run.run_dir, ended)
    await table.ledger.retire(buffer._nonce, "1-1", 0, [0])
    assert await is_over(table.config, table.redis_run.run_dir, table.ledger)
    await table.ledger.queue_replays([1])
    assert not await buffer.ended()
    assert not await is_over(table.config, table.redis_run.run_dir, table.ledger)
    assert not (table.redis_run.run_dir / "finished.json").exists(), "a learner that is stopped now has not finished"


async def test_end_of_data(table):
    table.player.end = 6
    table.player.open_only = {5}
    buffer = await table.buffer()
    await table.play()
    assert not await buffer.ended()  # one group is still open
    table.player.open_only = set()
    await table.play()
    assert await buffer.ended()
    assert buffer.untrained == 6
    more = table.config.data.model_copy(update={"epochs": 2})
    table.config = table.config.model_copy(update={"data": more})
    assert not await (await table.buffer()).ended()  # somebody wants another epoch: the feeder has not gone on yet


async def test_a_fenced_learner_writes_nothing(table):
    old = await table.buffer()
    await table.play()
    await old.refresh()
    new = await table.buffer()
    await new.refresh()
    groups = old.choose(4, 0, last=False)
    for write in (
        old.start_step(groups),
        old.announce(9, b"{}"),
        old.saved("1-9", []),
        old.drop_stale(100),
    ):
        with pytest.raises(Fenced):
            await write
    state = await table.ledger.state()
    assert (state.unretired, state.version, state.checkpoint, state.dropped, state.live) == (0, 0, None, 0, 8)


async def test_an_older_checkpoint_than_redis_retired_for_is_refused(table):
    buffer = await table.buffer()
    await table.play()
    await buffer.refresh()
    table.save(1, 1, [0])
    newest = table.save(2, 2, [0, 1])
    again = await table.buffer()
    await again.refresh()
    table.checkpoints.path(newest.position).rename(table.redis_run.run_dir / "elsewhere")
    with pytest.raises(Refused, match="ckpt-2-2"):
        await table.buffer()


async def test_weights_that_do_not_fit_their_ids_are_refused(table):
    meta = table.save(1, 1, [0, 1])
    path = table.checkpoints.path(meta.position) / "meta.json"
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(meta, count=3)))
    with pytest.raises(Refused, match="trained on 3 groups and names 2"):
        await table.buffer()


async def test_a_wiped_redis_goes_on_behind_what_was_trained(table):
    table.save(1, 1, [0, 1, 2, 4])
    buffer = await table.buffer()
    assert (await table.ledger.state()).cursor == 3
    await table.play()
    await buffer.refresh()
    assert ids(buffer.choose(2, 0, last=False)) == [3, 5]  # 4 came again and was retired


async def test_a_learner_that_is_fenced_while_it_starts_takes_nothing_back(table, monkeypatch):
    table.save(1, 1, [0, 1])
    fence, calls = table.ledger.fence, []

    async def overtaken(nonce, *rest):
        answer = await fence(nonce, *rest)
        if not calls:
            calls.append(await fence("newer", *rest))
        return answer

    monkeypatch.setattr(table.ledger, "fence", overtaken)
    with pytest.raises(Fenced):
        await table.buffer()
    await table.ledger.resume("newer", "1-1", calls[0].epoch)


async def test_the_doorbell_rings(table):
    buffer = await table.buffer()
    following = asyncio.create_task(buffer.follow())
    try:
        await asyncio.wait_for(buffer.changed.wait(), 10)
        await table.play()
        while len(buffer.choose(8, 10**9, last=True)) < 8:
            buffer.changed.clear()
            await asyncio.wait_for(buffer.changed.wait(), 10)
    finally:
        following.cancel()


def test_played_rewards_have_both_kinds():
    spread = [len({reward(group_id, sample) for sample in range(3)}) for group_id in range(20)]
    assert 1 in spread
    assert 2 in spread


async def test_groups_whose_images_cannot_be_read_for_a_while_stay(table, caplog):
    await table.play(1)
    outage = [OSError("the store does not answer")]

    def check(samples):
        if outage:
            raise outage.pop()

    buffer = await table.buffer(check)
    await buffer.refresh()
    assert "images of a group cannot be read" in caplog.text
    before = len(buffer.choose(9, 0, last=True))
    await buffer.refresh()
    assert len(buffer.choose(9, 0, last=True)) == before + 1
    assert not await table.ledger.dead_letters()
