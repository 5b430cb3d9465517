"""Every script: what it does, that a repeat changes nothing, and what a full server lets through. On 6.2 and 7.0."""

from __future__ import annotations

import asyncio

import pytest

from streamrl.errors import Fenced, Refused
from streamrl.queues import Ledger, Ledgers
from streamrl.queues.connection import load_scripts
from streamrl.queues.records import AdmitOutcome, ReplayOutcome, ScoreOutcome
from tests.queues.ledger_kit import admit, close_group, everything, faults, lease, replay, take


async def same_again(ledger: Ledger, call) -> None:
    """A repeat of a call changes no key."""
    before = await everything(ledger)
    await call()
    assert await everything(ledger) == before
    assert await faults(ledger) == []


def test_every_script_says_what_it_does_in_its_header():
    for script in load_scripts().values():
        for word in ("-- KEYS", "-- returns", "-- repeat"):
            assert word in script.text, f"{script.name}.lua lacks {word}"


async def test_admit_takes_the_cursor_as_the_id_and_moves_it(ledgers: Ledgers):
    train = ledgers.train
    first = await admit(train, 0, prompt=b"what?", samples=3, version=7)
    assert (first.outcome, first.cursor) == (AdmitOutcome.ADMITTED, 1)
    (prompt,) = await lease(train, "prompts")
    work = await train.open_work(prompt)
    assert (prompt.group_id, prompt.attempt, prompt.sample, prompt.deliveries) == (0, 1, None, 1)
    assert (work.prompt, work.samples, work.attempt, work.missing) == (b"what?", 3, 1, (0, 1, 2))
    again = await admit(train, 0)
    assert (again.outcome, again.cursor) == (AdmitOutcome.MOVED, 1)
    await same_again(train, lambda: admit(train, 0))
    ahead = await admit(train, 5)
    assert (ahead.outcome, ahead.cursor) == (AdmitOutcome.MOVED, 1)


async def test_admit_refuses_other_data(ledgers: Ledgers):
    await admit(ledgers.train, 0)
    with pytest.raises(Refused, match="other data"):
        await admit(ledgers.train, 1, fingerprint="another seed")
    assert (await ledgers.train.state()).cursor == 1


async def test_admit_keeps_both_bounds(ledgers: Ledgers):
    """Budget: live - held. Hard cap: live. Consumed groups free the budget, not the cap."""
    train = ledgers.train
    for cursor in range(2):
        await close_group(train, cursor, budget=2, hard_cap=3)
    assert (await admit(train, 2, budget=2, hard_cap=3)).outcome is AdmitOutcome.FULL
    await train.fence("n", 0)
    await train.consume("n", 2, 1, b"m", [0, 1])
    assert (await admit(train, 2, budget=2, hard_cap=3)).outcome is AdmitOutcome.ADMITTED
    assert (await admit(train, 3, budget=2, hard_cap=3)).outcome is AdmitOutcome.FULL
    await same_again(train, lambda: admit(train, 3, budget=2, hard_cap=3))


async def test_dead_letters_stop_admission(ledgers: Ledgers):
    train = ledgers.train
    await admit(train, 0, samples=3)
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
    assert (found.prompt, found.payload, found.sample) == (b"prompt 0", b"one", 1)
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


async def test_a_dead_prompt_keeps_what_was_generated(ledgers: Ledgers):
    train = ledgers.train
    await admit(train, 0, samples=3, min_group=1)
    (prompt,) = await lease(train, "prompts")
    await train.emit(prompt, 1, b"kept")
    assert await train.fail_prompt(prompt, "4 holders died of it", "trace")
    await same_again(train, lambda: train.fail_prompt(prompt, "again"))
    assert [letter.detail for letter in await train.dead_letters()] == ["trace", ""]
    (sample,) = await lease(train, "rollouts")
    assert await train.score(sample, b"1") is ScoreOutcome.CLOSED
    assert set((await train.read_group(0)).samples) == {1}


async def test_too_few_scores_make_a_dead_group_with_its_prompt(ledgers: Ledgers):
    train = ledgers.train
    await admit(train, 0, samples=2, min_group=2, prompt=b"hard")
    (prompt,) = await lease(train, "prompts")
    await train.emit(prompt, 0, b"x")
    await train.fail_sample(prompt, 1, "engine")
    (sample,) = await lease(train, "rollouts")
    assert await train.score(sample, b"1") is ScoreOutcome.DEAD
    await same_again(train, lambda: train.score(sample, b"1"))
    assert await train.live() == []
    whole = (await train.dead_letters())[-1]
    assert (whole.group_id, whole.sample, whole.prompt, whole.stage) == (0, None, b"hard", "close")
    assert (await train.trace(0))["state"] == "dead"
    assert (await train.state()).live == 0


async def test_a_prompt_whose_every_sample_dies_is_one_dead_group(ledgers: Ledgers):
    train = ledgers.train
    await admit(train, 0, samples=2)
    (prompt,) = await lease(train, "prompts")
    assert await train.fail_prompt(prompt, "too long")
    assert [letter.sample for letter in await train.dead_letters()] == [0, 1, None]
    assert await faults(train) == []


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
        train.begin("old", [0]),
        train.consume("old", 1, 9, b"m", [0]),
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
    await train.lift("n", 40)
    await same_again(train, lambda: train.lift("n", 40))
    assert (await admit(train, 0)).cursor == 40
    await train.fence("m", 3)
    await train.lift("m", 10)
    assert (await train.state()).cursor == 40
    before = await everything(train)
    with pytest.raises(Fenced):  # and the fence stays where it is
        await train.lift("n", 50)
    assert await everything(train) == before


async def test_consume_is_absolute_and_publishes_a_version_once(ledgers: Ledgers):
    train = ledgers.train
    await train.fence("n", 0)
    assert await ledgers.weights.newest() is None
    await train.consume("n", 8, 5, b"five")
    await same_again(train, lambda: train.consume("n", 8, 5, b"five"))
    assert await ledgers.weights.newest() == (5, b"five")
    await train.consume("n", 3, 4, b"older")
    assert await ledgers.weights.newest() == (5, b"five")
    await train.consume("n", 2, 9, None)
    assert await ledgers.weights.newest() == (5, b"five")
    state = await train.state()
    assert (state.unretired, state.version) == (2, 5)


async def test_begin_counts_learner_processes_and_consume_forgives(ledgers: Ledgers):
    train = ledgers.train
    await close_group(train, 0)
    await close_group(train, 1)
    await train.fence("a", 0)
    await train.begin("a", [0, 1])
    await same_again(train, lambda: train.begin("a", [0, 1]))
    await train.fence("b", 0)
    await train.begin("b", [0])
    assert [(await train.read_group(group_id)).crashes for group_id in (0, 1)] == [2, 1]
    await train.consume("b", 1, 1, b"m", [0])
    assert [(await train.read_group(group_id)).crashes for group_id in (0, 1)] == [0, 1]


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


async def test_fail_group_takes_closed_and_lost_groups(ledgers: Ledgers):
    train = ledgers.train
    for cursor in range(3):
        await close_group(train, cursor)
    await admit(train, 3)
    await train.fence("n", 0)
    assert await train.fail_group("n", 0, "killed the learner", "trace")
    await same_again(train, lambda: train.fail_group("n", 0, "again"))
    await train.retire("n", "1-1", 0, [1])
    assert await train.fail_group("n", 1, "rollback")  # retired for a checkpoint that is lost
    await same_again(train, lambda: train.fail_group("n", 1, "rollback"))
    await train.drop("n", 2, "stale")
    assert not await train.fail_group("n", 2, "dropped already")
    assert not await train.fail_group("n", 3, "open")
    assert not await train.fail_group("n", 99, "never admitted")
    assert [(letter.group_id, letter.prompt) for letter in await train.dead_letters()] == [(0, b"prompt 0"), (1, None)]
    assert await replay(train, 1, budget=9, hard_cap=9) is ReplayOutcome.NO_PROMPT


async def test_retire_names_the_checkpoint_and_takes_closed_groups_only(ledgers: Ledgers):
    train = ledgers.train
    await close_group(train, 0)
    await admit(train, 1)
    await train.fence("n", 0)
    assert await train.retire("n", "1-10", 4, [0, 1, 99]) == 1
    state = await train.state()
    assert (state.checkpoint, state.unretired, state.retired, state.live) == ("1-10", 4, 1, 1)
    await same_again(train, lambda: train.retire("n", "1-10", 4, [0, 1, 99]))
    assert await train.retire("n", "1-20", 0, []) == 0
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
    await train.fail_prompt(old_prompt, "poison")
    await train.fail_score(old_sample, "reward")
    assert (await train.trace(0))["state"] == "dead"
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


async def test_dead_groups_wait_in_a_queue_until_there_is_room(ledgers: Ledgers):
    train = ledgers.train
    for cursor in range(4):
        await admit(train, cursor, samples=2)
    for prompt in (await lease(train, "prompts", count=4))[:3]:
        await train.fail_prompt(prompt, "poison")
    wanted = {0: ReplayOutcome.QUEUED, 1: ReplayOutcome.QUEUED, 2: ReplayOutcome.QUEUED, 3: ReplayOutcome.GONE}
    assert await train.queue_replays([0, 1, 2, 3]) == wanted
    await same_again(train, lambda: train.queue_replays([0, 1, 2, 3]))
    assert (await train.state()).replays == 3
    assert [letter.group_id for letter in await train.dead_letters() if letter.sample is None] == [
        0,
        1,
        2,
    ]  # still dead
    await train.drop_dead([letter.entry for letter in await train.dead_letters() if letter.group_id == 2])
    queue = await train.queued_replays()
    room = {"budget": 2, "hard_cap": 9}
    assert await train.replay_queued(0, queue[0], **room) is ReplayOutcome.REPLAYED
    assert await train.replay_queued(1, queue[1], **room) is ReplayOutcome.FULL
    assert await train.replay_queued(2, queue[2], **room) is ReplayOutcome.GONE
    assert await train.queued_replays() == {1: queue[1]}
    assert {letter.group_id for letter in await train.dead_letters()} == {1}


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
    assert await take(train, "prompts", first, "c") is None  # its count has moved on
    assert (await take(train, "prompts", first, "b")).entry == first.entry  # a repeat of b's own
    stream = train.keys.prompts
    assert await call("renew", [stream], ["a", first.entry]) == [[first.entry.encode()], [], []]
    assert await call("renew", [stream], ["b"]) == [[], [], [[first.entry.encode(), 2]]]
    assert await call("release", [stream], ["a", "keeper", 1000, first.entry, 0]) == 0, "not its own"
    assert await call("release", [stream], ["b", "keeper", 1000, first.entry, 1]) == 1
    assert await call("release", [stream], ["b", "keeper", 1000, first.entry, 1]) == 0
    ((_, owner, _, count),) = await ledgers.connection.read("XPENDING", stream, "g", "-", "+", 10)
    assert (owner, count) == (b"keeper", 1)
    assert await call("reap", [stream], ["keeper", 0]) == 0, "it holds something"
    assert await call("reap", [stream], ["b", 0]) == 1
    await train.fail_prompt(first, "done")
    assert await call("renew", [stream], ["b", first.entry]) == [[], [first.entry.encode()], []]


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


async def test_roles_board(ledgers: Ledgers):
    await ledgers.roles.beat("rollout.0", {"state": "ready", "version": 3}, ttl=60)
    await ledgers.roles.beat("rollout.0", {"state": "draining"}, ttl=60)
    await ledgers.roles.beat("feeder", {"state": "ready"}, ttl=0.001)
    while await ledgers.connection.read("EXISTS", "{sr:test}:role:feeder"):
        pass
    assert await ledgers.roles.read() == {"rollout.0": {"state": "draining"}}
