"""What rewards see of an episode: the messages that its branch had, whatever the client made of the conversation."""

from __future__ import annotations

from streamrl import wire
from streamrl.consumers import RewardSample
from streamrl.consumers.transcript import transcript
from streamrl.producers.episodes.known_models import renderer_of
from streamrl.producers.episodes.session import EpisodeSession

from .chat_kit import KEEPS_THINKING, LOOK_UP, answered, asked, make_tokenizer
from .episode_kit import ADD, Script, call, config_of, order_of
from .test_session import CHAT, TOKENIZER, replied, session_of


def seen(session):
    """The sample of a session as a reward gets it, through the wire."""
    sample = wire.decode(wire.encode(session.sample()), wire.Sample)
    return RewardSample.of(order_of(TOKENIZER).prompt, sample)


async def test_a_reward_sees_roles_calls_and_results_of_all_turns():
    session, _ = session_of([call(ADD), "so it is three", "welcome"])
    first = await replied(session, CHAT, [LOOK_UP])
    chat = [*CHAT, first.message, answered("3", first.calls[0].id)]
    second = await replied(session, chat, [LOOK_UP])
    third = await replied(session, [*chat, second.message, asked("thanks")], [LOOK_UP])
    sample = seen(session)
    said = [first.message, chat[-1], second.message, asked("thanks"), third.message]
    assert (sample.text, sample.completion) == ("welcome", said)
    assert sample.messages == [*CHAT, *said]
    roles = ["user", "assistant", "tool", "assistant", "user", "assistant"]  # the first: the prompt with its tools
    assert [turn.role for turn in sample.turns] == roles
    text = transcript(sample)
    assert (
        text.index('"name": "add"') < text.index("<tool_response>\n3\n</tool_response>") < text.index("so it is three")
    )
    assert text.endswith("thanks\nwelcome")


async def test_a_single_answer_is_one_message_after_its_prompt():
    session, _ = session_of(["three"])
    await replied(session, CHAT)
    sample = seen(session)
    assert sample.messages == [*CHAT, {"role": "assistant", "content": "three"}]
    assert (sample.turns, transcript(sample)) == ([], "three")


async def test_an_agent_with_a_prompt_of_its_own_is_seen_with_that_prompt():
    own = [{"role": "system", "content": "You are terse."}, asked("1 + 2, please")]
    session, _ = session_of(["let me think", "three"])
    first = await replied(session, own)
    last = await replied(session, [*own, first.message, asked("well?")])
    sample = seen(session)
    assert sample.completion == [first.message, asked("well?"), last.message]
    assert sample.messages == [*own, *sample.completion]


async def test_of_several_branches_the_one_of_the_last_turn_is_the_conversation():
    session, _ = session_of(["a plan", "a critique", "another plan"])
    plan = await replied(session, CHAT)
    critic = [{"role": "system", "content": "You criticise."}, asked(str(plan.message["content"]))]
    await replied(session, critic)
    assert seen(session).messages == [*critic, {"role": "assistant", "content": "a critique"}]
    again = await replied(session, [*CHAT, plan.message, asked("again")])
    sample = seen(session)
    assert sample.messages == [*CHAT, plan.message, asked("again"), again.message]
    everything = [message["content"] for turn in sample.turns for message in turn.messages]
    assert everything == ["a plan", "You criticise.", "a plan", "a critique", "again", "another plan"]


async def test_thinking_that_a_client_drops_is_seen():
    tokenizer = make_tokenizer(KEEPS_THINKING)
    engine = Script(tokenizer, ["<think>\nhm\n</think>\n\nthree", "yes"])
    session = EpisodeSession(
        config_of({"tools": ["m:f"]}), engine, renderer_of(tokenizer), tokenizer, order_of(tokenizer)
    )
    first = await replied(session, CHAT)
    dropped = {key: value for key, value in first.message.items() if key != "reasoning_content"}
    assert dropped != first.message
    last = await replied(session, [*CHAT, dropped, asked("sure?")])
    assert seen(session).completion == [first.message, asked("sure?"), last.message]


async def test_a_number_that_messagepack_cannot_hold_fails_no_episode():
    session, _ = session_of([call(ADD), "three"])
    first = await replied(session, CHAT, [LOOK_UP])
    answer = answered("3", first.calls[0].id) | {"metadata": {"id": 1 << 70, "of": -7}}
    await replied(session, [*CHAT, first.message, answer], [LOOK_UP])
    assert seen(session).completion[1]["metadata"] == {"id": float(1 << 70), "of": -7}
