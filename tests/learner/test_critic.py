"""The critic on one rank: against plain transformers and plain AdamW, and that it learns."""

import numpy as np
import pytest
import torch
from tiny_policy import KINDS, LAYOUTS, count_tokens, lay_out, run_config
from transformers import AutoModel
from value_kit import plain_values, value_batch
from weights_kit import full_tensors

from streamrl.errors import ConfigError
from streamrl.learner.critic import Critic, freeze_attention


@pytest.fixture
def make(one_rank, model_of):
    def critic(kind="Qwen2", *, small=1 << 26, dtype="float32", critic=None, **learner):
        settings = {"kind": "model", "lr": 1e-2, "clip": 0, **(critic or {})}
        config = run_config(model_of(kind), dtype=dtype, critic=settings, advantage={"use": "gae"}, **learner)
        return Critic(config, one_rank, small=small)

    return critic


def plain(path, critic):
    """The bare model, and a head of the same weights."""
    model = AutoModel.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    tensors = full_tensors(critic)
    head = torch.nn.Linear(tensors["value_head.weight"].shape[1], 1)
    with torch.no_grad():
        head.weight.copy_(tensors["value_head.weight"])
        head.bias.copy_(tensors["value_head.bias"])
    return model, head


def put_head(critic, scale=0.3):
    """A head that is not 0."""
    state = critic.shard_state()
    generator = torch.Generator().manual_seed(1)
    for name in ("weight/value_head.weight", "weight/value_head.bias"):
        state[name] = torch.randn(state[name].shape, generator=generator) * scale
    critic.load_shard_state(state)


@pytest.mark.parametrize("kind", KINDS)
def test_values_equal_plain_transformers(make, model_of, kind):
    """In shared rows, padded rows and several micro-batches."""
    critic = make(kind, tokens_per_microbatch=128)
    put_head(critic)
    batch = value_batch(0)
    found = critic.compute_values(batch)
    model, head = plain(model_of(kind), critic)
    for ours, theirs in zip(found, plain_values(model, head, batch), strict=True):
        assert ours.dtype == np.float32
        assert ours == pytest.approx(theirs.detach().numpy(), abs=2e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_do_not_depend_on_the_layout(make, layout):
    whole, other = make("Llama"), lay_out(make("Llama", tokens_per_microbatch=96), layout)
    for critic in (whole, other):
        put_head(critic)
    batch = value_batch(1)
    for ours, theirs in zip(whole.compute_values(batch), other.compute_values(batch), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)


def test_the_first_values_are_zero(make):
    assert not any(values.any() for values in make().compute_values(value_batch(2)))
    assert make().compute_values([]) == []


def test_one_update_equals_plain_adamw(make, model_of):
    """Mean over tokens, clipped region, clipped norm."""
    critic = make("Llama", critic={"clip": 0.2}, clip_norm=0.05, tokens_per_microbatch=128)
    put_head(critic)
    model, head = plain(model_of("Llama"), critic)
    batch = value_batch(3)
    total = torch.zeros(())
    for sample, values in zip(batch, plain_values(model, head, batch), strict=True):
        aim, old = torch.from_numpy(sample.returns), torch.from_numpy(sample.values)
        bounded = old + (values - old).clamp(-0.2, 0.2)
        total = total + torch.maximum((values - aim) ** 2, (bounded - aim) ** 2).sum() / 2
    (total / count_tokens(batch)).backward()
    parameters = [*model.parameters(), *head.parameters()]
    norm = torch.nn.utils.clip_grad_norm_(parameters, 0.05)
    torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.95), weight_decay=0).step()
    stats = critic.update_critic(batch)
    assert stats.grad_norm == pytest.approx(norm.item(), rel=1e-4)
    assert stats.trained.mean("loss") == pytest.approx(total.item() / count_tokens(batch), rel=1e-5)
    assert 0 < stats.trained.clipped < stats.trained.tokens == count_tokens(batch)
    expected = dict(model.named_parameters()) | {f"value_head.{name}": p for name, p in head.named_parameters()}
    found = full_tensors(critic)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name].detach(), rtol=1e-4, atol=2e-4, msg=name)


def test_it_learns_a_small_known_value_function(make):
    critic = make("Qwen2", lr=1e-3, critic={"lr": 5e-3, "clip": 0})
    for step in range(40):
        stats = critic.update_critic(value_batch(step))
    assert stats.trained.mean("loss") < 0.02
    fresh = value_batch(999)
    found, expected = np.concatenate(critic.compute_values(fresh)), np.concatenate([item.returns for item in fresh])
    assert np.abs(found - expected).mean() < 0.25


def test_pieces_and_order_do_not_matter(make):
    batch = value_batch(4)
    whole, pieces = make("Llama"), make("Llama", tokens_per_microbatch=48)
    for _ in range(2):
        first = whole.update_critic(batch)
        for part in (batch[10:], [], batch[:3], batch[3:10]):
            pieces.accumulate(part)
        second = pieces.apply_update(count_tokens(batch))
        assert first.trained.loss == pytest.approx(second.trained.loss, rel=1e-5)
        assert first.grad_norm == pytest.approx(second.grad_norm, rel=1e-5)


def test_state_goes_on_bit_for_bit_and_discard_forgets(make):
    one, two = make(), make()
    for step in range(2):
        one.update_critic(value_batch(step))
    two.load_shard_state(one.shard_state())
    two.accumulate(value_batch(7))
    two.discard()
    assert one.update_critic(value_batch(2)) == two.update_critic(value_batch(2))
    first, second = one.shard_state(), two.shard_state()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_bfloat16_with_a_head_in_float32(make):
    critic = make("Llama", dtype="bfloat16", critic={"lr": 5e-3}, lr=1e-3)
    put_head(critic)
    batch = value_batch(6)
    found = np.concatenate(critic.compute_values(batch))
    rounded = torch.from_numpy(found).bfloat16().float().numpy()
    assert (found != rounded).mean() > 0.5, "the head rounds to bfloat16"
    before = critic.update_critic(batch).trained.loss
    for _ in range(10):
        after = critic.update_critic(batch).trained.loss
    assert after < before / 2


def test_a_critic_that_is_not_there_is_named_by_its_key(make, tmp_path):
    with pytest.raises(ConfigError, match=r"learner.critic.path .*does not exist"):
        make(critic={"path": str(tmp_path / "nowhere")})


@pytest.mark.parametrize("kind", ["Qwen2", "OPT"])
def test_frozen_attention_stays_as_it_was_and_the_rest_learns(make, kind):
    critic = make(kind, critic={"freeze": "attention"})
    shards = {**critic.parameters, **critic._frozen}
    before = {name: shard.to_local().clone() for name, shard in shards.items()}
    put_head(critic)
    for seed in range(2):
        critic.update_critic(value_batch(seed))
    moved = {name for name, shard in shards.items() if not torch.equal(shard.to_local(), before[name])}
    attention = {name for name in shards if "self_attn." in name}
    assert len(attention) > 4
    assert not moved & attention
    assert moved == shards.keys() - attention
    state, again = critic.shard_state(), make(kind, critic={"freeze": "attention"})
    again.load_shard_state(state)
    assert critic.update_critic(value_batch(3)) == again.update_critic(value_batch(3))


def test_a_model_without_attention_has_none_to_freeze():
    with pytest.raises(ConfigError, match="no parameter of the model is named attn"):
        freeze_attention(torch.nn.Linear(2, 2))
