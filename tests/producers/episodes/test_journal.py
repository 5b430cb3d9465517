"""Episodes whose process dies in the middle: what another process answers from the journal, and what it samples."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from itertools import count

import msgspec
import numpy as np
import pytest

from streamrl.config import RunConfig
from streamrl.errors import RetryLater
from streamrl.producers.episodes import journal as journal_module
from streamrl.producers.episodes.environment import EnvironmentEpisode, ToolEpisode
from streamrl.producers.episodes.episode import Episode
from streamrl.producers.episodes.journal import BeginEntry
from streamrl.producers.episodes.run_python import python_tool
from streamrl.producers.episodes.sampler import EpisodeSampler
from streamrl.producers.sampler import TurnJournal
from streamrl.queues import open_ledgers
from tests.queues.ledger_kit import admit, faults, lease, take, until

from .chat_kit import HERMES, make_tokenizer
from .episode_kit import ADD, DONE, Script, add, call, config_of, order_of

SHIFT = '{"name": "shift", "arguments": {"by": 5}}'
WAIT = '{"name": "wait", "arguments": {"seconds": 1}}'
PROGRAM = '{"name": "run_python", "arguments": {"code": "print(6 * 7)"}}'
RAN = []


def shift(by: int) -> int:
    """Shift.

    Args:
        by: how far.
    """
    RAN.append(by)
    return 10 + by


@pytest.fixture(autouse=True)
def _nothing_ran():
    RAN.clear()


@pytest.fixture
async def ledger(redis_run):
    async with open_ledgers(RunConfig(name="t", redis=redis_run.config), redis_run.run_dir) as ledgers:
        yield ledgers.train


class Dying(Script):
    """Says its texts; then it hangs, until its process is killed."""

    def __init__(self, tokenizer, texts, version=1):
        super().__init__(tokenizer, texts, version)
        self.hangs = asyncio.Event()

    async def generate(self, request):
        if not self.texts:
            self.hangs.set()
            await asyncio.Event().wait()
        return await super().generate(request)


class Lives:
    """One sample of one group, made by one process after the other."""

    def __init__(self, ledger, episode, *, deterministic=True, **limits):
        room = {"model": {"context": 2048}, "sampling": {"max_new_tokens": 256}}
        self.ledger = ledger
        self.episode = episode
        self.config = config_of({"tools": ["a:b"], "deterministic": deterministic, **limits}, **room)
        self.tokenizer = make_tokenizer(HERMES)
        self.lease = None
        self.lives = 1
        self.progress = []

    async def engine_of(self, *texts, version=1):
        """An engine of a new process, which has taken the lease over."""
        if self.lease is None:
            await admit(self.ledger, 0)
            (self.lease,) = await lease(self.ledger, "prompts")
        else:
            self.lives += 1
            self.lease = await take(self.ledger, "prompts", self.lease, f"worker-{self.lives}")
        return Dying(self.tokenizer, texts, version)

    @contextlib.asynccontextmanager
    async def playing(self, engine):
        order = order_of(self.tokenizer, journal=TurnJournal(self.lease, 0, self.progress.append))
        async with EpisodeSampler(self.config, engine, self.tokenizer, self.episode, "r") as sampler:
            task = asyncio.create_task(sampler.sample(order))
            try:
                yield task
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def die(self, *texts, version=1):
        """A process says these texts, and dies while it samples the next one."""
        engine = await self.engine_of(*texts, version=version)
        async with self.playing(engine) as task:
            hangs = asyncio.create_task(engine.hangs.wait())
            await asyncio.wait([task, hangs], return_when=asyncio.FIRST_COMPLETED, timeout=30)
            assert not task.done(), task.result()
        return engine

    async def live(self, *texts, version=2):
        engine = await self.engine_of(*texts, version=version)
        async with self.playing(engine) as task:
            return engine, await task


def said(engine, *texts):
    return np.concatenate([engine.ids(f"{text}<|im_end|>") for text in texts]).tolist()


async def test_recorded_turns_and_answers_are_taken_from_the_journal(ledger):
    """Nothing is sampled or run twice; the versions say who sampled what."""
    lives = Lives(ledger, ToolEpisode([shift]))
    await lives.die(call(SHIFT))
    first = call(SHIFT)
    await lives.die(call(SHIFT, text="again"), version=2)
    engine, sample = await lives.live(DONE, version=3)
    assert RAN == [5, 5], "each call ran once"
    assert len(engine.requests) == 1
    assert sample.token_ids.tolist() == said(engine, first, call(SHIFT, text="again"), DONE)
    assert (sample.replayed, sample.restarts, sample.stop) == (2, 0, "completed")
    assert sample.token_versions[[0, -1]].tolist() == [1, 3]
    assert [use.outcome for turn in sample.turns for use in turn.tools] == ["ok", "ok"]
    assert all(turn.cached for turn in sample.turns if turn.sampled), "also of the recorded ones"
    assert len(lives.progress) == 3
    assert await ledger.emit(lives.lease, 0, b"payload")
    assert (await ledger.trace(0))["journaled"] == {}
    assert await faults(ledger) == []


class Drawn(Episode):
    """Two turns, the first with options of its own."""

    def __init__(self):
        self.options = {"max_tokens": 9, "temperature": 0.5, "stop": ["x"]}

    async def run(self, task, chat):
        turn = await chat.session.sampled(task.messages, **self.options)
        await chat.session.sampled([*task.messages, turn.reply.message, {"role": "user", "content": "and?"}])


@pytest.mark.parametrize("other", [{}, {"temperature": 0.6}, {"stop": ["y"]}, {"max_tokens": 8}, {"top_k": 5}])
async def test_a_reply_with_other_options_is_no_recorded_one(ledger, other):
    lives = Lives(ledger, Drawn())
    await lives.die("a")
    lives.episode.options |= other
    engine, sample = await lives.live(*"bc")
    assert (sample.replayed, len(engine.requests)) == ((0, 2) if other else (1, 1))


async def test_without_determinism_an_episode_begins_again_each_time(ledger):
    lives = Lives(ledger, ToolEpisode([shift]), deterministic=False)
    await lives.die(call(SHIFT))
    await lives.die(call(SHIFT))
    engine, sample = await lives.live(call(SHIFT), DONE)
    assert RAN == [5, 5, 5]
    assert sample.token_ids.tolist() == said(engine, call(SHIFT), DONE)
    assert (sample.replayed, sample.restarts) == (0, 2)
    assert (await ledger.trace(0))["journaled"] == {0: 1}, "only how often it began"


async def test_a_program_that_has_run_is_not_run_again(ledger):
    """The function of `run_python` is a closure, and yet keeps no state."""
    ran = []

    async def run_python(code: str) -> str:
        ran.append(code)
        return "42"

    lives = Lives(ledger, ToolEpisode([replace(python_tool(), function=run_python, preparation=None)]))
    await lives.die(call(PROGRAM))
    engine, sample = await lives.live(DONE)
    assert (ran, len(engine.requests)) == (["print(6 * 7)"], 1)
    assert (sample.replayed, sample.restarts, sample.stop) == (1, 0, "completed")


async def test_tools_with_a_state_see_each_call_again(ledger):
    """The environment of the process that goes on is in the state of the one that died."""

    class Counter:
        def __init__(self):
            self.total = 0

        def add(self, a: int, b: int) -> int:
            """Add."""
            self.total += a + b
            return self.total

        def get_reward(self):
            return float(self.total)

    lives = Lives(ledger, EnvironmentEpisode(Counter))
    await lives.die(call(ADD), call(ADD))
    engine, sample = await lives.live(call(ADD), DONE)
    assert (sample.replayed, sample.restarts, sample.score.value) == (2, 0, 9.0)
    assert len(engine.requests) == 2


class Shelf:
    """An environment whose tools note each time that they run, and whose answers cannot be had again."""

    def __init__(self, ran, **changed):
        self.ran = ran
        self.changed = changed

    def reset(self, **row):
        self.items, self.done, self.number = [], False, next(self.changed.get("numbers", count()))
        return self.changed.get("text", lambda: "")()

    def put(self, item: str) -> str:
        """Put something on the shelf.

        Args:
            item: its name.
        """
        self.ran.append(item)
        self.items.append([item, len(self.ran)])
        return f"{item} is number {len(self.ran)}"

    def drop(self, item: str) -> str:
        """Drop something.

        Args:
            item: its name.
        """
        self.ran.append(item)
        raise OSError(f"no {item}")

    def finish(self) -> str:
        """Finish."""
        self.done = True
        return "closed"

    async def get_state(self):
        return await self.changed.get("get_state", self._state)()

    async def _state(self):
        return {"items": self.items, "done": self.done, "hash": b"\x00\xff", 1: None}

    def set_state(self, state):
        self.changed.get("set_state", lambda: None)()
        assert (state["hash"], state[1]) == (b"\x00\xff", None)
        self.items, self.done = state["items"], state["done"]

    def get_reward(self):
        return float(sum(number for _, number in self.items))


def put(item, name="put"):
    return f'{{"name": "{name}", "arguments": {{"item": "{item}"}}}}'


FINISH = '{"name": "finish", "arguments": {}}'


def shelves(ledger, **changed):
    ran = []
    return ran, Lives(ledger, EnvironmentEpisode(lambda: Shelf(ran, **changed)), deterministic=False)


def answers(sample):
    """What the tools answered, as the model read it."""
    ids = [turn.observed_ids for turn in sample.turns if turn.role == "tool"]
    return [make_tokenizer(HERMES).backend.decode(each) for each in ids]


async def test_an_environment_that_restores_its_state_goes_on_without_running_its_tools_again(ledger):
    """Several calls in a turn, of which one fails; two deaths; an episode that the last tool ends."""
    ran, lives = shelves(ledger)
    first, second = call(put("a"), put("b"), put("c", "drop")), call(put("d"))
    await lives.die(first)
    assert sorted(ran) == ["a", "b", "c"]
    kept = await ledger.read_journal(lives.lease, 0)
    assert len(kept.turns) == 3, "begin, one reply and all its answers"
    await lives.die(second, version=2)
    assert len((await ledger.read_journal(lives.lease, 0)).turns) == 5
    engine, sample = await lives.live(call(FINISH), version=3)
    assert sorted(ran) == ["a", "b", "c", "d"], "each call ran once"
    assert len(engine.requests) == 1
    assert sample.token_ids.tolist() == said(engine, first, second, call(FINISH))
    assert (sample.replayed, sample.restarts, sample.stop) == (2, 0, "tool_stopped")
    assert sample.token_versions[[0, -1]].tolist() == [1, 3]
    outcomes = [[use.outcome for use in turn.tools] for turn in sample.turns if turn.tools]
    assert outcomes == [["ok", "ok", "error"], ["ok"]]
    assert "d is number 4" in answers(sample)[1]
    assert sample.score.value == sum(ran.index(item) + 1 for item in "abd"), "its score is that of all its lives"
    assert await ledger.emit(lives.lease, 0, b"payload")
    fields = await ledger.connection.read("HKEYS", ledger.keys.group(0))
    assert not [name for name in fields if name.startswith(b"j:")]
    assert await faults(ledger) == []


async def test_an_episode_whose_last_tool_ran_goes_on_with_its_score(ledger):
    """Nothing is left to sample: the process died while the environment gave its reward."""
    scoring = asyncio.Event()

    class Slow(Shelf):
        async def get_reward(self):
            scoring.set()
            if lives.lives == 1:
                await asyncio.Event().wait()
            return super().get_reward()

    ran = []
    lives = Lives(ledger, EnvironmentEpisode(lambda: Slow(ran)), deterministic=False)
    engine = await lives.engine_of(call(put("a"), FINISH))
    async with lives.playing(engine):
        await asyncio.wait_for(scoring.wait(), 30)
    engine, sample = await lives.live()
    assert (ran, engine.requests) == (["a"], [])
    assert (sample.replayed, sample.score.value, sample.stop) == (1, 1.0, "tool_stopped")


async def test_a_death_between_the_end_of_a_tool_and_its_record_runs_the_tool_again(ledger):
    """At least once: who goes on cannot know that it ran. What it did to the state is gone with the process."""
    asked_for = asyncio.Event()

    async def hangs():
        asked_for.set()
        if lives.lives == 1:
            await asyncio.Event().wait()
        return {"items": [], "done": False, "hash": b"\x00\xff", 1: None}

    ran, lives = shelves(ledger, get_state=hangs)
    engine = await lives.engine_of(call(put("a")))
    async with lives.playing(engine):
        await asyncio.wait_for(asked_for.wait(), 30)
    assert ran == ["a"]
    _, sample = await lives.live(DONE)
    assert ran == ["a", "a"]
    assert (sample.replayed, sample.restarts, sample.score.value) == (1, 0, 2.0)


def bad_states():
    async def fails():
        raise OSError("no state")

    async def is_an_object():
        return {"lock": object()}

    async def is_a_set():
        return {"seen": {"a", "b"}}

    async def is_a_large_number():
        return 1 << 70

    async def is_too_large():
        return bytes(800)

    async def hangs():
        await asyncio.Event().wait()

    return [fails, is_an_object, is_a_set, is_a_large_number, is_too_large, hangs]


@pytest.mark.parametrize("bad", bad_states(), ids=lambda bad: bad.__name__)
async def test_a_state_that_cannot_be_kept_ends_the_record_before_it(ledger, monkeypatch, caplog, bad):
    """The next process goes on with the turn before, whose state is there; the episode itself sees nothing of it."""
    monkeypatch.setattr(journal_module, "_MOST_BYTES", 1500)
    states = iter([None, bad])

    async def state(self):
        read = next(states, None)
        return await (read or self._state)()

    class Changing(Shelf):
        get_state = state

    ran = []
    lives = Lives(ledger, EnvironmentEpisode(lambda: Changing(ran)), deterministic=False, tool_deadline=0.5)
    await lives.die(call(put("a")), call(put("b")), call(put("c")))
    assert "an episode is no longer recorded" in caplog.text
    assert len((await ledger.read_journal(lives.lease, 0)).turns) == 4, (
        "begin, a reply, its answers, and one reply more"
    )
    engine, sample = await lives.live(call(put("d")), DONE)
    assert ran == ["a", "b", "c", "b", "d"]
    assert (sample.replayed, sample.restarts, len(engine.requests)) == (2, 0, 2)
    assert sample.score.value == 1.0 + 4.0 + 5.0


def refuses():
    raise ValueError("this is no state of mine")


@pytest.mark.parametrize("refused", ["set_state", "text", "field"])
async def test_a_sample_whose_environment_cannot_go_on_begins_again(ledger, refused):
    """It refuses the state, or `reset` says something else, or the state is lost; the tools run again, counted."""
    texts = map(str, count())
    changed = {"set_state": refuses} if refused == "set_state" else {"text": lambda: next(texts)}
    ran, lives = shelves(ledger, **({} if refused == "field" else changed))
    await lives.die(call(put("a")), call(put("b")))
    if refused == "field":
        await ledger.connection.read("HDEL", ledger.keys.group(0), "j:0:s")
    engine, sample = await lives.live(call(put("c")), DONE)
    assert ran == ["a", "b", "c"]
    assert (sample.replayed, sample.restarts, sample.score.value) == (0, 1, 3.0)
    assert sample.token_ids.tolist() == said(engine, call(put("c")), DONE)
    assert sample.stop == "completed"
    assert (await ledger.read_journal(lives.lease, 0)).turns[0] == msgspec.msgpack.encode(BeginEntry(1))


async def test_a_process_that_lost_the_sample_gives_it_up(ledger):
    """Its journal is another process's: to fail the sample, or to begin again beside it, would be wrong."""
    _, lives = shelves(ledger, set_state=refuses)
    await lives.die(call(put("a")))
    engine = await lives.engine_of(DONE)
    await take(ledger, "prompts", lives.lease, "the next one")
    before = await ledger.read_journal(lives.lease, 0)
    async with lives.playing(engine) as task:
        with pytest.raises(RetryLater, match="another process has taken the sample over"):
            await task
    assert (engine.requests, await ledger.read_journal(lives.lease, 0)) == ([], before)


async def test_one_of_both_methods_is_a_tool(ledger):
    class Board:
        def get_state(self) -> str:
            """Look at the board."""
            return "empty"

    lives = Lives(ledger, EnvironmentEpisode(Board), deterministic=False)
    _, sample = await lives.live(call('{"name": "get_state", "arguments": {}}'), DONE)
    assert "empty" in answers(sample)[0]


def fickle(ledger, **limits):
    """An episode that was declared deterministic and is not: its second question is another one in each process."""
    lives = Lives(ledger, None, **limits)

    class Fickle(Episode):
        async def run(self, task, chat):
            messages = list(task.messages)
            for _ in range(4):
                messages.append((await chat(messages)).message)
                messages.append({"role": "user", "content": f"life {lives.lives}"})

    lives.episode = Fickle()
    return lives


async def test_code_that_goes_another_way_samples_anew_from_there(ledger):
    lives = fickle(ledger)
    await lives.die("a", "b", "c")
    await lives.die("d", version=2)
    assert (await ledger.trace(0))["journaled"] == {0: 5}
    engine, sample = await lives.live("e", "f", "g", version=3)
    assert (sample.replayed, sample.restarts) == (1, 0)
    assert sample.token_ids.tolist() == said(engine, "a", "e", "f", "g")
    assert sample.token_versions[[0, -1]].tolist() == [1, 3]


async def test_code_that_kills_its_process_on_another_way_each_time_is_found_to_be_the_cause(ledger):
    """A recorded turn clears the sample of earlier deaths, so there are no more of them than an episode may have."""
    lives = fickle(ledger, max_turns=4)
    await lives.die("a", "b")
    for life in range(4):
        await lives.die(f"other {life}")
    assert (await ledger.trace(0))["journaled"] == {0: 5}, "begin and four turns"
    [(_, _, _, deaths)] = await ledger.connection.read("XPENDING", ledger.keys.prompts, "g", "-", "+", 1)
    assert deaths == 3, "of the last two processes and the lease of the present one"


async def test_a_record_of_the_version_before_is_read(ledger):
    """Its entries said more: which calls had no answer yet."""
    lives = Lives(ledger, ToolEpisode([shift]))
    await lives.die(call(SHIFT))
    turns = (await ledger.read_journal(lives.lease, 0)).turns
    await ledger.forget_journal(lives.lease, 0)
    for number, turn in enumerate(turns[:2]):
        entry = msgspec.msgpack.decode(turn) | ({"waiting": []} if number else {})
        await ledger.journal(lives.lease, 0, number, msgspec.msgpack.encode(entry))
    _, sample = await lives.live(DONE)
    assert (RAN, sample.replayed, sample.restarts) == ([5, 5], 1, 0)


async def test_a_call_that_ran_beside_recorded_ones_is_no_other_way(ledger):
    """Two tools at the same time: one had answered when the process died, the other had not."""
    hangs = asyncio.Event()

    async def wait(seconds: int) -> str:
        """Wait."""
        hangs.set()
        await released.wait()
        return "waited"

    released = asyncio.Event()
    lives = Lives(ledger, ToolEpisode([shift, wait]))
    both = call(WAIT, SHIFT)
    engine = await lives.engine_of(both)
    async with lives.playing(engine):
        await until(lambda: hangs.is_set() and RAN)
        while len((await ledger.read_journal(lives.lease, 0)).turns) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    released.set()
    engine, sample = await lives.live(DONE)
    assert RAN == [5]
    assert (sample.replayed, sample.restarts) == (1, 0)
    assert sample.token_ids.tolist() == said(engine, both, DONE)


@pytest.mark.parametrize("foreign", [[b"garbage"], [msgspec.msgpack.encode(BeginEntry(3)), b"garbage"]])
async def test_a_journal_that_cannot_be_read_is_begun_again(ledger, foreign):
    lives = Lives(ledger, ToolEpisode([add]))
    await lives.engine_of()
    for number, entry in enumerate(foreign):
        assert await ledger.journal(lives.lease, 0, number, entry)
    engine, sample = await lives.live(call(ADD), DONE)
    assert len(engine.requests) == 2
    assert (sample.replayed, sample.restarts) == (0, 4 if len(foreign) > 1 else 1)


async def test_a_journal_that_is_full_ends_early(ledger, monkeypatch):
    monkeypatch.setattr(journal_module, "_MOST_BYTES", 700)
    lives = Lives(ledger, ToolEpisode([shift]))
    await lives.die(*(call(SHIFT, text=str(turn)) for turn in range(4)))
    sizes = [len(entry) for entry in (await ledger.read_journal(lives.lease, 0)).turns]
    assert 400 < sum(sizes) <= 720
    assert len(sizes) < 9
    _, sample = await lives.live(*(call(SHIFT, text=str(turn)) for turn in range(4)), DONE)
    assert 0 < sample.replayed < 4
    assert sample.restarts == 0


async def test_a_cancelled_write_leaves_no_gap(ledger):
    """What its writer did not wait for may be in Redis or not: the next turn comes after it, and once."""
    await admit(ledger, 0)
    (held,) = await lease(ledger, "prompts")
    kept = TurnJournal(held, 0, lambda _: None)
    await kept.turn(b"a")
    await ledger.journal(held, 0, 1, b"of a cancelled writer")
    await kept.turn(b"b")
    await kept.turn(b"c")
    assert (await ledger.read_journal(held, 0)).turns == [b"a", b"of a cancelled writer", b"b", b"c"]
    again = TurnJournal(held, 0, lambda _: None)
    await again.turn(b"a")  # a repeat after a lost reply
    await again.turn(b"d")
    assert (await ledger.read_journal(held, 0)).turns[-2:] == [b"c", b"d"]
    await again.forget()
    await again.turn(b"e")
    assert await again.recorded() == ([b"e"], None)
