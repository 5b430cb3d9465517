import pytest

from streamrl.consumers.rules.in_processes import Regex
from streamrl.consumers.rules.json_schema import JsonSchema, last_fence
from streamrl.errors import DataError
from tests.consumers.rule_kit import opened
from tests.consumers.samples import seen

CATASTROPHE = r"(a+)+$"
LONG = "a" * 60 + "b"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"$ref": "#/$defs/age"}},
    "required": ["name"],
    "$defs": {"age": {"type": "integer", "minimum": 0}},
}


@pytest.mark.parametrize(
    ("args", "text", "answer", "value"),
    [
        ({"pattern": r"\d+"}, "so 42", None, 1),
        ({"pattern": r"\d+"}, "none", None, 0),
        ({"pattern": r"\d+", "match": "whole"}, "so 42", None, 0),
        ({"pattern": r"(?s).*\d+", "match": "whole"}, "so\n42", None, 1),
        ({"pattern": "(?i)as an ai", "absent": True}, "As an AI, I", None, 0),
        ({"pattern": "(?i)as an ai", "absent": True}, "Well", None, 1),
        ({"pattern": r"#### (\d+)", "group": 1}, "#### 41 #### 42", "42", 1),
        ({"pattern": r"#### (?P<n>\d+)", "group": "n"}, "#### 42 #### 41", "42", 0),
        ({"pattern": r"#### (\d+)", "group": 1}, "42", "42", 0),
        ({"pattern": r"(x)?y", "group": 1}, "y", "x", 0),
    ],
)
async def test_regex(args, text, answer, value):
    async with opened(Regex(**args, processes=1)) as rule:
        assert (await rule.score(seen(text, answer))).value == value


async def test_a_pattern_that_explodes_is_an_error_unless_it_is_called_wrong():
    async with opened(Regex(CATASTROPHE, seconds=0.3, processes=1)) as rule:
        with pytest.raises(DataError, match=r"more than 0\.3 s of CPU time"):
            await rule.score(seen(LONG))
        assert (await rule.score(seen("aaa"))).value == 1.0
        rule.expensive = "wrong"
        score = await rule.score(seen(LONG))
        assert (score.value, score.parts) == (0.0, {"expensive": 1.0})


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({"pattern": "("}, "unterminated"),
        ({"pattern": "a", "group": 1}, "no group 1"),
        ({"pattern": "a", "group": "n"}, "no group 'n'"),
        ({"pattern": "a", "match": "first"}, "match is 'first'; it is one of search, whole"),
        ({"pattern": "(a)", "group": 1, "absent": True}, "exclude each other"),
        ({"pattern": "a", "expensive": "zero"}, "expensive is 'zero'; it is one of wrong, fail"),
    ],
)
def test_args_of_a_regex_that_make_no_sense_are_refused(args, why):
    with pytest.raises(ValueError, match=why):
        Regex(**args)


@pytest.mark.parametrize(
    ("text", "value", "json"),
    [
        ('{"name": "Ada", "age": 36}', 1, 1),
        ('Here:\n```json\n{"name": "Ada"}\n```\nDone.', 1, 1),
        ('```{"name": "Ada"}```', 1, 1),
        ('{"name": "Ada", "age": -1}', 0.25, 1),
        ('{"age": 1}', 0.25, 1),
        ("[]", 0.25, 1),
        ('{"name": "Ada", "age": NaN}', 0, 0),
        ('{"name": "Ada"', 0, 0),
        ("", 0, 0),
        ("[" * 100_000, 0, 0),
        ("[" * 100_000 + "]" * 100_000, 0, 0),
        ("9" * 100_000, 0, 0),
        ("-1e400", 0.25, 1),
        ('{"name": "\\ud800"}', 1, 1),
        ("\x00", 0, 0),
    ],
)
async def test_json_schema(text, value, json):
    async with opened(JsonSchema(schema=PERSON, parses=0.25, processes=1)) as rule:
        score = await rule.score(seen(text))
        assert (score.value, score.parts) == (value, {"json": json, "expensive": 0.0})
        assert rule.counts()["lost"] == 0


async def test_where_the_schema_and_the_json_are(tmp_path):
    (tmp_path / "schema.json").write_text('{"type": "integer"}')
    async with opened(JsonSchema(file=str(tmp_path / "schema.json"), tag="answer", processes=1)) as rule:
        assert (await rule.score(seen("<answer>7</answer> 'x'"))).value == 1.0
        assert (await rule.score(seen("7"))).value == 0.0
    async with opened(JsonSchema(key="schema", processes=1)) as rule:
        assert (await rule.score(seen("7", metadata={"schema": {"type": "integer"}}))).value == 1.0
        assert (await rule.score(seen("7", metadata={"schema": '{"type": "string"}'}))).value == 0.0
        with pytest.raises(DataError, match="line 7 of the data set has no schema"):
            await rule.score(seen("7"))
        with pytest.raises(DataError, match="schema of line 7 of the data set cannot be used"):
            await rule.score(seen("7", metadata={"schema": {"type": "whole number"}}))
        with pytest.raises(DataError, match="schema of line 7 of the data set cannot be used"):
            await rule.score(seen("7", metadata={"schema": {"$ref": "http://127.0.0.1:9/schema"}}))


async def test_a_schema_that_explodes_is_an_error():
    async with opened(JsonSchema(schema={"pattern": CATASTROPHE}, seconds=0.3, processes=1)) as rule:
        with pytest.raises(DataError, match="CPU time in phase response"):
            await rule.score(seen(f'"{LONG}"'))
        assert (await rule.score(seen('"aaa"'))).value == 1.0


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({}, "exactly one of"),
        ({"schema": {}, "key": "schema"}, "exactly one of"),
        ({"schema": {"type": "whole number"}}, "no JSON Schema"),
        ({"schema": {"properties": {"a": {"$ref": "#/$defs/b"}}}}, "refers to"),
        ({"schema": {"items": {"$ref": "https://example.org/schema"}}}, "refers to"),
        ({"schema": 7}, "a schema is an object"),
        ({"file": "/nowhere/schema.json"}, "cannot be read"),
    ],
)
def test_a_schema_that_is_none_is_refused_at_start(args, why):
    with pytest.raises(ValueError, match=why):
        JsonSchema(**args)


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("a", "a"),
        ("```\na\n```", "a\n"),
        ("```json\na\n``` b ```JSON5\nc\n``` ```open", "c\n"),
        ("```open", "```open"),
        ("```5\n```", "5\n"),
    ],
)
def test_the_last_fence_of_a_text(text, inside):
    assert last_fence(text) == inside


async def test_a_pattern_that_wants_too_much_memory_is_the_same():
    async with opened(Regex("(a|b)*c", seconds=30, memory_mib=64, processes=1, expensive="wrong")) as rule:
        assert (await rule.score(seen("ab" * 3_000_000))).parts == {"expensive": 1.0}
        assert (await rule.score(seen("abc"))).value == 1.0
        assert (rule.counts()["too_large"], rule.counts()["lost"]) == (1, 0)
