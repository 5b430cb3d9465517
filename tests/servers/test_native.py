"""The language of our own server, without a server: what is sent fits what is understood, and nothing else passes."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.config import RunConfig
from streamrl.engine import Request
from streamrl.errors import DataError, WeightsError, WireError
from streamrl.producers.serve import messages
from streamrl.producers.serve.app import PauseLeases
from streamrl.runfile import load
from streamrl.servers.kinds import make_dialect
from streamrl.servers.native import NativeDialect
from streamrl.weight_sync.tensors import Version

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture
def dialect() -> NativeDialect:
    made = make_dialect(RunConfig(name="mine"))
    assert isinstance(made, NativeDialect)
    return made


def understood(call, kind):
    """The message that the server would make of a call."""
    return msgspec.json.decode(orjson.dumps(call.body), type=kind)


def test_every_call_is_a_message_of_the_server(dialect):
    request = Request("r", np.asarray([3, 4], np.int32), 5, 0.5)
    sent = understood(dialect.generation(request, version=3), messages.Generate)
    assert (sent.id, sent.tokens, sent.max_new_tokens, sent.temperature) == ("r", [3, 4], 5, 0.5)
    assert sent.interval == RunConfig().engine.stream_interval
    (abort,) = dialect.abort(None, paused=True)
    assert understood(abort, messages.Abort).id is None
    assert understood(dialect.abort("r")[0], messages.Abort).id == "r"
    (pause,), (resume,) = dialect.pause(), dialect.resume()
    held = understood(pause, messages.Pause)
    assert held.seconds == RunConfig().lease.seconds
    assert held.owner == understood(resume, messages.Resume).owner == dialect.metrics().query["owner"]
    assert held.owner != NativeDialect(RunConfig()).metrics().query["owner"]
    assert understood(dialect.sleep(1)[0], messages.Sleep).level == 1
    assert understood(dialect.wake(["weights"])[0], messages.Wake).tags == ["weights"]


def test_a_version_travels_by_name(dialect):
    version = Version(
        (2, 7), 5, {}, Path("/x/v-2-7"), ("a.st", "b.st"), {"w": ("a.st", "b.st")}, sources=("http://h:1",)
    )
    (prefetch,), (update,) = dialect.prefetch(version), dialect.update(version)
    assert prefetch.body == update.body
    sent = understood(update, messages.Weights)
    assert (sent.run, sent.pair, sent.step, sent.folder) == ("mine", (2, 7), 5, "/x/v-2-7")
    assert (sent.parts, sent.sources, sent.deltas) == ({"w": ["a.st", "b.st"]}, ["http://h:1"], False)
    with pytest.raises(WeightsError, match="memory"):
        dialect.update(Version((1, 1), 1, {}))


@pytest.mark.parametrize(
    "change",
    [
        {"folder": "relative/v-1-1"},
        {"files": ["../secret"]},
        {"files": ["a/b"]},
        {"parts": {"w": ["other.st"]}},
        {"parts": {"w": []}},
        {"sources": ["file:///etc/passwd"]},
        {"pair": [1, -1]},
        {"surprise": 1},
    ],
)
def test_versions_that_are_none(change):
    good = {
        "run": "r", "pair": [1, 1], "step": 1, "folder": "/x", "files": ["a.st"], "parts": {"w": ["a.st"]},
    }  # fmt: skip
    msgspec.json.decode(orjson.dumps(good), type=messages.Weights)
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(orjson.dumps(good | change), type=messages.Weights)


def test_chunks(dialect):
    chunk = dialect.chunk({"tokens": [1, 2], "logprobs": [-0.5, -1]}, received=3)
    assert (chunk.tokens, chunk.logprobs, chunk.finish, chunk.runs) == ([1, 2], [-0.5, -1.0], None, None)
    last = {"tokens": [4], "logprobs": [0], "finish": "stop", "runs": [[0, 1], [4, 2]], "prompt_tokens": 9}
    chunk = dialect.chunk(last, received=5)
    assert (chunk.finish, chunk.runs, chunk.prompt_tokens) == ("stop", [(0, 1), (4, 2)], 9)
    with pytest.raises(WireError, match="runs"):
        dialect.chunk(last, received=2)
    with pytest.raises(DataError, match="too long"):
        dialect.chunk({"error": {"kind": "data", "message": "too long", "hint": ""}}, received=0)
    with pytest.raises(WireError, match="boom"):
        dialect.chunk({"error": {"kind": "internal", "message": "boom"}}, received=0)


@pytest.mark.parametrize(
    "message",
    [
        {"tokens": [1], "logprobs": []},
        {"tokens": [1], "logprobs": [math.nan]},
        {"tokens": [1], "logprobs": [-math.inf]},
        {"tokens": [1], "logprobs": [None]},
        {"tokens": [True], "logprobs": [0]},
        {"tokens": [1.5], "logprobs": [0]},
        {"tokens": [], "logprobs": [], "finish": "done", "runs": [], "prompt_tokens": 1},
        {"tokens": [], "logprobs": [], "finish": "abort", "runs": None, "prompt_tokens": 1},
        {"tokens": [], "logprobs": [], "finish": "abort", "prompt_tokens": 1},
        {"error": "text"},
        [],
        None,
        "data",
    ],
)
def test_chunks_that_are_none(dialect, message):
    with pytest.raises(WireError):
        dialect.chunk(message, received=0)


@given(answer=JSON | st.fixed_dictionaries({"tokens": JSON, "logprobs": JSON, "finish": JSON, "runs": JSON}))
def test_any_json_is_understood_or_refused(answer):
    dialect = NativeDialect(RunConfig())
    for read in (
        lambda: dialect.chunk(answer, received=0),
        lambda: dialect.read_about([answer]),
        lambda: dialect.read_metrics(answer),
    ):
        try:
            read()
        except (WireError, DataError):
            continue


def test_what_a_server_says_of_itself(dialect):
    said = {"software": "streamrl", "version": "1", "model": "m", "context": 5, "vocabulary": 7, "probe": [1, 2]}
    about = dialect.read_about([said])
    assert (about.model, about.context, about.vocabulary, about.probe, about.missing) == ("m", 5, 7, (1, 2), "")
    assert dialect.read_about([said | {"probe": None}]).probe is None
    with pytest.raises(WireError, match="nginx"):
        dialect.read_about([said | {"software": "nginx"}])
    figures = dialect.read_metrics(
        {"running": 1, "waiting": 2, "cache_use": 1.5, "tokens_sampled": 3, "preemptions": 4}
    )
    assert (figures.running, figures.waiting, figures.cache_use, figures.preemptions) == (1, 2, 1.0, 4)


def test_a_server_that_streamrl_starts_gets_the_values_of_the_run():
    config = RunConfig.model_validate(
        {"engine": {"slots": 7, "dtype": "bfloat16", "kv_cache": "1MiB"}, "model": {"tokenizer": "yes: [1]"}}
    )
    launch = NativeDialect(config).launch(model="/m", port=1234, seed=9)
    argv = list(launch.argv)
    assert argv[3:6] == ["engines", "serve", "/m"]
    assert argv[argv.index("--port") + 1] == "1234"
    values = [argv[k + 1] for k, word in enumerate(argv) if word == "--set"]
    read = load(None, values, environ={}).config
    assert (read.engine.slots, read.engine.dtype, read.engine.kv_cache, read.seed) == (7, "bfloat16", 1 << 20, 9)
    assert read.model.tokenizer == "yes: [1]"
    assert "--no-api-key" in argv
    assert not any("key-file" in word for word in argv)


# --- leases ---


def test_a_pause_lasts_as_long_as_its_owner_speaks():
    leases = PauseLeases()
    assert not leases
    assert leases.next_end() is None
    leases.take("a", 10, now=0)
    leases.take("b", 4, now=1)
    assert leases.next_end() == 5
    leases.renew("b", now=4)
    leases.renew("nobody", now=4)
    assert leases.expire(now=7.9) == []
    assert leases.expire(now=8) == ["b"]
    leases.renew("b", now=8)
    assert leases.next_end() == 10
    leases.take("a", 1, now=9)
    leases.give_back("b")
    assert leases.expire(now=9.9) == []
    leases.give_back("a")
    leases.give_back("a")
    assert not leases


@given(
    st.lists(
        st.tuples(st.sampled_from(["take", "renew", "give"]), st.sampled_from("ab"), st.integers(1, 5)), max_size=30
    )
)
def test_leases_against_a_list_of_last_words(steps):
    leases, last, now = PauseLeases(), {}, 0
    for what, owner, passed in steps:
        now += passed
        late = sorted(name for name, (word, seconds) in last.items() if word + seconds <= now)
        assert sorted(leases.expire(now)) == late
        last = {name: value for name, value in last.items() if name not in late}
        if what == "take":
            leases.take(owner, passed + 2, now)
            last[owner] = (now, passed + 2)
        elif what == "renew":
            leases.renew(owner, now)
            last = {name: (now, s) if name == owner else (w, s) for name, (w, s) in last.items()}
        else:
            leases.give_back(owner)
            last.pop(owner, None)
        assert bool(leases) == bool(last)
        assert leases.next_end() == min((w + s for w, s in last.values()), default=None)
