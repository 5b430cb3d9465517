"""Groups with equal rewards are left out only where they have no gradient anyway."""

from __future__ import annotations

import pytest

from streamrl.config import RunConfig
from streamrl.errors import ConfigError
from streamrl.learner.algorithms.advantages import ESTIMATORS
from streamrl.learner.algorithms.recipe import Recipe

LEARNS = {"gae", "remax", "reinforce_plus_plus", "batch_mean", "gdpo"}
REWARDS = [{"use": "exact", "name": "right"}]


def recipe(what, use="grpo", *, args=None, sampling=None, rewards=REWARDS, **learner):
    if use == "gdpo":
        args = args or {"weights": {"right": 1.0}}
    if use == "gae":
        learner["critic"] = {"kind": "model"}
    advantage = {"use": use, "args": args or {}, "zero_variance": what}
    sampling = {"greedy_baseline": use == "remax", **(sampling or {})}
    learner = {"advantage": advantage, **learner}
    return Recipe.of(RunConfig.model_validate({"sampling": sampling, "rewards": rewards, "learner": learner}))


@pytest.mark.parametrize("what", ["drop", "resample"])
@pytest.mark.parametrize("use", ESTIMATORS.names)
def test_estimators_that_learn_from_equal_rewards_keep_them(use, what):
    recipe("keep", use)
    if use in LEARNS:
        with pytest.raises(ConfigError, match=f"zero_variance {what} with learner.advantage.use {use}") as caught:
            recipe(what, use)
        assert "zero_variance: keep" in caught.value.hint
    else:
        assert recipe(what, use).zero_variance == what


def test_so_do_options_estimators_of_a_user_and_a_kl_in_the_reward():
    with pytest.raises(ConfigError, match="egpo"):
        recipe("drop", "egpo", args={"mode": "asymmetric"})
    recipe("drop", "egpo", args={"mode": "asymmetric", "degenerate": 0.0})
    recipe("drop", "egpo", args={"mode": "bonus"})
    with pytest.raises(ConfigError, match="raw"):
        recipe("drop", f"{__name__}:raw")
    with pytest.raises(ConfigError, match="no contrast"):
        recipe("resample", f"{__name__}:strict")
    for kl, reference in (("reward", "frozen"), ("loss", "frozen")):
        learner = {"kl": {"where": kl}, "reference": {"kind": reference}}
        recipe("keep", **learner)
        if kl == "reward":
            with pytest.raises(ConfigError, match="zero_variance drop with learner"):
                recipe("drop", **learner)
        else:
            recipe("drop", **learner)


def raw(group):
    return group.constant(group.rewards)


def strict(group):
    if group.rewards.std() == 0:
        raise ValueError("no contrast")
    return group.constant(group.rewards)


SINGLE = {"group_size": 1, "min_group": 1}


@pytest.mark.parametrize("use", ESTIMATORS.names)
def test_single_responses_need_a_baseline_from_elsewhere(use):
    if use in LEARNS - {"gdpo"}:
        assert recipe("keep", use, sampling=SINGLE).zero_variance == "keep"
    else:
        with pytest.raises(ConfigError, match=f"advantage.use {use} compares the responses of a group"):
            recipe("keep", use, sampling=SINGLE)


def test_rewards_that_are_normalised_apart_are_there_and_have_no_kl():
    recipe("keep", "gdpo", args={"weights": {"right/part": 1.0, "overlong": 1.0}})
    with pytest.raises(ConfigError, match="there is no reward wrong"):
        recipe("keep", "gdpo", args={"weights": {"wrong": 1.0}})
    with pytest.raises(ConfigError, match="one by one"):
        recipe("keep", "gdpo", kl={"where": "reward"}, reference={"kind": "frozen"})
