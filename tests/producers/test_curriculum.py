"""A curriculum passes prompts over, and the prompt of a group stays what it was, whatever dies or is lost."""

import os
from collections import Counter

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from producer_kit import Hands, until

from streamrl.config import RunConfig
from streamrl.errors import PluginError, Refused
from streamrl.producers import curriculum as module
from streamrl.producers import feeder
from streamrl.producers.curriculum import FILE, PassedOver, SkipSolved, open_curriculum
from streamrl.producers.feeder import run_feeder
from streamrl.wire import prompt_key

PROMPTS = [f"p{place}".encode() for place in range(5)]


class Data:
    """Five prompts, pass after pass, up to the place `limit`."""

    def __init__(self, limit=None):
        self.limit = limit

    def prompt(self, place):
        return PROMPTS[place % len(PROMPTS)]

    def end(self, before):
        return self.limit if self.limit is not None and self.limit <= before else None


def order_of(folder, curriculum=None, limit=None):
    return PassedOver(curriculum or SkipSolved(visits=1), folder, Data(limit))


def told(order, scores, count):
    """Take in scores, then decide so many groups."""
    order.learn(scores)
    return order.end(count)


def scored(prompt, *scores):
    return orjson.dumps([prompt_key(PROMPTS[prompt]), scores])


def test_solved_and_unsolved_prompts_are_passed_over_for_some_passes_and_then_tried_again():
    rule = SkipSolved(visits=2, epochs=2, threshold=0.5)
    passes = [((1, 1), False), ((1, 0), False), ((0, 0), False), ((0, 0), True), (None, True), (None, False)]
    passes += [((0, 0.5), True), (None, True), (None, False), ((1, 1), False), ((1, 1), True)]
    found = []
    for scores, _ in passes:
        if scores is not None:
            rule.scored("a", scores)
        found.append(rule.skip("a"))
    assert found == [skipped for _, skipped in passes]
    assert not rule.skip("b")


@pytest.mark.parametrize("args", [{"visits": 0}, {"epochs": 0}])
def test_arguments_that_cannot_be(args):
    with pytest.raises(ValueError, match="from 1 on"):
        SkipSolved(**args)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_restart_at_any_moment_changes_no_answer(tmp_path_factory, data):
    folders = [tmp_path_factory.mktemp("order") for _ in range(2)]
    whole, restarted = (order_of(folder, limit=60) for folder in folders)
    count, done = 0, set()
    for _ in range(data.draw(st.integers(1, 12))):
        count += data.draw(st.integers(0, 4))
        ids = data.draw(st.lists(st.integers(0, max(0, count - 1)), unique=True, max_size=3))
        # A group may be told twice, and other scores then do not count.
        scores = {one: scored(one % 5, *data.draw(st.sampled_from([(0, 0), (1, 1), (0, 1)]))) for one in ids if count}
        before = list(restarted.places)
        for order in (whole, restarted):
            told(order, scores, count)
        done |= scores.keys()
        if data.draw(st.booleans()):
            restarted = order_of(folders[1], limit=60)
        assert list(restarted.places)[: len(before)] == before
        assert (restarted.places, restarted.next) == (whole.places, whole.next)
    file = folders[0] / FILE
    lines = [orjson.loads(line) for line in file.read_bytes().splitlines()] if file.exists() else []
    assert sorted(line["gid"] for line in lines if "gid" in line) == sorted(done)


def test_a_line_that_a_crash_cut_off_was_never_said(tmp_path):
    order = order_of(tmp_path)
    told(order, {}, 2)
    size = (tmp_path / FILE).stat().st_size
    told(order, {0: scored(0, 1.0, 1.0)}, 6)
    os.truncate(tmp_path / FILE, size + 5)
    again = order_of(tmp_path)
    assert list(again.places) == [0, 1]
    assert (tmp_path / FILE).stat().st_size == size
    told(again, {}, 6)
    assert list(again.places) == [0, 1, 2, 3, 4, 5], "what it said of group 0 is told again by whoever told it"


def test_the_end_of_the_data_is_a_place_and_not_a_number_of_groups(tmp_path):
    order = order_of(tmp_path, limit=10)
    assert told(order, {}, 4) is None
    assert told(order, {n: scored(n, 1.0) for n in (0, 1)}, 40) == 8
    assert list(order.places) == [0, 1, 2, 3, 4, 7, 8, 9]
    assert [order.prompt(group_id) for group_id in (1, 5)] == [b"p1", b"p2"]
    order._data.limit = 8
    assert order.end(3) == 6, "fewer passes are asked for than were decided"
    order._data.limit = 15  # one more
    assert order.end(9) is None
    assert list(order.places)[8:] == [10]


def test_a_full_disk_or_a_prompt_that_cannot_be_made_forgets_nothing_and_asks_nothing_twice(tmp_path, monkeypatch):
    order, asked = order_of(tmp_path), []
    monkeypatch.setattr(order._curriculum, "skip", lambda prompt: asked.append(prompt) or False)

    def away(place):
        if place == 2:
            raise OSError(5, "the store of images is away")
        return PROMPTS[place]

    with monkeypatch.context() as full:
        full.setattr(module, "append_durably", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
        with pytest.raises(OSError, match="No space"):
            order.learn({0: scored(0, 1.0)})
        for _ in range(2):
            with pytest.raises(OSError, match="No space"):
                order.prompt(0)
    with monkeypatch.context() as gone:
        gone.setattr(order._data, "prompt", away)
        with pytest.raises(OSError, match="is away"):
            order.end(3)
    order.end(3)
    assert len(asked) == 3
    monkeypatch.undo()
    again = order_of(tmp_path)
    assert (list(again.places), again._known) == ([0, 1, 2], {0})


def test_a_curriculum_that_wants_nothing_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_MOST_SKIPPED", 50)
    order = order_of(tmp_path)
    monkeypatch.setattr(order._curriculum, "skip", lambda _: True)
    with pytest.raises(Refused, match="passed over 50 prompts in a row"):
        order.end(1)


async def played(run, hands, role, value, seconds=30.0):
    """Answer and score what comes, as the learner tell what it read, until the data has ended."""

    async def step():
        await hands.answer(hands.version)
        await hands.score(value)
        closed = [await hands.ledger.read_group(group_id) for group_id in await hands.ledger.closed()]
        scores = [[value(group.group_id, number) for number in group.samples] for group in closed]
        found = [[prompt_key(group.prompt), one] for group, one in zip(closed, scores, strict=True)]
        for group, each in zip(closed, found, strict=True):
            await hands.ledger.note_outcome(group.group_id, orjson.dumps(each))
        if closed:
            await until(lambda: nothing_told(hands.ledger), seconds)
        await hands.publish()
        await hands.retire()
        return role.status["admission"] == "end of data"

    await until(step, seconds)


async def nothing_told(ledger):
    return not await ledger.outcomes()


async def test_the_feeder_passes_over_what_is_solved_and_a_lost_redis_changes_no_prompt(run):
    """p0 is always solved: with two visits and one pass it comes in passes 1, 2, 4, 6, 8."""
    run.set("data", epochs=8, shuffle=False, curriculum={"use": "skip_solved"}).set("learner", groups_per_step=1)
    run.set(None, max_staleness=0)
    asked = {}

    def value(group_id, sample):
        (text,) = set(hands.prompts[group_id])
        asked[group_id] = text
        return 1.0 if text == "p0" else float(sample)

    async with run.open() as ledgers:
        hands = await Hands(ledgers.train).fence()
        for epochs in (3, 8):  # and a restart in between
            run.set("data", epochs=epochs)
            async with run.running(run_feeder, "feeder.0", ledgers) as (role, _):
                await until(lambda role=role: role.is_ready)
                await played(run, hands, role, value)
                admitted, skipped = role.status["admitted"], role.status["skipped"]
        assert admitted + skipped == 8 * 5
        state = await ledgers.train.state()
        assert (state.done, state.epochs) == (admitted, 8)
        counts = Counter(asked.values())
        assert counts == {"p0": 5, "p1": 8, "p2": 8, "p3": 8, "p4": 8}
        assert [group_id for group_id, text in sorted(asked.items()) if text == "p0"] == [0, 5, 14, 23, 32]
        before = dict(asked)
        await ledgers.connection.read("FLUSHALL")
        await ledgers.train.ensure()
        await ledgers.evaluation.ensure()
        hands = await Hands(ledgers.train).fence()
        async with run.running(run_feeder, "feeder.0", ledgers) as (role, _):
            await until(lambda: role.is_ready)
            await played(run, hands, role, value)
        assert asked == before, "groups that come again have the prompts that they had"


async def test_a_full_disk_holds_up_admission_and_no_more(run, monkeypatch, caplog):
    run.set("data", curriculum={})
    refusing = [True]
    real = module.append_durably

    def append(path, data):
        if refusing:
            raise OSError(28, "No space left on device")
        real(path, data)

    monkeypatch.setattr(module, "append_durably", append)
    monkeypatch.setattr(feeder, "IDLE_PAUSE", 0.01)
    async with run.open() as ledgers, run.running(run_feeder, "feeder.0", ledgers) as (role, _):
        await until(lambda: "prompts cannot be made" in caplog.text)
        assert (await ledgers.train.state()).cursor == 0
        refusing.clear()
        await until(lambda: role.status.get("admission") == "full")
        assert (await ledgers.train.state()).cursor == run.config.budget


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ({"use": "skip_slowed"}, "curriculum skip_slowed is not an import path"),
        ({"args": {"visit": 1}}, "curriculum skip_solved: args do not fit"),
        ({"args": {"visits": 0}}, "curriculum skip_solved cannot be built: ValueError: visits and epochs"),
    ],
)
def test_a_curriculum_that_is_none(spec, why):
    with pytest.raises(PluginError, match=why):
        open_curriculum(RunConfig.model_validate({"data": {"curriculum": spec}}))


def test_a_recording_has_no_curriculum():
    with pytest.raises(ValueError, match=r"data\.curriculum needs a learner and a feeder"):
        RunConfig.model_validate({"data": {"curriculum": {}}, "recording": {"mode": "write"}})


def test_a_curriculum_of_your_own(tmp_path, monkeypatch):
    (tmp_path / "my_order_of_prompts.py").write_text(
        "class Odd:\n"
        "    def __init__(self): self.asked = 0\n"
        "    def scored(self, prompt, scores): pass\n"
        "    def skip(self, prompt):\n"
        "        self.asked += 1\n"
        "        return self.asked % 2 == 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = RunConfig.model_validate({"data": {"curriculum": {"use": "my_order_of_prompts:Odd"}}})
    order = order_of(tmp_path, open_curriculum(config))
    order.end(3)
    assert list(order.places) == [1, 3, 5]
