"""What each script does that the model of `test_model` does not know, and that a repeat changes nothing."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from streamrl.errors import Fenced, Refused
from streamrl.queues import Lease, Ledger, Ledgers
from streamrl.queues.records import AdmitOutcome, ReplayOutcome, ScoreOutcome
from tests.queues.conftest import both_versions
from tests.queues.ledger_kit import admit, close_group, everything, faults, lease, replay, same_again, take

pytestmark = both_versions


async def test_admit_takes_the_cursor_as_the_id_and_moves_it(ledgers: Ledgers):
    train = ledgers.train
    first = await admit(train, 0, prompt=b"what?", samples=3, version=7)
    assert (first.outcome, first.cursor) == (AdmitOutcome.ADMITTED, 1)
    (prompt,) = await lease(train, "prompts")
    work = await train.open_work(prompt)
    assert (prompt.group_id, prompt.attempt, prompt.sample, prompt.deliveries) == (0, 1, None, 1)
    assert (work.prompt, work.missing) == (b"what?", (0, 1, 2))
    again = await admit(train, 0)
    assert (again.outcome, again.cursor) == (AdmitOutcome.MOVED, 1)
    await same_again(train, lambda: admit(train, 0))
    ahead = await admit(train, 5)
    assert (ahead.outcome, ahead.cursor) == (AdmitOutcome.MOVED, 1)


async def test_admit_keeps_both_bounds(ledgers: Ledgers):
    """Budget: live - held. Hard cap: live. Consumed groups free the budget, not the cap."""
    train = ledgers.train
    for cursor in range(2):
        await close_group(train, cursor, budget=2, hard_cap=3)
    assert (await admit(train, 2, budget=2, hard_cap=3)).outcome is AdmitOutcome.FULL
    await train.fence("n", 0)
    await train.finish_step("n", 2, 1, b"m", [0, 1])
    assert (await admit(train, 2, budget=2, hard_cap=3)).outcome is AdmitOutcome.ADMITTED
    assert (await admit(train, 3, budget=2, hard_cap=3)).outcome is AdmitOutcome.FULL
    await same_again(train, lambda: admit(train, 3, budget=2, hard_cap=3))


async def test_other_data_and_too_many_dead_letters_stop_admission(ledgers: Ledgers):
    train = ledgers.train
    await admit(train, 0, samples=3)
    with pytest.raises(Refused, match="other data"):
        await admit(train, 1, fingerprint="another seed")
    assert (await train.state()).cursor == 1
    (prompt,) = await lease(train, "prompts")
    await train.fail_sample(prompt, 0, "engine")
    await train.fail_sample(prompt, 1, "engine")
    assert (await admit(train, 1, max_dead=2)).outcome is AdmitOutcome.TOO_MANY_DEAD
    assert (await admit(train, 1, max_dead=3)).outcome is AdmitOutcome.ADMITTED


async def test_finish_only_where_the_cursor_stands(ledgers: Ledgers):
    train = ledgers.train
    await admit(train, 0)
    assert not await train.finish(2)
    assert (await train.state()).done is None
    assert await train.finish(1)
    await same_again(train, lambda: train.finish(1))
    assert (await train.state()).done == 1


async def test_a_group_goes_from_prompt_to_closed(ledgers: Ledgers):
    train = ledgers.train
    await admit(train, 0, samples=2, version=3)
    (prompt,) = await lease(train, "prompts")
    assert await train.emit(prompt, 1, b"one")
    await same_again(train, lambda: train.emit(prompt, 1, b"other"))
    assert (await train.open_work(prompt)).missing == (0,)
    assert await train.emit(prompt, 0, b"zero")
    assert await train.open_work(prompt) is None
    assert await lease(train, "prompts") == []
    samples = {sample.sample: sample for sample in await lease(train, "rollouts", count=10)}
    found = await train.leased_sample(samples[1])
    assert (found.prompt, found.payload) == (b"prompt 0", b"one")
    assert await train.score(samples[1], b"0.5") is ScoreOutcome.SCORED
    assert await train.score(samples[1], b"0.9") is ScoreOutcome.LOST
    assert await train.closed() == []
    assert await train.read_group(0) is None
    assert await train.score(samples[0], b"0.25") is ScoreOutcome.CLOSED
    await same_again(train, lambda: train.score(samples[0], b"0.9"))
    assert await train.closed() == [0]
    group = await train.read_group(0)
    assert group.samples == {0: (b"zero", b"0.25"), 1: (b"one", b"0.5")}
    assert (group.size, group.attempt, group.version, group.causes, group.crashes) == (2, 1, 3, {}, 0)
    assert await train.leased_sample(samples[0]) is None


async def test_samples_die_at_each_stage_and_the_group_closes_with_the_rest(ledgers: Ledgers):
    train = ledgers.train
    await admit(train, 0, samples=4, min_group=2)
    (prompt,) = await lease(train, "prompts")
    for k in (0, 1, 2):
        await train.emit(prompt, k, b"%d" % k)
    assert await train.fail_sample(prompt, 3, "engine error", "Traceback: ...")
    await same_again(train, lambda: train.fail_sample(prompt, 3, "engine error"))
    assert not await train.fail_sample(prompt, 0, "too late")
    assert not await train.emit(prompt, 3, b"too late")
    samples = await lease(train, "rollouts", count=10)
    assert await train.fail_score(samples[0], "reward raised", "x" * 10_000)
    await same_again(train, lambda: train.fail_score(samples[0], "reward raised"))
    assert await train.score(samples[1], b"1") is ScoreOutcome.SCORED
    assert await train.score(samples[2], b"1") is ScoreOutcome.CLOSED
    group = await train.read_group(0)
    assert set(group.samples) == {1, 2}
    assert group.causes == {0: "reward raised", 3: "engine error"}
    letters = await train.dead_letters()
    assert [(letter.sample, letter.stage, letter.why) for letter in letters] == [
        (3, "generate", "engine error"),
        (0, "reward", "reward raised"),
    ]
    assert len(letters[1].detail) == 4096  # hole 22: a traceback is capped
    assert await faults(train) == []


async def test_a_journal_belongs_to_one_holder_and_ends_with_its_sample(ledgers: Ledgers):
    """The turns of a sample; a holder whose lease was given out again writes and forgets nothing."""
    train = ledgers.train
    await admit(train, 0, samples=3, min_group=1)
    (old,) = await lease(train, "prompts", "a")
    for sample in range(3):
        assert await train.journal(old, sample, 0, b"first")
    assert await train.journal(old, 0, 1, b"second", b"state")
    assert await train.journal(old, 0, 2, b"third", b"newer state")
    assert await train.journal(old, 0, 3, b"fourth")
    assert await train.journal(old, 1, 1, b"second", b"state")
    assert await train.journal(old, 2, 1, b"second", b"state")
    assert not await train.journal(old, 0, 5, b"the turn before it is missing", b"nor is its state written")
    assert await faults(train) == []
    assert (await train.trace(0))["journaled"] == {0: 4, 1: 2, 2: 2}
    new = await take(train, "prompts", old, "b")
    before = await everything(train)
    assert not await train.journal(old, 0, 4, b"zombie", b"its state")
    assert not await train.forget_journal(old, 0)
    assert await everything(train) == before
    assert await train.read_journal(new, 0) == ([b"first", b"second", b"third", b"fourth"], b"newer state")
    assert await train.forget_journal(new, 0)
    assert await train.read_journal(new, 0) == ([], None)
    assert await train.journal(new, 0, 0, b"again", b"state")
    assert await train.emit(new, 0, b"payload")
    assert not await train.journal(new, 0, 1, b"after its end")
    assert await train.fail_sample(new, 1, "engine")
    assert (await train.trace(0))["journaled"] == {2: 2}
    assert await train.fail_prompt(new, "prompt")
    assert (await train.trace(0))["journaled"] == {}
    (sample,) = await lease(train, "rollouts")
    assert await train.score(sample, b"s") is ScoreOutcome.CLOSED
    assert not [name for name in (await everything(train))[train.keys.group(0)] if name.startswith(b"j:")]


async def test_a_part_that_became_durable_clears_the_work_of_deaths(ledgers: Ledgers):
    """But not turns of an episode that begins again each time: work that kills at a later turn would live for ever."""
    train, stream = ledgers.train, ledgers.train.keys.prompts
    await admit(train, 0, samples=3, min_group=1)
    (held,) = await lease(train, "prompts", "a")

    async def taken(deaths: int) -> Lease:
        claim = ("XCLAIM", stream, "g", "b", 0, held.entry, "RETRYCOUNT", deaths, "JUSTID")
        await ledgers.connection.read(*claim)
        return replace(held, consumer="b", deliveries=deaths)

    async def deliveries() -> int:
        ((_, owner, _, count),) = await ledgers.connection.read("XPENDING", stream, "g", "-", "+", 10)
        assert owner == b"b"
        return count

    new = await taken(4)
    assert await train.journal(new, 0, 0, b"turn")
    assert await deliveries() == 1
    await taken(4)
    assert await train.emit(new, 1, b"payload")
    assert await deliveries() == 1
    assert await train.forget_journal(new, 0)
    await taken(4)
    assert await train.journal(new, 0, 0, b"turn")
    assert await deliveries() == 4
    assert await train.emit(new, 0, b"payload")
    assert await deliveries() == 1
    assert await faults(train) == []


async def test_the_journal_of_a_dead_attempt_is_gone(ledgers: Ledgers):
    train = ledgers.train
    await admit(train, 0, samples=2, min_group=2)
    (old,) = await lease(train, "prompts")
    await train.journal(old, 0, 0, b"turn", b"state")
    await train.journal(old, 1, 0, b"turn")
    await train.fail_prompt(old, "poison")
    assert await replay(train, 0, budget=9, hard_cap=9) is ReplayOutcome.REPLAYED
    (new,) = await lease(train, "prompts")
    assert not await train.journal(old, 0, 0, b"zombie")
    assert not await train.forget_journal(old, 0)
    assert await train.read_journal(old, 0) == await train.read_journal(new, 0) == ([], None)


async def test_fence_counts_epochs_and_keeps_the_old_learner_out(ledgers: Ledgers):
    train = ledgers.train
    await close_group(train, 0)
    old = await train.fence("old", 0)
    assert (old.epoch, old.checkpoint, old.version, old.base, old.base_epoch) == (1, None, 0, None, 0)
    await same_again(train, lambda: train.fence("old", 0))
    await train.resume("old", "0-0", 1)
    await same_again(train, lambda: train.resume("old", "0-0", 1))
    new = await train.fence("new", 6)  # files of epoch 6 are on disk
    assert (new.epoch, new.base, new.base_epoch) == (7, "0-0", 1)
    before = await everything(train)
    for refused in (
        train.resume("old", "1-1", 1),
        train.start_step("old", [0]),
        train.finish_step("old", 1, 9, b"m", [0]),
        train.drop("old", 0, "stale"),
        train.fail_group("old", 0, "poison"),
        train.retire("old", "1-1", 0, [0]),
    ):
        with pytest.raises(Fenced):
            await refused
    assert await everything(train) == before


async def test_the_cursor_of_a_redis_that_lost_its_data_is_lifted(ledgers: Ledgers):
    train = ledgers.train
    await train.fence("n", 3)
    await train.advance_cursor("n", 40)
    await same_again(train, lambda: train.advance_cursor("n", 40))
    assert (await admit(train, 0)).cursor == 40
    await train.fence("m", 3)
    await train.advance_cursor("m", 10)
    assert (await train.state()).cursor == 40
    before = await everything(train)
    with pytest.raises(Fenced):  # and the fence stays where it is
        await train.advance_cursor("n", 50)
    assert await everything(train) == before


async def test_finish_step_is_absolute_and_publishes_a_version_once(ledgers: Ledgers):
    train = ledgers.train
    await train.fence("n", 0)
    assert await ledgers.weights.newest() is None
    await train.finish_step("n", 8, 5, b"five")
    await same_again(train, lambda: train.finish_step("n", 8, 5, b"five"))
    assert await ledgers.weights.newest() == (5, b"five")
    await train.finish_step("n", 3, 4, b"older")
    assert await ledgers.weights.newest() == (5, b"five")
    await train.finish_step("n", 2, 9, None)
    assert await ledgers.weights.newest() == (5, b"five")
    state = await train.state()
    assert (state.unretired, state.version) == (2, 5)


async def test_drop_remembers_the_id_and_the_reason(ledgers: Ledgers):
    train = ledgers.train
    await close_group(train, 0)
    await admit(train, 1)
    await train.fence("n", 0)
    assert await train.drop("n", 0, "stale")
    await same_again(train, lambda: train.drop("n", 0, "stale"))
    assert not await train.drop("n", 1, "stale"), "an open group cannot be dropped"
    assert await train.dropped() == [0]
    assert await train.trace(0) == {"gid": 0, "state": "dropped", "why": "stale", "letters": []}
    assert await train.trace(7) is None


async def test_retire_names_the_checkpoint_and_takes_closed_groups_only(ledgers: Ledgers):
    train = ledgers.train
    for cursor in range(3):
        await close_group(train, cursor)
    await admit(train, 3)
    await train.fence("n", 0)
    assert await train.retire("n", "1-10", 4, [0, 3, 99]) == 1
    state = await train.state()
    assert (state.checkpoint, state.unretired, state.retired, state.live) == ("1-10", 4, 1, 3)
    await same_again(train, lambda: train.retire("n", "1-10", 4, [0, 3, 99]))
    many = [1, *range(4, 1400), 2]  # more than one script may take (the Lua stack)
    assert await train.retire("n", "1-20", 0, many) == 2
    assert (await train.fence("m", 0)).checkpoint == "1-20"


async def test_the_first_retire_after_a_fence_waits_for_the_disk_of_redis(ledgers: Ledgers):
    """Hole 6: only then is the fence itself safe from a crash of Redis. A lower bound, so no clock decides."""
    train = Ledger(ledgers.connection, ledgers.train.keys, fsync_period=0.2)
    await close_group(train, 0)
    loop = asyncio.get_running_loop()
    await train.fence("n", 0)
    fenced = loop.time()
    assert await train.retire("n", "1-1", 0, [0]) == 1
    assert loop.time() - fenced >= 0.19


async def test_retire_goes_in_chunks(ledgers: Ledgers):
    """More groups than one script may take (the Lua stack), the first and the last of them closed."""
    train = ledgers.train
    await close_group(train, 0)
    await close_group(train, 1)
    await train.fence("n", 0)
    assert await train.retire("n", "1-1", 0, [0, *range(2, 1400), 1]) == 2


async def test_replay_under_a_new_attempt(ledgers: Ledgers):
    train = ledgers.train
    await admit(train, 0, samples=2, min_group=2)
    (old_prompt,) = await lease(train, "prompts")
    await train.emit(old_prompt, 0, b"old")
    (old_sample,) = await lease(train, "rollouts")
    await train.fail_prompt(old_prompt, "poison", "trace")
    await train.fail_score(old_sample, "reward")
    assert (await train.trace(0))["state"] == "dead"
    letters = [(letter.sample, letter.stage, letter.detail, letter.prompt) for letter in await train.dead_letters()]
    assert letters == [(1, "prompt", "trace", None), (0, "reward", "", None), (None, "close", "", b"prompt 0")]
    assert await replay(train, 0, budget=0, hard_cap=9) is ReplayOutcome.FULL
    assert await replay(train, 0, budget=9, hard_cap=9) is ReplayOutcome.REPLAYED
    await same_again(train, lambda: replay(train, 0, budget=9, hard_cap=9))
    assert await train.dead_letters() == []
    (prompt,) = await lease(train, "prompts")
    assert prompt.attempt == 2
    before = await everything(train)  # whoever worked on the first attempt can do nothing
    assert not await train.emit(old_prompt, 1, b"zombie")
    assert not await train.fail_sample(old_prompt, 1, "zombie")
    assert await train.score(old_sample, b"zombie") is ScoreOutcome.LOST
    assert await train.open_work(old_prompt) is None
    assert await everything(train) == before
    assert (await train.open_work(prompt)).missing == (0, 1)
    assert await replay(train, 5, budget=9, hard_cap=9) is ReplayOutcome.GONE


async def test_a_dead_letter_thrown_away_stays_accounted_for(ledgers: Ledgers):
    train = ledgers.train
    await admit(train, 0)
    (prompt,) = await lease(train, "prompts")
    await train.fail_prompt(prompt, "bad")
    entries = [letter.entry for letter in await train.dead_letters()]
    assert await train.drop_dead([*entries, "1-1"]) == 3
    await same_again(train, lambda: train.drop_dead(entries))
    assert await train.dropped() == [0]
    assert (await train.trace(0))["state"] == "dropped"
    assert await replay(train, 0, budget=9, hard_cap=9) is ReplayOutcome.GONE


async def test_taking_over_and_handing_back_count_as_they_should(ledgers: Ledgers):
    train, call = ledgers.train, ledgers.connection.call
    await admit(train, 0)
    (first,) = await lease(train, "prompts", "a")
    second = await take(train, "prompts", first, "b")
    assert second.deliveries == 2
    assert await take(train, "prompts", first, "c", 1) is None  # its count has moved on
    assert (await take(train, "prompts", first, "b", 1)).entry == first.entry  # a repeat of b's own
    stream = train.keys.prompts
    names = [stream, train.keys.deaths]
    assert await call("renew", names, ["a", first.entry]) == [[first.entry.encode()], [], []]
    assert await call("renew", names, ["b"]) == [[], [], [[first.entry.encode(), 2]]]
    assert await call("release", [stream], ["a", "keeper", 1000, first.entry, 0]) == 0, "not its own"
    assert await call("release", [stream], ["b", "keeper", 1000, first.entry, 1]) == 1
    assert await call("release", [stream], ["b", "keeper", 1000, first.entry, 1]) == 0
    ((_, owner, _, count),) = await ledgers.connection.read("XPENDING", stream, "g", "-", "+", 10)
    assert (owner, count) == (b"keeper", 1)
    assert await call("reap", [stream], ["keeper", 0]) == 0, "it holds something"
    assert await call("reap", [stream], ["b", 0]) == 1
    await train.fail_prompt(first, "done")
    assert await call("renew", names, ["b", first.entry]) == [[], [first.entry.encode()], []]


async def test_claim_cleans_up_after_a_foreign_delete(ledgers: Ledgers):
    """On 6.2 an entry that was deleted while pending stays pending for ever."""
    train, read = ledgers.train, ledgers.connection.read
    await admit(train, 0)
    (prompt,) = await lease(train, "prompts")
    await read("XDEL", train.keys.prompts, prompt.entry)
    assert await take(train, "prompts", prompt, "b") is None
    assert await read("XPENDING", train.keys.prompts, "g", "-", "+", 10) == []


async def test_reap_forgets_silent_consumers(ledgers: Ledgers):
    train, call = ledgers.train, ledgers.connection.call
    await admit(train, 0)
    await lease(train, "prompts", "holder")
    await ledgers.connection.read("XGROUP", "CREATECONSUMER", train.keys.prompts, "g", "idle")
    assert await call("reap", [train.keys.prompts], ["", 3_600_000]) == 0
    assert await call("reap", [train.keys.prompts], ["", 0]) == 1
    names = [row[b"name"] for row in await ledgers.connection.read("XINFO", "CONSUMERS", train.keys.prompts, "g")]
    assert names == [b"holder"]


async def test_the_evaluation_ledger_is_another_one(ledgers: Ledgers):
    await admit(ledgers.train, 0, prompt=b"train")
    await admit(ledgers.evaluation, 0, prompt=b"held out", fingerprint="other")
    assert (await ledgers.train.state()).live == (await ledgers.evaluation.state()).live == 1
    (prompt,) = await lease(ledgers.evaluation, "prompts")
    assert (await ledgers.evaluation.open_work(prompt)).prompt == b"held out"
    assert ledgers.evaluation.evaluation
    assert not ledgers.train.evaluation
    await ledgers.evaluation.fence("feeder", 0)
    assert (await ledgers.train.state()).epoch == 0
