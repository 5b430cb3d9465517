"""The objective whole: exactly PPO on-policy, by hand off-policy, additive, finite, and what its sums say."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_kit import make_tokens as tokens_of
from loss_kit import with_logprobs

from streamrl.config.learner import CorrectionConfig, KlConfig
from streamrl.learner.algorithms.corrections import Corrections
from streamrl.learner.algorithms.losses import LOSSES
from streamrl.learner.algorithms.recipe import lr_factor, objective, reaches_zero_advantage, token_weights
from streamrl.learner.algorithms.tokens import TOKEN_SUMS, Tokens, TokenSums

BASES = ("decoupled", "prox_approx", "bypass", "uncorrected")
MASKS = [{"use": "mask"}, {"use": "veto"}, {"use": "opsm"}, {"use": "m2po", "tighten": 0.5}]
EVERYTHING = {
    "decoupled": [{"use": "tis", "tighten": 1.0}, *MASKS],
    "prox_approx": [{"use": "icepop", "level": "geometric"}, *MASKS],
    "bypass": MASKS,
    "uncorrected": [],
}


def terms(base="decoupled", gates=None, *, loss="ppo", kl=None, entropy=0.0, **args):
    config = CorrectionConfig.model_validate({"base": base} | ({} if gates is None else {"gates": gates}))
    return SimpleNamespace(
        loss=LOSSES.resolve(loss, args), corrections=Corrections.of(config), kl=kl or KlConfig(), entropy=entropy
    )


def random_tokens(seed, base, spread=0.5, **more):
    generator = torch.Generator().manual_seed(seed)
    counts = [3, 1, 5, 4, 2]
    total = sum(counts)
    behaviour, old, new, advantages = torch.randn(4, total, generator=generator, dtype=torch.float64)
    behaviour = behaviour - 4
    proximal = behaviour + spread * old
    ages = torch.randint(0, 30, (total,), generator=generator)
    return tokens_of(
        proximal + spread * new, proximal, behaviour, advantages, base=base, counts=counts, ages=ages, **more
    )


def differentiate(tokens, recipe, coefficient=0.0, **more):
    logprobs = tokens.logprobs.detach().clone().requires_grad_()
    found = objective(with_logprobs(tokens, logprobs), recipe, coefficient, **more)
    (gradient,) = torch.autograd.grad(found.per_token.sum(), logprobs)
    return found.per_token.detach(), gradient, TokenSums.from_tensor(found.sums)


def test_by_hand():
    ln = math.log
    theta = [ln(0.5), ln(0.5), ln(0.5), ln(0.1)]
    proximal = [ln(0.5), ln(0.25), ln(0.25), ln(0.4)]
    behaviour = [ln(0.4), ln(0.25), ln(0.05), ln(0.8)]
    tokens = tokens_of(theta, proximal, behaviour, [1.0, 2.0, -3.0, -1.0], counts=[1, 1, 1, 1])
    loss, gradient, sums = differentiate(tokens, terms(gates=[{"use": "tis"}]))
    #       rho              u     min(u A, clip(u) A)
    # 0     .5/.4 = 1.25     1     1                -> -1.25, gradient -1.25
    # 1     1                2     1.28 * 2 clipped -> -2.56, none
    # 2     5 -> capped at 2 2     2 * -3           -> 12,    gradient 12
    # 3     .5               .25   .8 * -1 clipped  -> .4,    none
    assert loss.tolist() == pytest.approx([-1.25, -2.56, 12.0, 0.4])
    assert gradient.tolist() == pytest.approx([-1.25, 0, 12, 0])
    w = [1.25, 1.0, 5.0, 0.5]
    assert (sums.tokens, sums.responses, sums.clipped, sums.capped, sums.masked) == (4, 4, 2, 1, 0)
    assert sums.loss == pytest.approx(8.59)
    assert sums.weight == sums.response_weight == pytest.approx(sum(w))
    assert sums.ess == sums.response_ess == pytest.approx(sum(w) ** 2 / (4 * sum(x * x for x in w)))
    assert sums.mean("squared_log_ratio") == pytest.approx(sum(ln(x) ** 2 for x in w) / 4)
    assert sums.mean("engine_gap") == pytest.approx(sum(abs(ln(x)) for x in w) / 4)
    assert sums.mean("kl_k1") == pytest.approx(-sum(ln(x) for x in w) / 4)
    assert sums.mean("kl_k3") == pytest.approx(sum(x - 1 - ln(x) for x in w) / 4)


@pytest.mark.parametrize("base", BASES)
def test_on_policy_everything_is_exactly_ppo(base):
    """Whatever base, gates, ages and tightening: bit for bit the loss and gradient of PPO alone."""
    recipe = terms(base, EVERYTHING[base])
    tokens = random_tokens(0, base, spread=0.0)
    loss, gradient, sums = differentiate(tokens, recipe)
    assert loss.tolist() == (-tokens.advantages).tolist()
    assert gradient.tolist() == (-tokens.advantages).tolist()
    assert (sums.masked, sums.capped, sums.clipped) == (0, 0, 0)
    assert (sums.ess, sums.response_ess, sums.kl_k1, sums.kl_k3) == (1, 1, 0, 0)


@pytest.mark.parametrize("base", ["decoupled", "prox_approx"])
def test_where_behaviour_is_the_old_policy_everything_is_exactly_ppo(base):
    """Several updates on fresh tokens: the trust region acts, the correction does not."""
    generator = torch.Generator().manual_seed(3)
    proximal, moved, advantages = torch.randn(3, 40, generator=generator, dtype=torch.float64)
    tokens = tokens_of(proximal + moved, proximal, proximal, advantages, base=base)
    loss, gradient, sums = differentiate(tokens, terms(base, EVERYTHING[base]))
    leaf = tokens.logprobs.clone().requires_grad_()
    u = (leaf - proximal).exp()
    ppo = -torch.minimum(u * advantages, u.clamp(0.8, 1.28) * advantages)
    ppo = torch.where(advantages < 0, torch.minimum(ppo, -10 * advantages), ppo)
    torch.testing.assert_close(loss, ppo.detach(), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(gradient, torch.autograd.grad(ppo.sum(), leaf)[0], rtol=1e-14, atol=1e-14)
    assert sums.clipped > 0
    assert sums.masked == 0


def test_the_three_policies_of_decoupled_ppo_each_stand_in_their_place():
    # behaviour .2, proximal .3, policy .33: rho 1.5, u 1.1
    tokens = tokens_of([math.log(0.33)], [math.log(0.3)], [math.log(0.2)], [1.0])
    loss, gradient, _ = differentiate(tokens, terms())
    assert loss.tolist() == pytest.approx([-1.5 * 1.1])
    assert gradient.tolist() == pytest.approx([-1.5 * 1.1])
    # With bypass the trust region is around behaviour: 1.65 is outside, and clipped.
    tokens = tokens_of([math.log(0.33)], [math.log(0.3)], [math.log(0.2)], [1.0], base="bypass")
    loss, gradient, sums = differentiate(tokens, terms("bypass"))
    assert loss.tolist() == pytest.approx([-1.28])
    assert (gradient.tolist(), sums.clipped) == ([0.0], 1)


def test_correction_weights_carry_no_gradient():
    # With bypass and reinforce the weight is theta / behaviour; the gradient is -w A, not of w log theta.
    tokens = tokens_of([math.log(0.3)], [math.log(0.3)], [math.log(0.2)], [2.0], base="bypass")
    _, gradient, _ = differentiate(tokens, terms("bypass", [{"use": "tis", "high": 10.0}], loss="reinforce"))
    assert gradient.tolist() == pytest.approx([-1.5 * 2.0])


def test_kl_and_entropy_go_on_where_a_gate_drops_the_token():
    entropy = torch.tensor([1.0, 2.0], dtype=torch.float64)
    tokens = tokens_of([-1.0, -1.0], [-1.0, -1.0], [-1.0, 15.0], [1.0, 1.0], reference=[-1.5, -1.5], entropy=entropy)
    recipe = terms(
        gates=[{"use": "tis"}, {"use": "mask", "low": 1e-3}], kl=KlConfig(where="loss", estimator="k1"), entropy=0.1
    )
    loss, _, sums = differentiate(tokens, recipe, coefficient=0.2)
    assert loss.tolist() == pytest.approx([-1 + 0.2 * 0.5 - 0.1, 0.2 * 0.5 - 0.2])
    assert (sums.masked, sums.kl_reference, sums.entropy) == (1, pytest.approx(1.0), 3.0)


def test_a_reference_is_measured_also_where_its_kl_is_in_the_reward():
    tokens = tokens_of([-1.0], [-1.0], [-1.0], [1.0], reference=[-1.5])
    loss, _, sums = differentiate(tokens, terms(kl=KlConfig(where="reward", estimator="k1")), coefficient=9.0)
    assert loss.tolist() == [-1.0]
    assert sums.kl_reference == pytest.approx(0.5)


TEACHER = KlConfig(where="advantage", estimator="k1")
TIS = [{"use": "tis"}]


def test_a_teacher_by_hand():
    ln = math.log
    theta, behaviour, teacher = [0.3, 0.2, 0.5], [0.2, 0.2, 0.1], [0.6, 0.05, 1.0]
    columns = [[ln(p) for p in column] for column in (theta, theta, behaviour)]
    reference = [ln(p) for p in teacher]
    tokens = tokens_of(*columns, [0.0, 0.0, 1.0], base="bypass", reference=reference)
    _, gradient, sums = differentiate(tokens, terms("bypass", TIS, loss="reinforce", kl=TEACHER), coefficient=0.5)
    #    w = theta / behaviour    A + 0.5 log(teacher / theta)
    # 0  1.5                      0.5 log 2
    # 1  1                        0.5 log 1/4
    # 2  5 -> capped at 2         1 + 0.5 log 2
    assert gradient.tolist() == pytest.approx([-1.5 * 0.5 * ln(2), 0.5 * ln(4), -2 * (1 + 0.5 * ln(2))])
    assert sums.kl_reference == pytest.approx(-ln(2) + ln(4) - ln(2)), "the KL, without its coefficient"
    assert (sums.kl_tokens, sums.measured, sums.capped) == (3, 3, 1)


@pytest.mark.parametrize("sampling", [[0.5, 0.3, 0.2], [0.4, 0.4, 0.2]], ids=["on-policy", "off-policy"])
@pytest.mark.parametrize(("loss", "gates"), [("reinforce", TIS), ("cispo", [])])
def test_what_a_teacher_gives_is_in_expectation_the_gradient_of_the_kl(loss, gates, sampling):
    policy, teacher = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6]], dtype=torch.float64)
    logits = policy.log().requires_grad_()
    logprobs = torch.log_softmax(logits, dim=0)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - teacher.log())).sum(), logits, retain_graph=True)
    behaviour = torch.tensor(sampling, dtype=torch.float64).log()
    recipe = terms("bypass", gates, loss=loss, kl=TEACHER)
    tokens = tokens_of(logprobs.detach(), behaviour, behaviour, [0.0] * 3, base="bypass", reference=teacher.log())
    per_token = objective(with_logprobs(tokens, logprobs), recipe, 1.0).per_token
    (found,) = torch.autograd.grad((behaviour.exp() * per_token).sum(), logits)
    torch.testing.assert_close(found, exact)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(*[st.floats(-1000, 0, width=32)] * 3), min_size=1, max_size=8))
def test_what_a_teacher_gives_is_finite(rows):
    theta, behaviour, reference = zip(*rows, strict=True)
    tokens = tokens_of(theta, theta, behaviour, [0.0] * len(rows), base="bypass", reference=reference)
    loss, gradient, sums = differentiate(tokens, terms("bypass", TIS, loss="reinforce", kl=TEACHER), coefficient=1.0)
    assert torch.isfinite(loss).all()
    assert (gradient.abs() <= 2 * 20 * (1 + 1e-9)).all(), "the cap of tis times the bound of the difference"
    assert all(math.isfinite(getattr(sums, name)) for name in TOKEN_SUMS)


def full_recipe(base):
    return terms(base, EVERYTHING[base], kl=KlConfig(where="loss", estimator="k3", unbiased=True), entropy=0.01)


@pytest.mark.parametrize("base", BASES)
def test_the_gradient_is_the_slope(base):
    noise = torch.randn(15, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    tokens = random_tokens(7, base, spread=0.1, reference=noise - 4, entropy=noise.abs())
    recipe = full_recipe(base)
    if base == "bypass":  # its gates look at the present policy: where one acts there is no slope
        recipe = terms(base, [], kl=recipe.kl, entropy=0.01)

    def value(logprobs):
        return objective(with_logprobs(tokens, logprobs), recipe, 0.3).per_token

    assert torch.autograd.gradcheck(value, tokens.logprobs.clone().requires_grad_(), atol=1e-6)


@pytest.mark.parametrize("base", BASES)
def test_micro_batches_add_up(base):
    tokens = random_tokens(9, base)
    recipe = terms(base, [gate for gate in EVERYTHING[base] if gate["use"] != "m2po"])
    weights = torch.from_numpy(token_weights(tokens.counts.numpy(), "sequence_mean", 8)).double()
    loss, gradient, whole = differentiate(tokens, recipe, weights=weights)
    losses, gradients, sums = [], [], TokenSums()
    for first, last in ((0, 2), (2, 5)):
        inside = (tokens.sequence >= first) & (tokens.sequence < last)
        fields = {
            name: getattr(tokens, name)[inside]
            for name in ("logprobs", "old", "proximal", "behaviour", "advantages", "ages")
        }
        part = Tokens(**fields, sequence=tokens.sequence[inside] - first, counts=tokens.counts[first:last])
        piece = differentiate(part, recipe, weights=weights[inside])
        losses.append(piece[0])
        gradients.append(piece[1])
        sums = sums + piece[2]
    torch.testing.assert_close(torch.cat(losses), loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat(gradients), gradient, rtol=1e-12, atol=1e-12)
    for name in TOKEN_SUMS:
        assert getattr(sums, name) == pytest.approx(getattr(whole, name)), name


@pytest.mark.parametrize("base", BASES)
@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(*[st.floats(-1000, 0, width=32)] * 4, st.floats(-5, 5, width=32)), min_size=2, max_size=8),
    st.integers(0, 1000),
)
def test_finite_log_probs_give_a_finite_objective_gradient_and_sums(base, rows, age):
    theta, proximal, behaviour, reference, advantages = zip(*rows, strict=True)
    tokens = tokens_of(
        theta, proximal, behaviour, advantages, base=base, counts=[1, len(rows) - 1], ages=[age] * len(rows),
        reference=reference, entropy=[1.0] * len(rows),
    )  # fmt: skip
    fields = {name: getattr(tokens, name) for name in Tokens.__slots__}
    narrow = {
        name: part.float() if part is not None and part.dtype == torch.float64 else part
        for name, part in fields.items()
    }
    loss, gradient, sums = differentiate(Tokens(**narrow), full_recipe(base), 0.1)
    assert torch.isfinite(loss).all()
    assert torch.isfinite(gradient).all()
    assert all(math.isfinite(getattr(sums, name)) for name in TOKEN_SUMS)
    assert 0 < lr_factor("ess", sums, "sequence") <= 1 + 1e-9
    assert 0 < lr_factor("ess", sums) <= 1 + 1e-9


def test_dropped_tokens_are_counted_by_staleness():
    ages = [0, 0, 1, 2, 3, 4, 7, 8, 15, 16, 500]
    dropped = [0, 1, 0, 1, 1, 0, 0, 0, 0, 0, 1]
    behaviour = [15.0 if drop else -1.0 for drop in dropped]
    tokens = tokens_of([-1.0] * 11, [-1.0] * 11, behaviour, [1.0] * 11, ages=ages)
    recipe = terms(gates=[{"use": "tis"}, {"use": "mask", "low": 1e-3}])
    _, _, sums = differentiate(tokens, recipe)
    assert [getattr(sums, f"tokens_{bucket}") for bucket in ("0", "1", "2_3", "4_7", "8_15", "16")] == [
        2,
        1,
        2,
        2,
        2,
        2,
    ]
    assert sums.masked_by_age == {"0": 0.5, "1": 0, "2-3": 1, "4-7": 0, "8-15": 0, "16": 0.5}
    assert sums.mean("age") == pytest.approx(sum(ages) / 11)
    assert sums.masked == 4


@pytest.mark.parametrize(
    ("loss", "kl", "entropy", "reaches"),
    [
        ("ppo", "none", 0.0, False),
        ("reinforce", "reward", 0.0, False),
        ("ppo", "loss", 0.0, True),
        ("ppo", "advantage", 0.0, True),
        ("ppo", "none", 0.01, True),
        ("kimi", "none", 0.0, True),
    ],
)
def test_what_gives_zero_advantage_tokens_a_gradient(loss, kl, entropy, reaches):
    assert reaches_zero_advantage(terms(loss=loss, kl=KlConfig(where=kl), entropy=entropy)) == reaches
    assert not reaches_zero_advantage(terms(loss="dppo"))
    assert reaches_zero_advantage(terms(loss="dppo", regulariser=1e-3))


def test_a_mean_goes_over_the_tokens_that_its_field_is_summed_over():
    fields = {"loss": 24.0, "age": 24.0, "kl_reference": 24.0, "entropy": 24.0}
    sums = TokenSums(tokens=8, measured=4, kl_tokens=6, **fields)
    assert [sums.mean(name) for name in fields] == [3, 3, 4, 6]


def test_the_learning_rate_by_hand():
    sums = TokenSums(
        tokens=8,
        measured=4,
        responses=2,
        weight=7.0,
        weight_squared=25.0,
        response_weight=4.0,
        response_weight_squared=10.0,
        age=12.0,
    )
    assert lr_factor("none", sums) == 1
    assert lr_factor("ess", sums) == lr_factor("ess", sums, "geometric") == pytest.approx(math.sqrt(49 / 100))
    assert lr_factor("ess", sums, "sequence") == pytest.approx(math.sqrt(16 / 20))
    assert lr_factor("staleness", sums) == pytest.approx(1 / math.sqrt(2.5))
    assert [lr_factor(rule, TokenSums()) for rule in ("none", "ess", "staleness")] == [1, 1, 1]


def test_the_effective_size_of_responses_sees_what_lies_beyond_the_bound_of_a_token():
    """All responses far off but alike are a good sample; one that outweighs the others is a sample of one."""
    alike = tokens_of([-1.0] * 4, [-1.0] * 4, [-60.0] * 4, [1.0] * 4, counts=[1] * 4)
    assert differentiate(alike, terms())[2].response_ess == pytest.approx(1)
    single = tokens_of([-1.0] * 4, [-1.0] * 4, [-60.0, -40.0, -40.0, -40.0], [1.0] * 4, counts=[1] * 4)
    assert differentiate(single, terms())[2].response_ess == pytest.approx(1 / 4)
