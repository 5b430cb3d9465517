"""What a wrong run file is told: plain sentences, never the words of pydantic or of Python, whatever is wrong."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import ErrorDetails

from streamrl import runfile
from streamrl.config.words import WORDS, explain
from streamrl.errors import ConfigError
from streamrl.runfile import load, read_saved
from tests.test_config import places

VALUES: list[Any] = [
    *("abc", "", "1e5", "12parsec", "x" * 100, "-3s", "s", "MiB", "nan", "inf", "1e999", "a/b:c", "\xff\x00", "\ud800"),
    *(5, -5, 0, 1.5, 10**400, -(10**400), math.nan, math.inf, -math.inf, True, None),
    *([], ["a"], [1], [1, 2, 3], [2, 1], [[]], [None], [{"use": 5}], [{"args": 5}], [{"use": "code", "clip": [1]}]),
    *({}, {"a": 1}, {1: 2}, {"a": None}, {"a": {}}, {"a": {"model": 5}}, {"bad name!": {"model": "m"}}),
]
FOREIGN = re.compile(
    r"should|input|valid\b|Tuple|Field required|Value error|String|unable to parse|dictionary|instance|permitted"
    r"|pydantic|could not convert|literal|NoneType|Traceback|codec|Overflow|<class",
)


@pytest.fixture(scope="module")
def wrong() -> dict[str, list[str]]:
    """Every key with every value: messages by the type of error that pydantic found."""
    found: dict[str, list[str]] = defaultdict(list)

    def spy(error: ErrorDetails) -> str:
        words = explain(error)
        found[error["type"]].append(words)
        return words

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runfile, "explain", spy)
        for key, _ in places():
            for value in VALUES:
                values: Any = {}
                node = values
                *parents, last = key.split(".")
                for parent in parents:
                    node = node.setdefault(parent, {})
                node[last] = value
                try:
                    runfile._validate(values, {})
                except ConfigError as error:
                    found["all"].append(f"{key} = {value!r}: {error.message}")
    return found


def test_no_message_has_words_of_another_program(wrong: dict[str, list[str]]):
    assert len(wrong["all"]) > 2000
    foreign = [message for message in wrong["all"] if FOREIGN.search(message.partition(": ")[2])]
    assert foreign == []


def test_every_type_of_error_has_its_words_and_is_made_here(wrong: dict[str, list[str]]):
    elsewhere = {"extra_forbidden", "json_invalid", "int_parsing_size", "string_unicode", "too_short", "too_long"}
    assert set(wrong) - {"all"} <= set(WORDS)
    assert set(WORDS) - set(wrong) <= elsewhere


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rewards=[]", "rewards: must have 1 or more entries, and has 0 (--set)"),
        ("rewards=[{}]", "rewards.0.use: is missing"),
        ("seed=1.5", "seed: must be a whole number, not 1.5 (--set)"),
        ("learner.lr=fast", "learner.lr: must be a number, not 'fast' (--set)"),
        ("data.shuffle=maybe", "data.shuffle: must be true or false, not 'maybe' (--set)"),
        ("max_staleness=-1", "max_staleness: must be at least 0, not -1 (--set)"),
        ("sampling.temperature=0", "sampling.temperature: must be more than 0, not 0 (--set)"),
        ("scoring.clip=[1]", "scoring.clip.1: is missing: the list is too short"),
        ("scoring.clip=[1, 2, 3]", "scoring.clip: must have 2 or fewer entries, and has 3 (--set)"),
        (
            "lease.seconds=soon",
            "lease.seconds: 'soon' is not a duration (write 500ms, 30s, 10m or a number of seconds)",
        ),
        ("redis.maxmemory=.inf", "redis.maxmemory: must be a finite number, not inf (--set)"),
        ("redis.maxmemory=lots", "redis.maxmemory: 'lots' is not a size (write 512MiB, 8GiB or a number of bytes)"),
        ("name=2024-13-45", "--set name: '2024-13-45' is not a YAML value"),
        ("name=2024-12-24", "name: must be text; put it in quotes (--set)"),
        ("model=x", "model: must be a mapping: {key: value} (--set)"),
        ("data.train=5", "data.train.0: must be a mapping: {key: value}"),
        ("model.path=5", "model.path: must be text; put it in quotes (--set)"),
        (
            "name=../x",
            "name: must be 1 to 64 letters, digits, '.', '_' and '-', beginning with a letter or digit, not '../x'",
        ),
        ("max_staleness=1" + 400 * "0", "max_staleness: must be at most 9223372036854775807, not 1000"),
    ],
)
def test_what_is_said(override: str, message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(None, [override], {})


@pytest.mark.parametrize("text", ['health: {host: "\\ud800"}', 'data: {train: "\\ud800"}'])
def test_a_part_of_a_character(tmp_path: Path, text: str):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match="part of a character"):
        load(tmp_path / "run.yaml", environ={})


def test_a_run_json_of_another_version(tmp_path: Path):
    for text in ("{", '{"config": {"seed": 1.5}, "origins": {}}', "[]", '{"config": {}}'):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(ConfigError) as caught:
            read_saved(tmp_path / "run.json")
        assert not FOREIGN.search(caught.value.message.partition("streamrl: ")[2]), caught.value.message
