"""Groups with equal rewards are left out only where they have no gradient anyway."""

from __future__ import annotations

import pytest

from streamrl.config import RunConfig
from streamrl.errors import ConfigError
from streamrl.learner.algorithms.advantages import ESTIMATORS
from streamrl.learner.algorithms.recipe import Recipe

LEARNS = {"gae", "remax", "reinforce_plus_plus"}


def recipe(what, use="grpo", *, args=None, **learner):
    if use == "gae":
        learner["critic"] = {"kind": "model"}
    advantage = {"use": use, "args": args or {}, "zero_variance": what}
    sampling = {"greedy_baseline": use == "remax"}
    return Recipe.of(RunConfig.model_validate({"sampling": sampling, "learner": {"advantage": advantage, **learner}}))


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
