"""Both ways through a step on one rank: streaming and collected agree, and collected does what it says."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from step_kit import estimated, rewarded, step, weights, worker_of
from tiny_policy import count_tokens, run_config, with_advantage, without_key_biases
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from streamrl.learner.algorithms.advantages import normalise
from streamrl.learner.critic import Critic
from streamrl.learner.policy import Actor, LogProbs


@pytest.fixture
def make(one_rank, model_of):
    def actor(**learner):
        return Actor(run_config(model_of("Qwen2"), **{"lr": 1e-3, **learner}), one_rank)

    return actor


def assert_same(ours, theirs, tolerance=1e-5):
    ours, theirs = without_key_biases(ours), without_key_biases(theirs)
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=tolerance, atol=tolerance, msg=name)


def differ(ours, theirs):
    return any(not torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


@pytest.mark.parametrize(
    "learner",
    [
        {},
        {"loss": {"aggregate": "sequence_mean"}},
        {"loss": {"aggregate": "prompt_mean"}},
        {"loss": {"aggregate": "constant_length", "entropy": 0.01}},
        {"correction": {"base": "bypass"}},
        {"correction": {"base": "prox_approx", "lr_scale": "staleness"}},
        {"correction": {"lr_scale": "ess"}, "advantage": {"use": "dr_grpo"}},
    ],
    ids=str,
)
def test_a_step_that_could_stream_gives_the_same_weights_collected(make, learner):
    """In other micro-batches, too, and with groups that are not computed."""
    streaming, collected = make(**learner), make(**learner, tokens_per_microbatch=96)
    assert streaming.recipe.streams
    for seed in range(2):
        batch = estimated(rewarded(seed, near=streaming), streaming)
        batch[:4] = [with_advantage(sample, 0.0) for sample in batch[:4]]
        first = step(worker_of(streaming, collected=False), batch, cuts=[2, 3])
        second = step(worker_of(collected, collected=True), batch, cuts=[4])
        for name in ("loss", "grad_norm", "lr"):
            assert getattr(second, name) == pytest.approx(getattr(first, name), rel=1e-4)
        assert second.trained.ess == pytest.approx(first.trained.ess, rel=1e-4)
        assert second.trained.age == first.trained.age > 0
    assert_same(weights(collected), weights(streaming))


def five_groups(actor):
    """Three groups of equal rewards whose tokens are fresh, two with a contrast that are six steps old."""
    batch = rewarded(11, groups=5, near=actor)
    batch = [
        replace(
            sample,
            reward=1.0 if sample.group_id < 3 else float(place % 2),
            steps=np.full(len(sample.tokens), 10 if sample.group_id < 3 else 4),
        )
        for place, sample in enumerate(batch)
    ]
    return estimated(batch, actor)


@pytest.mark.parametrize("collected", [False, True])
@pytest.mark.parametrize("lr_scale", ["none", "staleness", "ess"])
def test_leaving_responses_without_an_advantage_out_changes_nothing(make, lr_scale, collected):
    """An entropy bonus too small to change a weight has all of them computed."""
    settings = {"correction": {"lr_scale": lr_scale, "gates": [{"use": "tis"}, {"use": "mask", "low": 0.9}]}}
    ours, whole = make(**settings), make(**settings, loss={"entropy": 1e-30})
    assert not whole.recipe.skips_zero
    batch = five_groups(ours)
    done = [step(worker_of(actor, collected=collected), batch, cuts=[1, 4]) for actor in (ours, whole)]
    ages = np.concatenate([10 - sample.steps for sample in batch])
    if lr_scale == "staleness":
        assert done[0].lr == pytest.approx(1e-3 / np.sqrt(1 + ages.mean()), rel=1e-9)
    assert done[0].lr == pytest.approx(done[1].lr, rel=1e-6)
    assert done[0].grad_norm == pytest.approx(done[1].grad_norm, rel=1e-5)
    first, second = (stats.trained for stats in done)
    assert 0 < first.masked == second.masked
    assert first.mean("age") == second.mean("age") == ages.mean()
    assert first.masked_by_age == second.masked_by_age
    for name in ("ess", "response_ess"):
        assert getattr(first, name) == pytest.approx(getattr(second, name), rel=1e-6) != 1
    for name in ("squared_log_ratio", "clipped", "capped", "masked", "kl_k1", "kl_k3"):
        assert first.mean(name) == pytest.approx(second.mean(name), rel=1e-5, abs=1e-9), name
    assert_same(weights(ours), weights(whole))


def test_a_reference_is_measured_on_the_same_responses(make):
    settings = {"reference": {"kind": "frozen"}}
    ours, whole = make(**settings), make(**settings, loss={"entropy": 1e-30})
    batch = five_groups(ours)
    far = [
        step(worker_of(actor, collected=False, reference=Other(actor, 0.5)), batch).trained.mean("kl_reference")
        for actor in (ours, whole)
    ]
    assert far[0] == pytest.approx(far[1], rel=1e-6)
    assert far[0] == pytest.approx(np.exp(-0.5) - 1 + 0.5, rel=1e-3)


def test_several_passes_keep_the_policy_of_the_start_of_the_step(make):
    """Against the same updates by hand: log-probs once, then every update around them, mini-batches by permutation."""
    settings = {"passes": 2, "mini_batches": 3, "lr": 3e-3}
    ours, plain = make(**settings), make(**settings)
    batch = estimated(rewarded(0, near=ours), ours)
    stats = step(worker_of(ours, collected=True), batch, cuts=[1, 4])
    assert (stats.updates, stats.skipped_updates, stats.skipped) == (6, 0, False)
    assert stats.trained.tokens == 2 * count_tokens(batch)
    assert stats.trained.measured == 2 * sum(len(sample.tokens) for sample in batch if sample.has_advantage)
    assert stats.trained.clipped > 0, "later updates leave the trust region somewhere"

    proximal = plain.compute_log_prob(batch).logprobs
    known = [replace(sample, proximal=logprobs) for sample, logprobs in zip(batch, proximal, strict=True)]
    for number in range(2):
        order = np.random.default_rng([plain.recipe.seed, 10, number]).permutation(np.arange(6))
        for part in np.array_split(order, 3):
            chosen = [sample for sample in known if sample.group_id in part]
            plain.accumulate(chosen, step=10)
            plain.apply_update(count_tokens(chosen))
    assert_same(weights(ours), weights(plain))


def test_the_order_in_which_groups_come_does_not_matter(make):
    settings = {"passes": 2, "mini_batches": 2, "advantage": {"use": "reinforce_plus_plus_baseline"}}
    ours, other = make(**settings), make(**settings)
    batch = estimated(rewarded(1, near=ours), ours)
    step(worker_of(ours, collected=True), batch, cuts=[2])
    shuffled = sorted(batch, key=lambda sample: -sample.group_id)
    step(worker_of(other, collected=True), shuffled, cuts=[1, 5])
    assert_same(weights(ours), weights(other))


@pytest.mark.parametrize("use", ["reinforce_plus_plus", "grpo_batch_std", "batch_mean", "gpg"])
def test_advantages_are_normalised_over_the_step(make, use):
    """Whatever the micro-batches: the same update as with advantages that were normalised before."""
    ours, plain = make(advantage={"use": use}), make(advantage={"use": use})
    assert not ours.recipe.streams
    batch = estimated(rewarded(2, near=ours), ours)
    batch[4:8] = [replace(sample, reward=1.0) for sample in batch[4:8]]
    batch = estimated(batch, ours)
    step(worker_of(ours, collected=True), batch, cuts=[1, 2])
    arrays = [sample.advantages.astype(np.float64) for sample in batch]
    done = normalise(arrays, ours.recipe.estimator.normalise, lambda values: values)
    ready = [replace(sample, advantages=array.astype(np.float32)) for sample, array in zip(batch, done, strict=True)]
    plain.update_policy(ready, step=10)
    assert_same(weights(ours), weights(plain))


@pytest.mark.parametrize("use", ["grpo", "grpo_batch_std"])
def test_a_masked_response_has_no_gradient_and_stays_in_the_baseline(make, use):
    """Also where advantages are normalised over the step; its tokens count in the mean."""
    ours, plain = make(advantage={"use": use}, loss={"truncated": "mask"}), make(advantage={"use": use})
    batch = estimated(rewarded(2, near=ours), ours)
    batch = [replace(sample, truncated=place % 4 == 1) for place, sample in enumerate(batch)]
    stats = step(worker_of(ours, collected=True), batch)
    done = normalise(
        [sample.advantages.astype(np.float64) for sample in batch], ours.recipe.estimator.normalise, lambda sums: sums
    )
    left = [
        replace(sample, advantages=(array * (not sample.truncated)).astype(np.float32))
        for sample, array in zip(batch, done, strict=True)
    ]
    assert stats.trained.tokens == plain.update_policy(left, step=10).trained.tokens == count_tokens(batch)
    assert_same(weights(ours), weights(plain))
    assert differ(weights(ours), weights(make()))


def test_an_exact_ratio_is_one_for_fresh_tokens(make):
    """As if the engine had computed them as the learner does, with one update per step and with several."""
    for settings in ({}, {"passes": 2, "correction": {"base": "bypass"}}):
        correction = {"exact_on_policy_ratio": True, **settings.get("correction", {})}
        ours, plain = make(**{**settings, "correction": correction}), make(**settings)
        batch = estimated(rewarded(4, near=ours), ours)
        known = plain.compute_log_prob(batch).logprobs
        exact = [
            replace(sample, logprobs=np.where(sample.steps == 10, logprobs, sample.logprobs))
            for sample, logprobs in zip(batch, known, strict=True)
        ]
        collected = bool(settings)
        first = step(worker_of(ours, collected=collected), batch)
        second = step(worker_of(plain, collected=collected), exact)
        assert first.trained.engine_gap == pytest.approx(second.trained.engine_gap, abs=1e-4)
        assert first.trained.tokens_0 > 0
        assert_same(weights(ours), weights(plain))


def test_the_tokens_with_the_highest_entropy_alone_are_trained(make):
    """The gate has the learner compute entropies, and no gradient flows through them."""
    ours, plain = make(correction={"gates": [{"use": "tis"}, {"use": "top_entropy"}]}), make()
    batch = estimated(rewarded(5, near=ours), ours)
    found = plain.compute_log_prob(batch, calculate_entropy=True)
    chosen = [place for place, sample in enumerate(batch) if sample.has_advantage]
    entropies = np.concatenate([found.entropy[place] for place in chosen])
    least = np.sort(entropies)[-int(np.ceil(0.2 * entropies.size))]
    stats = step(worker_of(ours, collected=False), batch)
    assert stats.trained.masked == (entropies < least).sum()
    assert stats.trained.entropy == pytest.approx(entropies.sum(), rel=1e-4)
    left = [
        replace(sample, advantages=np.where(entropy >= least, sample.advantages, 0).astype(np.float32))
        for sample, entropy in zip(batch, found.entropy, strict=True)
    ]
    plain.update_policy(left, step=10)
    assert_same(weights(ours), weights(plain))


class Other:
    """A reference policy: the actor's log-probs, moved by a constant."""

    def __init__(self, actor, distance):
        self.actor, self.distance = actor, distance

    def compute_ref_log_prob(self, batch):
        return [logprobs - np.float32(self.distance) for logprobs in self.actor.compute_log_prob(batch).logprobs]


def test_kl_in_the_reward_is_taken_off_before_the_advantages(make):
    """With k1 each token's penalty is the distance times the coefficient, so a response pays for its length."""
    settings = {
        "kl": {"where": "reward", "estimator": "k1", "coefficient": 0.1},
        "reference": {"kind": "frozen"},
        "advantage": {"use": "dr_grpo"},
    }
    ours, plain = make(**settings), make(advantage={"use": "dr_grpo"})
    batch = rewarded(3, near=ours)
    stats = step(worker_of(ours, collected=True, reference=Other(ours, 0.5)), batch)
    assert stats.trained.mean("kl_reference") == pytest.approx(0.5, rel=1e-3)
    paid = [replace(sample, reward=sample.reward - 0.05 * len(sample.tokens)) for sample in batch]
    step(worker_of(plain, collected=False), estimated(paid, plain))
    assert_same(weights(ours), weights(plain))


def test_the_bonus_of_egpo_is_the_entropy_between_the_tags(make, one_rank, model_of, tmp_path):
    """Tags are found in the text of tokens 3 and 4; a response without them has the plain advantage."""
    words = {f"w{number}": number for number in range(61)} | {"<think>": 3, "</think>": 4}
    backend = Tokenizer(WordLevel({word: number for word, number in words.items() if word not in {"w3", "w4"}}))
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path)
    config = run_config(model_of("Qwen2"), lr=1e-3, advantage={"use": "egpo"})
    ours = Actor(
        config.model_copy(update={"model": config.model.model_copy(update={"tokenizer": str(tmp_path)})}), one_rank
    )
    plain = make()
    batch = estimated(rewarded(8, near=ours), ours)
    tagged = np.asarray([7, 3, 9, 10, 11, 4, 12], dtype=np.int32)
    seven = {
        "tokens": tagged,
        "logprobs": np.full(7, -4.0, dtype=np.float32),
        "steps": np.full(7, 10),
        "advantages": np.zeros(7, dtype=np.float32),
    }
    batch = [
        replace(sample, **seven)
        if place % 3
        else replace(sample, tokens=np.where(np.isin(sample.tokens, [3, 4]), 5, sample.tokens).astype(np.int32))
        for place, sample in enumerate(batch)
    ]
    entropy = ours.compute_log_prob(batch, calculate_entropy=True).entropy
    ready = []
    for place, (sample, grpo) in enumerate(zip(batch, estimated(batch, plain), strict=True)):
        known = grpo.advantages[0]
        bonus = min(entropy[place][2:5].mean(), abs(known) / 2) if place % 3 else 0.0
        ready.append(with_advantage(sample, known + 0.4 * bonus))
    assert not ours.recipe.streams
    step(worker_of(ours, collected=True), batch)
    plain.update_policy(ready, step=10)
    assert_same(weights(ours), weights(plain))


def test_kl_in_the_loss_streams_with_its_reference(make):
    settings = {"kl": {"where": "loss", "estimator": "k2", "coefficient": 0.3}, "reference": {"kind": "frozen"}}
    ours = make(**settings)
    assert ours.recipe.streams
    batch = [with_advantage(sample, 0.0) for sample in rewarded(4)]
    before = weights(ours)
    stats = step(worker_of(ours, collected=False, reference=Other(ours, 0.5)), batch, cuts=[2])
    assert stats.trained.kl_tokens == count_tokens(batch), "without an advantage, too"
    assert stats.trained.mean("kl_reference") == pytest.approx(0.125, rel=1e-3)
    assert stats.loss == pytest.approx(0.3 * 0.125, rel=1e-3)
    assert differ(before, weights(ours))


def test_one_update_that_is_not_finite_is_left_out_and_counted(make):
    settings = {"mini_batches": 3}
    ours = make(**settings)
    batch = estimated(rewarded(6, near=ours), ours)
    batch[0] = with_advantage(batch[0], 3e38)
    stats = step(worker_of(ours, collected=True), batch)
    assert (stats.updates, stats.skipped_updates, stats.skipped) == (2, 1, False)
    assert np.isfinite([stats.loss, stats.grad_norm, stats.trained.loss]).all()
    all_of_them = [with_advantage(sample, 3e38) for sample in batch]
    before = weights(ours)
    stats = step(worker_of(ours, collected=True), all_of_them)
    assert (stats.updates, stats.skipped_updates, stats.skipped) == (0, 3, True)
    assert not differ(before, weights(ours))


def test_advantages_that_cannot_be_computed_skip_the_step(make, monkeypatch):
    ours = make(advantage={"use": "egpo", "args": {"mode": "bonus", "part": "joint"}})
    batch = rewarded(7)
    before = weights(ours)
    compute = Actor.compute_log_prob

    def broken(self, part, calculate_entropy=False):
        found = compute(self, part, calculate_entropy)
        return LogProbs(logprobs=found.logprobs, entropy=[np.full_like(each, np.nan) for each in found.entropy])

    monkeypatch.setattr(Actor, "compute_log_prob", broken)
    monkeypatch.setattr(type(ours.recipe.estimator), "__call__", lambda *_: (_ for _ in ()).throw(ValueError("no")))
    worker = worker_of(ours, collected=True)
    assert step(worker, batch).skipped
    assert not differ(before, weights(ours))
    monkeypatch.undo()
    assert not step(worker, batch).skipped, "nothing of the step before is left"


def test_a_discarded_step_leaves_nothing(make):
    ours, clean = make(passes=2), make(passes=2)
    batch = estimated(rewarded(8, near=ours), ours)
    worker = worker_of(ours, collected=True)
    assert worker.train([0, 1], [sample for sample in batch if sample.group_id < 2])
    worker.discard()
    for one, its_worker in ((ours, worker), (clean, worker_of(clean, collected=True))):
        step(its_worker, estimated(rewarded(9, near=clean), one), at=11)
    assert_same(weights(ours), weights(clean))


def test_a_critic_learns_the_returns_of_its_own_lambda_twice_per_update(make, one_rank):
    """One response per prompt; the policy has another lambda, and waits for the critic."""
    settings = {
        "advantage": {"use": "gae", "args": {"alpha": 0.05}},
        "critic": {"kind": "model", "lr": 1e-3, "lam": 1.0, "updates_per_step": 2, "warmup_steps": 11},
    }
    actor = make(**settings)
    critic, alone = (Critic(actor.config, one_rank) for _ in range(2))
    worker, before = worker_of(actor, collected=True, critic=critic), weights(actor)
    batch = estimated(rewarded(3, groups=8, size=1, near=actor), actor)
    values = alone.compute_values(batch)
    known = [
        replace(sample, values=value, returns=np.full(len(value), sample.reward, dtype=np.float32))
        for sample, value in zip(batch, values, strict=True)
    ]
    stats = step(worker, batch)
    assert (stats.updates, len(stats.critic)) == (0, 2)
    assert [one.trained.loss for one in stats.critic] == [alone.update_critic(known).trained.loss for _ in range(2)]
    assert not differ(before, weights(actor))
    assert step(worker, batch, at=11).updates == 1
    assert differ(before, weights(actor))
