"""The task of the tools demo: its template only appends, its lessons are what episodes record, its tool is needed."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict

from streamrl.demo import prepare, tool_task
from streamrl.producers.episodes import probe
from streamrl.producers.episodes.known_models import renderer_of
from streamrl.producers.tokenizer import Tokenizer

LOOK_UP = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}


def test_the_chat_template_only_appends_and_its_words_are_one_token():
    backend = prepare.make_chat_tokenizer()
    assert {text: backend.convert_tokens_to_ids(text) for text in tool_task.SPECIAL} == tool_task.SPECIAL
    assert len(backend) <= prepare.make_model().config.vocab_size
    assert probe.examine(renderer_of(Tokenizer(backend, "demo"))) == ""


def test_a_lesson_is_what_an_episode_would_record():
    renderer, source = renderer_of(Tokenizer(prepare.make_chat_tokenizer(), "demo")), random.Random(0)
    called = 0
    for ids, written in itertools.islice((tool_task.lesson(source) for _ in itertools.count()), 50):
        turns = [
            [token for token, _ in run]
            for _, run in itertools.groupby(zip(ids, written, strict=True), lambda it: it[1])
        ]
        question = {"role": "user", "content": "".join(map(chr_of, turns[0][1:-1]))}
        first = renderer.parse(turns[1], [LOOK_UP])
        assert renderer.render([question]) == turns[0]
        if not first.calls:
            assert len(first.content) == 2
            continue
        called += 1
        [call] = first.calls
        assert (call.status, call.name, f"{call.arguments['key']}+1") == ("ok", "look_up", question["content"])
        number = "".join(map(chr_of, turns[2][1:-1]))
        result = {"role": "tool", "tool_call_id": call.id, "content": number}
        before = [*turns[0], *turns[1]]
        assert renderer.extend([question, first.message], None, before, [result], sampled=len(turns[1])) == turns[2]
        assert abs(int(renderer.parse(turns[3]).content) - int(number)) == 1
    assert 20 < called < 45


def chr_of(token: int) -> str:
    return tool_task.CHARACTERS[token - tool_task.FIRST_CHARACTER]


def test_the_answer_is_in_the_table_of_the_tool_and_nowhere_else():
    trained, held_out = ([*itertools.islice(tool_task.problems(1, evaluation=side), 2000)] for side in (False, True))
    answers = defaultdict(set)
    for row in trained:
        key = row["messages"][0]["content"].removesuffix("+1")
        assert row["answer"] == str(row["numbers"][key] + 1)
        answers[key].add(row["answer"])
    several = [key for key, found in answers.items() if len(found) > 1]
    assert len(several) > 300, "the same prompt has other answers in other lines"
    pairs = [{(row["messages"][0]["content"], row["answer"]) for row in side} for side in (trained, held_out)]
    assert not pairs[0] & pairs[1]
