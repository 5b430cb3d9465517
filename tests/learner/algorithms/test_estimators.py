"""Estimators of advantages against numbers worked out by hand, and on the inputs that went wrong for others."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.config.learner import LearnerConfig
from streamrl.errors import ConfigError
from streamrl.learner.algorithms.advantages import ESTIMATORS, Estimator, GroupData, traits, value_targets

CENTRED = ("grpo", "dr_grpo", "grpo_batch_std", "rloo", "reinforce_plus_plus_baseline", "gpg")
OWN_BASELINE = (*CENTRED, "opo", "pass_at_k", "egpo")


def group(rewards, lengths=None, **more):
    lengths = [2] * len(rewards) if lengths is None else lengths
    behaviour = more.pop("behaviour", [np.full(length, -1.0) for length in lengths])
    return GroupData(np.asarray(rewards, dtype=np.float64), np.asarray(lengths), behaviour, **more)


def estimator(use, **args):
    if use == "egpo":
        args = {"mode": "ratio"} | args  # which needs nothing but log-probabilities
    if use == "gdpo":
        args = {"weights": {"right": 1.0}} | args
    critic = {"kind": "model"} if use == "gae" else {}
    return Estimator.of(LearnerConfig.model_validate({"advantage": {"use": use, "args": args}, "critic": critic}))


def per_response(use, rewards, lengths=None, *, data=None, **args):
    """One number for each response, which all of its tokens have."""
    advantages = estimator(use, **args)(group(rewards, lengths, **(data or {})))
    assert all(np.all(tokens == tokens[0]) for tokens in advantages if tokens.size)
    return [tokens[0] for tokens in advantages]


def test_grpo_divides_by_the_unbiased_standard_deviation():
    # mean 0.25, deviations -.25 -.25 -.25 .75, sum of squares .75, unbiased variance .25, std .5
    assert per_response("grpo", [0, 0, 0, 1]) == pytest.approx([-0.5, -0.5, -0.5, 1.5], rel=1e-5)
    assert per_response("grpo", [0, 0, 0, 1])[3] == pytest.approx(0.75 / (0.5 + 1e-6), rel=1e-12)


def test_dr_grpo_is_the_distance_from_the_mean():
    assert per_response("dr_grpo", [1, 2, 6]) == pytest.approx([-2, -1, 3])


def test_rloo_is_the_distance_from_the_mean_of_the_others():
    assert per_response("rloo", [1, 2, 6]) == pytest.approx([1 - 4, 2 - 3.5, 6 - 1.5])


def test_batch_mean_leaves_the_baseline_to_the_step():
    assert per_response("batch_mean", [1, 2, 6]) == [1, 2, 6]


def test_gdpo_normalises_each_reward_by_itself():
    parts = [{"right": 0.0, "short": 0.0}, {"right": 1.0, "short": 0.3}, {"right": 0.0, "short": 0.3}, {"short": 0.3}]
    # right: 0 1 0 0 -> deviations / .5; short: 0 .3 .3 .3 -> mean .225, std .15
    right, short = np.asarray([-0.5, 1.5, -0.5, -0.5]), np.asarray([-1.5, 0.5, 0.5, 0.5])
    found = per_response("gdpo", [0.0] * 4, data={"parts": parts}, weights={"right": 1.0, "short": 0.5})
    assert found == pytest.approx(right + 0.5 * short, rel=1e-4)
    alone = per_response("gdpo", [0.0] * 4, data={"parts": parts})
    assert alone == per_response("grpo", [0, 1, 0, 0]), "one reward is GRPO"
    with pytest.raises(ConfigError, match="weights"):
        Estimator.of(LearnerConfig.model_validate({"advantage": {"use": "gdpo"}}))
    with pytest.raises(ValueError, match="needs parts"):
        estimator("gdpo")(group([0, 1]))


def test_opo_weighs_the_baseline_by_length():
    # (1 x 0 + 3 x 1) / 4 = .75
    assert per_response("opo", [0, 1], [1, 3]) == pytest.approx([-0.75, 0.25])
    assert estimator("opo")(group([0, 1], [0, 0])) == [pytest.approx([]), pytest.approx([])]


def test_remax_takes_the_greedy_reward_off():
    assert per_response("remax", [0, 1, 3], data={"baseline_reward": 1.0}) == [-1, 0, 2]
    assert per_response("remax", [3], data={"baseline_reward": 1.0}) == [2]
    with pytest.raises(ValueError, match="needs baseline"):
        estimator("remax")(group([0, 1]))


def test_pass_at_k_pays_only_the_best():
    # std of 0, 1, 3 (mean 4/3): sqrt((16 + 1 + 25) / 9 / 2)
    std = math.sqrt(42 / 18)
    assert per_response("pass_at_k", [0, 3, 1]) == pytest.approx([0, 2 / (std + 1e-6), 0])
    assert per_response("pass_at_k", [0, 3, 3]) == [0, 0, 0]


def test_reinforce_plus_plus_discounts_back_from_the_end():
    advantages = estimator("reinforce_plus_plus", gamma=0.5)(group([4, -1], [3, 0]))
    assert advantages[0].tolist() == [1, 2, 4]
    assert advantages[1].tolist() == []


def test_penalties_are_taken_off_the_reward():
    penalties = [np.asarray([0.25, 0.25]), np.asarray([0.5])]
    data = {"penalties": penalties}
    assert per_response("dr_grpo", [1, 1], [2, 1], data=data) == [0, 0]  # 1 - .5 both
    assert per_response("dr_grpo", [1.5, 1], [2, 1], data=data) == [0.25, -0.25]
    returns = estimator("reinforce_plus_plus")(group([1, 1], [2, 1], **data))
    assert [tokens.tolist() for tokens in returns] == [[0.5, 0.75], [0.5]]
    to_go = estimator("remax")(group([1, 1], [2, 1], baseline_reward=0.5, **data))
    assert [tokens.tolist() for tokens in to_go] == [[0, 0.25], [0]]


def test_gae_takes_gamma_and_lambda_from_the_critic():
    config = LearnerConfig.model_validate(
        {"advantage": {"use": "gae"}, "critic": {"kind": "model", "gamma": 0.5, "lam": 0.5}}
    )
    advantages = Estimator.of(config)(group([1], [2], values=[[2, 4]]))
    # delta_1 = 1 - 4 = -3; delta_0 = .5 x 4 - 2 = 0, so A_0 = 0 + .25 x -3
    assert advantages[0].tolist() == [-0.75, -3]
    with pytest.raises(ValueError, match="needs values"):
        Estimator.of(config)(group([1], [2]))


def test_the_policy_may_have_another_lambda_than_the_critic():
    config = LearnerConfig.model_validate(
        {"advantage": {"use": "gae", "args": {"lam": 0.0}}, "critic": {"kind": "model", "gamma": 0.5, "lam": 1.0}}
    )
    data = group([1], [2], values=[[2, 4]])
    assert Estimator.of(config)(data)[0].tolist() == [0, -3]
    # What the critic learns: 1 at the last token, half of it one before.
    assert value_targets(data, gamma=0.5, lam=1.0)[0].tolist() == [0.5, 1]


def test_lambda_may_follow_the_length():
    # lambda is 1 - 1 / (.5 x 4) = .5 for four tokens, and 0 for two
    values = [[0.0, 0.0, 0.0, 1.0], [0.0, 1.0]]
    long, short = estimator("gae", alpha=0.5)(group([2, 2], [4, 2], values=values))
    # deltas 0, 0, 1 and 1
    assert long.tolist() == [0.375, 0.75, 1.5, 1]
    assert short.tolist() == [1, 1]
    with pytest.raises(ConfigError, match="alpha 0 is above 0"):
        estimator("gae", alpha=0)


ROUNDED = [
    [0.1 + 0.2, 0.3],
    [-0.3, -0.1 - 0.2, -0.3],
    [1e12 * (0.1 + 0.2), 3e11],  # twelve digits more than the 1e-6 that is added to a deviation
    [sum([0.1] * 10), 1.0, 1.0],
]
"""Rewards that are equal but for the order in which they were added up."""


@pytest.mark.parametrize("use", OWN_BASELINE)
@pytest.mark.parametrize("rewards", [[], [1.0], [0.1] * 7, [-3.7] * 3, [1e300] * 4, *ROUNDED])
def test_equal_rewards_and_a_group_of_one_give_exactly_zero(use, rewards):
    assert [tokens.tolist() for tokens in estimator(use)(group(rewards))] == [[0.0, 0.0]] * len(rewards)


@pytest.mark.parametrize("use", [*OWN_BASELINE, "remax"])
def test_a_small_contrast_is_not_rounding(use):
    found = per_response(use, [1.0, 1.0, 1.0 + 1e-6], data={"baseline_reward": 1.0})
    assert found[2] > 0


def test_a_reward_equal_to_that_of_the_greedy_response_is_worth_nothing():
    assert per_response("remax", [0.1 + 0.2, 0.3, 1.3], data={"baseline_reward": 0.3})[:2] == [0, 0]
    assert per_response("pass_at_k", [0.1 + 0.2, 0.3, 0.0]) == [0, 0, 0]


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_is_refused(reward):
    with pytest.raises(ValueError, match="not finite"):
        group([0.0, reward])
    with pytest.raises(ValueError, match="not finite"):
        group([0.0], baseline_reward=reward)


@pytest.mark.parametrize("use", ["dr_grpo", "rloo", "opo", "remax"])
def test_rewards_too_far_apart_are_refused(use):
    with pytest.raises(ValueError, match="too far apart"):
        estimator(use)(group([1.7e308, -1.7e308, -1.7e308], baseline_reward=1.7e308))


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=2, max_size=12))
def test_grpo_is_finite_centred_and_bounded(rewards):
    advantages = np.asarray(per_response("grpo", rewards))
    assert abs(advantages.sum()) < 1e-6 * len(rewards)
    # The largest possible distance from the mean in units of the unbiased deviation.
    assert np.abs(advantages).max() <= (len(rewards) - 1) / math.sqrt(len(rewards)) + 1e-9


@given(st.lists(st.integers(-5, 5), min_size=2, max_size=8), st.floats(0.1, 100), st.floats(-50, 50))
def test_scale_and_shift_of_rewards_do_not_matter_to_grpo(rewards, scale, shift):
    moved = per_response("grpo", [scale * reward + shift for reward in rewards])
    if len(set(rewards)) > 1:
        assert moved == pytest.approx(per_response("grpo", rewards), abs=1e-4)


@given(
    st.sampled_from([name for name in ESTIMATORS.names if name != "gae"]),
    st.lists(st.tuples(st.integers(-5, 5), st.integers(1, 5)), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
)
def test_the_order_of_the_responses_does_not_matter(use, responses, random):
    order = list(range(len(responses)))
    random.shuffle(order)

    def advantages(chosen):
        rewards, lengths = zip(*chosen, strict=True)
        surprise = [np.full(length, -0.1 * length) for length in lengths]
        parts = [{"right": reward} for reward in rewards]
        return estimator(use)(group(rewards, list(lengths), behaviour=surprise, baseline_reward=1.0, parts=parts))

    shuffled, plain = advantages([responses[place] for place in order]), advantages(responses)
    for place, tokens in zip(order, shuffled, strict=True):
        assert tokens == pytest.approx(plain[place], abs=1e-9)


@pytest.mark.parametrize(
    ("advantage", "message"),
    [
        ({"use": "grop"}, "did you mean"),
        ({"use": "grpo", "args": {"gamma": 1}}, "takes no argument gamma"),
        ({"use": "reinforce_plus_plus", "args": {"gamma": 2}}, "between 0 and 1"),
        ({"use": "egpo", "args": {"mode": "ratoi"}}, "no mode ratoi"),
        ({"use": "egpo", "args": {"mode": "bonus", "bonus": 3}}, "sign could flip"),
        ({"use": "egpo", "args": {"mode": "ratio", "lambda_min": 3}}, "lambda_min"),
        ({"use": "egpo", "args": {"closing": ""}}, "opening and closing"),
        ({"use": "egpo", "args": {"part": "thought"}}, "no part thought"),
        ({"use": f"{__name__}:one_number"}, "gave shapes"),
        ({"use": f"{__name__}:careless"}, "failed: KeyError"),
        ({"use": f"{__name__}:odd_need"}, "needs luck"),
        ({"use": f"{__name__}:odd_normalisation"}, "normalisation sometimes"),
        ({"use": "no.such.module:name"}, "cannot be imported"),
    ],
)
def test_what_does_not_fit_fails_at_the_start(advantage, message):
    with pytest.raises(ConfigError, match=message):
        Estimator.of(LearnerConfig.model_validate({"advantage": advantage}))


@traits(needs=["entropy"], normalise="std")
def weighted_by_entropy(group, *, scale=1.0):
    return [scale * entropy for entropy in group.entropy]


def one_number(group):
    return [np.zeros(1)]


@traits(needs=["luck"])
def odd_need(group):
    return group.constant(group.rewards)


def careless(group):
    return {}["reward"]


@traits(normalise="sometimes")
def odd_normalisation(group):
    return group.constant(group.rewards)


def test_a_function_of_the_user_says_what_it_needs():
    own = estimator(f"{__name__}:weighted_by_entropy", scale=2.0)
    assert (own.needs, own.normalise) == (frozenset({"entropy"}), "std")
    assert own(group([1], [2], entropy=[np.asarray([1.0, 2.0])]))[0].tolist() == [2, 4]


def test_each_estimator_says_how_it_is_normalised_and_what_it_needs():
    said = {name: (estimator(name).normalise, set(estimator(name).needs)) for name in ESTIMATORS.names}
    assert {name: kind for name, (kind, _) in said.items() if kind != "none"} == {
        "grpo_batch_std": "std",
        "batch_mean": "centre",
        "gdpo": "std",
        "reinforce_plus_plus": "whiten",
        "reinforce_plus_plus_baseline": "whiten",
        "gpg": "nonzero",
        "gae": "whiten",
    }
    assert {name: needs for name, (_, needs) in said.items() if needs} == {
        "remax": {"baseline"},
        "gae": {"values"},
        "gdpo": {"parts"},
    }
    assert estimator("egpo", mode="bonus").needs == {"entropy", "text"}
    assert estimator("egpo", mode="bonus", part="joint").needs == {"entropy"}
    assert estimator("egpo", part="answer").needs == {"text"}
