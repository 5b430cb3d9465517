"""Episodes of users as samples: tools, environments, limits, errors, and the replay of a journal."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import Counter
from typing import ClassVar

import numpy as np
import pytest
import replica_kit
import torch
from producer_kit import until
from replica_kit import Learner, admit, replica_on, samples_of
from transformers import AutoModelForCausalLM

from streamrl import wire
from streamrl.consumers.reward import RewardSample
from streamrl.consumers.rules.episode import EpisodeScore
from streamrl.errors import ConfigError, DataError, DeadlineExceeded, PluginError, Unreachable
from streamrl.producers.engines.hf import HfEngine
from streamrl.producers.episodes import sampler as sampler_module
from streamrl.producers.episodes.clock import EpisodeOver
from streamrl.producers.episodes.environment import EnvironmentEpisode, ToolEpisode
from streamrl.producers.episodes.episode import Episode
from streamrl.producers.episodes.sampler import EpisodeFailed, EpisodeSampler, episode_of, sampler_of
from streamrl.producers.episodes.tools import left_behind
from streamrl.producers.sampler import SingleTurn
from streamrl.producers.tokenizer import Tokenizer
from streamrl.runtime.preflight import check_episode
from streamrl.score import Score

from .chat_kit import HERMES, asked, make_tokenizer
from .episode_kit import ABSENT, ADD, BROKEN, DONE, WRONG, Script, add, call, config_of, order_of, save_talker

TOKENIZER = make_tokenizer(HERMES)


async def sampled(episode, texts, limits=None, *, order=None, **sections):
    engine = texts if isinstance(texts, Script) else Script(TOKENIZER, texts)
    config = config_of({"tools": ["m:f"], **(limits or {})}, **sections)
    async with EpisodeSampler(config, engine, TOKENIZER, episode, "rollout.0") as sampler:
        sample = await sampler.sample(order or order_of(TOKENIZER))
    return wire.decode(wire.encode(sample), wire.Sample)


def heard(sample):
    return [TOKENIZER.backend.decode(turn.observed_ids) for turn in sample.turns if turn.observed]


async def test_a_real_model_calls_tools(tmp_path):
    """What was sampled has the log-probabilities of a forward pass over the branch."""
    save_talker(tmp_path)
    config = config_of({"tools": ["m:f"]}, model={"path": str(tmp_path)}, engine={"threads": 1})
    tokenizer = Tokenizer.load(config.model)
    engine = HfEngine(config, 1)
    await engine.start()
    try:
        async with EpisodeSampler(config, engine, tokenizer, ToolEpisode([add]), "rollout.0") as sampler:
            orders = [order_of(tokenizer) for _ in range(16)]
            orders = [type(order)(order.prompt, id=f"r-{n}") for n, order in enumerate(orders)]
            samples = await asyncio.gather(*map(sampler.sample, orders))
    finally:
        await engine.close()
    outcomes = Counter(use.outcome for sample in samples for turn in sample.turns for use in turn.tools)
    assert set(outcomes) == {"ok", "malformed", "unknown"}
    longest = max(samples, key=lambda sample: len(sample.turns))
    ids, kept, at = [], [], 0
    for turn in longest.turns:
        own = turn.observed_ids if turn.observed else longest.token_ids[at : at + turn.sampled]
        kept += [bool(turn.sampled)] * len(own)
        at += turn.sampled
        ids += own.tolist()
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    expected = logits.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()[np.array(kept[1:])]
    np.testing.assert_allclose(longest.token_logprobs, expected, atol=1e-4)


async def test_bad_calls_are_answered_and_the_episode_goes_on():
    def divide(a: int, b: int) -> float:
        """Divide."""
        return a / b

    by_zero = '{"name": "divide", "arguments": {"a": 1, "b": 0}}'
    texts = [call(ADD, by_zero), call(WRONG), call(ABSENT), call(BROKEN), DONE]
    long = {"sampling": {"max_new_tokens": 200}, "model": {"context": 2048}}
    sample = await sampled(ToolEpisode([add, divide]), texts, **long)
    outcomes = [[use.outcome for use in turn.tools] for turn in sample.turns if turn.role == "tool"]
    assert outcomes == [["ok", "error"], ["malformed"], ["unknown"], ["malformed"]]
    assert "ZeroDivisionError" in heard(sample)[1]
    assert (sample.stop, sample.text, sample.score) == ("completed", DONE, None)


async def test_a_reply_that_is_cut_ends_the_episode():
    sample = await sampled(ToolEpisode([add]), [call(ADD), call(ADD)], sampling={"max_new_tokens": 20})
    assert (sample.stop, sample.finish) == ("max_tokens", "length")


class Rewarded:
    """A TRL environment."""

    made: ClassVar[list[Rewarded]] = []

    def __init__(self, start=0):
        self.total, self.closed, self.done = start, False, False
        self.made.append(self)

    def reset(self, answer, level, **row):
        self.goal = int(answer) + level
        return f" Reach {self.goal}."

    async def add(self, a: int, b: int) -> int:
        """Add."""
        self.total += a + b
        self.done = self.total >= self.goal + 100
        return self.total

    def get_reward(self):
        return self.total / self.goal

    def close(self):
        self.closed = True


@pytest.mark.parametrize(
    ("texts", "limits", "stop", "score"),
    [
        ([call(ADD), DONE], {}, "completed", 0.75),
        ([call(ADD), call(ADD)], {"max_turns": 1}, "max_turns", 0.75),
        ([call('{"name": "add", "arguments": {"a": 100, "b": 4}}')], {}, "tool_stopped", 26.0),
    ],
    ids=["completed", "limit", "done"],
)
async def test_an_environment_of_trl(texts, limits, stop, score):
    sample = await sampled(EnvironmentEpisode(Rewarded), texts, limits)
    assert (sample.stop, sample.score.value) == (stop, score)
    assert "what is 1 + 2? Reach 4.<|im_end|>" in heard(sample)[0]
    assert Rewarded.made[-1].closed


async def test_an_environment_that_does_not_begin_in_time_is_named():
    class Hangs(Rewarded):
        async def reset(self):
            await asyncio.Event().wait()

    why = r"without a single sampled token: .* ran out of time during start"
    with pytest.raises(DataError, match=why):
        await sampled(EnvironmentEpisode(Hangs), [], {"deadline": 0.4})


class Agents(Episode):
    """Two sub-agents at the same time, rewards of turns, and a score with parts."""

    async def run(self, task, chat):
        one, two = chat.fork(), chat.fork([add])
        await asyncio.gather(one([asked("one")]), two([asked("two")]))
        one.reward(1.0)
        two.reward(2.0)
        reply = await chat(task.messages)
        chat.reward(3.0)
        return Score(float(reply.content), {"line": task.line})


async def test_sub_agents_are_branches_with_rewards_of_their_own():
    sample = await sampled(Agents(), ["a", "b", "5"])
    assert {turn.reward for turn in sample.turns if turn.sampled} == {1.0, 2.0, 3.0}
    assert sample.turns[-1].parent == wire.PROMPT
    assert sample.score == wire.SampleScore(value=5.0, parts={"line": 7.0})
    prompt = wire.Prompt(tokens=sample.tokens)
    score = await EpisodeScore().score(RewardSample.of(prompt, sample))
    assert (score.value, score.parts) == (5.0, {"line": 7.0})


async def test_the_reward_of_an_episode_without_a_score_is_an_error():
    sample = await sampled(ToolEpisode([add]), [DONE])
    with pytest.raises(DataError, match="gave itself no score"):
        await EpisodeScore().score(RewardSample.of(wire.Prompt(tokens=sample.tokens), sample))


def episode(body, **methods):
    return type("Mine", (Episode,), {"run": body, **methods})()


async def says(self, task, chat):
    await chat(task.messages)


async def test_code_that_takes_too_long_is_ended_and_scored_or_dropped():
    async def run(self, task, chat):
        await chat(task.messages)
        await asyncio.Event().wait()

    async def cut_short(self, task, stop):
        return await asyncio.to_thread(lambda: 0.5 if stop == "rollout_timeout" else 1.0)

    limits = {"deadline": 0.3}
    assert (await sampled(episode(run), ["a"], limits)).score.value == 0.0
    assert (await sampled(episode(run, cut_short=cut_short), ["a"], limits)).score.value == 0.5
    with pytest.raises(DeadlineExceeded, match=r"ran out of time during run \(episode\.deadline 0\.3 s"):
        await sampled(episode(run), ["a"], {**limits, "timed_out": "drop"})


async def test_code_that_a_part_ended_may_use_the_time_kept_for_scoring():
    async def run(self, task, chat):
        await chat(task.messages)
        with contextlib.suppress(EpisodeOver):
            async with chat.session.part("tools"):
                await asyncio.Event().wait()
        return await asyncio.to_thread(lambda: 0.5)

    sample = await sampled(episode(run), ["a"], {"deadline": 0.4, "scoring_share": 0.5})
    assert (sample.stop, sample.score.value) == ("rollout_timeout", 0.5)


@pytest.mark.parametrize(
    ("value", "why"), [("1", "not a number"), (True, "not a number"), (float("nan"), "is nan")], ids=str
)
async def test_what_is_no_score_is_an_error_of_the_episode(value, why):
    async def run(self, task, chat):
        await chat(task.messages)
        return value

    with pytest.raises(EpisodeFailed, match=f"episode Mine failed: .*{why}"):
        await sampled(episode(run), ["a"])


async def test_errors_of_the_code_are_not_those_of_the_engine():
    async def raises(self, task, chat):
        raise Unreachable("some service of mine")

    async def swallows(self, task, chat):
        for _ in range(3):
            try:
                await chat(task.messages)
            except Exception:  # noqa: BLE001
                continue
        return 1.0

    async def silent(self, task, chat):
        return 1.0

    with pytest.raises(EpisodeFailed, match="Mine failed: Unreachable: some service of mine"):
        await sampled(episode(raises), [])
    with pytest.raises(Unreachable, match="died"):
        await sampled(episode(swallows), [Unreachable("died")])
    with pytest.raises(DataError, match="without a single sampled token"):
        await sampled(episode(silent), [])


async def test_code_that_goes_on_after_the_end_does_not_keep_the_event_loop_busy():
    asked_for = 0

    async def never_ends(self, task, chat):
        nonlocal asked_for
        while True:
            asked_for += 1
            try:
                await chat(task.messages)
            except Exception:  # noqa: BLE001
                continue

    sample = await sampled(episode(never_ends), ["a"] * 3, {"max_turns": 2, "deadline": 0.3})
    assert sample.stop == "max_turns"
    assert asked_for < 10


async def test_the_errors_of_a_group_of_sub_agents_are_those_of_the_episode():
    async def run(self, task, chat):
        await chat(task.messages)
        async with asyncio.TaskGroup() as group:
            for number in range(3):
                group.create_task(chat.fork()([asked(str(number))]))

    async def fails(self, task, chat):
        async with asyncio.TaskGroup() as group:
            group.create_task(says(self, task, chat))
            group.create_task(run(self, task, chat))
            raise KeyError("mine")

    sample = await sampled(episode(run), ["a"] * 4, {"max_turns": 2})
    assert (sample.stop, sample.score.value) == ("max_turns", 0.0)
    with pytest.raises(Unreachable, match="died"):
        await sampled(episode(run), ["a", Unreachable("died"), "b", "c"])
    with pytest.raises(DataError, match="without messages"):
        await sampled(episode(grouped([])), [])
    with pytest.raises(EpisodeFailed, match="Mine failed: KeyError: 'mine'"):
        await sampled(episode(fails), ["a"] * 8, {"max_turns": 1})


def grouped(messages):
    async def run(self, task, chat):
        async with asyncio.TaskGroup() as group:
            group.create_task(chat(messages))

    return run


async def test_what_the_code_leaves_behind_ends_with_its_episode():
    left, sampling = [], asyncio.Event()

    class Hangs(Script):
        async def generate(self, request):
            if not self.texts:
                sampling.set()
                await asyncio.Event().wait()
            return await super().generate(request)

    async def run(self, task, chat):
        await chat(task.messages)
        left.extend([chat, asyncio.create_task(chat.fork()([asked("and?")]))])
        await sampling.wait()
        return 1.0

    sample = await sampled(episode(run), Hangs(TOKENIZER, ["a"]))
    chat, task = left
    assert (sample.v, sample.score.value, task.cancelled()) == (1, 1.0, True)
    assert chat.session.generating == 0
    with pytest.raises(EpisodeOver, match="completed"):
        await chat([asked("and?")])


async def test_an_episode_that_does_not_open_in_time_is_named():
    async def hangs(self):
        await asyncio.Event().wait()

    with pytest.raises(DeadlineExceeded, match=r"episode Mine was not open after 0\.05 s"):
        await sampled(episode(says, open=hangs), [], supervisor={"start_deadline": 0.1})


async def test_an_episode_that_does_not_close_hides_nothing(caplog):
    async def fails(self):
        raise OSError("no close")

    async def raises(self, task, chat):
        raise KeyError("mine")

    assert (await sampled(episode(says, close=fails), ["a"])).text == "a"
    with pytest.raises(EpisodeFailed, match="mine"):
        await sampled(episode(raises, close=fails), [])
    assert [record.exc_info[1].args for record in caplog.records] == [("no close",)] * 2


def test_code_that_blocks_is_named(caplog):
    async def blocks(self, task, chat):
        await chat(task.messages)
        named.wait(20)  # holds the event loop until the log has a line
        return 1.0

    class Naming(logging.Handler):
        def emit(self, record):
            named.set()

    named = threading.Event()
    watched = logging.getLogger("streamrl.producers.episodes.blocked_loop")
    watched.addHandler(handler := Naming(logging.ERROR))
    try:
        asyncio.run(sampled(episode(blocks), ["a"], lease={"seconds": 0.6}))
    finally:
        watched.removeHandler(handler)
    (record,) = [record for record in caplog.records if record.name == watched.name]
    assert "in blocks" in record.place
    assert __file__ in record.place


async def test_code_that_swallows_its_cancellation_stalls_nothing(monkeypatch):
    monkeypatch.setattr(sampler_module, "_GRACE", 0.1)
    tasks = []

    async def run(self, task, chat):
        await chat(task.messages)
        tasks.append(asyncio.current_task())
        while tasks:
            try:
                await asyncio.sleep(60)
            except:  # noqa: E722
                continue

    before = len(left_behind)
    sample = await sampled(episode(run), ["a"], {"deadline": 0.3})
    assert (sample.stop, sample.score.value) == ("rollout_timeout", 0.0)
    assert len(left_behind) == before + 1
    tasks.pop().cancel()
    await until(lambda: len(left_behind) == before)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, asyncio.CancelledError])
async def test_what_would_end_the_process_fails_the_episode_that_raised_it(error):
    async def run(self, task, chat):
        raise error

    async def opens(self):
        raise error

    with pytest.raises(EpisodeFailed, match=f"episode Mine failed: RuntimeError: it raised {error.__name__}"):
        await sampled(episode(run), [])
    if error is not asyncio.CancelledError:
        with pytest.raises(PluginError, match=f"episode Mine cannot be opened: {error.__name__}"):
            await sampled(episode(run, open=opens), [])


async def test_episodes_are_counted_apart_from_what_the_engine_generates():
    started, going_on = asyncio.Event(), asyncio.Event()

    async def waits(self, task, chat):
        await chat(task.messages)
        started.set()
        await going_on.wait()

    config = config_of({"tools": ["m:f"], "concurrent": 1})
    async with EpisodeSampler(config, Script(TOKENIZER, ["a", "b"]), TOKENIZER, episode(waits)) as sampler:
        assert (sampler.capacity(64), sampler.capacity(0)) == (1, 0)
        tasks = [asyncio.create_task(sampler.sample(order_of(TOKENIZER))) for _ in range(2)]
        await started.wait()
        counted = {"episodes": 1, "generating": 0, "forks": 0, "dropped_turns": 0, "auxiliary_turns": 0}
        counted |= {"hanging": len(left_behind), "agents_failed": 0}
        assert sampler.figures() == counted
        going_on.set()
        await asyncio.gather(*tasks)
    assert EpisodeSampler(config_of({"tools": ["m:f"]}), None, TOKENIZER, episode(waits)).capacity(8) == 16


@pytest.mark.parametrize(
    ("section", "why"),
    [
        ({"run": "a:B", "tools": ["c:d"]}, "episode.run and episode.tools both run"),
        ({"max_turns": 3}, "episode.max_turns is set, and nothing runs the episodes"),
        ({"tools": ["c:d"], "args": {"x": 1}}, "episode.args are the arguments"),
        ({"run": "a.B"}, "write module:Name"),
        ({"tools": ["c:d"], "deadline": 900}, "set lease.max_hold to 1800s or more"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_section_that_makes_no_sense_is_refused(section, why):
    with pytest.raises(ValueError, match=why):
        config_of(section)


def test_what_is_no_episode_is_refused(tmp_path, monkeypatch):
    (tmp_path / "my_episodes.py").write_text(
        "from streamrl.producers.episodes.episode import Episode\n"
        "class Half(Episode): pass\n"
        "class Sync(Episode):\n    def run(self, task, chat): pass\n"
        "class Env:\n    def __init__(self, size): pass\n"
        "class Silent:\n    def reset(self): pass\n    def move(self): pass\n"
        "def tool(x): pass\n"
    )
    monkeypatch.chdir(tmp_path)
    for section, why in [
        ({"run": "my_episodes:Half"}, "episode my_episodes:Half is abstract"),
        ({"run": "my_episodes:Sync"}, "run is not async"),
        ({"run": "my_episodes:Env"}, "no subclass of Episode"),
        ({"run": "my_episode:Half"}, "there is no module my_episode"),
        ({"environment": "my_episodes:Env"}, "episode.args do not fit"),
        ({"environment": "my_episodes:Silent"}, "tool move has no docstring"),
        ({"tools": ["my_episodes:tool"]}, "has no docstring"),
        ({"tools": ["my_episodes:tols"]}, "has no tols"),
    ]:
        with pytest.raises(PluginError, match=why):
            episode_of(config_of(section))
    assert isinstance(sampler_of(config_of({}), None, TOKENIZER), SingleTurn)


def test_a_context_that_the_model_does_not_have_is_refused_before_the_start(tmp_path):
    save_talker(tmp_path)
    tools = {"tools": ["tests.producers.episodes.episode_kit:add"]}
    model = {"path": str(tmp_path)}
    assert check_episode(config_of(tools, model={**model, "context": 1024})).startswith("tools: ToolEpisode")
    with pytest.raises(ConfigError, match=r"model\.context \(1025\) tokens, but .* has 1024 positions"):
        check_episode(config_of(tools, model={**model, "context": 1025}))


async def settled(ledger):
    return await ledger.connection.read("XLEN", ledger.keys.prompts) == 0


async def test_a_replica_emits_episodes_and_buries_those_without_a_token(run, tmp_path, monkeypatch):
    """Odd lines end before the first reply: dead letters that say so, at the first attempt."""
    (tmp_path / "odd.py").write_text(
        "from streamrl.producers.episodes.episode import Episode\n"
        "class Odd(Episode):\n"
        "    async def run(self, task, chat):\n"
        "        if task.line % 2:\n"
        "            return 1.0\n"
        "        await chat(task.messages)\n"
        "        await chat([*task.messages, {'role': 'user', 'content': 'and?'}])\n"
        "        return float(task.answer)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    save_talker(tmp_path / "talker")
    run.set("model", path=str(tmp_path / "talker"), context=512)
    run.set("episode", run="odd:Odd", concurrent=3).set("sampling", group_size=2, max_new_tokens=16)
    run.set("engine", threads=1, slots=4)
    async with run.open() as ledgers:
        learner = await Learner.of(run, ledgers, version=None)
        talker = AutoModelForCausalLM.from_pretrained(tmp_path / "talker", dtype=torch.float32)
        monkeypatch.setattr(replica_kit, "tiny_model", lambda seed: talker)
        await learner.publish(1)
        await admit(run, ledgers.train, 2)
        async with replica_on(run, ledgers):
            await until(lambda: settled(ledgers.train))
        even, odd = [await samples_of(ledgers.train, group) for group in (0, 1)]
        letters = await ledgers.train.dead_letters()
    assert len(even) == 2
    assert odd == {}
    samples = [wire.decode(payload, wire.Sample) for payload in even.values()]
    assert {(sample.score.value, sample.stop, sample.engine) for sample in samples} == {(0.0, "completed", "rollout.0")}
    assert {len([turn for turn in sample.turns if turn.sampled]) for sample in samples} == {2}
    own = [letter for letter in letters if letter.sample is not None]
    assert len(own) == 2
    assert all("line 1 of the data set ended without a single sampled token" in letter.why for letter in own)
