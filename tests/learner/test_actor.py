"""The actor on one rank: against plain transformers and plain AdamW, in any layout and in any pieces."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from tiny_policy import (
    KINDS,
    VOCABULARY,
    count_tokens,
    lay_out,
    make_batch,
    passes_of,
    run_config,
    train_sample,
    with_advantage,
    without_key_biases,
)
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM
from weights_kit import full_tensors

from streamrl.errors import ConfigError, Refused
from streamrl.learner.policy import Actor


@pytest.fixture
def make(one_rank, model_of):
    def policy(kind="Qwen2", *, small=1 << 26, temperature=1.0, dtype="float32", **learner):
        config = run_config(model_of(kind), temperature=temperature, dtype=dtype, **learner)
        return Actor(config, one_rank, small=small)

    return policy


def plain(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def reference_logprobs(model, batch, temperature=1.0):
    """One forward pass per sample, no padding, all logits."""
    for sample in batch:
        ids = torch.from_numpy(np.concatenate([sample.prompt, sample.tokens])).long()[None]
        logits = model(input_ids=ids).logits[0, len(sample.prompt) - 1 : -1]
        full = torch.log_softmax(logits.float() / temperature, dim=-1)
        yield full, full[torch.arange(len(sample.tokens)), ids[0, len(sample.prompt) :]]


def reference_gradient(model, batch):
    """Gradient of the summed loss by plain transformers; leaves it in the parameters."""
    total = torch.zeros(())
    for sample, (_, logprobs) in zip(batch, reference_logprobs(model, batch), strict=True):
        advantages = torch.from_numpy(sample.advantages)
        behaviour = torch.from_numpy(sample.logprobs)
        weight = (logprobs.detach() - behaviour).exp().clamp(max=2.0)  # the defaults: tis; veto drops none of these
        assert weight.min() > 1e-4
        total = total - (weight * advantages * (logprobs - logprobs.detach()).exp()).sum()
    total.backward()
    return total.item()


def weights(policy):
    return full_tensors(policy)


def gradients(policy):
    return {name: parameter.grad.to_local().clone() for name, parameter in policy.parameters.items()}


def assert_same(ours, theirs, tolerance=1e-5):
    assert ours.keys() == theirs.keys()
    if tolerance:
        ours, theirs = without_key_biases(ours), without_key_biases(theirs)
    scale = max(float(tensor.detach().abs().max()) for tensor in theirs.values())
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=tolerance, atol=tolerance * scale, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_and_entropy_equal_plain_transformers(make, model_of, kind):
    """In float32, in shared rows, padded rows and chunks, for models that do all kinds of things to their logits."""
    policy = make(kind, temperature=0.8, tokens_per_microbatch=128, logprob_chunk=13)
    batch = make_batch(0, zero=1)
    found = policy.compute_log_prob(batch, calculate_entropy=True)
    expected = list(reference_logprobs(plain(model_of(kind)), batch, temperature=0.8))
    for ours, spread, (full, theirs) in zip(found.logprobs, found.entropy, expected, strict=True):
        assert ours == pytest.approx(theirs.detach().numpy(), abs=2e-5)
        assert spread == pytest.approx(-(full.exp() * full).sum(-1).detach().numpy(), abs=2e-5)
    assert policy.compute_log_prob(batch).entropy is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["rows of like length", "packed", "apart"])
def test_gradient_equals_one_sample_at_a_time(make, model_of, kind, layout):
    model = plain(model_of(kind))
    batch = make_batch(1)
    loss = reference_gradient(model, batch)
    policy = lay_out(make(kind, tokens_per_microbatch=192, logprob_chunk=32), layout)
    passes = passes_of(policy)
    policy.accumulate(batch)
    assert len(passes) > 1
    assert sum(part.counts.sum() for part in passes) == count_tokens(batch)
    assert_same(gradients(policy), {name: p.grad for name, p in model.named_parameters()})
    assert policy.apply_update(100).loss == pytest.approx(loss / 100, rel=1e-5)


def test_prompts_are_shared_where_the_model_allows_it(make):
    """What one prompt saves."""
    batch = make_batch(2, groups=2, size=8, longest=8)
    actors = make("Llama"), lay_out(make("Llama"), "apart")
    shared, alone = (passes_of(actor) for actor in actors)
    for actor in actors:
        actor.accumulate(batch)
    assert {sum(part.counts.sum() for part in parts) for parts in (shared, alone)} == {count_tokens(batch)}
    assert sum(part.input_ids.size for part in shared) < sum(part.input_ids.size for part in alone)


def test_rows_that_are_not_shared_have_no_mask(make, monkeypatch):
    """Fast kernels of attention take none, and what is behind a token cannot reach it."""
    actor, masks = lay_out(make(), "apart"), []
    layers = actor._module.model.base_model
    forward = layers.forward
    monkeypatch.setattr(layers, "forward", lambda **given: masks.append("attention_mask" in given) or forward(**given))
    actor.update_policy(make_batch(0))
    assert masks
    assert not any(masks)


def test_sharing_is_off_for_a_model_that_ignores_the_mask(make, monkeypatch):
    import streamrl.learner.model as module

    monkeypatch.setattr(module, "dense_mask", lambda until, dtype: torch.zeros(1, 1, *until.shape[1:] * 2).tril_())
    assert make("Llama").limits.shared == 0


def test_entropy_is_computed_for_a_bonus_alone_and_estimated_otherwise(make):
    batch = make_batch(0)
    exact, estimated = make(loss={"entropy": 1e-9}), make()
    known = exact.compute_log_prob(batch, calculate_entropy=True)
    found = [actor.update_policy(batch).trained.mean("entropy") for actor in (exact, estimated)]
    assert found[0] == pytest.approx(np.concatenate(known.entropy).mean(), rel=1e-5)
    assert found[1] == pytest.approx(-np.concatenate(known.logprobs).mean(), rel=1e-5)


def test_a_window_of_the_model_limits_shared_rows(make):
    assert make("Gemma2").limits.shared == 64
    assert make("Llama").limits.shared == 4 * 32


def test_one_step_equals_plain_adamw(make, model_of):
    """Mean over all tokens of the step, clip, AdamW with weight decay, warm-up: three steps."""
    settings = {"lr": 5e-3, "warmup_steps": 2, "weight_decay": 0.1, "clip_norm": 0.05, "betas": (0.9, 0.99)}
    policy = make("Llama", **settings)
    model = plain(model_of("Llama"))
    adamw = torch.optim.AdamW(model.parameters(), lr=0, betas=(0.9, 0.99), weight_decay=0.1)
    for step, rate in enumerate((2.5e-3, 5e-3, 5e-3)):
        batch = make_batch(10 + step, zero=1)
        tokens = count_tokens(batch)
        reference_gradient(model, batch)
        for parameter in model.parameters():
            parameter.grad /= tokens
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05).item()
        adamw.param_groups[0]["lr"] = rate
        adamw.step()
        adamw.zero_grad()
        stats = policy.update_policy(batch)
        assert (stats.update, stats.skipped) == (step + 1, False)
        assert stats.lr == pytest.approx(rate)
        assert stats.grad_norm == pytest.approx(norm, rel=1e-4)
        assert_same(weights(policy), dict(model.named_parameters()))


@pytest.mark.parametrize("cuts", [[5], [1, 2, 3, 9], [4, 8, 12]])
def test_a_step_in_pieces_is_the_step(make, cuts):
    batch = make_batch(3)
    whole, pieces = make("Qwen2"), make("Qwen2", tokens_per_microbatch=48)
    for _ in range(2):
        whole.accumulate(batch)
        first = whole.apply_update(count_tokens(batch))
        for start, end in zip([0, *cuts], [*cuts, len(batch)], strict=True):
            pieces.accumulate(batch[start:end])
        second = pieces.apply_update(count_tokens(batch))
    assert second.trained.tokens == first.trained.tokens
    assert second.trained.ess == pytest.approx(first.trained.ess, rel=1e-5)
    assert_same(weights(pieces), weights(whole))


def test_zero_advantage_is_skipped_exactly(make):
    """The same weights as if those samples had been computed with a vanishing advantage; their tokens count."""
    batch = make_batch(4, zero=2)
    tiny = [with_advantage(sample, float(sample.advantages[0]) or 1e-38) for sample in batch]
    skipping, computing = make("Qwen2"), make("Qwen2")
    some, every = passes_of(skipping), passes_of(computing)
    skipping.update_policy(batch)
    computing.update_policy(tiny)
    assert [sum(len(part.samples) for part in parts) for parts in (some, every)] == [8, 16]
    assert_same(weights(skipping), weights(computing))
    only = make("Qwen2")
    only.update_policy(batch[8:])
    with pytest.raises(AssertionError):
        assert_same(gradients_after(only, batch[8:]), gradients_after(skipping, batch))


def gradients_after(policy, batch):
    policy.accumulate(batch)
    scale = 1 / count_tokens(batch)
    return {name: gradient * scale for name, gradient in gradients(policy).items()}


def test_a_step_without_any_gradient_moves_on_momentum_only(make):
    policy, computing = make("Qwen2"), make("Qwen2")
    for one in (policy, computing):
        one.update_policy(make_batch(5))
    nothing = [with_advantage(sample, 0.0) for sample in make_batch(6)]
    passes = passes_of(policy)
    stats = policy.update_policy(nothing)
    computing.update_policy([with_advantage(sample, 1e-38) for sample in nothing])
    assert (passes, stats.grad_norm, stats.skipped, stats.update) == ([], 0.0, False, 2)
    assert_same(weights(policy), weights(computing))


def test_a_gradient_that_is_not_finite_skips_the_update_and_says_so(make):
    policy = make("Qwen2")
    batch = make_batch(7)
    policy.update_policy(batch)
    before = policy.shard_state()
    huge = [with_advantage(sample, 3e38) for sample in batch]
    stats = policy.update_policy(huge)
    assert stats.skipped
    assert not np.isfinite(stats.grad_norm)
    assert stats.update == 1
    assert_bits(policy.shard_state(), before)
    stats = policy.update_policy(batch)
    assert not stats.skipped, "nothing of the bad gradient is left"


def test_discard_forgets_the_partial_step(make):
    policy, clean = make("Qwen2"), make("Qwen2")
    policy.accumulate(make_batch(8))
    policy.discard()
    for one in (policy, clean):
        one.update_policy(make_batch(9))
    assert_bits(policy.shard_state(), clean.shard_state())


@pytest.mark.parametrize("small", [1 << 26, 1])
def test_a_stay_on_the_host_between_and_within_steps_changes_nothing(make, small):
    moved, still = make(small=small), make(small=small)
    for step in range(3):
        batch = make_batch(step)
        for policy in (moved, still):
            policy.accumulate(batch[:2])
            if policy is moved:
                policy.to_host()
                policy.to_device()
            policy.accumulate(batch[2:])
            policy.apply_update(count_tokens(batch))
        moved.to_host()
        moved.to_device()
    assert_bits(moved.shard_state(), still.shard_state())


def assert_bits(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


def test_state_round_trip_continues_bit_for_bit(make):
    first = make("Qwen2", warmup_steps=5)
    for seed in range(2):
        first.update_policy(make_batch(seed))
    state = first.shard_state()
    kept = {name: tensor.clone() for name, tensor in state.items()}
    ahead = [first.update_policy(make_batch(seed)) for seed in range(2, 4)]
    assert_bits(state, kept)  # copies: training went on while they could be written

    second = make("Qwen2", warmup_steps=5)
    second.accumulate(make_batch(50))  # a partial step that the load must forget
    second.load_shard_state(state)
    assert second._optimizer.updates == 2
    assert_bits(second.shard_state(), state)
    assert [second.update_policy(make_batch(seed)) for seed in range(2, 4)] == ahead
    assert_bits(second.shard_state(), first.shard_state())


def test_state_of_another_model_is_refused_and_changes_nothing(make):
    policy = make("Qwen2")
    before = policy.shard_state()
    with pytest.raises(Refused, match="another model"):
        policy.load_shard_state(make("Llama").shard_state())
    with pytest.raises(Refused, match="updates"):
        policy.load_shard_state({name: tensor for name, tensor in before.items() if name != "updates"})
    assert_bits(policy.shard_state(), before)


@pytest.mark.parametrize("kind", ["Qwen2", "Llama", "GPTNeoX", "Qwen3Moe"])
def test_one_unit_per_layer_trains_the_same(make, kind):
    """What large models get: each decoder layer its own FSDP unit, gathered and freed around its use."""
    whole, layers = make(kind), make(kind, small=0, tokens_per_microbatch=192)
    assert whole._whole
    assert not layers._whole
    for seed in range(2):
        batch = make_batch(seed)
        for policy in (whole, layers):
            policy.compute_log_prob(batch)
            policy.update_policy(batch)
    assert_same(weights(layers), weights(whole))


def test_every_parameter_is_sharded_on_dimension_zero(make):
    for small in (0, 1 << 26):
        parameters = make("Qwen2", small=small).parameters
        assert all(isinstance(parameter, DTensor) for parameter in parameters.values())
        assert {parameter.placements for parameter in parameters.values()} == {(Shard(0),)}


def test_parameters_have_hugging_face_names_and_tied_ones_once(make, model_of):
    expected = dict(plain(model_of("Qwen2")).named_parameters())
    policy = make("Qwen2")
    assert "lm_head.weight" not in expected
    assert_same(weights(policy), expected, tolerance=0)
    assert "lm_head.weight" in weights(make("Llama"))


def test_tied_embeddings_get_both_gradients_and_stay_tied(make, model_of):
    policy = make("Qwen2")
    policy.update_policy(make_batch(0))
    name = "model.embed_tokens.weight"
    assert not torch.equal(weights(policy)[name], plain(model_of("Qwen2")).get_input_embeddings().weight)
    (row,) = make_batch(1, groups=1, size=1)
    moved = plain(model_of("Qwen2"))
    moved.load_state_dict(weights(policy), strict=False)
    (_, expected) = next(iter(reference_logprobs(moved, [row])))
    assert policy.compute_log_prob([row]).logprobs[0] == pytest.approx(expected.detach().numpy(), abs=2e-5)


def test_bfloat16_computes_in_it_and_keeps_float32_weights(make):
    """Updates far below the resolution of bfloat16 must add up, which needs float32 master weights."""
    policy, exact = make("Qwen2", dtype="bfloat16", lr=1e-5), make("Qwen2", lr=1e-5)
    batch = make_batch(0)
    start = weights(policy)
    rough = policy.compute_log_prob(batch).logprobs
    fine = exact.compute_log_prob(batch).logprobs
    differences = np.concatenate([a - b for a, b in zip(rough, fine, strict=True)])
    assert 1e-4 < np.abs(differences).max() < 0.5
    for _ in range(3):
        policy.update_policy(batch)
        exact.update_policy(batch)
    assert all(parameter.dtype == torch.float32 for parameter in policy.parameters.values())
    ours = torch.cat([(weights(policy)[name] - start[name]).flatten() for name in start])
    theirs = torch.cat([(weights(exact)[name] - start[name]).flatten() for name in start])
    assert 0 < ours.abs().max() < 1e-4
    assert torch.cosine_similarity(ours, theirs, dim=0) > 0.9


class BiggestTensor(TorchDispatchMode):
    """Elements of the biggest tensor that any operation returned."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.numel())
        return result


def test_logits_of_a_batch_never_exist(make):
    """The biggest tensor of a training pass with small chunks is far below tokens x vocabulary."""
    batch = make_batch(0, groups=8, size=8)
    sizes = {}
    for chunk in (16, 4096):
        policy = lay_out(make("GPT2", logprob_chunk=chunk, tokens_per_microbatch=4096), "apart")
        passes = passes_of(policy)
        with BiggestTensor() as biggest:
            policy.accumulate(batch)
        sizes[chunk] = biggest.elements
    assert sizes[4096] >= count_tokens(batch) * VOCABULARY / len(passes)
    width = 4 * 32 * 2048  # activations: tokens of a pass x the widest layer
    assert sizes[16] < width


def test_no_dropout_while_training(make):
    policy = make("GPT2")
    batch = make_batch(0)
    policy.accumulate(batch)
    first = gradients(policy)
    policy.discard()
    policy.accumulate(batch)
    assert_same(gradients(policy), first, tolerance=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda good: train_sample(0, good.prompt, np.asarray([VOCABULARY], dtype=np.int32), good.logprobs[:1], 1.0),
            "vocabulary",
        ),
        (partial(replace, prompt=np.asarray([-1], dtype=np.int32)), "vocabulary"),
        (partial(replace, prompt=np.zeros(200, dtype=np.int32)), "the model takes 128"),
    ],
)
def test_a_sample_that_does_not_fit_the_model_is_refused(make, change, message):
    (good,) = make_batch(0, groups=1, size=1, longest=2)
    policy = make("Qwen2")
    with pytest.raises(ValueError, match=f"group 0.*{message}"):
        policy.check_samples([good, change(good)])
    policy.check_samples([good])


def test_learned_positions_up_to_the_last_one(make, model_of):
    """70 positions are no multiple of the width step: padding must not ask for position 79."""
    tokens = np.arange(70, dtype=np.int32) % VOCABULARY
    sample = train_sample(0, tokens[:1], tokens, np.zeros(70, dtype=np.float32), 1.0)
    policy = make("GPT2")
    (_, expected) = next(iter(reference_logprobs(plain(model_of("GPT2")), [sample_short(sample)])))
    found = policy.compute_log_prob([sample]).logprobs[0]
    assert found[:69] == pytest.approx(expected.detach().numpy(), abs=2e-5)


def sample_short(sample):
    return train_sample(0, sample.prompt, sample.tokens[:69], sample.logprobs[:69], 1.0)


def test_a_missing_model_is_a_configuration_error(one_rank, tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        Actor(run_config(tmp_path / "nowhere"), one_rank)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="exists"):
        Actor(run_config(tmp_path / "empty"), one_rank)


def test_a_model_with_logits_of_its_own_kind_is_refused(make, monkeypatch):
    from transformers import LlamaForCausalLM

    original = LlamaForCausalLM.forward

    def odd(self, *args, **kwargs):
        output = original(self, *args, **kwargs)
        if kwargs.get("input_ids") is not None:
            output.logits = output.logits + 1
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", odd)
    with pytest.raises(ConfigError, match="LlamaForCausalLM cannot be trained"):
        make("Llama")
