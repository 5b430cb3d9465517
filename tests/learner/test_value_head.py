"""A value head on the policy: one pass and one update for both, and it stays out of the versions."""

import numpy as np
import pytest
import torch
from test_critic import plain, put_head
from tiny_policy import count_tokens, run_config
from transformers import AutoModelForCausalLM
from value_kit import plain_values, value_batch

from streamrl.learner.actor import Actor
from streamrl.learner.critic import Critic
from streamrl.learner.value_head import Head, HeadedActor

CLIP = 0.3


@pytest.fixture
def make(one_rank, model_of):
    def actor(kind="Llama", *, of=HeadedActor, dtype="float32", critic=None, **learner):
        settings = {"kind": "head", "clip": CLIP, "lr": 1e-2, **(critic or {})}
        config = run_config(model_of(kind), dtype=dtype, critic=settings, advantage={"use": "gae"}, **learner)
        return of(config, one_rank)

    return actor


def gradients(model):
    return {name: p.grad.to_local().clone() for name, p in model._parameters.items() if p.grad is not None}


@pytest.mark.parametrize("kind", ["Qwen2", "GPT2", "OPT"])
def test_values_equal_plain_transformers_and_log_probs_are_those_of_the_policy(make, model_of, kind):
    actor, bare = make(kind, tokens_per_microbatch=128), make(kind, of=Actor, tokens_per_microbatch=128)
    put_head(actor)
    batch = value_batch(0)
    model, head = plain(model_of(kind), actor)
    for ours, theirs in zip(actor.compute_values(batch), plain_values(model, head, batch), strict=True):
        assert ours == pytest.approx(theirs.detach().numpy(), abs=2e-5)
    for ours, theirs in zip(actor.compute_log_prob(batch).logprobs, bare.compute_log_prob(batch).logprobs, strict=True):
        assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("share", [True, False])
def test_the_gradient_is_that_of_the_policy_plus_that_of_a_critic(make, share):
    options = {"share_prompts": share, "tokens_per_microbatch": 128}
    actor = make(critic={"coefficient": 0.25}, **options)
    bare, critic = make(of=Actor, **options), make(of=Critic, **options)
    put_head(actor)
    put_head(critic)
    batch = value_batch(1)
    for model in (actor, bare, critic):
        model.accumulate(batch)
    both, policy, values = gradients(actor), gradients(bare), gradients(critic)
    for name, found in both.items():
        own = name.removeprefix("model.")
        expected = torch.zeros_like(found)
        expected += policy.get(name, 0)
        expected += 0.25 * values.get(own, torch.zeros(()))
        scale = float(expected.abs().max())
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * max(scale, 1.0), msg=name)
    assert both.keys() == policy.keys() | {"value_head.weight", "value_head.bias"}


def test_one_update_learns_both_and_says_so(make):
    actor = make()
    critic = Head(actor)
    batch = value_batch(2)
    before = actor.shard_state()
    actor.accumulate(batch)
    actor.apply_update(count_tokens(batch))
    critic.accumulate(batch)
    stats = critic.apply_update(count_tokens(batch))
    after = actor.shard_state()
    assert actor.updates == 1
    assert stats.sums.tokens == count_tokens(batch)
    assert stats.sums.mean("loss") == pytest.approx(0.5)  # values of 0, returns of 1 and -1
    assert not torch.equal(before["weight/value_head.weight"], after["weight/value_head.weight"])
    assert not torch.equal(before["weight/lm_head.weight"], after["weight/lm_head.weight"])


def test_the_head_has_a_learning_rate_of_its_own(make):
    """The first update of AdamW moves every weight by its learning rate."""
    actor = make(lr=1e-3, critic={"lr": 0.2})
    batch = value_batch(7)
    before = actor.shard_state()
    actor.accumulate(batch)
    stats = actor.apply_update(count_tokens(batch))
    after = actor.shard_state()

    def moved(name):
        return float((after[f"weight/{name}"] - before[f"weight/{name}"]).abs().max())

    assert moved("value_head.weight") == pytest.approx(0.2, rel=1e-3)
    assert moved("lm_head.weight") == pytest.approx(1e-3, rel=1e-3)
    assert (stats.lr, actor.learnt.lr) == (1e-3, pytest.approx(0.2))


def test_in_the_warm_up_only_the_head_learns(make):
    actor = make(weight_decay=0.1, lr=5e-2)
    critic = Head(actor)
    before = actor.shard_state()
    losses = []
    for step in range(6):
        batch = value_batch(step)
        critic.accumulate(batch)
        losses.append(critic.apply_update(count_tokens(batch)).sums.mean("loss"))
    after = actor.shard_state()
    for name, tensor in before.items():
        if not name.startswith("updates") and "/value_head" not in name:
            assert torch.equal(tensor, after[name]), name
    assert not torch.equal(before["weight/value_head.weight"], after["weight/value_head.weight"])
    batch = value_batch(9)
    actor.accumulate(batch)
    actor.apply_update(count_tokens(batch))
    assert not torch.equal(after["weight/lm_head.weight"], actor.shard_state()["weight/lm_head.weight"])


def test_after_the_warm_up_the_policy_begins_as_if_there_had_been_none(make):
    """Bias correction, learning rate and average begin with its own first update; also from a checkpoint."""
    options = {"betas": (0.9, 0.999), "warmup_steps": 4, "ema": 0.9, "lr": 1e-2}
    fresh, warmed, resumed = make(**options), make(**options), make(**options)
    critic = Head(warmed)
    rates = []
    for _ in range(3):
        batch = value_batch(0)
        critic.accumulate(batch)
        rates.append(critic.apply_update(count_tokens(batch)).lr)
    assert rates == pytest.approx([1e-2 / 4, 2e-2 / 4, 3e-2 / 4])  # the head goes through the schedule by itself
    for name, tensor in fresh.shard_state().items():
        if "/value_head" in name:  # what the policy learns next depends on the values of the head
            warmed._optimizer.live()[name].copy_(tensor)
    resumed.load_shard_state(warmed.shard_state())
    for _ in range(2):
        for actor in (fresh, warmed, resumed):
            # The head is still at 0, so that the gradient of the policy is the same in all of them.
            actor.accumulate(batch)
            stats = actor.apply_update(count_tokens(batch))
            for name in ("weight/value_head.weight", "weight/value_head.bias"):
                actor._optimizer.live()[name].zero_()
        first, *others = (actor.shard_state() for actor in (fresh, warmed, resumed))
        for other in others:
            for name, tensor in first.items():
                if not name.startswith("updates") and "value_head" not in name:
                    assert torch.equal(tensor, other[name]), name
    assert (stats.lr, resumed.learnt.lr) == (pytest.approx(1e-2 * 2 / 4), pytest.approx(1e-2))
    assert (resumed.updates, fresh.updates) == (5, 2)


def test_the_head_is_in_checkpoints_and_in_no_version(make, tmp_path):
    actor, again, bare = make("Qwen2"), make("Qwen2"), make("Qwen2", of=Actor)
    put_head(actor)
    assert actor.published.keys() == bare.published.keys()
    assert actor.parameters.keys() == bare.parameters.keys()
    actor.export(tmp_path / "model")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert not [name for name, _ in exported.named_parameters() if "value" in name]
    again.load_shard_state(actor.shard_state())
    batch = value_batch(3)
    for ours, theirs in zip(actor.compute_values(batch), again.compute_values(batch), strict=True):
        assert np.array_equal(ours, theirs)
    rows = {name: torch.full_like(parameter.to_local(), 0.5) for name, parameter in actor.parameters.items()}
    head = actor.shard_state()["weight/value_head.weight"]
    actor.adopt(lambda name: rows[name])
    assert torch.equal(actor.shard_state()["weight/value_head.weight"], head)
    assert (actor.shard_state()["weight/model.norm.weight"] == 0.5).all()


def test_discard_forgets_both(make):
    one, two = make(), make()
    two.accumulate(value_batch(4))
    two.discard()
    batch = value_batch(5)
    for actor in (one, two):
        actor.accumulate(batch)
        actor.apply_update(count_tokens(batch))
    assert one.learnt == two.learnt
    first, second = one.shard_state(), two.shard_state()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_bfloat16_and_an_adapter(make):
    actor = make(dtype="bfloat16", lora={"rank": 4})
    critic = Head(actor)
    batch = value_batch(6)
    before = actor.shard_state()
    for _ in range(2):
        actor.accumulate(batch)
        actor.apply_update(count_tokens(batch))
        stats = critic.apply_update(count_tokens(batch))
    assert stats.sums.mean("loss") < 0.5
    assert not stats.skipped
    after = actor.shard_state()
    assert not torch.equal(before["weight/value_head.weight"], after["weight/value_head.weight"])
    assert not [name for name in actor.parameters if "value_head" in name]
