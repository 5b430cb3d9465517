"""One sample of several turns: its record, its limits, and how it ends."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from streamrl import wire
from streamrl.errors import DataError, Unreachable
from streamrl.producers.episodes.clock import EpisodeOver
from streamrl.producers.episodes.episode import Chat
from streamrl.producers.episodes.known_models import renderer_of
from streamrl.producers.episodes.session import ContextOverflow, EpisodeSession
from streamrl.score import Score
from streamrl.wire import NOTHING, PROMPT, ToolUse

from .chat_kit import HERMES, LOOK_UP, answered, asked, make_tokenizer
from .episode_kit import ADD, Script, call, config_of, order_of

TOKENIZER = make_tokenizer(HERMES)
CHAT = [{"role": "user", "content": "what is 1 + 2?"}]


def session_of(texts, episode=None, order=None, **sections):
    engine = Script(TOKENIZER, texts)
    config = config_of({"tools": ["m:f"], **(episode or {})}, **sections)
    return EpisodeSession(config, engine, renderer_of(TOKENIZER), TOKENIZER, order or order_of(TOKENIZER)), engine


async def replied(session, messages, *rest):
    return (await session.sampled(messages, *rest)).reply


def ids_of(engine, *texts):
    return np.concatenate([engine.ids(text) for text in texts])


async def test_turns_are_one_sample_whose_tokens_are_those_of_the_engine():
    session, engine = session_of([call(ADD), "three"])
    first = await replied(session, CHAT, [LOOK_UP])
    session.used(first.calls[0].id, ToolUse(name="add", outcome="error", seconds=2.5))
    session.reward(0.5, 1)
    engine.version = 2
    again = [*CHAT, first.message, answered("3", first.calls[0].id)]
    await replied(session, again, [LOOK_UP])
    session.reward(1.0, 3)
    session.reward(-0.25, 3)
    sample = wire.decode(wire.encode(session.sample(Score(2.0, {"a": 1.0}), "rollout.0")), wire.Sample)
    assert sample.v == 2
    assert np.array_equal(sample.token_ids, ids_of(engine, f"{call(ADD)}<|im_end|>", "three<|im_end|>"))
    count = len(engine.ids(f"{call(ADD)}<|im_end|>"))
    assert sample.runs == [(0, 1), (count, 2)]
    assert sample.token_logprobs[count] == -1
    opened, said, heard, ended = sample.turns  # the prompt of the data set has no tools
    assert [turn.parent for turn in sample.turns] == [NOTHING, 0, 1, 2]
    assert (said.sampled, heard.sampled, ended.finish) == (count, 0, "stop")
    assert (heard.role, heard.tools) == ("tool", [ToolUse(name="add", outcome="error", seconds=2.5)])
    assert (said.reward, ended.reward) == (0.5, 0.75)
    cached = [len(request.tokens) // 2 for request in engine.requests]
    assert [turn.cached for turn in sample.turns] == [0, cached[0], 0, cached[1]]
    assert (sample.text, sample.stop, sample.finish) == ("three", "completed", "stop")
    assert sample.score == wire.SampleScore(value=2.0, parts={"a": 1.0})
    seen = np.concatenate([opened.observed_ids, sample.token_ids[:count], heard.observed_ids])
    assert np.array_equal(engine.requests[1].tokens, seen)
    assert [request.affinity for request in engine.requests] == ["g0/rollout.0-1", "g0/rollout.0-1"]
    assert [request.cache_version for request in engine.requests] == [1, 1]
    assert len({request.id for request in engine.requests}) == 2


async def test_a_text_ends_a_reply_and_the_conversation_goes_on_behind_its_tokens():
    session, engine = session_of(["think\nObservation: it rains", "done;", call(ADD)], sampling={"stop": (";",)})
    turn = await session.sampled(CHAT, stop=["\nObservation:", "never"])
    assert (turn.reply.content, turn.finish, turn.cut) == ("think", "stop", None)
    said = TOKENIZER.decode(turn.tokens)
    assert said.startswith("think\nObservation:")
    assert not TOKENIZER.decode(turn.tokens[:-1]).endswith("Observation:")
    assert turn.text == "think"
    chat = [*CHAT, turn.reply.message, asked("Observation: it rains")]
    second = await session.sampled(chat)  # the texts of the run
    assert (second.reply.content, TOKENIZER.decode(second.tokens)) == ("done", "done;")
    assert [request.stop for request in engine.requests] == [("\nObservation:", "never"), (";",)]
    before = [*engine.requests[0].tokens, *turn.tokens]
    assert engine.requests[1].tokens[: len(before)].tolist() == before
    rest = TOKENIZER.decode(engine.requests[1].tokens[len(before) :], special=True)
    assert rest == "<|im_end|>\n<|im_start|>user\nObservation: it rains<|im_end|>\n<|im_start|>assistant\n"
    sample = session.sample()
    assert (sample.text, sample.finish) == ("done", "stop")
    assert [len(turn.messages) for turn in sample.turns if turn.sampled] == [1, 2]
    third = await session.sampled([*chat, second.reply.message, asked("add")], [LOOK_UP], stop=())
    assert third.reply.calls[0].name == "add"


async def test_how_replies_are_drawn_is_asked_of_the_engine():
    order = order_of(TOKENIZER, seed="7/g0/0")
    session, engine = session_of(["a", "b"], order=order, sampling={"top_p": 0.9, "min_tokens": 2})
    first = await replied(session, CHAT)
    await replied(session, [*CHAT, first.message, asked("and?")])
    assert [(request.top_p, request.min_tokens) for request in engine.requests] == [(0.9, 2)] * 2
    assert len({request.seed for request in engine.requests} - {None}) == 2


async def test_a_text_within_the_least_length_ends_no_reply_that_ends_by_itself():
    session, _ = session_of(["Yes. I do"], sampling={"stop": ["."], "min_tokens": 6})
    first = await replied(session, CHAT)
    assert (first.message["content"], session.sample().text) == ("Yes. I do", "Yes. I do")


async def test_an_option_whose_log_probabilities_nobody_tells_is_refused_to_every_caller():
    session, _ = session_of(["a"])
    with pytest.raises(DataError, match="temperature: at 0 all samples"):
        await session.sampled(CHAT, temperature=0.0)
    with pytest.raises(DataError, match="keeps no reply to a schema"):
        await session.sampled(CHAT, json_schema={"type": "object"})


async def test_one_turn_on_the_prompt_costs_what_a_single_answer_costs():
    session, _ = session_of(["three"])
    await replied(session, CHAT)
    sample = session.sample(Score(1.0))
    assert (sample.v, sample.turns, sample.stop) == (1, [], None)
    assert sample.score == wire.SampleScore(value=1.0)


async def test_a_tool_that_nobody_noted_counts_as_called():
    session, _ = session_of([call(ADD), "three"])
    first = await replied(session, CHAT, [LOOK_UP])
    await replied(session, [*CHAT, first.message, answered("3", first.calls[0].id)])
    assert session.sample().turns[-2].tools == [ToolUse(name="add")]


async def test_time_is_counted_from_a_reply_only():
    session, _ = session_of(["a", "b"])
    chat = [asked("a sub-agent's prompt")]
    await replied(session, chat)
    await replied(session, [*chat, {"role": "assistant", "content": "never said"}, asked("and?")])
    _, _, forked, _ = session.sample().turns
    assert (forked.parent, forked.tool_seconds) == (0, 0.0)


async def test_the_cache_of_older_weights_can_be_refused():
    session, engine = session_of(["three"], {"prefix_cache": "refresh"})
    await replied(session, CHAT)
    assert engine.requests[0].cache_version is None


async def test_a_turn_that_the_engine_breaks_off_is_a_fault_of_the_engine():
    session, _ = session_of([None])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="aborted"):
            await replied(session, CHAT)


async def test_a_token_that_ends_a_turn_ends_it_also_where_the_engine_goes_on():
    session, engine = session_of(["three<|im_end|> and four"])
    turn = await session.sampled(CHAT)
    assert np.array_equal(turn.tokens, engine.ids("three<|im_end|>"))
    assert turn.finish == "stop"
    assert turn.cut is None


LONG = "grass " * 30


@pytest.mark.parametrize(
    ("episode", "sections", "texts", "stop"),
    [
        ({"max_turns": 1}, {}, ["a", "b"], "max_turns"),
        ({"max_forks": 1}, {}, ["a", "b"], None),
        ({"max_tool_calls": 1}, {}, [call(ADD, ADD), "b"], "max_tool_calls"),
        ({"max_parse_errors": 1}, {}, [call("no JSON"), "b"], "parse_error"),
        ({"max_parse_errors": 2}, {}, [call("no JSON"), "b"], None),
        ({"max_sampled_tokens": 3}, {}, [LONG, "b"], "max_sampled_tokens"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
async def test_a_limit_ends_the_episode_which_keeps_what_there_is(episode, sections, texts, stop):
    session, _ = session_of(texts, episode, **sections)
    first = await session.sampled(CHAT, [LOOK_UP])
    going_on = [*CHAT, first.reply.message, asked("and " + "then " * 10)]
    if stop is None:
        await replied(session, going_on, [LOOK_UP])
        return
    for _ in range(2):
        with pytest.raises(EpisodeOver) as over:
            await replied(session, going_on, [LOOK_UP])
        assert over.value.stop == stop
    sample = session.sample()
    assert (sample.stop, len(sample.tokens) // 4) == (stop, len(first.tokens))
    if stop == "max_sampled_tokens":
        assert (first.cut, len(first.tokens)) == (stop, 3)


async def test_a_conversation_that_is_too_long_leaves_the_others_alive():
    session, _ = session_of(["a", "b", "c"], model={"context": 90})
    first = await replied(session, CHAT)
    for _ in range(2):
        with pytest.raises(
            ContextOverflow, match=r"maximum context length is 90 tokens .* your messages resulted in \d+"
        ):
            await replied(session, [*CHAT, first.message, asked(LONG * 2)])
    assert session.stop is None
    await replied(session, [asked("in short")])
    session.check_overflow()
    assert session.stop is None
    with pytest.raises(ContextOverflow):
        await replied(session, [*CHAT, first.message, asked(LONG * 2)])
    session.check_overflow()
    sample = session.sample()
    assert (sample.stop, len([turn for turn in sample.turns if turn.sampled])) == ("context_overflow", 2)


async def test_code_that_repeats_a_conversation_that_is_too_long_waits_each_time(monkeypatch):
    waited = []

    async def wait(seconds):
        waited.append(seconds)

    session, _ = session_of(["a", "b"], model={"context": 90})
    monkeypatch.setattr(asyncio, "sleep", wait)
    for _ in range(3):
        with pytest.raises(ContextOverflow):
            await session.sampled([asked(LONG * 4)])
    assert waited == [0, 0.1, 0.1]
    await session.sampled([asked("in short")])
    del waited[:]
    await session.sampled([asked("and?")])
    assert waited[0] == 0


@pytest.mark.parametrize(
    ("tools", "most", "content", "calls"),
    [
        ([], None, call(ADD, ADD, text="so "), 0),
        ([LOOK_UP], 0, call(ADD, ADD, text="so "), 0),
        ([LOOK_UP], 1, "so", 1),
        ([LOOK_UP], None, "so", 2),
    ],
)
async def test_calls_are_read_as_far_as_they_are_asked_for(tools, most, content, calls):
    session, engine = session_of([call(ADD, ADD, text="so "), "three"])
    turn = await session.sampled(CHAT, tools, most_calls=most)
    assert (turn.reply.content, len(turn.reply.calls)) == (content, calls)
    answers = [answered("3", one.id) for one in turn.reply.calls] or [asked("and?")]
    await session.sampled([*CHAT, turn.reply.message, *answers], tools, most_calls=most)
    assert session.forks == 0
    second = engine.requests[1].tokens.tolist()
    assert turn.tokens.tolist() == second[turn.prompt_tokens : turn.prompt_tokens + len(turn.tokens)]


async def test_forks_have_a_limit():
    session, _ = session_of(["a"] * 5, {"max_forks": 1})
    await replied(session, CHAT)
    await replied(session, [asked("a sub-agent's prompt")])
    with pytest.raises(EpisodeOver, match="forked"):
        await replied(session, [asked("another")])
    assert [turn.parent for turn in session.sample().turns] == [PROMPT, NOTHING, 1]
    assert session.forks == 1


def at_once(engine):
    """Let the engine sample several turns at the same time."""
    generate = engine.generate

    async def generate_beside_others(request):
        for _ in range(3):
            await asyncio.sleep(0)
        return await generate(request)

    engine.generate = generate_beside_others


async def test_turns_at_the_same_time_share_the_limit_of_tokens():
    session, engine = session_of([LONG] * 4, {"max_sampled_tokens": 10})
    at_once(engine)
    ends = await asyncio.gather(*(session.sampled([asked(str(n))]) for n in range(4)), return_exceptions=True)
    assert [type(end) for end in ends[1:]] == [EpisodeOver] * 3
    assert (len(ends[0].tokens), session.stop, len(engine.requests)) == (10, "max_sampled_tokens", 1)

    session, engine = session_of(["a"] * 4, {"max_sampled_tokens": 80})
    at_once(engine)
    ends = await asyncio.gather(*(session.sampled([asked(str(n))]) for n in range(4)))
    assert [end.cut for end in ends] == [None] * 4
    assert {request.max_new_tokens for request in engine.requests} == {64}


async def test_turns_at_the_same_time_share_the_limit_of_forks():
    session, engine = session_of(["a"] * 4, {"max_forks": 1})
    at_once(engine)
    ends = await asyncio.gather(*(replied(session, [asked(str(n))]) for n in range(4)), return_exceptions=True)
    assert [isinstance(end, EpisodeOver) for end in ends] == [False, False, True, True]
    assert session.forks == 1


async def test_branches_may_be_sampled_at_the_same_time():
    session, _ = session_of(["a", "b", "c"])
    await asyncio.gather(*(replied(session, [asked(f"agent {n}")]) for n in range(3)))
    sample = wire.decode(wire.encode(session.sample()), wire.Sample)
    assert sorted(turn.parent for turn in sample.turns) == [NOTHING] * 3 + [0, 2, 4]


async def test_nothing_sampled_is_an_error_that_says_why():
    session, _ = session_of([])
    with pytest.raises(DataError, match=r"line 7 .* without a single sampled token"):
        session.sample()
    with pytest.raises(DataError, match="before the first reply"):
        Chat(session).reward(1.0)
    session, _ = session_of([], order=order_of(TOKENIZER, text=LONG * 30))
    with pytest.raises(ContextOverflow, match=r"model\.context"):
        await replied(session, [asked(LONG * 30)])


async def test_the_death_of_the_engine_is_kept_whatever_the_code_makes_of_it():
    session, engine = session_of([Unreachable("the engine died")])
    for _ in range(2):
        with pytest.raises(Unreachable):
            await replied(session, CHAT)
    assert isinstance(session.fault, Unreachable)
    assert len(engine.requests) == 1


async def test_time_is_kept_for_the_score_and_what_ran_out_of_it_is_named():
    session, engine = session_of([], {"deadline": 0.4, "scoring_share": 0.75})
    engine.generate = lambda _: asyncio.Event().wait()
    late = r"ran out of time during model \(episode.deadline 0.4 s, 0.3 s of it for the score\)"
    with pytest.raises(EpisodeOver, match=late):
        await replied(session, CHAT)
    assert session.stop == "rollout_timeout"
    with pytest.raises(EpisodeOver, match=late):
        async with session.part("tools"):
            await asyncio.Event().wait()
    async with session.part("scoring"):
        await asyncio.sleep(0)
    with pytest.raises(EpisodeOver, match=late):
        async with session.part("scoring"):
            await asyncio.Event().wait()
