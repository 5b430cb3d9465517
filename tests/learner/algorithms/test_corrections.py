"""Bases, gates together, what is refused, and that no ratio counts twice or in the wrong direction."""

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_kit import make_tokens

from streamrl.config.learner import CorrectionConfig, GateConfig, LearnerConfig
from streamrl.config.presets import PRESETS
from streamrl.errors import ConfigError
from streamrl.learner.algorithms.corrections import (
    Corrections,
    behaviour_logprobs,
    correct,
    old_logprobs,
)
from streamrl.learner.algorithms.losses import LOSSES, LossResult
from streamrl.learner.algorithms.recipe import check_combination

LOG_RATIOS = st.floats(-1000, 1000, width=32)
GATES = [{"use": use} for use in ("tis", "icepop", "mask", "veto", "opsm", "m2po", "binary_kl", "tv", "clip_cov")]
GATES += [{"use": "binary_kl", "level": "sequence"}]
GATES += [
    {"use": use, "level": level} for use in ("tis", "icepop", "mask", "opsm") for level in ("sequence", "geometric")
]


def wide(*values):
    return torch.tensor(values, dtype=torch.float64)


def corrections(base="decoupled", *gates):
    return Corrections.of(CorrectionConfig(base=base, gates=[GateConfig(**gate) for gate in gates] if gates else None))


tokens_of = functools.partial(make_tokens, dtype=None)


def test_what_the_old_policy_is():
    proximal, behaviour, ages = wide(-1.0, -1.0, -1.0), wide(-3.0, -3.0, -3.0), torch.tensor([0, 1, 3])
    assert old_logprobs("decoupled", proximal, behaviour, ages).tolist() == [-1.0] * 3
    assert old_logprobs("uncorrected", proximal, behaviour, ages).tolist() == [-1.0] * 3
    assert old_logprobs("bypass", proximal, behaviour, ages).tolist() == [-3.0] * 3
    # Log-linear in the versions: at the age 1 half of the way from behaviour, at 3 three quarters.
    assert old_logprobs("prox_approx", proximal, behaviour, ages).tolist() == [-3.0, -2.0, -1.5]


def test_an_exact_ratio_is_that_of_fresh_tokens_alone():
    proximal, behaviour, ages = wide(-1.0, -1.0).requires_grad_(), wide(-1.1, -1.1), torch.tensor([0, 1])
    exact = behaviour_logprobs(True, proximal, behaviour, ages)
    assert exact.tolist() == [-1.0, -1.1]
    assert not exact.requires_grad
    assert behaviour_logprobs(False, proximal, behaviour, ages) is behaviour
    tokens = tokens_of(theta=proximal.detach(), proximal=proximal.detach(), behaviour=exact, ages=[0, 1], base="bypass")
    found = correct(tokens, corrections("bypass", {"use": "tis"}))
    assert found.factor.tolist() == pytest.approx([1.0, math.exp(0.1)])
    assert found.factor[0] == 1


def test_the_old_policy_has_no_gradient():
    theta = wide(-1.0).requires_grad_()
    for base in ("decoupled", "prox_approx", "bypass", "uncorrected"):
        assert not old_logprobs(base, theta, wide(-2.0), torch.tensor([1])).requires_grad


@pytest.mark.parametrize(
    ("base", "factor"),
    [
        ("decoupled", 0.4 / 0.1),  # old / behaviour = proximal / behaviour
        ("prox_approx", (0.4 / 0.1) ** 0.5),  # of age 1: half of the way
        ("bypass", 0.2 / 0.1),  # policy / behaviour
        ("uncorrected", 1.0),
    ],
)
def test_which_ratio_is_gated(base, factor):
    tokens = tokens_of(
        theta=wide(math.log(0.2)), proximal=wide(math.log(0.4)), behaviour=wide(math.log(0.1)), base=base, ages=[1]
    )
    gates = [] if base == "uncorrected" else [{"use": "tis", "high": 100.0}]
    found = correct(tokens, corrections(base, *gates))
    assert found.factor.tolist() == pytest.approx([factor])


@pytest.mark.parametrize(("base", "ratio"), [("decoupled", 4), ("prox_approx", 4), ("uncorrected", 4), ("bypass", 2)])
def test_statistics_are_about_the_policy_that_is_there(base, ratio):
    tokens = tokens_of(
        theta=wide(math.log(0.2)), proximal=wide(math.log(0.4)), behaviour=wide(math.log(0.1)), base=base, ages=[1]
    )
    assert correct(tokens, corrections(base)).log_ratio.exp().tolist() == pytest.approx([ratio])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(*[st.floats(-5, 0)] * 3, st.integers(0, 20)), min_size=1, max_size=10))
def test_weight_times_trust_ratio_is_the_whole_ratio(rows):
    """rho u = theta / behaviour with every base that weighs: nothing counts twice, nothing is lost."""
    theta, proximal, behaviour, ages = zip(*rows, strict=True)
    whole = (wide(*theta) - wide(*behaviour)).exp()
    for base in ("decoupled", "prox_approx"):
        tokens = tokens_of(
            theta=wide(*theta), proximal=wide(*proximal), behaviour=wide(*behaviour), base=base, ages=list(ages)
        )
        factor = correct(tokens, corrections(base, {"use": "tis", "high": 1e6})).factor
        torch.testing.assert_close(factor * (tokens.logprobs - tokens.old).exp(), whole)
    tokens = tokens_of(theta=wide(*theta), proximal=wide(*proximal), behaviour=wide(*behaviour), base="bypass")
    factor = correct(tokens, corrections("bypass", {"use": "veto", "low": 0.0})).factor
    torch.testing.assert_close(factor * (tokens.logprobs - tokens.old).exp(), whole)


def test_weights_multiply_and_masks_add_up():
    ratios = wide(4.0, 0.5, 1e-5, 8.0)
    tokens = tokens_of(theta=ratios.log(), proximal=ratios.log(), behaviour=wide(0, 0, 0, 0), counts=[2, 1, 1])
    found = correct(tokens, corrections("decoupled", {"use": "tis"}, {"use": "mask", "low": 0.1}, {"use": "veto"}))
    assert found.factor.tolist() == pytest.approx([2.0, 0.5, 0.0, 0.0])
    assert found.keep.tolist() == [True, True, False, False]
    assert found.cut.tolist() == [True, False, False, True]


@pytest.mark.parametrize(
    ("base", "uses"), [("decoupled", ["tis", "veto"]), ("prox_approx", ["tis", "veto"]), ("bypass", ["veto"])]
)
def test_gates_of_a_base_when_none_are_named(base, uses):
    found = corrections(base)
    assert [gate.config.use for gate in found.gates] == uses
    assert {gate.config.use: (gate.config.low, gate.config.high) for gate in found.gates}["veto"] == (1e-4, math.inf)
    assert corrections("uncorrected").gates == ()
    assert Corrections.of(CorrectionConfig(base="bypass", gates=())).gates == ()


def test_the_level_of_the_weight():
    assert corrections().level == "token"
    assert corrections("decoupled", {"use": "mask", "level": "geometric"}).level == "token"
    assert corrections("decoupled", {"use": "veto"}, {"use": "tis", "level": "sequence"}).level == "sequence"


@pytest.mark.parametrize("gate", GATES)
@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(*[LOG_RATIOS] * 3, st.floats(-5, 5, width=32)), min_size=2, max_size=9))
def test_finite_log_probs_give_finite_weights_without_a_gradient(gate, rows):
    theta, proximal, behaviour, advantages = (torch.tensor(column) for column in zip(*rows, strict=True))
    for base in ("decoupled", "prox_approx", "bypass"):
        tokens = tokens_of(
            theta=theta.requires_grad_(),
            proximal=proximal,
            behaviour=behaviour,
            base=base,
            advantages=advantages,
            counts=[len(theta) - 1, 1],
            ages=[3] * len(theta),
        )
        found = correct(tokens, corrections(base, gate))
        assert torch.isfinite(found.factor).all()
        assert torch.isfinite(found.log_ratio).all()
        assert (found.factor >= 0).all()
        assert (found.factor[~found.keep] == 0).all()
        assert not any(part.requires_grad for part in (found.factor, found.log_ratio))


@pytest.mark.parametrize("gate", [gate for gate in GATES if gate["use"] not in {"m2po", "clip_cov"}])
def test_no_response_changes_the_gates_of_another(gate):
    generator = torch.Generator().manual_seed(0)
    behaviour, shift, advantages = torch.randn(3, 7, generator=generator)
    whole = tokens_of(
        theta=behaviour, proximal=behaviour + shift, behaviour=behaviour, advantages=advantages, counts=[3, 4]
    )
    first = tokens_of(
        theta=behaviour[:3], proximal=(behaviour + shift)[:3], behaviour=behaviour[:3], advantages=advantages[:3]
    )
    gates = corrections("decoupled", gate)
    assert correct(whole, gates).factor[:3].tolist() == correct(first, gates).factor.tolist()


def check(learner, loss="ppo"):
    learner = LearnerConfig.model_validate({"loss": {"use": loss}, **learner})
    function = LOSSES.resolve(loss, {}) if loss in LOSSES.names else stranger
    check_combination(learner, Corrections.of(learner.correction), function)


def stranger(tokens):
    return LossResult(per_token=-tokens.logprobs, clipped=torch.zeros_like(tokens.logprobs, dtype=torch.bool))


def correction(base, *gates):
    return {"correction": {"base": base, "gates": list(gates)}}


TIS, MASK, VETO = {"use": "tis"}, {"use": "mask"}, {"use": "veto"}


@pytest.mark.parametrize(
    ("learner", "loss", "words"),
    [
        (correction("decoupled", TIS, {"use": "icepop"}), "ppo", "squared"),
        (correction("decoupled", TIS, {"use": "tis", "level": "sequence"}), "ppo", "squared"),
        (correction("bypass", TIS), "ppo", "count it twice"),
        (correction("bypass", TIS, VETO), "cispo", "count it twice"),
        (correction("bypass", {"use": "icepop"}), "dppo", "mask in place of icepop"),
        (correction("bypass", TIS), "my:own", "count it twice"),
        ({"correction": {"base": "bypass"}}, "reinforce", "stale tokens count as fresh"),
        (correction("bypass"), "reinforce", "stale tokens count as fresh"),
        (correction("bypass", VETO), "reinforce", "stale tokens count as fresh"),
        (correction("decoupled", VETO), "ppo", "outliers apart"),
        (correction("decoupled", {"use": "tv"}, {"use": "binary_kl"}), "ppo", "outliers apart"),
        (correction("bypass", {"use": "binary_kl"}), "reinforce", "stale tokens count as fresh"),
        (correction("prox_approx", {"use": "opsm"}, VETO), "gspo", "outliers apart"),
        ({"kl": {"where": "reward", "estimator": "k3+"}, "reference": {"kind": "frozen"}}, "ppo", "in the reward"),
        ({"kl": {"where": "reward", "unbiased": True}, "reference": {"kind": "frozen"}}, "ppo", "in the reward"),
    ],
)
def test_what_counts_a_ratio_twice_or_forgets_it_is_refused(learner, loss, words):
    with pytest.raises(ConfigError, match=words) as caught:
        check(learner, loss)
    assert caught.value.hint


@pytest.mark.parametrize("loss", LOSSES.names)
@pytest.mark.parametrize("base", ["decoupled", "prox_approx", "uncorrected"])
def test_every_loss_goes_with_the_defaults_of_its_base(base, loss):
    check({"correction": {"base": base}}, loss)


@pytest.mark.parametrize("loss", [loss for loss in LOSSES.names if loss != "reinforce"])
def test_every_loss_but_reinforce_goes_with_bypass(loss):
    check({"correction": {"base": "bypass"}}, loss)


@pytest.mark.parametrize(
    ("learner", "loss"),
    [
        (correction("bypass", TIS), "reinforce"),
        (correction("bypass", MASK), "ppo"),
        (correction("bypass", {"use": "m2po"}, VETO), "ppo"),
        (correction("bypass"), "cispo"),
        (correction("bypass", VETO), "kimi"),
        (correction("decoupled", MASK), "ppo"),
        (correction("decoupled", {"use": "m2po"}, TIS, MASK, VETO, {"use": "opsm"}), "ppo"),
        ({"kl": {"where": "loss", "estimator": "k3+", "unbiased": True}, "reference": {"kind": "frozen"}}, "ppo"),
    ],
)
def test_what_is_sound_is_let_through(learner, loss):
    check(learner, loss)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_sound(name):
    learner = LearnerConfig.model_validate(PRESETS[name]["learner"])
    check_combination(learner, Corrections.of(learner.correction), LOSSES.resolve(learner.loss.use, learner.loss.args))


def test_the_configuration_knows_that_some_gates_must_be_there():
    with pytest.raises(ValueError, match="forgets the policy"):
        LearnerConfig.model_validate(correction("decoupled"))
    with pytest.raises(ValueError, match="has no gates"):
        LearnerConfig.model_validate(correction("uncorrected", VETO))
