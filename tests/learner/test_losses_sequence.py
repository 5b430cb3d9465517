"""Policy losses of whole responses: numbers worked out by hand, the plain formulas in float64, numerical gradients."""

import math

import pytest
import torch
from loss_kit import differentiate, random_tokens, slope, tokens_of

from streamrl.errors import ConfigError
from streamrl.learner.algorithms.losses import gmpo, gspo, kimi, topr, vespo

LN = math.log
# Responses of two, one and two tokens; u = 2, 1/2 | 4 | 1/4, 1/4
LOGPROBS = [LN(0.4), LN(0.1), LN(0.8), LN(0.1), LN(0.2)]
OLD = [LN(0.2), LN(0.2), LN(0.2), LN(0.4), LN(0.8)]
ADVANTAGES = [1.0, 1.0, -2.0, -1.0, -1.0]
COUNTS = [2, 1, 2]
BY_HAND = tokens_of(LOGPROBS, OLD, ADVANTAGES, counts=COUNTS)


def test_gspo_by_hand():
    result, gradient = differentiate(gspo, BY_HAND)
    # s = 1, 4, 1/4: the first is on-policy as a whole, the second open to the side it may leave by, the third clipped
    assert result.per_token.tolist() == pytest.approx([-1, -1, 8, 1 - 3e-4, 1 - 3e-4])
    assert gradient.tolist() == pytest.approx([-1, -1, 8, 0, 0])
    assert result.clipped.tolist() == [False, False, False, True, True]


def test_gmpo_by_hand():
    result, gradient = differentiate(gmpo, BY_HAND)
    # log u: min(ln 2, .4) + -ln 2; ln 4; max(-ln 4, -.4) twice
    first, second, third = math.exp((0.4 - LN(2)) / 2), 4, math.exp(-0.4)
    assert result.per_token.tolist() == pytest.approx([-first, -first, 2 * second, third, third])
    assert gradient.tolist() == pytest.approx([0, -first, 2 * second, 0, 0])
    assert result.clipped.tolist() == [True, False, False, True, True]


# One response of two tokens, u = e^6 and e^2: s = e^4 = 54.6, far above the bound; the same with A > 0
FAR_OFF = tokens_of([-1.0, -1.0] * 2, [-7.0, -3.0] * 2, [-2.0, -2.0, 3.0, 3.0], counts=[2, 2])


def test_gspo_has_a_bound_where_the_clip_has_none():
    result, gradient = differentiate(gspo, FAR_OFF)
    assert result.per_token.tolist() == pytest.approx([20, 20, -3 * (1 + 4e-4), -3 * (1 + 4e-4)])
    assert gradient.tolist() == [0, 0, 0, 0]
    assert result.clipped.all()
    result, gradient = differentiate(lambda tokens: gspo(tokens, dual_clip=None), FAR_OFF)
    assert gradient.tolist() == pytest.approx([2 * math.exp(4), 2 * math.exp(4), 0, 0])
    _, gradient = differentiate(lambda tokens: gspo(tokens, dual_clip=60), FAR_OFF)
    assert gradient.tolist() == pytest.approx([2 * math.exp(4), 2 * math.exp(4), 0, 0])


def test_gmpo_has_a_bound_where_the_clip_has_none():
    result, gradient = differentiate(gmpo, FAR_OFF)
    # A > 0: both tokens are clipped to e^.4
    assert result.per_token.tolist() == pytest.approx([20, 20, -3 * math.exp(0.4), -3 * math.exp(0.4)])
    assert gradient.tolist() == [0, 0, 0, 0]
    assert result.clipped.all()
    _, gradient = differentiate(lambda tokens: gmpo(tokens, dual_clip=None), FAR_OFF)
    assert gradient.tolist() == pytest.approx([2 * math.exp(4), 2 * math.exp(4), 0, 0])


@pytest.mark.parametrize("loss", [gspo, gmpo])
def test_a_bound_below_the_clip_is_refused(loss):
    with pytest.raises(ConfigError, match="dual_clip"):
        differentiate(lambda tokens: loss(tokens, dual_clip=1.0), BY_HAND)


def test_topr_by_hand():
    result, gradient = differentiate(topr, BY_HAND)
    # A > 0: 1; A < 0: min(4, 1), and 1/16 for the whole response
    weight = [1, 1, 1, 1 / 16, 1 / 16]
    assert gradient.tolist() == pytest.approx([-w * a for w, a in zip(weight, ADVANTAGES, strict=True)])
    assert result.clipped.tolist() == [False, False, True, False, False]
    _, gradient = differentiate(lambda tokens: topr(tokens, level="token", positive=0.5, negative=2), BY_HAND)
    assert gradient.tolist() == pytest.approx([-0.5, -0.5, 4, 0.5, 0.5])


def test_vespo_by_hand():
    result, gradient = differentiate(vespo, BY_HAND)
    # U = 1, 4, 1/16; A > 0: U^2 e^(3 (1 - U)); A < 0: U^3 e^(2 (1 - U))
    phi = [1, 1, 64 * math.exp(-6), 16**-3 * math.exp(15 / 8), 16**-3 * math.exp(15 / 8)]
    expected = [-p * a for p, a in zip(phi, ADVANTAGES, strict=True)]
    assert gradient.tolist() == pytest.approx(expected)
    assert result.per_token.tolist() == pytest.approx([g * l for g, l in zip(expected, LOGPROBS, strict=True)])


def test_kimi_by_hand():
    result, gradient = differentiate(kimi, BY_HAND)
    # log U = 0, ln 4, -2 ln 4; the square is shared by the tokens of its response
    pull = [0, 0, LN(4), -2 * LN(4), -2 * LN(4)]
    assert gradient.tolist() == pytest.approx([-a + 0.1 * p for a, p in zip(ADVANTAGES, pull, strict=True)])
    expected = [
        -a * l + 0.05 * p**2 / n for a, l, p, n in zip(ADVANTAGES, LOGPROBS, pull, [2, 2, 1, 2, 2], strict=True)
    ]
    assert result.per_token.tolist() == pytest.approx(expected)
    _, gradient = differentiate(lambda tokens: kimi(tokens, level="token"), BY_HAND)
    assert gradient.tolist() == pytest.approx(
        [-1 + 0.1 * LN(2), -1 - 0.1 * LN(2), 2 + 0.1 * LN(4)] + [1 - 0.1 * LN(4)] * 2
    )


def responses(tokens, values):
    return tokens.spread(tokens.mean_per_response(values))


def plain_gspo(tokens):
    s = responses(tokens, tokens.logprobs - tokens.old).exp()
    return -torch.minimum(s * tokens.advantages, s.clamp(0.9, 1.1) * tokens.advantages)


def plain_gmpo(tokens):
    sign = tokens.advantages.sign()
    log_u = tokens.logprobs - tokens.old
    inner = sign * torch.minimum(sign * log_u, sign * log_u.clamp(-0.4, 0.4))
    return -responses(tokens, inner).exp() * tokens.advantages


def plain_kimi(tokens):
    log_u = responses(tokens, tokens.logprobs - tokens.old) * tokens.spread(tokens.counts)
    return -tokens.advantages * tokens.logprobs + 0.05 * log_u**2 / tokens.spread(tokens.counts)


@pytest.mark.parametrize(
    ("loss", "plain"),
    [(lambda t: gspo(t, clip_low=0.1, clip_high=0.1), plain_gspo), (gmpo, plain_gmpo), (kimi, plain_kimi)],
    ids=["gspo", "gmpo", "kimi"],
)
def test_value_and_gradient_are_those_of_the_plain_formula(loss, plain):
    tokens = random_tokens(0)
    result, gradient = differentiate(loss, tokens)
    torch.testing.assert_close(result.per_token, plain(tokens), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, slope(plain, tokens), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("loss", [topr, vespo])
def test_gradient_of_a_stopped_weight_is_the_slope_with_the_weight_held(loss):
    tokens = random_tokens(1, spread=0.5)
    U = tokens.spread(tokens.sum_per_response(tokens.logprobs - tokens.old)).exp()
    good = tokens.advantages >= 0
    if loss is topr:
        weight = torch.where(good, 1.0, U.clamp(max=1))
    else:
        weight = torch.where(good, U**2 * (3 * (1 - U)).exp(), U**3 * (2 * (1 - U)).exp())
    result, gradient = differentiate(loss, tokens)
    torch.testing.assert_close(result.per_token, -weight * tokens.advantages * tokens.logprobs)
    held = slope(lambda moved: -weight * moved.advantages * moved.logprobs, tokens)
    torch.testing.assert_close(gradient, held, rtol=1e-6, atol=1e-7)


def test_tokens_of_a_response_keep_their_own_advantages():
    """GSPO-token: s of the response, A of the token, also in the choice of the side that is clipped."""
    tokens = tokens_of([LN(0.4), LN(0.4)], [LN(0.2), LN(0.2)], [1.0, -3.0], counts=[2])
    _, gradient = differentiate(gspo, tokens)
    assert gradient.tolist() == pytest.approx([0, 6])
    _, gradient = differentiate(gmpo, tokens)
    assert gradient.tolist() == pytest.approx([0, 3 * math.exp((0.4 + LN(2)) / 2)])


def test_a_response_has_one_ratio_whatever_its_length():
    """The geometric mean does not grow with the length; the product does."""
    short, long = (tokens_of([-1.0] * n, [-1.2] * n, [-1.0] * n, counts=[n]) for n in (2, 50))
    for loss in (gspo, gmpo):
        assert differentiate(loss, short)[1][0].item() == pytest.approx(differentiate(loss, long)[1][0].item())
    assert differentiate(vespo, long)[1][0] < differentiate(vespo, short)[1][0] / 100


@pytest.mark.parametrize(("log_u", "advantage", "grows"), [(1.0, 1.0, False), (-1.0, -1.0, False), (1.0, -1.0, True)])
def test_direction_of_the_ratio_of_a_response(log_u, advantage, grows):
    tokens = tokens_of([log_u - 2] * 3, [-2.0] * 3, [advantage] * 3, counts=[3])
    _, gradient = differentiate(gspo, tokens)
    assert (gradient.abs() > 1).all() == grows
    _, gradient = differentiate(kimi, tokens)
    pull = gradient + torch.tensor([advantage] * 3)
    assert (pull.sign() == math.copysign(1, log_u)).all()  # always back to the old policy


def test_a_response_that_has_become_unlikely_fades():
    """A < 0: the less likely it is by now, the less it is pushed down."""
    far, near = (tokens_of([log_u - 2] * 2, [-2.0] * 2, [-1.0] * 2, counts=[2]) for log_u in (-2.0, -0.5))
    for loss in (topr, vespo):
        assert 0 < differentiate(loss, far)[1][0] < differentiate(loss, near)[1][0] < 1
