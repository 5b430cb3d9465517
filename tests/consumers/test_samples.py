"""Samples without a run: made by hand, and read from files."""

import dataclasses

import numpy as np
import orjson
import pytest

from streamrl import wire
from streamrl.archive.reader import Header, RecordedGroup
from streamrl.archive.writer import RecordingWriter
from streamrl.consumers import make_sample
from streamrl.consumers.samples import read_samples
from streamrl.errors import ConfigError, DataError
from tests.consumers.samples import prompt, response

LINE = {"prompt": "2+2=", "response": "4", "answer": "4"}


def test_a_sample_made_by_hand_has_what_rewards_read():
    sample = make_sample("4", prompt="2+2=", answer="4", metadata={"topic": "sums"}, group=3, index=1, finish="length")
    assert (sample.text, sample.finish, sample.group_id, sample.index) == ("4", "length", 3, 1)
    assert (sample.prompt.text, sample.prompt.answer, sample.prompt.metadata) == ("2+2=", "4", {"topic": "sums"})
    assert sample.tokens.tolist() == [ord("4")]
    assert sample.prompt.tokens.dtype == np.int32
    assert make_sample("four", tokens=[7, 2]).tokens.tolist() == [7, 2]
    with pytest.raises(ValueError, match="finish is 'done'"):
        make_sample("4", finish="done")
    with pytest.warns(DeprecationWarning, match="group_id"):
        assert sample.gid == 3


@pytest.mark.parametrize("form", ["lines", "list", "object", "indented"])
def test_json_in_every_form_is_read(tmp_path, form):
    records = [LINE | {"topic": "sums", "metadata": {"level": 2}}] * (1 if form in {"object", "indented"} else 2)
    data = {
        "lines": b"\n\n".join(map(orjson.dumps, records)) + b"\n",
        "list": orjson.dumps(records),
        "object": orjson.dumps(records[0]),
        "indented": orjson.dumps(records[0], option=orjson.OPT_INDENT_2),
    }[form]
    (tmp_path / "samples").write_bytes(data)
    found = list(read_samples(tmp_path / "samples"))
    assert len(found) == len(records)
    assert (found[0].text, found[0].prompt.text, found[0].prompt.answer) == ("4", "2+2=", "4")
    assert found[0].prompt.metadata == {"topic": "sums", "level": 2}
    assert [each.prompt.line for each in found] == list(range(len(records)))


def test_all_keys_of_a_sample(tmp_path):
    record = {
        "messages": [{"role": "user", "content": "What is"}, {"role": "user", "content": "6 * 7?"}],
        "response": "42", "answer": 42, "finish": "length", "tokens": [4, 2], "group": 9, "index": 3, "line": 17,
        "evaluation": True,
    }  # fmt: skip
    (tmp_path / "one.json").write_bytes(orjson.dumps(record))
    (sample,) = read_samples(tmp_path / "one.json")
    assert sample.prompt.messages == record["messages"]
    assert sample.prompt.text == "What is\n6 * 7?"
    assert (sample.prompt.answer, sample.prompt.line, sample.prompt.evaluation) == (42, 17, True)
    assert (sample.group_id, sample.index, sample.finish, sample.tokens.tolist()) == (9, 3, "length", [4, 2])


@pytest.mark.parametrize(
    ("data", "said", "hint"),
    [
        (b"", "is empty", "each line"),
        (b"{} {", "line 1: no JSON", "write"),
        (b'{"prompt": "x", "response": "y"}\nnonsense', "line 2: no JSON", "write"),
        (b"[1]", "item 0: not an object", "write"),
        (b'{"prompt": "x", "completion": "y"}', "has no `response`", "is it `completion`?"),
        (b'{"prompt": "x", "respones": "y"}', "has no `response`", "is it `respones`?"),
        (b'{"prompt": "x"}', "has no `response`", "write"),
        (b'{"response": "x"}', "neither `prompt` nor `messages`", "write"),
        (b'{"prompt": 7, "response": "x"}', "got `int` - at `$.prompt`", "write"),
        (b'{"prompt": "x", "response": ["x"]}', "got `array` - at `$.response`", "write"),
        (b'{"messages": ["x"], "response": "x"}', "at `$.messages[0]`", "write"),
        (b'{"prompt": "x", "response": "x", "metadata": []}', "at `$.metadata`", "write"),
        (b'{"prompt": "x", "response": "x", "tokens": [1.5]}', "at `$.tokens[0]`", "write"),
        (b'{"prompt": "x", "response": "x", "tokens": [4294967296]}', "out of bounds", "write"),
        (b'{"prompt": "x", "response": "x", "index": true}', "got `bool` - at `$.index`", "write"),
        (b'{"prompt": "x", "response": "x", "finish": "done"}', "at `$.finish`", "write"),
    ],
)
def test_a_line_that_is_no_sample_is_named(tmp_path, data, said, hint):
    (tmp_path / "samples.jsonl").write_bytes(data)
    with pytest.raises(DataError) as caught:
        list(read_samples(tmp_path / "samples.jsonl"))
    assert said in caught.value.message
    assert hint in caught.value.hint
    assert "samples.jsonl" in caught.value.message


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        list(read_samples(tmp_path / "nothing.jsonl"))
    with pytest.raises(ConfigError, match="no recorded groups"):
        list(read_samples(tmp_path))


def record(folder, epoch, group_id, *texts):
    """A file of a recording with one group."""
    writer = RecordingWriter(folder, epoch, Header(id="1", run="r", model="m", temperature=1.0), 1 << 20)
    score = wire.encode(wire.SampleScore(value=1.0))
    samples = [(wire.encode(response(text)), score) for text in texts]
    writer.add(RecordedGroup(group_id=group_id, prompt=wire.encode(prompt()), samples=samples))
    writer.sync()
    writer.close()


def test_a_recording_is_read_like_samples(tmp_path):
    folder = tmp_path / "run" / "recording"
    record(folder, 1, 5, "4", "5")
    for path in (tmp_path / "run", folder, next(folder.iterdir())):
        found = list(read_samples(path))
        assert [(each.group_id, each.index, each.text) for each in found] == [(5, 0, "4"), (5, 1, "5")]
        assert found[0].prompt.answer == "4"


def test_a_damaged_file_of_a_recording_is_named_and_the_others_are_read(tmp_path):
    for epoch, group_id in ((1, 5), (2, 6)):
        record(tmp_path, epoch, group_id, "4")
    first = tmp_path / "groups-1-0.msgpack.zst"
    first.write_bytes(b"what is this")
    problems = []
    assert [each.group_id for each in read_samples(tmp_path, problems)] == [6]
    assert len(problems) == 1
    assert str(first) in problems[0]
    with pytest.raises(DataError, match="groups-1-0"):
        list(read_samples(tmp_path))


def test_a_prompt_that_is_a_list_of_messages_is_read_as_verl_reads_it(tmp_path):
    messages = [{"role": "user", "content": "2+2="}]
    path = tmp_path / "samples.jsonl"
    path.write_bytes(orjson.dumps({"prompt": messages, "response": "4", "data_source": "gsm8k"}))
    (sample,) = read_samples(path)
    assert (sample.prompt.messages, sample.prompt.text) == (messages, "2+2=")
    assert sample.prompt.metadata == {"data_source": "gsm8k"}


def test_the_conversation_of_a_sample_is_made_once_and_is_that_which_was_given():
    said = [
        {"role": "assistant", "content": "a"},
        {"role": "tool", "content": "b"},
        {"role": "assistant", "content": "c"},
    ]
    sample = make_sample("c", prompt="?", completion=said)
    assert (sample.completion, sample.messages) == (said, [{"role": "user", "content": "?"}, *said])
    assert sample.messages is sample.messages
    assert not sample.turns, "they are what an episode recorded"
    with pytest.raises(ValueError, match="begin and end"):
        make_sample("c", completion=said[:2])


def test_a_copy_with_another_text_says_that_text():
    sample = dataclasses.replace(make_sample("<b>4</b>", prompt="2+2="), text="4")
    assert sample.messages == [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]
