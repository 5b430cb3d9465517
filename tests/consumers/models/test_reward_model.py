"""The reward `reward_model` as a worker has it: what it asks, what it makes of the answers, what it refuses."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from streamrl.config import RunConfig
from streamrl.consumers import RewardContext, RewardSample
from streamrl.consumers.models import ModelClient, open_models
from streamrl.consumers.models.dialects import DIALECTS, UnclearScore, read_score
from streamrl.consumers.models.rendering import Renderer
from streamrl.consumers.models.reward_model import RewardModel
from streamrl.consumers.models.router import PoolServerState
from streamrl.consumers.models.template import _VALUES, Body, Template
from streamrl.consumers.plugins import load_rewards
from streamrl.errors import (
    ConfigError,
    DataError,
    PluginError,
    RewardImpossible,
    RewardUnavailable,
    Unreachable,
    WireError,
)
from streamrl.http import BadRequest
from tests.consumers.models.faulty_server import FaultyServer, gone, score_of, servers, serving
from tests.consumers.samples import episode, seen
from tests.queues.ledger_kit import until


def run_of(args: Mapping[str, Any], model: Mapping[str, Any] | None = None) -> RunConfig:
    models = {} if model is None else {"critic": model}
    spec = {"use": "reward_model", "args": dict(args)}
    return RunConfig.model_validate({"name": "t", "rewards": [spec], "reward_models": models})


async def never() -> bool:
    return False


@contextlib.asynccontextmanager
async def opened(
    keys: Mapping[str, Any], deadline: float = 60.0, scored: Callable[[], Awaitable[bool]] = never, **args: Any
) -> AsyncIterator[RewardModel]:
    """The reward, loaded and opened as a worker does it."""
    config = run_of({"model": "critic", **args}, keys)
    (loaded,) = load_rewards(config)
    async with open_models(config) as models:
        reward = loaded.life
        assert isinstance(reward, RewardModel)
        try:
            await reward.open(RewardContext(config, Path(), models, "reward.0", deadline, scored))
            yield reward
        finally:
            await reward.close()


async def test_scores_come_from_the_model_with_its_own_text(tokenizer):
    async with servers(["well"], ["well"]) as (one, two):
        model = {"url": [one.url, two.url], "model": str(tokenizer)}
        async with opened(model) as reward:
            renderer = Renderer(str(tokenizer))
            samples = [seen(f"It is {index}.") for index in range(10)]
            scores = await asyncio.gather(*(reward.score(sample) for sample in samples))
        assert [score.value for score in scores] == [score_of(renderer.ids(sample)) for sample in samples]
        body = one.bodies[-1]
        assert body == {"model": str(tokenizer), "input": body["input"], "use_activation": False, "activation": False}


async def test_a_long_text_is_made_in_a_thread_and_is_the_same(tokenizer):
    async with servers(["well"]) as (one,), opened({"url": [one.url], "model": str(tokenizer)}) as reward:
        sample = seen("It is 4. " * 5000)
        assert (await reward.score(sample)).value == score_of(Renderer(str(tokenizer)).ids(sample))


async def test_the_text_of_an_episode_is_made_in_a_thread(tokenizer, monkeypatch):
    """Whatever its length: what its tools said is not measured first."""
    threads, make = [], RewardModel._question

    def question(reward, sample):
        threads.append(threading.current_thread() is threading.main_thread())
        return make(reward, sample)

    async with servers(["well"]) as (one,), opened({"url": [one.url], "model": str(tokenizer)}) as reward:
        monkeypatch.setattr(RewardModel, "_question", question)
        await reward.score(seen())
        await reward.score(episode())
    assert threads == [True, False]


def test_the_hash_of_a_sample_is_made_once_for_all_places_of_a_body(monkeypatch):
    made = []
    monkeypatch.setitem(_VALUES, "fence", lambda _: made.append(1) or "f")
    filled = Body({"a": "{fence} {fence}", "b": ["{fence}"]}).filled(seen())
    assert (filled, len(made)) == ({"a": "f f", "b": ["f"]}, 1)


async def test_a_server_with_a_template_of_its_own_gets_messages():
    async with servers(["well"]) as (one,):
        async with opened({"url": [one.url], "model": "theirs"}, text="server") as reward:
            await reward.score(seen("4", messages=[{"role": "user", "content": "2 + 2?"}]))
        body = one.bodies[-1]
        assert body["messages"] == [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
        assert "input" not in body


def test_each_kind_is_asked_in_its_own_way():
    bodies = {key: dialect.body("m", [1, 2]) for key, dialect in DIALECTS.items()}
    raw = {"use_activation": False, "activation": False}
    assert bodies == {
        ("vllm", "classify"): {"model": "m", "input": [1, 2], **raw},
        ("vllm", "pooling"): {"model": "m", "input": [1, 2], **raw},
        ("sglang", "classify"): {"input_ids": [1, 2]},
        ("sglang", "pooling"): {"model": "m", "input": [1, 2], "encoding_format": "float"},
    }
    assert "model" not in DIALECTS["vllm", "classify"].body("", [1])


ANSWERS = {
    ("vllm", "classify"): lambda numbers: {"data": [{"index": 0, "probs": numbers, "num_classes": len(numbers)}]},
    ("vllm", "pooling"): lambda numbers: {"data": [{"index": 0, "object": "pooling", "data": numbers}]},
    ("sglang", "classify"): lambda numbers: {"embedding": numbers, "meta_info": {"prompt_tokens": 3}},
    ("sglang", "pooling"): lambda numbers: {"object": "list", "data": [{"index": 0, "embedding": numbers}]},
}


@pytest.mark.parametrize("key", ANSWERS)
def test_each_kind_answers_in_its_own_way(key):
    dialect, answer = DIALECTS[key], ANSWERS[key]
    assert read_score(dialect, answer([-1.25]), None) == -1.25
    assert read_score(dialect, answer([3]), None) == 3.0
    assert read_score(dialect, answer([1.0, 2.0, 3.0]), 1) == 2.0
    assert read_score(dialect, answer([1.0, 2.0, 3.0]), -1) == 3.0
    with pytest.raises(UnclearScore, match="3 numbers") as caught:
        read_score(dialect, answer([1.0, 2.0, 3.0]), None)
    assert "label" in caught.value.hint
    for label in (3, -4):
        with pytest.raises(UnclearScore, match="3 numbers"):
            read_score(dialect, answer([1.0, 2.0, 3.0]), label)
    for bad in ([], [None], ["1"], [True], [float("nan")], [float("-inf")], [[]], 0.5, None, {"0": 1.0}):
        with pytest.raises(WireError):
            read_score(dialect, answer(bad) if isinstance(bad, list) else {"data": [{"probs": bad}]}, 0)
    for bad in ({}, {"data": []}, {"data": [1]}, {"data": None}, {"error": "no"}):
        with pytest.raises(WireError):
            read_score(dialect, bad, None)


def test_of_numbers_for_each_token_the_last_counts():
    dialect = DIALECTS["vllm", "pooling"]
    assert read_score(dialect, ANSWERS["vllm", "pooling"]([[0.1], [0.2], [0.9]]), None) == 0.9


async def test_what_the_server_refuses_is_the_end_of_this_sample_only(tokenizer):
    def act(ids: list[int]) -> str:
        return "400" if len(ids) > 100 else "well"

    async with servers([act]) as (one,), opened({"url": [one.url], "model": str(tokenizer)}) as reward:
        with pytest.raises(BadRequest, match="status 400"):
            await reward.score(seen("far too long " * 100))
        await reward.score(seen("4"))


async def test_a_reward_gives_up_before_its_deadline_and_names_the_server(tokenizer):
    async with (
        servers([lambda ids: "hangs" if len(ids) > 100 else "well"]) as (one,),
        opened({"url": [one.url], "model": str(tokenizer)}, deadline=2.0) as reward,
    ):
        with pytest.raises(ConnectionError, match=f"{one.url}/classify: no answer within 1"):
            await reward.score(seen("so long " * 100))


async def test_servers_that_can_never_do_it_end_the_start(tokenizer, monkeypatch):
    monkeypatch.setattr("streamrl.consumers.models.reward_model._PROBE_SECONDS", 2.0)

    async def starts(act: str, says: str) -> None:
        async with servers([act]) as (one,):
            with pytest.raises(ConfigError, match=says):
                async with opened({"url": [one.url], "model": str(tokenizer)}):
                    pass

    acts = ["404", "400", "401", "501"]
    await asyncio.gather(starts("several", "2 numbers"), *(starts(act, f"answered {act}") for act in acts))


async def test_servers_that_have_a_bad_moment_do_not_end_the_start(tokenizer):
    async def starts(act: str) -> None:
        async with (
            servers([act, "well"]) as (one,),
            opened({"url": [one.url], "model": str(tokenizer)}) as reward,
        ):
            await reward.score(seen("4"))

    await asyncio.gather(*map(starts, ["500", "nan", "half json", "busy"]))


@contextlib.asynccontextmanager
async def back(one: FaultyServer, reward: RewardModel) -> AsyncIterator[None]:
    """The server is there, and the reward knows."""
    client = reward._model
    assert isinstance(client, ModelClient)
    async with serving(one):
        await until(lambda: any(row.state is PoolServerState.SERVING for row in client.standings()))
        yield


async def always() -> bool:
    return True


@pytest.fixture
def keys(tokenizer: Path) -> Callable[..., dict[str, Any]]:
    """Of a reward model with these servers."""
    return lambda *urls: {"url": urls, "model": str(tokenizer)}


@pytest.mark.parametrize(("act", "says"), [("several", "2 numbers"), ("401", "answered 401"), ("404", "answered 404")])
async def test_servers_that_were_away_at_the_start_end_the_run_with_their_first_answer(keys, act, says, short_looks):
    async with gone(act) as one, opened(keys(one.url), 2.0) as reward, back(one, reward):
        with pytest.raises(RewardImpossible, match=f"critic cannot be asked: .*{says}"):
            await reward.score(seen())


@pytest.mark.parametrize("act", ["several", "403"])
async def test_after_a_score_the_same_answer_is_a_bad_moment(keys, act):
    async with servers(["well", act]) as (one,), opened(keys(one.url), 2.0) as reward:
        with pytest.raises((UnclearScore, RewardUnavailable)):
            await reward.score(seen())


@pytest.mark.parametrize("act", ["several", "400", "403"])
async def test_a_worker_that_starts_in_a_run_that_has_scored_waits(keys, act, caplog, short_looks):
    async with servers([act]) as (one,), opened(keys(one.url), scored=always) as reward:
        assert "reward model does not answer yet" in caplog.text
        one.acts = ["well"]
        assert isinstance((await reward.score(seen())).value, float)


async def test_one_server_that_refuses_says_nothing_of_another_that_is_loading(keys, short_looks):
    async with (
        servers(["401"]) as (one,),
        gone("well") as two,
        opened(keys(one.url, two.url)) as reward,
        back(two, reward),
    ):
        assert one.asked
        assert isinstance((await reward.score(seen())).value, float)


async def test_while_nobody_knows_whether_the_run_has_scores_nothing_is_decided(keys, short_looks):
    async def silent() -> bool:
        raise Unreachable("redis is away")

    async with servers(["401", "well"]) as (one,), opened(keys(one.url), scored=silent) as reward:
        assert one.asked
        one.acts = ["well"]
        assert isinstance((await reward.score(seen())).value, float)


async def test_a_text_that_is_refused_is_the_end_of_its_sample_and_decides_nothing(keys, short_looks):
    async with gone("400") as one, opened(keys(one.url), 2.0) as reward, back(one, reward):
        with pytest.raises(ConfigError, match="400") as caught:
            await reward.score(seen())
        assert not isinstance(caught.value, RewardImpossible)


BAD_ARGS = [
    ({}, "args do not fit"),
    ({"model": "critic", "text": "html"}, "text is 'html'"),
    ({"model": "critic", "label": "1"}, "label is '1'"),
    ({"model": "critic", "label": True}, "label is True"),
    ({"model": "critic", "text": "plain", "chat_template": "x.jinja"}, "chat_template is for text: chat"),
    ({"model": "critic", "text": "server", "tokenizer": "x"}, "tokenizer is not used"),
    ({"model": "critic", "path": "/score"}, "body is missing"),
    ({"model": "critic", "path": "/score", "body": {}}, "value is missing"),
    ({"model": "critic", "path": "/s", "body": {"a": "{promt}"}, "value": "x"}, "{promt}"),
    ({"model": "critic", "path": "/s", "body": {"a": "{"}, "value": "x"}, "brace is alone"),
    ({"model": "critic", "path": "/s", "body": {"a": ["{metadata.}"]}, "value": "x"}, "{metadata.}"),
    ({"model": "critic", "path": "/s", "body": {"a": 1}, "value": "x..y"}, "value 'x..y' has an empty step"),
    ({"model": "critic", "path": "/s", "body": {"a": "{respons}"}, "value": "x"}, "did you mean {response}?"),
]


@pytest.mark.parametrize(("args", "says"), BAD_ARGS)
def test_arguments_that_do_not_fit_are_refused_when_the_reward_is_loaded(args, says):
    with pytest.raises(PluginError) as caught:
        load_rewards(run_of(args))
    assert says in str(caught.value)


URL = "http://127.0.0.1:9"
PARTS = {"path": "/score", "body": {"text": "{response}"}, "value": "score"}
BAD_FITS = [
    ({"model": "crtic"}, {"url": [URL]}, "did you mean critic?"),
    ({}, {"url": [URL], "kind": "template"}, "needs path, body and value"),
    ({**PARTS, "label": 1}, {"url": [URL], "kind": "template"}, "label is not used"),
    ({**PARTS}, {"url": [URL]}, "are for kind template"),
    ({}, {"url": [URL], "kind": "openai", "task": "chat"}, "use: judge"),
    ({}, {"url": [URL], "task": "chat"}, "use: judge"),
    ({"text": "server"}, {"url": [URL], "kind": "sglang"}, "take no messages"),
    ({}, {"url": [URL], "model": "/nowhere"}, "is not a directory"),
    ({}, {"url": [URL]}, "is not a directory"),
]


@pytest.mark.parametrize(("args", "model", "says"), BAD_FITS)
async def test_arguments_that_do_not_fit_the_model_end_the_start(args, model, says):
    with pytest.raises(ConfigError) as caught:
        async with opened(model, **args):
            pass
    assert says in str(caught.value)


def test_a_model_that_the_run_does_not_have_is_a_clear_error(tmp_path):
    reward = RewardModel("critic")
    with pytest.raises(ConfigError, match="no reward model 'critic'") as caught:
        asyncio.run(reward.open(RewardContext(run_of({"model": "critic"}), tmp_path)))
    assert caught.value.hint.startswith("add it: reward_models: {")


def full(**metadata: Any) -> RewardSample:
    return seen("Four.", answer={"value": 4}, metadata=metadata, messages=[{"role": "user", "content": "2+2?"}])


def test_a_template_puts_values_and_text_into_their_places():
    body = {
        "q": "{prompt}",
        "both": "Q: {prompt} A: {response}",
        "chat": "{messages}",
        "answer": "{answer}",
        "said": "the answer {answer}, level {metadata.level}",
        "deep": [{"x": ["{metadata.tags}", 1, None, True]}],
        "all": "{metadata}",
        "braces": "{{prompt}} }}{{",
        "id": "{group_id}/{index}/{finish}",
    }
    filled = Template(body, "x").filled(full(level=3, tags=["a", "b"]))
    assert filled == {
        "q": "2 + 2 =",
        "both": "Q: 2 + 2 = A: Four.",
        "chat": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "Four."}],
        "answer": {"value": 4},
        "said": 'the answer {"value":4}, level 3',
        "deep": [{"x": [["a", "b"], 1, None, True]}],
        "all": {"level": 3, "tags": ["a", "b"]},
        "braces": "{prompt} }{",
        "id": "0/0/stop",
    }


def test_a_template_has_all_turns_of_an_episode_and_the_last_one_by_its_name():
    filled = Template({"all": "{response}", "last": "{text}", "chat": "{messages}"}, "x").filled(episode())
    assert filled["last"] == "It is 4."
    assert [message["role"] for message in filled["chat"]] == ["user", "assistant", "tool", "assistant"]
    assert filled["all"].index("Let me see.") < filled["all"].index(">\n4\n</tool-") < filled["all"].index("It is 4.")


def test_what_a_response_says_fills_no_place():
    sample = seen("{answer} {{x}} {metadata.key}")
    assert Template({"a": "[{response}]"}, "x").filled(sample) == {"a": "[{answer} {{x}} {metadata.key}]"}


def test_what_a_prompt_lacks_is_an_error_of_the_sample():
    with pytest.raises(DataError, match="line 7 of the data set has no 'level'"):
        Template({"a": "{metadata.level}"}, "x").filled(full())
    with pytest.raises(DataError, match="line 7 of the data set has no answer"):
        Template({"a": "{answer}"}, "x").filled(seen(answer=None))


@pytest.mark.parametrize(
    ("way", "answer", "value"),
    [
        ("score", {"score": 1}, 1.0),
        ("data.0.s", {"data": [{"s": -0.5}]}, -0.5),
        ("data.-1", {"data": [1, 2, 3]}, 3.0),
        ("0", {"0": 2.5}, 2.5),
    ],
)
def test_the_score_is_found_on_its_way(way, answer, value):
    assert Template({}, way).read(answer) == value


@pytest.mark.parametrize(
    "answer", [{}, {"a": {}}, {"a": {"b": None}}, {"a": {"b": "1"}}, {"a": {"b": True}}, {"a": [1]}, {"a": 1}]
)
def test_a_score_that_is_not_there_is_no_number(answer):
    with pytest.raises(WireError):
        Template({}, "a.b").read(answer)


async def test_a_template_server_is_asked_and_read():
    model = {"url": [URL], "kind": "template"}
    args = {"path": "/classify", "body": {"input": "{prompt}{response}"}, "value": "data.0.probs.0"}
    async with servers(["well"]) as (one,), opened({**model, "url": [one.url]}, **args) as reward:
        assert (await reward.score(seen("4"))).value == score_of(list(b"2 + 2 =4"))
