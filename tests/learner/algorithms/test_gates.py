"""Each gate by hand numbers that tell a ratio from its inverse, at each level, for each age."""

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from loss_kit import make_tokens
from torch.distributions import Bernoulli, kl_divergence

from streamrl.config.learner import GateConfig
from streamrl.errors import ConfigError
from streamrl.learner.algorithms.corrections import Gate, GateResult, traits
from streamrl.learner.algorithms.tokens import LOG_RATIO_BOUND


def tokens_at(ratios, *, counts=None, advantages=None, ages=None):
    """Tokens whose old policy gives them `ratio` times the probability they were sampled with."""
    behaviour = torch.full((len(ratios),), -5.0, dtype=torch.float64)
    old = behaviour + torch.tensor(ratios, dtype=torch.float64).log()
    counts = [1] * len(ratios) if counts is None else counts
    return make_tokens(old, old, behaviour, advantages, counts=counts, ages=ages)


def run(tokens, **config):
    gate = Gate.of(GateConfig(**config))
    weight, keep, cut = gate(tokens.old - tokens.behaviour, tokens)
    return weight.tolist(), keep.tolist(), cut.tolist()


def test_tis_cuts_large_ratios_of_old_to_behaviour_and_leaves_small_ones():
    weight, keep, cut = run(tokens_at([4.0, 0.25, 1.0, 1.9]), use="tis")
    assert weight == pytest.approx([2.0, 0.25, 1.0, 1.9])
    assert keep == [True] * 4
    assert cut == [True, False, False, False]
    weight, _, cut = run(tokens_at([4.0, 0.25]), use="tis", low=0.5, high=3.0)
    assert weight == pytest.approx([3.0, 0.5])
    assert cut == [True, True]


def test_icepop_weighs_inside_of_an_asymmetric_band_and_drops_outside():
    weight, keep, _ = run(tokens_at([4.0, 0.25, 0.6, 5.5]), use="icepop")
    assert keep == [True, False, True, False]
    assert [weight[0], weight[2]] == pytest.approx([4.0, 0.6])


def test_mask_drops_outside_of_an_asymmetric_band_and_never_weighs():
    weight, keep, _ = run(tokens_at([4.0, 0.25, 1.3, 0.7]), use="mask", low=0.2, high=1.4)
    assert keep == [False, True, True, True]
    assert weight == [1.0] * 4


def test_levels_take_the_product_and_the_geometric_mean_of_the_response():
    tokens = tokens_at([2.0, 3.0, 0.5], counts=[2, 1])
    assert run(tokens, use="tis", high=100.0)[0] == pytest.approx([2, 3, 0.5])
    assert run(tokens, use="tis", level="sequence", high=100.0)[0] == pytest.approx([6, 6, 0.5])
    assert run(tokens, use="tis", level="geometric", high=100.0)[0] == pytest.approx([6**0.5, 6**0.5, 0.5])
    assert run(tokens, use="tis", level="sequence", high=5.0)[0] == pytest.approx([5, 5, 0.5])
    assert run(tokens, use="mask", level="sequence", low=0.4, high=5.9)[1] == [False, False, True]
    assert run(tokens, use="mask", level="geometric", low=0.4, high=2.5)[1] == [True, True, True]


def test_a_geometric_band_does_not_depend_on_the_length():
    tokens = tokens_at([1.005] * 400 + [1.02], counts=[400, 1])
    assert run(tokens, use="mask", level="geometric")[1] == [True] * 400 + [False]
    assert run(tokens, use="mask", level="sequence")[1] == [False] * 400 + [True]


def test_veto_drops_the_whole_response_of_one_token_the_policy_would_never_say():
    tokens = tokens_at([1.0, 5e-5, 1.0, 2e-4, 3e4], counts=[3, 1, 1])
    assert run(tokens, use="veto")[1] == [False, False, False, True, True]
    assert run(tokens, use="veto", high=100.0)[1] == [False, False, False, True, False]
    assert run(tokens, use="veto", low=1e-3)[1] == [False, False, False, False, True]


def test_opsm_drops_only_bad_responses_the_policy_has_left():
    # log(behaviour / old) is 0.6 on average in the first two responses, -0.6 in the last.
    left, near = math.exp(-0.2), math.exp(-1.0)
    tokens = tokens_at([left, near] * 2 + [1 / left, 1 / near], counts=[2, 2, 2], advantages=[-1, -1, 1, 1, -1, -1])
    assert run(tokens, use="opsm")[1] == [False, False, True, True, True, True]
    assert run(tokens, use="opsm", low=math.exp(-0.61))[1] == [True] * 6
    assert run(tokens, use="opsm", level="token")[1] == [True, False, True, True, True, True]


def test_m2po_drops_the_furthest_outward_tokens_until_the_mean_square_fits():
    logs = [0.1, 0.3, -0.2, -0.9, 0.5]
    tokens = tokens_at([math.exp(log) for log in logs], advantages=[1, 1, -1, 1, 1])
    # Outward: all but the fourth. Squares .01 .09 .04 .25: mean .0975; without .25: .0467; without .09: .025.
    assert run(tokens, use="m2po")[1] == [True, False, True, True, False]
    assert run(tokens, use="m2po", args={"tau": 0.05})[1] == [True, True, True, True, False]
    assert run(tokens, use="m2po", args={"tau": 0.1})[1] == [True] * 5
    # All: squares .01 .09 .04 .81 .25.
    assert run(tokens, use="m2po", args={"only": "all", "tau": 0.1})[1] == [True, True, True, False, True]


def test_m2po_looks_outward_only():
    away, back = math.exp(1.0), math.exp(-1.0)
    tokens = tokens_at([away, back, away, back], advantages=[1, 1, -1, -1])
    assert run(tokens, use="m2po")[1] == [False, True, True, False]


def moved(mu, old, **more):
    """Tokens that were sampled with probabilities `mu` and have `old` now."""
    old, mu = (torch.tensor(column, dtype=torch.float64).log() for column in (old, mu))
    return make_tokens(old, old, mu, **{"counts": [1] * len(mu)} | more)


def test_binary_kl_of_a_token_is_bounded_both_ways():
    # D(.5, .25) = .5 ln 2 + .5 ln(2 / 3) = .1438, D(.25, .5) = .25 ln(1 / 2) + .75 ln(3 / 2) = .1308
    tokens = moved([0.5, 0.25], [0.25, 0.5])
    assert run(tokens, use="binary_kl", high=0.1439)[1] == [True, True]
    assert run(tokens, use="binary_kl", high=0.1437)[1] == [False, False]
    assert run(tokens, use="binary_kl")[1] == [False, False]
    # A hundred times as likely, and still a rare token: .01 ln 100 + .99 ln(.99 / .9999) = .036.
    assert run(moved([1e-4, 0.3], [1e-2, 0.999]), use="binary_kl")[1] == [True, False]


def test_binary_kl_of_a_response_is_the_mean_of_that_from_mu():
    tokens = moved([0.5, 0.5, 0.25, 0.25], [0.25, 0.5, 0.5, 0.25], counts=[2, 2])
    assert run(tokens, use="binary_kl", level="sequence", high=0.0720)[1] == [True] * 4
    assert run(tokens, use="binary_kl", level="sequence", high=0.0718)[1] == [False, False, True, True]
    assert run(tokens, use="binary_kl", level="sequence", high=0.0653)[1] == [False] * 4
    assert run(tokens, use="binary_kl", level="sequence")[1] == [False] * 4


@given(st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0)), min_size=1, max_size=8), st.floats(1e-3, 5))
def test_binary_kl_is_that_of_two_coins(rows, high):
    mu, old = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    coins = [Bernoulli(probs=logs.exp().clamp(1e-6, 1 - 1e-6)) for logs in (mu, old)]
    there, back = kl_divergence(*coins), kl_divergence(*reversed(coins))
    assume(not torch.isclose(torch.cat([there, back, there.mean()[None]]), torch.tensor(high).double()).any())
    tokens = make_tokens(old, old, mu, counts=[len(mu)])
    both = run(tokens, use="binary_kl", high=high)[1]
    assert both == (torch.maximum(there, back) <= high).tolist()
    assert run(tokens, use="binary_kl", level="sequence", high=high)[1] == [bool(there.mean() <= high)] * len(mu)


def test_tv_looks_at_the_probability_and_not_at_the_sign():
    tokens = moved([0.5, 0.5, 0.5, 1e-6], [0.79, 0.81, 0.19, 0.25], advantages=[-1, -1, 1, 1])
    assert run(tokens, use="tv")[1] == [True, False, False, True]
    assert run(tokens, use="tv", high=0.2)[1] == [False, False, False, False]


def test_clip_cov_drops_a_few_of_the_tokens_that_would_take_the_entropy():
    # Means -3 and 0, so the covariances are 2 x 2, -2 x -2, 0 and 0; the last token has no advantage and no say.
    logprobs, advantages = [-1.0, -5.0, -3.0, -3.0, -90.0], [2.0, -2.0, 2.0, -2.0, 0.0]
    tokens = make_tokens(logprobs, logprobs, logprobs, advantages, counts=[1] * 5)
    assert run(tokens, use="clip_cov")[1] == [True, False, True, True, True], "one at least"
    assert run(tokens, use="clip_cov", args={"share": 0.5})[1] == [False, False, True, True, True]
    assert run(tokens, use="clip_cov", high=3.9)[1] == [True] * 5
    assert run(tokens, use="clip_cov", low=4.1)[1] == [True] * 5


def test_clip_cov_draws_evenly():
    logprobs, advantages = [-1.0, -5.0] * 500, [2.0, -2.0] * 500
    tokens = make_tokens(logprobs, logprobs, logprobs, advantages, counts=[1000])
    dropped = [place for place, kept in enumerate(run(tokens, use="clip_cov", args={"share": 0.004})[1]) if not kept]
    assert dropped == [249, 499, 749, 999]


def test_top_entropy_keeps_the_tokens_where_a_response_forks():
    tokens = make_tokens([-1.0] * 5, [-1.0] * 5, [-1.0] * 5, counts=[3, 2], entropy=[0.1, 0.9, 0.5, 0.7, 0.3])
    assert run(tokens, use="top_entropy", args={"share": 0.4})[1] == [False, True, False, True, False]
    assert run(tokens, use="top_entropy")[1] == [False, True, False, False, False]
    assert run(tokens, use="top_entropy", args={"share": 1})[1] == [True] * 5


def test_tighten_narrows_log_bounds_by_age():
    tokens = tokens_at([3.0, 3.0, 3.0], ages=[0, 1, 3])
    weight, _, cut = run(tokens, use="tis", high=4.0, tighten=1.0)
    assert weight == pytest.approx([3.0, 2.0, 2**0.5])
    assert cut == [False, True, True]
    tokens = tokens_at([0.3, 0.3, 0.6], ages=[0, 1, 1])
    assert run(tokens, use="mask", low=0.25, high=4.0, tighten=1.0)[1] == [True, False, True]


def test_the_oldest_token_gives_the_age_of_its_response():
    tokens = tokens_at([1.5, 1.0, 1.5], counts=[2, 1], ages=[0, 1, 0])
    assert run(tokens, use="tis", level="sequence", high=2.0, tighten=1.0)[0] == pytest.approx([2**0.5, 2**0.5, 1.5])


def test_m2po_counts_an_old_token_as_further_away():
    tokens = tokens_at([math.exp(0.19)] * 2, ages=[0, 1])
    assert run(tokens, use="m2po")[1] == [True, True]
    assert run(tokens, use="m2po", tighten=1.0)[1] == [True, False]


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("use", ["tis", "icepop", "mask", "opsm", "binary_kl", "tv"])
def test_on_policy_a_gate_does_exactly_nothing(use, level):
    tokens = tokens_at([1.0] * 5, counts=[3, 2], advantages=[1, 1, 1, -1, -1], ages=[0, 1, 2, 3, 90])
    more = {"level": level, "tighten": 0.5} if use not in {"binary_kl", "tv"} else {}
    assert run(tokens, use=use, **more) == ([1.0] * 5, [True] * 5, [False] * 5)


@pytest.mark.parametrize("use", ["tis", "icepop"])
def test_a_bound_in_the_far_distance_is_still_a_finite_weight(use):
    tokens = tokens_at([math.exp(500), math.exp(-500)])
    weight, _, _ = run(tokens, use=use, low=0.0, high=1e300)
    assert weight == pytest.approx([math.exp(LOG_RATIO_BOUND), math.exp(-500 if use == "tis" else -LOG_RATIO_BOUND)])


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"use": "tiss"}, "did you mean tis"),
        ({"use": "tis", "args": {"cap": 2}}, "takes no argument cap"),
        ({"use": "veto", "level": "sequence"}, "has no level sequence"),
        ({"use": "m2po", "level": "geometric"}, "has no level geometric"),
        ({"use": "m2po", "high": 2.0}, "has no high bound"),
        ({"use": "opsm", "high": 2.0}, "has no high bound"),
        ({"use": "mask", "low": 6.0}, "low 6 is above high 5"),
        ({"use": "tis", "high": 0.5, "tighten": 1.0}, "1 is outside"),
        ({"use": "m2po", "args": {"tau": "much"}}, "fails"),
        ({"use": "m2po", "args": {"tau": -0.1}}, "tau"),
        ({"use": "m2po", "args": {"only": "inward"}}, "inward"),
        ({"use": "binary_kl", "level": "geometric"}, "has no level geometric"),
        ({"use": "tv", "low": 0.1}, "has no low bound"),
        ({"use": "clip_cov", "tighten": 1.0}, "has no tighten"),
        ({"use": "clip_cov", "args": {"share": 2}}, "share is from 0 to 1|share: 2"),
        ({"use": "top_entropy", "args": {"share": -0.1}}, "share: -0.1"),
        ({"use": f"{__name__}:secretly_weighing"}, "without the trait"),
        ({"use": f"{__name__}:one_for_all"}, "one value per token"),
        ({"use": "no.such:gate"}, "cannot be imported"),
    ],
)
def test_what_cannot_be_meant_is_refused_at_the_start(config, words, plugin):
    with pytest.raises(ConfigError, match=words):
        Gate.of(GateConfig(**config))


def test_a_gate_of_a_user_is_called_with_its_arguments(plugin):
    tokens = tokens_at([4.0, 1.0])
    weight, keep, _ = run(tokens, use=f"{__name__}:halved", args={"share": 0.25})
    assert weight == pytest.approx([0.25, 0.25])
    assert keep == [True, True]


@pytest.fixture
def plugin(monkeypatch):
    """Make this module importable by its name, as a module of a user is."""
    import sys
    from types import ModuleType

    module = ModuleType(__name__)
    for function in (secretly_weighing, one_for_all, halved):
        setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, __name__, module)


def secretly_weighing(log_ratio, tokens, gate):
    return GateResult(weight=log_ratio.exp())


def one_for_all(log_ratio, tokens, gate):
    return GateResult(keep=torch.tensor(True))


@traits(ranges={"token": (0.0, math.inf)}, weighs=True)
def halved(log_ratio, tokens, gate, *, share=0.5):
    return GateResult(weight=torch.full_like(log_ratio, share))
