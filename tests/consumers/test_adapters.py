import copy

import pytest

from streamrl.config import RunConfig
from streamrl.consumers import RewardSample, Score
from streamrl.consumers.plugins import load_rewards
from streamrl.errors import DataError, PluginError
from tests.consumers.samples import episode, prompt, response, seen

MODULE = "tests.consumers.functions_for_tests"


def load(name, adapter, scoring=None, **spec):
    rewards = [{"use": f"{MODULE}:{name}", "adapter": adapter, **spec}, {"use": "exact_match"}]
    return load_rewards(RunConfig.model_validate({"rewards": rewards, "scoring": scoring or {}}))[0]


async def call(reward, subject):
    result = reward.call(subject)
    return await result if not reward.blocking else result


def group(*texts, tokens=None, **fields):
    lengths = tokens or [3] * len(texts)
    return [
        RewardSample.of(prompt(**fields), response(text, tokens=length), 5, index)
        for index, (text, length) in enumerate(zip(texts, lengths, strict=True))
    ]


# --- verl -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "args", "text", "score"),
    [
        ("gsm8k", {}, "#### 4", Score(1.0)),
        ("gsm8k", {}, "4", Score(0.0)),
        ("gsm8k", {"method": "loose"}, "4", Score(0.5)),
        ("partial", {}, "4", Score(0.5)),
        ("verl_true", {}, "4", Score(1.0)),  # true is 1 for these systems
        ("judged", {"reward_router_address": "localhost:1"}, "4", Score(1.0, {"router": 1.0})),
        ("Scorer", {}, "4", Score(7.0)),
    ],
)
async def test_a_function_of_verl_gets_its_four_arguments_and_args(name, args, text, score):
    reward = load(name, "verl", args=args)
    assert (reward.blocking, reward.group) == (name not in {"judged", "Scorer"}, False)
    assert await call(reward, seen(text)) == score


async def test_a_line_made_for_verl_is_read_as_verl_reads_it():
    metadata = {
        "data_source": "openai/gsm8k",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"split": 3, "index": 11},
    }
    before = copy.deepcopy(metadata)
    score = await call(load("detailed", "verl"), seen("4", answer=None, metadata=metadata))
    assert score.value == 1.0
    assert score.parts == {"acc": 1.0, "length": 1.0, "turns": 2.0, "split": 3.0, "index": 11.0}
    assert all(type(part) is float for part in score.parts.values())
    assert metadata == before
    score = await call(load("detailed", "verl"), seen("5", answer="4", metadata={"index": 2}))
    assert (score.value, score.parts["acc"], score.parts["index"]) == (-1.0, 0.0, 2.0), "any other line"


async def test_a_function_of_verl_with_lists_gets_lists_of_one():
    reward = load("verl_batch", "verl", args={"bonus": 1})
    assert not reward.group
    assert await call(reward, seen("ab")) == Score(2.0, {"n": 1.0})


async def test_a_function_of_verl_that_is_declared_to_compare_gets_the_whole_group():
    reward = load("verl_batch", "verl", args={"bonus": 1}, group=True)
    assert reward.group
    scores = await call(reward, group("ab", "abcd"))
    assert scores == [Score(1.5, {"n": 2.0}), Score(2.0, {"n": 2.0})]


@pytest.mark.parametrize(("name", "why"), [("verl_without_score", "without `score`: reward"), ("verl_none", "None")])
async def test_what_is_no_score_is_an_error_and_never_zero(name, why):
    with pytest.raises(TypeError, match=why):
        await call(load(name, "verl"), seen("4"))


# --- TRL --------------------------------------------------------------------------------------------------------------


CHAT = {"messages": [{"role": "user", "content": "2 + 2"}]}


@pytest.mark.parametrize(
    ("name", "texts", "fields", "values"),
    [
        ("reward_len", ["x" * 20, "x" * 25], {}, [0.0, -5.0]),
        ("think_format", ["<think>a</think>4", "4"], CHAT, [1.0, 0.0]),
        ("correct", ["it is 4", "5"], {}, [2.0, 0.0]),
        ("old_style", ["a", "b"], {}, [7.0, 7.0]),
    ],
)
@pytest.mark.parametrize("compares", [False, True])
async def test_a_function_of_trl_gets_chats_as_messages_and_texts_as_texts(name, texts, fields, values, compares):
    reward = load(name, "trl", group=compares)
    assert (reward.group, reward.blocking) == (compares, True)
    samples = group(*texts, **fields)
    scores = await call(reward, samples) if compares else [await call(reward, sample) for sample in samples]
    assert [score.value for score in scores] == values


async def test_a_function_of_trl_that_asks_for_the_size_of_the_group_gets_the_whole_group():
    reward = load("share", "trl")
    assert reward.group
    assert await call(reward, group("a", "b", "a")) == [Score(2 / 3), Score(1 / 3), Score(2 / 3)]
    assert not load("share", "trl", args={"num_generations": 4}).group, "a constant is not asked for"


async def test_token_ids_columns_and_what_a_function_logs():
    samples = group("a", "b", tokens=[2, 5], metadata={"difficulty": "hard"})
    scores = await call(load("best_of_group", "trl", group=True), samples)
    assert scores == [Score(0.0, {"longest": 5.0}), Score(1.0, {"longest": 5.0})]
    constant = load("best_of_group", "trl", args={"difficulty": "none"})
    assert await call(constant, seen("a")) == Score(1.0, {"longest": 3.0})
    with pytest.raises(DataError, match="needs difficulty, and line 7 of the data set has answer, completion_ids"):
        await call(load("best_of_group", "trl"), seen("a"))


async def test_no_opinion_is_nothing_in_a_sum_and_an_error_elsewhere():
    reward = load("sometimes", "trl")
    assert [await call(reward, seen(text)) for text in ("skip", "x")] == [Score(0.0, {"skipped": 1.0}), Score(1.0)]
    for scoring, spec in [({"combine": "min"}, {}), ({}, {"gate": 0.5}), ({}, {"clip": [1, 2]})]:
        with pytest.raises(TypeError, match="returned None"):
            await call(load("sometimes", "trl", scoring, **spec), seen("skip"))


@pytest.mark.parametrize(
    ("name", "error", "why"),
    [("one_for_all", ValueError, "1 rewards for 2 completions"), ("scalar", TypeError, "a float, not a list")],
)
async def test_results_that_do_not_fit_are_errors(name, error, why):
    with pytest.raises(error, match=why):
        await call(load(name, "trl", group=True), group("a", "b"))


# --- both -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "adapter", "args", "why"),
    [
        ("foreign", "verl", {}, "does not fit verl"),
        ("foreign", "trl", {}, "does not fit TRL: it takes sample"),
        ("gsm8k", "verl", {"methud": 1}, "methud"),
        ("gsm8k", "trl", {}, "does not fit TRL"),
        ("stateful", "trl", {}, "needs trainer_state: rewards are scored apart from the learner"),
        ("old_style", "trl", {"x": 1}, "takes no x"),
        ("np", "verl", {}, "is of type module"),
        ("gsm8k", "verl", {"group": True}, "has group: true, and it takes one sample"),
    ],
)
def test_what_does_not_fit_is_refused_at_the_start(name, adapter, args, why):
    group = args.get("group", False)
    with pytest.raises(PluginError) as caught:
        load(name, adapter, args={} if group else args, group=group)
    assert why in caught.value.message


# --- episodes ---------------------------------------------------------------------------------------------------------


async def test_an_episode_is_scored_whole_by_functions_of_verl():
    sample = episode()
    assert (await call(load("detailed", "verl"), sample)).parts["turns"] == 4.0, "prompt, two replies, one result"
    assert await call(load("used_a_tool", "verl"), sample) == Score(1.0)
    assert await call(load("used_a_tool", "verl"), seen("It is 4.")) == Score(0.0)


async def test_an_episode_is_scored_whole_by_functions_of_trl():
    chat = episode(messages=[{"role": "user", "content": "2+2="}])
    reward = load("roles", "trl")
    assert await call(reward, chat) == Score(3.0, {"assistant": 2.0, "tool": 1.0})
    assert await call(load("reward_len", "trl"), episode()) != await call(load("reward_len", "trl"), seen("It is 4."))
