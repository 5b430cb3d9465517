"""Rewards for some sources of prompts: who is called, what the score is made of, and a source that nobody scores."""

import re

import pytest

from streamrl.config import RewardSpec, RunConfig
from streamrl.consumers import make_sample
from streamrl.consumers.calls import ScoringFailed
from streamrl.errors import ConfigError
from streamrl.queues import open_ledgers
from streamrl.runfile import load
from streamrl.runtime.preflight import check_all
from tests.cli.run_kit import cli, data_of
from tests.consumers.calls_kit import loaded, scorer
from tests.consumers.worker_kit import put, put_whole, until_closed, until_dead, values, worker
from tests.queues.ledger_kit import faults

MATH, CODE = {"source": "math"}, {"source": ["code", "shell"]}


def reward(name, value, asked, **spec):
    async def call(sample):
        asked.append(name)
        return value

    call.__name__ = name
    return loaded(call, **spec)


def sample(source):
    return make_sample("4", source=source)


async def test_only_the_rewards_of_a_source_are_called_and_add_up():
    asked = []
    rewards = [
        reward("all", 1.0, asked, weight=0.5),
        reward("math", 2.0, asked, when=MATH),
        reward("code", 3.0, asked, when=CODE),
    ]
    scoring = scorer(*rewards)
    score = await scoring.score(sample("math"))
    assert (score.value, score.parts, asked) == (2.5, {"all": 1.0, "math": 2.0}, ["all", "math"])
    assert (await scoring.score(sample("shell"))).value == 3.5
    assert (await scoring.score(sample(""))).value == 0.5
    for combine, value in (("product", 2.0), ("min", 1.0)):
        assert (await scorer(*rewards, scoring={"combine": combine}).score(sample("math"))).value == value


async def test_a_gate_of_one_source_holds_back_no_other():
    asked = []
    scoring = scorer(reward("gate", 0.0, asked, gate=1, when=MATH), reward("all", 1.0, asked), scoring={"gated": -1})
    assert (await scoring.score(sample("math"))).value == -1.0
    assert (await scoring.score(sample("code"))).value == 1.0
    assert asked == ["gate", "all"]


async def test_a_comparison_of_one_source():
    async def rank(samples):
        return [float(one.index) for one in samples]

    scoring = scorer(loaded(rank, group=True, when=MATH), reward("all", 1.0, []))
    for source, found in (("math", [1.0, 2.0]), ("code", [1.0, 1.0])):
        group = [make_sample("4", index=index, source=source) for index in range(2)]
        assert [one.value for one in await scoring.score_group(group)] == found


@pytest.mark.parametrize("nothing", [{"gate": 0}, {"weight": 0}, {"when": MATH}])
@pytest.mark.parametrize("combine", ["sum", "product", "min"])
async def test_a_source_that_no_reward_scores_is_a_failure_and_never_a_number(nothing, combine):
    asked = []
    scoring = scorer(
        reward("math", 1.0, asked, when=MATH), reward("no", 1.0, asked, **nothing), scoring={"combine": combine}
    )
    with pytest.raises(ScoringFailed, match=r"no reward scores prompts of source 'cod': see when\.source of rewards"):
        await scoring.score(sample("cod"))
    assert asked == []


@pytest.mark.parametrize(("fill", "compares"), [(put, []), (put_whole, [{"use": "group_rewards_for_tests:Rank"}])])
async def test_samples_of_a_run_go_where_their_source_says(redis_run, make_config, fill, compares):
    spec = {"use": "exact_match", "when": {"source": "right"}}
    wrong = {"use": "length", "args": {"most": 100}, "when": {"source": "long"}}
    config = make_config(spec, wrong, *({**one, "when": {"source": "right"}} for one in compares))
    async with open_ledgers(config, redis_run.run_dir) as ledgers:
        await fill(ledgers.train, 0, ["4", "5"], source="long")
        await fill(ledgers.train, 1, ["4", "5"], source="other")
        async with worker(config, redis_run.run_dir, ledgers):
            await until_closed(ledgers.train, [0])
            letters = await until_dead(ledgers.train, 1)
        assert await values(ledgers.train, 0) == {0: 1.0, 1: 1.0}
        assert "no reward scores prompts of source 'other'" in letters[1, 0].why
        assert not await faults(ledgers.train)


@pytest.mark.parametrize(
    ("rewards", "why"),
    [
        ([{"use": "math", "when": {"source": "gsm8"}}], r"rewards\.math\.when\.source: no data has the name 'gsm8'"),
        ([{"use": "math", "when": {"source": ["gsm8k", ""]}}], r"no data has the name ''"),
        ([{"use": "math", "when": {"source": "gsm8k"}}], "no reward scores prompts of source 'code': all have a gate"),
        ([{"use": "math", "when": {"source": "gsm8k"}}, {"use": "format", "gate": 1}], "prompts of source 'code'"),
        ([{"use": "math", "when": {"source": ["gsm8k", "code"]}}], "prompts of source 'held'"),
    ],
)
def test_routes_that_cannot_be_meant_are_refused_at_the_start(tmp_path, rewards, why):
    for name in ("gsm8k", "code", "held"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "2+2=", "kind": "sums"}')
    held = {"source": str(tmp_path / "held.jsonl"), "name": "held"}
    data = {"train": [str(tmp_path / "gsm8k.jsonl"), str(tmp_path / "code.jsonl")], "held_out": held}

    def rewards_of(config):
        (check,) = [check for check in check_all(config, tmp_path) if check.name == "rewards"]
        return check

    check = rewards_of(RunConfig.model_validate({"rewards": rewards, "data": data}))
    assert isinstance(check.error, ConfigError)
    assert re.search(why, check.error.message)
    assert "there are 'code', 'gsm8k', 'held'" in check.error.hint or "when.source of one" in check.error.hint
    assert rewards_of(RunConfig.model_validate({"rewards": [{"use": "math"}], "data": data})).error is None
    named = {**data, "columns": {"source": "kind"}}
    assert rewards_of(RunConfig.model_validate({"rewards": rewards, "data": named})).error is None, "who knows"


def test_a_name_or_a_list_of_names_and_never_none():
    found = [RewardSpec.model_validate({"use": "math", "when": when}) for when in (MATH, CODE)]
    assert [spec.when.source for spec in found] == [("math",), ("code", "shell")]
    assert RunConfig.model_validate({"rewards": [{"use": "math", "when": MATH}]}).rewards[0].applies("math")
    with pytest.raises(ConfigError, match="source"):
        load(None, ["rewards=[{use: math, when: {source: []}}]"], {})


def test_reward_test_takes_the_source_of_each_sample(tmp_path):
    (tmp_path / "run.yaml").write_text("rewards: [{use: exact_match, when: {source: right}}]")
    lines = '{"prompt": "2+2=", "answer": "4", "response": "4", "source": "%s"}\n'
    (tmp_path / "samples.jsonl").write_text(lines % "right" + lines % "left")
    done = cli(
        "reward", "test", "--file", str(tmp_path / "run.yaml"), "--sample", str(tmp_path / "samples.jsonl"), "--json"
    )
    right, left = data_of(done.stdout, "streamrl.reward.test/1")["samples"]
    assert (done.returncode, right["value"], left["value"]) == (1, 1.0, None)
    assert "source 'left'" in left["error"]
