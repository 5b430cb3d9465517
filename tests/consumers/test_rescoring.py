"""Recorded groups scored again: new scores are a recording; failures are listed, never a number; figures of both."""

from __future__ import annotations

import asyncio
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl import wire
from streamrl.archive.reader import read_archive, read_groups
from streamrl.consumers.rescoring import RescoredSet, compare, most_different, rescore_groups
from streamrl.errors import CannotCreate, ConfigError, StreamrlError, Unreachable, unwrap
from tests.archive_kit import archived, closed, configured

ABOUT = {"rewards": [{"use": "length"}]}


async def longer(samples):
    """The number of tokens is the score."""
    return [wire.SampleScore(value=float(len(sample.tokens)), parts={"length": 1.0}) for sample in samples]


def failing(*keys):
    """As `longer`, but for these samples there is no score."""

    async def score(samples):
        results = list(await longer(samples))
        for place, sample in enumerate(samples):
            if (sample.group_id, sample.index) in keys:
                results[place] = Unreachable("the judge is away")
        return results

    return score


@pytest.fixture
async def run_dir(tmp_path):
    """A run with ten archived groups of four responses, of which group 3 has lost one."""
    groups = [closed(group_id, dead=(2,) if group_id == 3 else ()) for group_id in range(10)]
    await archived(tmp_path, configured(), *groups)
    return tmp_path


async def again(run_dir, score=longer, *, name="new", about=None, **options):
    into = RescoredSet(run_dir, name, about or ABOUT, evaluation=False)
    try:
        return await rescore_groups(read_archive(run_dir), score, into, **{"concurrency": 3, **options})
    finally:
        into.close()


async def test_new_scores_are_a_recording_beside_the_old_ones(run_dir):
    before = [group.raw for group in read_archive(run_dir)]
    outcome = await again(run_dir)
    assert (outcome.groups, outcome.scored, outcome.kept, outcome.failures) == (10, 39, 0, [])
    reading = read_archive(run_dir / "rescored" / "new")
    found = {group.group_id: group for group in reading}
    assert sorted(found) == list(range(10))
    assert found[3].causes == {2: "deadline: sample 2"}
    for group in read_archive(run_dir):
        other = found[group.group_id]
        assert [sample.response for sample in other.samples] == [sample.response for sample in group.samples]
        assert [sample.score.value for sample in other.samples] == [
            float(len(sample.response.token_ids)) for sample in group.samples
        ]
    assert len(list(read_groups(run_dir / "rescored" / "new"))) == 10  # it can be trained
    assert [group.raw for group in read_archive(run_dir)] == before
    pairs = dict(zip(outcome.keys, zip(outcome.old, outcome.new, strict=True), strict=True))
    assert pairs[4, 1, 0] == (1.0, 1.0)
    assert pairs[4, 1, 1] == (0.0, 2.0)


async def test_a_failure_is_listed_and_has_no_score_and_is_tried_again(run_dir):
    outcome = await again(run_dir, failing((1, 0), (4, 2)))
    assert [(each.group_id, each.number, each.why) for each in sorted(outcome.failures, key=lambda f: f.group_id)] == [
        (1, 0, "the judge is away"), (4, 2, "the judge is away"),
    ]  # fmt: skip
    assert (outcome.scored, outcome.unwritten, len(outcome.keys)) == (37, 2, 37)
    assert {group.group_id for group in read_archive(run_dir / "rescored" / "new")} == {0, 2, 3, 5, 6, 7, 8, 9}
    called = []

    async def counting(samples):
        called.extend(sample.group_id for sample in samples)
        return await longer(samples)

    outcome = await again(run_dir, counting)
    assert (set(called), outcome.scored, outcome.kept, outcome.failures) == ({1, 4}, 8, 31, [])
    assert len(outcome.keys) == 39
    assert len(list(read_archive(run_dir / "rescored" / "new"))) == 10


async def test_groups_may_be_kept_without_what_failed_but_not_with_one_response(run_dir):
    outcome = await again(run_dir, failing((1, 0), (4, 0), (4, 1), (4, 2)), drop_failed=True)
    assert outcome.unwritten == 1
    found = {group.group_id: group for group in read_archive(run_dir / "rescored" / "new")}
    assert 4 not in found
    assert [sample.number for sample in found[1].samples] == [1, 2, 3]
    assert found[1].causes == {0: "the judge is away"}


async def test_what_was_written_before_a_cancellation_is_kept(run_dir):
    reached, done = asyncio.Event(), []

    async def score(samples):
        if samples[0].group_id == 6:
            reached.set()
            await asyncio.Event().wait()
        done.append(samples[0].group_id)
        return await longer(samples)

    task = asyncio.create_task(again(run_dir, score, concurrency=1))
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == [0, 1, 2, 3, 4, 5]
    outcome = await again(run_dir)
    assert (outcome.kept, outcome.scored) == (23, 16)
    assert len(list(read_archive(run_dir / "rescored" / "new"))) == 10


async def test_never_more_at_a_time_than_asked(run_dir):
    going = most = 0
    three = asyncio.Event()

    async def score(samples):
        nonlocal going, most
        going += 1
        most = max(most, going)
        if going == 3:
            three.set()
        async with asyncio.timeout(60):
            await three.wait()
        await asyncio.sleep(0)  # whoever may come too comes now
        going -= 1
        return await longer(samples)

    seen = []
    await again(run_dir, score, concurrency=3, on_progress=lambda outcome: seen.append(outcome.scored))
    assert most == 3
    assert seen == sorted(seen)
    assert seen[-1] == 39


async def test_a_name_belongs_to_one_choice_of_rewards(run_dir):
    await again(run_dir)
    with pytest.raises(ConfigError, match="other rewards") as caught:
        await again(run_dir, about={"rewards": [{"use": "other"}]})
    assert "--force" in caught.value.hint
    RescoredSet.remove(run_dir, "new", evaluation=False)
    outcome = await again(run_dir, about={"rewards": [{"use": "other"}]})
    assert (outcome.scored, outcome.kept) == (39, 0)
    RescoredSet.remove(run_dir, "never", evaluation=False)
    (run_dir / "rescored" / "mine").mkdir()
    RescoredSet.remove(run_dir, "mine", evaluation=False)  # no scores of ours are in there
    assert (run_dir / "rescored" / "mine").exists()


def test_training_and_held_out_scores_of_a_name_go_apart(tmp_path):
    other = {"rewards": [{"use": "other"}]}
    for evaluation, about in ((False, ABOUT), (True, other)):
        RescoredSet(tmp_path, "new", about, evaluation=evaluation).close()
    RescoredSet.remove(tmp_path, "new", evaluation=True)
    with pytest.raises(ConfigError, match="other rewards"):
        RescoredSet(tmp_path, "new", other, evaluation=False)
    RescoredSet(tmp_path, "new", ABOUT, evaluation=True).close()
    RescoredSet.remove(tmp_path, "new", evaluation=False)
    with pytest.raises(ConfigError, match="other rewards"):
        RescoredSet(tmp_path, "new", other, evaluation=True)


async def test_an_error_of_the_rewards_as_a_whole_ends_it(run_dir):
    async def score(samples):
        raise StreamrlError("all threads hang")

    with pytest.raises(BaseExceptionGroup) as caught:
        await again(run_dir, score)
    assert unwrap(caught.value).message == "all threads hang"


async def test_no_room_for_the_new_scores(run_dir, monkeypatch):
    def pwrite(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("streamrl.archive.writer.os.pwrite", pwrite)
    with pytest.raises((CannotCreate, BaseExceptionGroup)) as caught:
        await again(run_dir)
    error = unwrap(caught.value)
    assert isinstance(error, CannotCreate)
    assert "No space left" in error.message
    monkeypatch.undo()
    assert (await again(run_dir)).scored == 39


# --- the figures of a comparison --------------------------------------------------------------------------------------


FINITE = st.floats(allow_nan=False, allow_infinity=False)


def test_by_hand():
    old = [0.0, 1.0, 1.0, 0.0, 1.0, 1.0]
    new = [0.1, 0.9, 0.4, 0.6, 0.7, 0.7]
    found = compare(old, new, ["a", "a", "a", "b", "b", "c"], 0.5)
    assert (found.samples, found.groups) == (6, 3)
    assert found.agreement == pytest.approx(4 / 6)  # 0.4 and 0.6 are on the wrong side
    assert found.same == 0
    # In a: 1 over 0 twice, both ordered alike; in b: 1 over 0 once, ordered alike.
    assert (found.order, found.pairs) == (1.0, 3)
    assert (found.zero_variance_old, found.zero_variance_new) == (1, 1)  # c has one response
    assert found.old.mean == pytest.approx(4 / 6)
    assert found.new.mean == pytest.approx(3.4 / 6)
    assert found.new.std == pytest.approx(math.sqrt(sum((x - 3.4 / 6) ** 2 for x in new) / 6))
    assert (found.new.min, found.new.max) == (0.1, 0.9)
    mean_old, mean_new = 4 / 6, 3.4 / 6
    covariance = sum((x - mean_old) * (y - mean_new) for x, y in zip(old, new, strict=True))
    spread = math.sqrt(sum((x - mean_old) ** 2 for x in old) * sum((y - mean_new) ** 2 for y in new))
    assert found.pearson == pytest.approx(covariance / spread)


def test_order_within_a_prompt_counts_ties_half_and_other_prompts_not_at_all():
    old = [0.0, 1.0, 5.0, 6.0]
    assert compare(old, [1.0, 0.0, 0.5, 0.5], [0, 0, 1, 1], 0.5).order == pytest.approx(0.25)
    found = compare([1.0, 1.0], [0.0, 1.0], [0, 0], 0.5)
    assert (found.order, found.pairs) == (None, 0)


def test_ranks_are_compared_whatever_the_scale():
    old = [1.0, 2.0, 3.0, 4.0]
    new = [math.exp(x) for x in old]
    found = compare(old, new, [0, 1, 2, 3], 0.5)
    assert found.spearman == pytest.approx(1.0)
    assert found.pearson < 0.99
    assert compare(old, [-x for x in new], [0, 1, 2, 3], 0.5).spearman == pytest.approx(-1.0)


def test_no_correlation_with_a_constant():
    found = compare([1.0, 1.0, 1.0], [0.1, 0.2, 0.3], [0, 0, 0], 0.5)
    assert (found.pearson, found.spearman, found.order) == (None, None, None)
    assert compare([1.0], [2.0], [0], 0.5).pearson is None


def test_what_differs_most_is_found_by_rank():
    old = [0.0, 0.0, 1.0, 1.0, 1.0]
    new = [-3.0, 9.0, 8.0, 7.0, -2.0]
    assert most_different(old, new, 2) == [1, 4]
    assert most_different(old, new, 99)[:2] == [1, 4]
    assert most_different(old, old, 5) == []


@given(st.lists(st.tuples(FINITE, FINITE, st.integers(0, 3)), min_size=1, max_size=40))
def test_any_finite_scores_give_finite_figures(rows):
    old, new, groups = ([row[k] for row in rows] for k in range(3))
    found = compare(old, new, groups, 0.5)
    assert 0 <= found.agreement <= 1
    assert 0 <= found.same <= 1
    for value in (found.pearson, found.spearman):
        assert value is None or -1.000001 <= value <= 1.000001
    for moments in (found.old, found.new):
        assert math.isfinite(moments.mean)
        assert math.isfinite(moments.std)
    places = most_different(old, new, len(rows))
    assert len(set(places)) == len(places)
    same = compare(old, old, groups, 0.5)
    assert (same.same, same.agreement) == (1.0, 1.0)
    assert same.order in (None, 1.0)
    assert most_different(old, old, 9) == []
