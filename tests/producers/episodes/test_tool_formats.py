"""Calls of tools in sampled text: what is read of them, and what becomes of those that cannot be read."""

from __future__ import annotations

import pytest

from streamrl.producers.episodes.tool_formats import FORMATS, WrittenCall, format_of, name_calls

from .chat_kit import LLAMA, LOOK_UP

GOOD = '<tool_call>\n{"name": "look_up", "arguments": {"word": "zebra", "deep": false}}\n</tool_call>'
XML = """<tool_call>
<function=look_up>
<parameter=word>
zebra
</parameter>
<parameter=deep>
false
</parameter>
</function>
</tool_call>"""
ARGUMENTS = {"word": "zebra", "deep": False}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", GOOD),
        ("hermes", GOOD.replace('{"word": "zebra", "deep": false}', '"{\\"word\\": \\"zebra\\", \\"deep\\": false}"')),
        ("qwen_xml", XML),
        ("llama_json", '{"name": "look_up", "parameters": {"word": "zebra", "deep": false}}'),
        ("llama_json", '<|python_tag|>{"name": "look_up", "parameters": {"word": "zebra", "deep": false}}'),
        ("pythonic", '[look_up(word="zebra", deep=False)]'),
        ("pythonic", '[look_up(word="zebra", deep=false)]'),
    ],
)
def test_a_call_is_read(name: str, text: str):
    content, [call] = FORMATS[name](text, [LOOK_UP])
    assert (content, call.name, call.arguments) == ("", "look_up", ARGUMENTS)
    assert call.arguments["deep"] is False
    assert call.raw in text


def test_of_two_calls_one_may_be_malformed():
    text = f'I look.\n{GOOD}\n<tool_call>\n{{"name": "look_up", "arguments": {{"word": }}}}\n</tool_call>'
    content, written = FORMATS["hermes"](text, [LOOK_UP])
    good, bad = name_calls(written, [1, 2], [0])
    assert content == "I look."
    assert (good.status, good.arguments) == ("ok", ARGUMENTS)
    assert (bad.status, bad.arguments, bad.raw) == ("malformed", {}, text[text.rindex("<tool_call>") :])
    assert good.id != bad.id
    assert name_calls(written, [1, 2], [0]) == (good, bad), "the same turn gets the same ids"
    assert name_calls(written, [1, 2], [0, 3])[0].id != good.id


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "look_up", "arguments": {"word": "zeb'),
        ("hermes", '<tool_call>{"name": "look_up", "arguments": {"word": "zebra"}}'),
        ("hermes", '<tool_call>{"name": "look_up", "arguments": ["zebra"]}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"word": "zebra"}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "look_up", "arguments": {"word": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "look_up", "arguments": {"word": "\\ud800"}}</tool_call>'),
        ("hermes", f"<tool_call>{'[' * 100_000}</tool_call>"),
        ("qwen_xml", "<tool_call><function=look_up><parameter=word>zebra</function></tool_call>"),
        ("llama_json", '{"name": "look_up", "parameters": {"word": '),
        ("llama_json", "<|python_tag|>look_up.call(word)"),
        ("pythonic", '[look_up("zebra")]'),
        ("pythonic", "[look_up(word=open('x'))]"),
        ("pythonic", "[look_up(word="),
    ],
)
def test_what_cannot_be_read_keeps_its_text(name: str, text: str):
    content, [call] = FORMATS[name](text, [LOOK_UP])
    assert (content, call.arguments) == ("", None)
    assert call.raw == text or call.raw in text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "The tool is called <tool_calls>."),
        ("llama_json", '{"answer": 3}'),
        ("llama_json", "{ not JSON"),
        ("pythonic", "[1, 2] is a list"),
    ],
)
def test_text_that_is_no_call_is_content(name: str, text: str):
    assert FORMATS[name](text, [LOOK_UP]) == (text, [])


def test_the_schema_tells_text_from_json():
    text = "<tool_call><function=look_up><parameter=word>true</parameter><parameter=deep>true</parameter>"
    text += "</function></tool_call>"
    _, [call] = FORMATS["qwen_xml"](text, [LOOK_UP])
    assert call.arguments == {"word": "true", "deep": True}


def test_auto_looks_at_the_template():
    assert format_of("auto", "anything") is FORMATS["hermes"]
    assert format_of("auto", "<tool_call>\n<function=") is FORMATS["qwen_xml"]
    assert format_of("auto", LLAMA) is FORMATS["llama_json"]


def test_a_call_without_a_name_is_malformed():
    [call] = name_calls([WrittenCall("raw", "", {})], [], [])
    assert call.status == "malformed"
