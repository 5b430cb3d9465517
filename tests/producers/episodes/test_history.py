"""The tree of a sample: ids are exact, each sampled token is there once, and nothing is made to fit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamrl.engine import Completion
from streamrl.errors import DataError
from streamrl.producers.episodes.history import History
from streamrl.producers.episodes.known_models import renderer_of
from streamrl.wire import NOTHING, PROMPT

from .chat_kit import HERMES, KEEPS_THINKING, LOOK_UP, STRIPS_THINKING, answered, asked, make_tokenizer

TOKENIZERS = {name: make_tokenizer(name) for name in (HERMES, STRIPS_THINKING)}


class Recorder:
    """A history with a policy that says what it is told; keeps what the policy was given."""

    def __init__(self, template=HERMES, prompt=None, tools=()):
        self.tokenizer = TOKENIZERS.get(template) or make_tokenizer(template)
        self.renderer = renderer_of(self.tokenizer)
        ids = self.renderer.render(prompt or [asked()], tools)
        self.history = History(self.renderer, np.asarray(ids, dtype=np.int32))
        self.seen = {}
        self.said = []

    def say(self, messages, text, *, finish="stop", tools=()):
        """`text` are the ids of its characters if it is a list of them, which no tokenizer would write."""
        place = self.history.place(messages, tools)
        ids = [token for piece in [*text] for token in self.tokenizer.plain_ids(piece)]
        if isinstance(text, str):
            ids = self.tokenizer.plain_ids(text)
        ids += [] if finish == "length" else self.tokenizer.plain_ids("<|im_end|>")
        tokens = np.asarray(ids, dtype=np.int32)
        reply = self.renderer.parse(ids, tools or None, prompt=place.ids.tolist())
        completion = Completion(tokens, np.zeros(len(ids), np.float32), [(0, 1)], finish, 0.0)
        turn = self.history.record(place, completion, reply)
        self.seen[turn] = [*place.ids.tolist(), *ids]
        self.said.append(ids)
        return [*messages, reply.message], turn

    def parents(self):
        return [turn.parent for turn in self.history.turns]

    def check(self):
        """Branches are what the engine saw, and the arrays hold what it said, once and in order."""
        for turn, ids in self.seen.items():
            assert self.history.ids(turn).tolist() == ids
        assert [turn.ids.tolist() for turn in self.history.turns if turn.sampled] == self.said


def test_a_conversation_that_grows_is_one_branch_with_the_prompt_of_the_data_set():
    recorder = Recorder()
    chat, _ = recorder.say([asked()], 'let me see<tool_call>\n{"name": "look_up", "arguments": {}}\n</tool_call>')
    chat, _ = recorder.say([*chat, answered("grass"), answered("leaves")], "grass and le", finish="length")
    recorder.say([*chat, asked("and?")], "no more")
    assert recorder.parents() == [PROMPT, 0, 1, 2, 3]
    assert [turn.role for turn in recorder.history.turns] == ["assistant", "tool", "assistant", "user", "assistant"]
    assert recorder.history.forks == 0
    recorder.check()


def test_what_a_client_rewrites_without_changing_it_is_the_same_message():
    recorder = Recorder(KEEPS_THINKING, tools=(LOOK_UP,))
    text = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"b": 1, "a": false}}\n</tool_call>'
    (*_, said), _ = recorder.say([asked()], text, tools=(LOOK_UP,))
    assert said["reasoning_content"]
    back = {"role": "assistant", "content": [{"type": "text", "text": said["content"]}]}
    function = {"name": "f", "arguments": '{"a":false,  "b":1}'}
    back["tool_calls"] = [{"id": "mine", "type": "function", "function": function}]
    recorder.say([asked(), back, answered("x", "mine")], "done", tools=(LOOK_UP,))
    assert recorder.parents() == [PROMPT, 0, 1]
    assert recorder.history.forks == 0
    recorder.check()


@pytest.mark.parametrize(
    ("change", "parent", "role"),
    [
        (lambda chat: [*chat[:2], asked("other"), *chat[3:]], 0, "assistant"),
        (lambda chat: [*chat[:2], asked("other")], 0, "user"),
        (lambda chat: chat[:1], PROMPT, None),
        (lambda chat: chat[:3], 1, None),
        (lambda chat: [{"role": "system", "content": "short"}, asked("so far: much")], NOTHING, "user"),
        (lambda chat: [chat[0], {**chat[1], "content": "I never said that"}, chat[2]], PROMPT, "user"),
    ],
    ids=["edited and answered", "edited", "again", "again later", "compacted", "put into its mouth"],
)
def test_a_conversation_that_is_no_extension_forks_where_it_agrees(change, parent, role):
    recorder = Recorder()
    chat, _ = recorder.say([asked()], "grass")
    chat, _ = recorder.say([*chat, asked("and?")], "leaves")
    assert recorder.parents() == [PROMPT, 0, 1]
    recorder.say(change(chat), "something else")
    first, *_ = added = recorder.history.turns[3:]
    assert recorder.history.forks == 1
    assert (first.parent, first.role, len(added)) == (parent, role or "assistant", 2 if role else 1)
    recorder.check()


def test_a_template_that_changes_what_it_wrote_forks_at_each_question():
    recorder = Recorder(STRIPS_THINKING)
    chat, _ = recorder.say([asked()], "<think>\nhm\n</think>\n\ngrass")
    chat, _ = recorder.say([*chat, asked("and?")], "<think>\nwell\n</think>\n\nleaves")
    chat, _ = recorder.say([*chat, answered("a tool says more")], "so")
    assert recorder.parents() == [PROMPT, PROMPT, 1, 2, 3]
    assert recorder.history.forks == 1
    recorder.check()


def test_a_sibling_with_the_same_text_leaves_the_branch_of_the_first_where_it_is():
    recorder = Recorder()
    chat, _ = recorder.say([asked()], "grass")
    chat, last = recorder.say([*chat, asked("and?")], "leaves")
    recorder.say([asked()], "grass")
    recorder.say([*chat, asked("what else?")], "nothing")
    assert recorder.parents() == [PROMPT, 0, 1, PROMPT, last, 4]
    assert recorder.history.forks == 1
    recorder.check()


def test_replies_that_are_dropped_leave_their_siblings():
    recorder = Recorder()
    for text in ("lost", "used", "cancelled"):
        _, last = recorder.say([asked()], text)
    assert recorder.history.drop({0, last}) == {0, last}
    assert [turn.ids.tolist() for turn in recorder.history.turns] == [recorder.said[1]]


def test_other_tools_are_another_prompt():
    recorder = Recorder()
    tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
    recorder.say([asked()], "grass")
    recorder.say([asked()], "leaves", tools=(tool,))
    assert recorder.parents() == [PROMPT, NOTHING, 1]
    recorder.check()


BLIND = HERMES.replace("if tools", "if false")
LATE = HERMES.replace("{%- if add_gen", "{{- tools | length if tools }}{%- if add_gen")


@pytest.mark.parametrize("again", [(), (LOOK_UP, LOOK_UP)], ids=["none", "more"])
def test_other_tools_that_change_nothing_before_a_reply_go_on_after_it(again):
    """The reply is of ids that no tokenizer would write, so it is lost where the history is tokenized again."""
    recorder = Recorder(BLIND)
    chat, _ = recorder.say([asked()], list("grass"), tools=(LOOK_UP,))
    chat, _ = recorder.say([*chat, asked("and?")], list("leaves"), tools=(LOOK_UP,))
    chat, _ = recorder.say([*chat, asked("what else?")], list("herbs"), tools=again)
    recorder.say([*chat, asked("really?")], "no", tools=(LOOK_UP,))
    assert recorder.parents() == [PROMPT, 0, 1, 2, 3, 4, 5]
    assert recorder.history.forks == 0
    recorder.check()


def test_other_tools_that_stand_before_the_reply_make_a_branch_from_where_they_stand():
    recorder = Recorder(LATE, tools=(LOOK_UP,))
    chat, _ = recorder.say([asked()], list("grass"), tools=(LOOK_UP,))
    recorder.say([*chat, asked("and?")], "leaves", tools=(LOOK_UP, LOOK_UP))
    assert recorder.parents() == [PROMPT, NOTHING, 1]
    recorder.check()


def test_a_conversation_with_other_words_goes_on_where_its_ids_do():
    """What differs may not reach the model: this template trims."""
    recorder = Recorder(HERMES.replace("{{- message.content }}", "{{- message.content | trim }}"))
    chat, _ = recorder.say([asked("why?")], "grass")
    chat, _ = recorder.say([*chat, asked("and?")], "leaves")
    recorder.say([asked(" why? "), *chat[1:], asked("so?")], "yes")
    assert recorder.parents()[2:] == [1, 2, 3, 4]
    recorder.check()


@pytest.mark.parametrize("messages", [[], [{"role": "user", "content": {1, 2}}]], ids=["none", "no JSON"])
def test_what_is_no_conversation_is_refused(messages):
    with pytest.raises(DataError):
        Recorder().history.place(messages)


WORDS = ("grass", "leaves", "<think>\nhm\n</think>\n\nyes", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>')
STEP = st.tuples(
    st.integers(0, 9),  # which of the chats so far goes on
    st.sampled_from(["user", "tool", "cut", "again", "edit"]),
    st.sampled_from(WORDS),
    st.sampled_from(["stop", "length"]),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(template=st.sampled_from([HERMES, STRIPS_THINKING]), steps=st.lists(STEP, min_size=1, max_size=8))
def test_whatever_is_asked_each_sampled_token_is_recorded_once_after_what_the_engine_saw(template, steps):
    recorder = Recorder(template)
    chats = [[]]
    for which, how, text, finish in steps:
        chat = list(chats[which % len(chats)])
        if how == "edit" and chat:
            chat[0] = asked("edited")
        if how == "cut":
            chat = chat[: len(chat) // 2]
        if how != "again" or not chat or chat[-1]["role"] == "assistant":
            chat.append(answered("t") if how == "tool" and chat else asked(how))
        chats.append(recorder.say(chat, text, finish=finish)[0])
    recorder.check()
    turns = recorder.history.turns
    for number, turn in enumerate(turns):
        assert turn.parent < number
        assert turn.sampled or len(turn.ids)
        assert not (turn.sampled and turn.parent == NOTHING)
    leaves = len(turns) - len({turn.parent for turn in turns if turn.parent >= 0})
    assert recorder.history.forks == leaves - 1
