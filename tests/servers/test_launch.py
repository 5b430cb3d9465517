"""Flags of servers that streamrl starts."""

from __future__ import annotations

import json

import pytest

from streamrl.errors import ConfigError
from streamrl.servers.launch import merged, words


def test_the_user_has_the_last_word_whichever_way_a_flag_is_written():
    ours = {"max-num-seqs": 64, "port": 7, "enforce-eager": True}
    given = {"max_num_seqs": 5, "--enforce-eager": False, "hf_overrides.rope_theta": 3}
    flags = merged(ours, given)
    assert flags == {"max-num-seqs": 5, "port": 7, "enforce-eager": False, "hf-overrides.rope_theta": 3}
    assert list(words(flags)) == ["--max-num-seqs", "5", "--port", "7", "--hf-overrides.rope_theta", "3"]


def test_words():
    flags = {"a": True, "b": False, "c": None, "d": [1, "x y"], "e": {"k": [1, None]}, "f": 0, "g": 0.5}
    assert list(words(flags)) == [
        "--a",
        "--d",
        "1",
        "x y",
        "--e",
        json.dumps({"k": [1, None]}),
        "--f",
        "0",
        "--g",
        "0.5",
    ]


@pytest.mark.parametrize("flag", ["host", "--host", "port", "api-key", "api_key", "admin_api_key"])
def test_what_would_open_the_server_or_show_a_secret_is_refused(flag):
    with pytest.raises(ConfigError, match="cannot be set") as caught:
        merged({}, {flag: "s3cret"})
    assert "engine.url" in caught.value.hint
    assert "s3cret" not in str(caught.value)
