"""Groups that are scored whole: what the model of `test_model_whole` does not know of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.archive.reader import Header, RecordedGroup, read_groups
from streamrl.archive.writer import RecordingWriter
from streamrl.errors import Unreachable
from streamrl.queues import Lease, Ledger, Ledgers, open_ledgers
from streamrl.queues.records import Cause, ScoreOutcome
from tests.queues.conftest import both_versions
from tests.queues.ledger_kit import admit, everything, faults, lease, same_again
from tests.redis_kit import RedisRun

pytestmark = both_versions


async def put_up(ledger: Ledger, cursor: int = 0, samples: int = 3, **changed) -> tuple[Lease, Lease]:
    """A group that is scored whole, with all payloads: the leases of its prompt and of the group."""
    await ledger.set_group_scored(True)
    await admit(ledger, cursor, samples=samples, **changed)
    (prompt,) = await lease(ledger, "prompts")
    for k in range(samples):
        assert await ledger.emit(prompt, k, b"%d" % k)
    (group,) = await lease(ledger, "rollouts", count=10)
    return prompt, group


async def entries(ledger: Ledger) -> int:
    return await ledger.connection.read("XLEN", ledger.keys.rollouts)


async def test_a_group_is_put_up_once_when_its_last_sample_has_a_fate(ledgers: Ledgers):
    train = ledgers.train
    await train.set_group_scored(True)
    await same_again(train, lambda: train.set_group_scored(True))
    assert (await train.state()).group_scored
    await admit(train, 0, samples=4, min_group=2)
    (prompt,) = await lease(train, "prompts")
    for k in (0, 2, 3):
        assert await train.emit(prompt, k, b"%d" % k)
        assert await entries(train) == 0
    assert (await train.trace(0))["whole"]
    assert await train.fail_sample(prompt, 1, "engine")
    await same_again(train, lambda: train.fail_sample(prompt, 1, "engine"))
    (found,) = await lease(train, "rollouts", count=10)
    assert (found.group_id, found.attempt, found.sample, found.is_group) == (0, 1, None, True)
    group = await train.leased_group(found)
    assert (group.prompt, group.payloads) == (b"prompt 0", {0: b"0", 2: b"2", 3: b"3"})
    assert (group.least, group.size) == (2, 4)
    scores, causes = {0: b"a", 3: b"b"}, {2: Cause("wire: garbage", "x" * 10_000)}
    assert await train.score_group(found, scores, causes) is ScoreOutcome.CLOSED
    await same_again(train, lambda: train.score_group(found, {0: b"z", 2: b"z", 3: b"z"}, {}))
    assert await train.leased_group(found) is None
    closed = await train.read_group(0)
    assert closed.samples == {0: (b"0", b"a"), 3: (b"3", b"b")}
    assert closed.causes == {1: "engine", 2: "wire: garbage"}
    letters = await train.dead_letters()
    assert [(letter.sample, letter.stage, letter.deliveries) for letter in letters] == [
        (1, "generate", 1),
        (2, "reward", 1),
    ]
    assert len(letters[1].detail) == 4096


async def test_too_few_scores_or_a_sample_that_dooms_it_make_a_dead_group(ledgers: Ledgers):
    train = ledgers.train
    _, few = await put_up(train, 0, min_group=2)
    assert await train.score_group(few, {1: b"s"}, dict.fromkeys((0, 2), Cause("no"))) is ScoreOutcome.DEAD
    _, doomed = await put_up(train, 1, min_group=1)
    settle = {"scores": {0: b"s", 1: b"s"}, "causes": {2: Cause("away")}, "fail_group": "the judge is away"}
    assert await train.score_group(doomed, **settle) is ScoreOutcome.DEAD
    await same_again(train, lambda: train.score_group(doomed, **settle))
    whole = {letter.group_id: letter.why for letter in await train.dead_letters() if letter.sample is None}
    assert whole == {0: "fewer scored samples than min_group", 1: "the judge is away"}
    assert (await train.live(), await entries(train)) == ([], 0)


async def test_leases_are_not_mixed_up(ledgers: Ledgers):
    train = ledgers.train
    prompt, group = await put_up(train, 0)
    await train.set_group_scored(False)
    await admit(train, 1)
    (other,) = await lease(train, "prompts")
    await train.emit(other, 0, b"0")
    (sample,) = await lease(train, "rollouts")
    for call in (train.leased_sample(group), train.score(group, b"s"), train.leased_group(sample)):
        with pytest.raises(TypeError):
            await call
    with pytest.raises(TypeError, match="of a prompt"):
        await train.score(prompt, b"s")


@pytest.mark.parametrize("generated", [1, 3])
async def test_a_group_that_was_put_up_sample_by_sample_is_gathered(ledgers: Ledgers, generated: int):
    train = ledgers.train
    await admit(train, 0, samples=3)
    (prompt,) = await lease(train, "prompts")
    for k in range(generated):
        await train.emit(prompt, k, b"%d" % k)
    samples = await lease(train, "rollouts", count=3)
    if generated == 3:
        assert await train.score(samples[1], b"alone") is ScoreOutcome.SCORED
    await train.make_group_scored(samples[0])
    await same_again(train, lambda: train.make_group_scored(samples[0]))
    assert await entries(train) == (generated == 3), "one for the group, and none of its samples"
    assert (await train.trace(0))["scores"] == {}
    for zombie in samples:
        assert await train.leased_sample(zombie) is None
        assert await train.score(zombie, b"zombie") is ScoreOutcome.LOST
        assert not await train.fail_score(zombie, "zombie")
        await same_again(train, lambda zombie=zombie: train.make_group_scored(zombie))
    for k in range(generated, 3):
        await train.emit(prompt, k, b"%d" % k)
    (group,) = await lease(train, "rollouts", count=10)
    assert group.is_group
    assert await train.score_group(group, dict.fromkeys(range(3), b"s"), {}) is ScoreOutcome.CLOSED
    await admit(train, 1)
    assert (await train.trace(1))["whole"], "whoever gathers says so for the groups to come"
    assert await faults(train) == []


async def test_the_stream_is_deleted_under_a_worker(ledgers: Ledgers):
    train = ledgers.train
    _, group = await put_up(train, 0, samples=2)
    await ledgers.connection.read("DEL", train.keys.rollouts)
    assert await train.score_group(group, {0: b"s", 1: b"s"}, {}) is ScoreOutcome.LOST
    await train.make_group_scored(group)


async def test_a_full_redis_settles_groups_and_takes_no_payload(run: RedisRun, config):
    """Hole 15: what drains begins by freeing."""
    config = config.model_copy(update={"redis": config.redis.model_copy(update={"patience": 0.5})})
    async with open_ledgers(config, run.run_dir) as opened:
        train = opened.train
        _, settled = await put_up(train, 0)
        _, failed = await put_up(train, 1)
        await admit(train, 2, samples=2)
        (prompt,) = await lease(train, "prompts")
        await train.emit(prompt, 0, b"0")
        await train.set_group_scored(False)
        await admit(train, 3, samples=2)
        (other,) = await lease(train, "prompts")
        for k in range(2):
            await train.emit(other, k, b"%d" % k)
        (sample, _) = await lease(train, "rollouts", count=2)
        await opened.connection.read("CONFIG", "SET", "maxmemory", "1")
        with pytest.raises(Unreachable):
            await train.emit(prompt, 1, b"1")
        await train.make_group_scored(sample)
        await train.set_group_scored(True)
        assert await train.score_group(settled, {0: b"s", 2: b"s"}, {1: Cause("c")}) is ScoreOutcome.CLOSED
        assert await train.fail_score(failed, "reward")
        assert await train.fail_sample(prompt, 1, "engine")
        found = {one.group_id: one for one in await lease(train, "rollouts", count=10)}
        assert await train.score_group(found[2], {0: b"s"}, {}) is ScoreOutcome.CLOSED
        assert await train.score_group(found[3], {0: b"s", 1: b"s"}, {}) is ScoreOutcome.CLOSED
        await opened.connection.read("CONFIG", "SET", "maxmemory", "0")
        assert await faults(train) == []


async def test_whole_groups_are_recorded_and_played_like_others(ledgers: Ledgers, tmp_path: Path):
    """A run that plays a recording has no reward workers; whatever was said of its ledger, its groups are closed."""
    train, player = ledgers.train, ledgers.evaluation
    _, group = await put_up(train, 0, samples=3)
    await train.score_group(group, {0: b"a", 2: b"c"}, {1: Cause("wire: none")})
    writer = RecordingWriter(tmp_path, 1, Header(id="one", run="r", model="m", temperature=1.0), 1 << 20)
    writer.add(RecordedGroup.of(await train.read_group(0)))
    writer.sync()
    writer.close()
    (recorded,) = read_groups(tmp_path)
    assert (recorded.samples, recorded.causes) == ([(b"0", b"a"), (b"2", b"c")], [(1, "wire: none")])
    await player.set_group_scored(True)
    bounds = {"min_group": 2, "budget": 9, "hard_cap": 9, "max_dead": 9}
    await player.admit_closed(cursor=0, fingerprint="f", prompt=recorded.prompt, samples=recorded.samples, **bounds)
    assert (await player.read_group(0)).samples == {0: (b"0", b"a"), 1: (b"2", b"c")}
    assert await entries(player) == 0
    assert await faults(player) == []


@pytest.mark.parametrize(("group_id", "attempt"), [(9, 1), (0, 2)])
async def test_an_entry_of_no_open_group_is_removed_and_nothing_else(ledgers: Ledgers, group_id: int, attempt: int):
    """Such entries nobody of ours makes: the group is not there, or on another attempt."""
    train = ledgers.train
    _, real = await put_up(train, 0, samples=2)
    before = await train.trace(0)
    for k in ("0", "*", "*"):
        await ledgers.connection.read("XADD", train.keys.rollouts, "*", "g", group_id, "a", attempt, "k", k)
    single, group, other = await lease(train, "rollouts", count=10)
    await train.make_group_scored(single)
    assert await train.score_group(group, {0: b"s", 1: b"s"}, {}) is ScoreOutcome.GONE
    assert await train.leased_group(other) is None
    assert await train.trace(0) == before
    assert await train.live() == [0]
    assert await faults(train) == []
    assert await train.score_group(real, {0: b"s", 1: b"s"}, {}) is ScoreOutcome.CLOSED


async def test_forget_looks_again_before_it_removes(ledgers: Ledgers):
    """Read and removal are two steps: what waits by then stays, and a sample of a whole group waits for nobody."""
    train, call = ledgers.train, ledgers.connection.call
    _, group = await put_up(train, 0, samples=2)
    names = [train.keys.rollouts, train.keys.group(0)]
    assert await call("forget", names, [group.entry, "*", 1]) == 0
    assert await call("forget", names, [group.entry, "*", 2]) == 1, "another attempt"
    await ledgers.connection.read("XADD", train.keys.rollouts, "*", "g", 0, "a", 1, "k", 0)
    (single,) = await lease(train, "rollouts")
    assert await train.leased_sample(single) is None
    assert await entries(train) == 0


@pytest.mark.parametrize("named", [[], [0], [0, 1, 3], [0, 1, 2, 3]])
async def test_what_is_settled_is_what_waits(ledgers: Ledgers, named: list[int]):
    """A bug of a worker cannot close a group over a sample that nobody looked at."""
    train = ledgers.train
    _, group = await put_up(train, 0, samples=3)
    before = await everything(train)
    for scores, causes in ((named, []), (named[:1], named[1:]), ([], named)):
        with pytest.raises(ValueError, match="group 0"):
            await train.score_group(group, dict.fromkeys(scores, b"s"), dict.fromkeys(causes, Cause("c")))
    assert await everything(train) == before
    assert await train.score_group(group, dict.fromkeys(range(3), b"s"), {}) is ScoreOutcome.CLOSED
