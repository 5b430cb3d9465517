"""Policy losses of single tokens: numbers worked out by hand, the plain formulas in float64, numerical gradients."""

import math

import pytest
import torch
from loss_kit import differentiate, random_tokens, slope, tokens_of, with_logprobs

from streamrl.errors import ConfigError
from streamrl.learner.algorithms.losses import LOSSES, aipo, cispo, dppo, kl_cov, ppo, reinforce, sapo, uses_ratio

LN = math.log
# u = 1, 2, 2, 1/4, 16
LOGPROBS = [LN(0.5), LN(0.5), LN(0.5), LN(0.1), LN(0.8)]
OLD = [LN(0.5), LN(0.25), LN(0.25), LN(0.4), LN(0.05)]
ADVANTAGES = [1.0, 2.0, -3.0, -1.0, -1.0]
BY_HAND = tokens_of(LOGPROBS, OLD, ADVANTAGES)


def test_ppo_by_hand():
    result, gradient = differentiate(ppo, BY_HAND)
    # min(u A, clip A): 1; 2 * 1.28 clipped; 2 * -3; .8 * -1 clipped; 10 * -1 by the dual clip
    assert result.per_token.tolist() == pytest.approx([-1, -2.56, 6, 0.8, 10])
    assert gradient.tolist() == pytest.approx([-1, 0, 6, 0, 0])
    assert result.clipped.tolist() == [False, True, False, True, True]


def test_cispo_by_hand():
    result, gradient = differentiate(lambda tokens: cispo(tokens, low=0.5, cap=1.5), BY_HAND)
    weight = [1, 1.5, 1.5, 0.5, 1.5]
    expected = [-w * a for w, a in zip(weight, ADVANTAGES, strict=True)]
    assert gradient.tolist() == pytest.approx(expected)
    assert result.per_token.tolist() == pytest.approx([g * l for g, l in zip(expected, LOGPROBS, strict=True)])
    assert result.clipped.tolist() == [False, True, True, True, True]


def test_aipo_bounds_one_side_only():
    _, gradient = differentiate(lambda tokens: aipo(tokens, cap=1.5), BY_HAND)
    assert gradient.tolist() == pytest.approx([-1, -3, 4.5, 0.25, 1.5])


def test_kl_cov_pulls_the_tokens_back_that_would_take_the_entropy():
    # u = 2, 1/2, 1 and 1; means of log theta -3, of A 0: covariances 4, 4, 0 and 0
    logprobs, advantages = [-1.0, -5.0, -3.0, -3.0, -90.0], [2.0, -2.0, 2.0, -2.0, 0.0]
    old = [-1 - LN(2), -5 + LN(2), -3, -3, -1]
    tokens = tokens_of(logprobs, old, advantages)
    result, gradient = differentiate(lambda tokens: kl_cov(tokens, share=0.5, coefficient=0.3), tokens)
    assert result.per_token.tolist() == pytest.approx([-2 * 2 + 0.3 * LN(2), 0.5 * 2 + 0.3 * LN(2), -2, 2, 0])
    assert gradient.tolist() == pytest.approx([-2 * 2 + 0.3, 0.5 * 2 - 0.3, -2, 2, 0])
    assert not result.clipped.any()
    _, gradient = differentiate(lambda tokens: kl_cov(tokens, cap=1.5), tokens)
    assert gradient.tolist() == pytest.approx([-1.5 * 2 + 1, 0.5 * 2, -2, 2, 0]), "one at least"


def test_reinforce_by_hand():
    result, gradient = differentiate(reinforce, BY_HAND)
    assert gradient.tolist() == [-a for a in ADVANTAGES]
    assert result.per_token.tolist() == pytest.approx([-a * l for a, l in zip(ADVANTAGES, LOGPROBS, strict=True)])
    assert not result.clipped.any()


def test_sapo_by_hand():
    result, gradient = differentiate(sapo, BY_HAND)

    def gate(u, tau):
        return 4 / tau / (1 + math.exp(-tau * (u - 1)))

    expected = [gate(1, 1), gate(2, 1), gate(2, 1.05), gate(0.25, 1.05), gate(16, 1.05)]
    assert result.per_token.tolist() == pytest.approx([-g * a for g, a in zip(expected, ADVANTAGES, strict=True)])
    # the derivative of the gate in log theta: 4 sigmoid (1 - sigmoid) u
    taus = [1, 1, 1.05, 1.05, 1.05]
    for value, g, tau, u, a in zip(gradient.tolist(), expected, taus, [1, 2, 2, 0.25, 16], ADVANTAGES, strict=True):
        share = g * tau / 4
        assert value == pytest.approx(-4 * share * (1 - share) * u * a)


def test_dppo_by_hand():
    behaviour = [LN(0.5), LN(0.29), LN(0.75), LN(0.2), LN(0.05)]
    tokens = tokens_of(LOGPROBS, OLD, ADVANTAGES, behaviour=behaviour)
    result, gradient = differentiate(lambda tokens: dppo(tokens, cap=8), tokens)
    # theta - mu: 0; .21 with A > 0: out; -.25 with A < 0: out; -.1: in; .75 with A < 0: in, u = 16 is cut to 8
    assert gradient.tolist() == pytest.approx([-1, 0, 0, 0.25, 8])
    assert result.per_token.tolist() == pytest.approx([-1, 0, 0, 0.25, 8])
    assert result.clipped.tolist() == [False, True, True, False, True]


def test_dppo_lets_rare_tokens_learn_where_ppo_does_not():
    tokens = tokens_of([LN(1e-3)], [LN(1e-4)], [1.0])
    assert differentiate(ppo, tokens)[1].item() == 0
    assert differentiate(dppo, tokens)[1].item() == pytest.approx(-10)


def test_dppo_measures_the_distance_to_the_sampling_policy():
    near_old = tokens_of([LN(0.5)], [LN(0.5)], [1.0], behaviour=[LN(0.1)])
    assert differentiate(dppo, near_old)[1].item() == 0
    near_mu = tokens_of([LN(0.5)], [LN(0.1)], [1.0], behaviour=[LN(0.5)])
    assert differentiate(dppo, near_mu)[1].item() == pytest.approx(-5)


def test_the_regulariser_of_dppo_pulls_towards_the_sampling_policy():
    tokens = tokens_of([-1.0, -3.0, -900.0], [-1.0, -3.0, -900.0], [0.0, 0.0, 0.0], behaviour=[-2.0, -2.0, -2.0])
    result, gradient = differentiate(lambda tokens: dppo(tokens, regulariser=0.1), tokens)
    assert result.per_token.tolist() == pytest.approx([0.1, 0.1, 0.1 * 400])
    # 2 * .1 * log w; bounded at 20 and still pulling
    assert gradient.tolist() == pytest.approx([0.2, -0.2, -4.0])


def plain_ppo(tokens):
    u = (tokens.logprobs - tokens.old).exp()
    inner = torch.minimum(u * tokens.advantages, u.clamp(0.8, 1.28) * tokens.advantages)
    return -torch.where(tokens.advantages < 0, torch.maximum(inner, 3 * tokens.advantages), inner)


def two_sided_ppo(tokens):
    """INTELLECT-2: the cap delta on the ratio itself."""
    u = (tokens.logprobs - tokens.old).exp()
    return -torch.minimum(u.clamp(max=3) * tokens.advantages, u.clamp(0.8, 1.28) * tokens.advantages)


@pytest.mark.parametrize("plain", [plain_ppo, two_sided_ppo])
def test_dual_clip_and_two_sided_cap_are_one_formula(plain):
    tokens = random_tokens(0, 400, spread=1.0)
    result, gradient = differentiate(lambda tokens: ppo(tokens, dual_clip=3), tokens)
    torch.testing.assert_close(result.per_token, plain(tokens), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, slope(plain, tokens), rtol=1e-6, atol=1e-6)


def plain_sapo(tokens):
    u = (tokens.logprobs - tokens.old).exp()
    tau = torch.where(tokens.advantages > 0, 1.0, 1.05).double()
    return -4 / tau * torch.sigmoid(tau * (u - 1)) * tokens.advantages


def test_sapo_is_its_plain_formula_and_its_gradient_the_slope():
    tokens = random_tokens(1, spread=1.0)
    result, gradient = differentiate(sapo, tokens)
    torch.testing.assert_close(result.per_token, plain_sapo(tokens), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, slope(plain_sapo, tokens), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("loss", "cap"), [(cispo, 5), (aipo, 2)])
def test_gradient_of_a_stopped_weight_is_the_slope_with_the_weight_held(loss, cap):
    tokens = random_tokens(2, spread=1.5)
    weight = (tokens.logprobs - tokens.old).exp().clamp(max=cap)
    _, gradient = differentiate(loss, tokens)
    held = slope(lambda moved: -weight * moved.advantages * moved.logprobs, tokens)
    torch.testing.assert_close(gradient, held, rtol=1e-6, atol=1e-7)


def test_gradient_of_dppo_is_the_slope_inside_its_region_and_below_its_cap():
    tokens = random_tokens(3, spread=1.0)

    def plain(moved):
        w = (moved.logprobs - moved.old).exp().clamp(max=20)
        shift = tokens.logprobs.exp() - tokens.behaviour.exp()
        keep = torch.where(tokens.advantages > 0, shift <= 0.05, shift >= -0.05)
        return -1.0 * keep * w * moved.advantages + 1e-3 * (moved.logprobs - moved.behaviour) ** 2

    result, gradient = differentiate(lambda tokens: dppo(tokens, low=0.05, high=0.05, regulariser=1e-3), tokens)
    torch.testing.assert_close(result.per_token, plain(tokens), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, slope(plain, tokens), rtol=1e-6, atol=1e-7)
    assert 0 < result.clipped.sum() < len(gradient)


@pytest.mark.parametrize(
    ("log_u", "advantage", "moves"),
    [(1.0, 1.0, False), (1.0, -1.0, True), (-1.0, 1.0, True), (-1.0, -1.0, False), (0.0, 1.0, True), (0.0, -1.0, True)],
)
def test_the_clip_of_ppo_stops_only_what_runs_away(log_u, advantage, moves):
    result, gradient = differentiate(ppo, tokens_of([log_u - 2], [-2.0], [advantage]))
    assert (gradient.item() != 0) == moves
    assert result.clipped.item() == (not moves)


def test_an_asymmetric_clip_gives_more_room_above():
    tokens = tokens_of([LN(1.25), LN(0.75)], [0.0, 0.0], [1.0, -1.0])
    assert (differentiate(ppo, tokens)[1] != 0).tolist() == [True, False]


def test_no_gradient_flows_into_the_old_policy_or_the_sampling_one():
    for name in LOSSES.names:
        old = torch.tensor([-1.0, -2.0], requires_grad=True)
        behaviour = torch.tensor([-1.5, -2.0], requires_grad=True)
        moving = torch.tensor([-0.9, -2.1], requires_grad=True)
        tokens = tokens_of([-1.0, -2.0], [-1.0, -2.0], [1.0, -1.0], counts=[2], dtype=torch.float32)
        fields = {key: getattr(tokens, key) for key in tokens.__slots__}
        moved = type(tokens)(**(fields | {"logprobs": moving, "old": old, "behaviour": behaviour}))
        LOSSES.resolve(name, {})(moved).per_token.sum().backward()
        assert moving.grad is not None, name
        assert old.grad is None, name
        assert behaviour.grad is None, name


def test_which_losses_weigh_by_the_ratio():
    without = {name for name in LOSSES.names if not uses_ratio(LOSSES.resolve(name, {}))}
    assert without == {"reinforce", "kimi"}
    assert uses_ratio(lambda tokens: None)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("ppo", {"clip_low": 1.5}),
        ("ppo", {"clip_low": float("nan")}),
        ("ppo", {"clip_high": -0.1}),
        ("ppo", {"dual_clip": 1.1}),
        ("ppo", {"clip_low": "0.2"}),
        ("cispo", {"cap": 0.5}),
        ("cispo", {"low": 2}),
        ("aipo", {"cap": True}),
        ("sapo", {"temperature_neg": 0}),
        ("dppo", {"high": 2}),
        ("dppo", {"regulariser": -1}),
        ("gspo", {"clip_low": -1}),
        ("gmpo", {"clip_high": -1}),
        ("topr", {"level": "word"}),
        ("topr", {"cap": 0}),
        ("vespo", {"lambda_pos": 0}),
        ("kimi", {"tau": -0.1}),
        ("kl_cov", {"share": 1.1}),
        ("kl_cov", {"coefficient": -1}),
        ("kimi", {"level": "geometric"}),
    ],
)
def test_options_out_of_range_are_refused(name, args):
    tokens = tokens_of([-1.0], [-1.0], [1.0])
    with pytest.raises(ConfigError, match=rf"learner\.loss\.args {next(iter(args))} is"):
        LOSSES.resolve(name, args)(tokens)


def test_a_lower_clip_of_one_leaves_the_ratio_free():
    result = ppo(with_logprobs(BY_HAND, BY_HAND.logprobs - 900), clip_low=1.0)
    assert result.per_token[3].item() == 0
    assert not result.clipped[3]
