"""LoRA and DoRA: against peft's own merge, on every model family, through versions, checkpoints and exports."""

from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tiny_policy import count_tokens, make_batch, run_config
from transformers import AutoModelForCausalLM
from weights_kit import export, full_tensors

from streamrl.errors import ConfigError, Refused
from streamrl.learner.lora import Lora
from streamrl.learner.model_loading import load_rows
from streamrl.learner.policy import Actor
from streamrl.learner.weight_copy import Copies
from streamrl.weight_sync.adapter import write_adapter
from streamrl.weight_sync.manifest import read_manifest
from streamrl.weight_sync.publisher import Publisher
from streamrl.weight_sync.tensors import map_version

LORA = {"rank": 4, "alpha": 8.0}
FAMILIES = ["Qwen2", "Qwen3", "Llama", "Gemma2", "GPTNeoX"]


@pytest.fixture
def make(one_rank, model_of):
    def actor(kind="Qwen2", *, small=1 << 26, dtype="float32", lora=LORA, **learner):
        config = run_config(model_of(kind), dtype=dtype, lora=lora, **learner)
        return Actor(config, one_rank, small=small)

    return actor


def train(actor, steps=2):
    for step in range(steps):
        batch = make_batch(step)
        actor.accumulate(batch)
        actor.apply_update(count_tokens(batch))


def logprobs(actor, batch):
    return np.concatenate(actor.compute_log_prob(batch).logprobs)


def plain(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def adapter_of(actor):
    return {name: parameter.full_tensor().clone() for name, parameter in actor.parameters.items()}


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_new_adapter_changes_nothing(make, kind, dora):
    batch = make_batch(3)
    base = make(kind, lora={"rank": 0})
    adapted = make(kind, lora={**LORA, "dora": dora})
    assert np.array_equal(logprobs(adapted, batch), logprobs(base, batch))
    assert {name: tuple(p.shape) for name, p in adapted.published.items()} == {
        name: tuple(p.shape) for name, p in base.published.items()
    }


@pytest.mark.parametrize("small", [1 << 26, 0])
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("kind", ["Qwen2", "Llama", "GPTNeoX"])
def test_merged_weights_are_those_of_pefts_own_merge(make, model_of, tmp_path, kind, dora, small):
    actor = make(kind, lora={**LORA, "dora": dora}, small=small)
    train(actor)
    write_adapter(tmp_path / "adapter", actor.lora.about, adapter_of(actor))
    theirs = PeftModel.from_pretrained(plain(model_of(kind)), tmp_path / "adapter").merge_and_unload()
    expected = dict(theirs.named_parameters())
    ours = full_tensors(actor)
    assert ours.keys() == expected.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, expected[name].detach(), rtol=1e-6, atol=1e-6, msg=name)
    base = dict(plain(model_of(kind)).named_parameters())
    moved = [name for name in ours if not torch.equal(ours[name], base[name])]
    assert all("norm" not in name and "embed" not in name for name in moved)
    assert moved


@pytest.mark.parametrize("dora", [False, True])
def test_log_probabilities_in_training_are_those_of_the_merged_model(make, model_of, tmp_path, dora):
    actor, batch = make(lora={**LORA, "dora": dora}), make_batch(5)
    train(actor)
    export(actor, tmp_path / "model")
    merged = Actor(run_config(tmp_path / "model"), actor.ranks)
    np.testing.assert_allclose(logprobs(actor, batch), logprobs(merged, batch), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("small", [1 << 26, 0])
def test_without_its_adapter_the_model_is_the_base_and_goes_on_learning_afterwards(make, small):
    batch = make_batch(7)
    base, actor = make(lora={"rank": 0}), make(small=small)
    train(actor)
    before = logprobs(actor, batch)
    with actor.lora.disabled():
        assert np.array_equal(logprobs(actor, batch), logprobs(base, batch))
    assert np.array_equal(logprobs(actor, batch), before)
    twin = make(small=small)
    train(twin)
    for each in (actor, twin):
        train(each, 1)
    assert all(torch.equal(mine, adapter_of(twin)[name]) for name, mine in adapter_of(actor).items())
    assert not np.array_equal(logprobs(actor, batch), before)


def test_only_the_adapter_is_trained_and_saved(make):
    actor = make()
    assert all("lora_" in name for name in actor.parameters)
    assert sum(p.numel() for p in actor.parameters.values()) < 0.4 * sum(p.numel() for p in actor.published.values())
    weights = [name.removeprefix("weight/") for name in actor.shard_state() if name.startswith("weight/")]
    assert sorted(weights) == sorted(actor.parameters)


@pytest.mark.parametrize("dora", [False, True])
def test_a_checkpoint_goes_on_bit_for_bit(make, dora):
    actor, again = make(lora={**LORA, "dora": dora}), make(lora={**LORA, "dora": dora})
    train(actor)
    again.load_shard_state(actor.shard_state())
    again.lora.load_state(actor.lora.state())
    for each in (actor, again):
        train(each, 1)
    ours, theirs = actor.shard_state(), again.shard_state()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("other", [{"rank": 8}, {"alpha": 9.0}, {"dora": True}, {"targets": ("q_proj",)}])
def test_a_checkpoint_of_another_adapter_is_refused(make, other):
    actor, stranger = make(), make(lora={**LORA, **other})
    with pytest.raises(Refused, match="another adapter"):
        stranger.lora.load_state(actor.lora.state())


def test_a_checkpoint_of_whole_weights_is_refused(make):
    with pytest.raises(Refused, match="another model"):
        make().load_shard_state(make(lora={"rank": 0}).shard_state())


@pytest.mark.parametrize(
    ("targets", "match"),
    [
        (("no_such_layer",), "no_such_layer"),
        (("embed_tokens",), "Embedding"),
        (("q_proj", "lm_head"), "are one weight"),
    ],
)
def test_targets_that_cannot_be_adapted_are_refused(make, targets, match):
    with pytest.raises(ConfigError, match=match):
        make(lora={**LORA, "targets": targets})


@pytest.mark.parametrize(("kind", "layer"), [("GPT2", "Conv1D"), ("Qwen3Moe", "Qwen3MoeExperts")])
def test_another_kind_of_layer_is_refused(make, kind, layer):
    with pytest.raises(ConfigError, match=layer):
        make(kind)


def test_experts_are_left_alone_when_targets_are_named(make):
    batch, targets = make_batch(1), ("q_proj", "v_proj")
    base, actor = make("Qwen3Moe", lora={"rank": 0}), make("Qwen3Moe", lora={**LORA, "targets": targets})
    assert np.array_equal(logprobs(actor, batch), logprobs(base, batch))


def test_targets_are_named_by_their_last_part_where_all_of_that_name_are_adapted(model_of, one_rank):
    def targets(chosen):
        config = run_config(model_of("Qwen2"), lora={**LORA, "targets": chosen})
        model, rows = load_rows(config.model, one_rank)
        return Lora(model, config, rows).about.targets

    assert targets(("v_proj", "q_proj")) == ["q_proj", "v_proj"]
    assert targets(("0.self_attn.q_proj",)) == ["model.layers.0.self_attn.q_proj"]
    assert targets("all-linear") == sorted(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )


def publish(actor, run_dir: Path, number: int = 1):
    from streamrl.config import WeightsConfig

    publisher = Publisher(WeightsConfig(transport="directory"), "r", run_dir)
    snapshot = Copies(actor.published, torch.float32, adapter=actor.adapter).take(actor.published_rows())
    publisher.publish(
        epoch=1,
        version=number,
        step=number,
        tensors=snapshot.tensors,
        adapter=snapshot.adapter,
    )
    return publisher.root / f"v-1-{number}"


def test_a_merged_version_holds_all_weights(make, tmp_path):
    actor = make()
    train(actor)
    folder = publish(actor, tmp_path)
    manifest = read_manifest(folder)
    assert manifest.kind == "full"
    held = map_version(folder, manifest).tensors
    for name, tensor in full_tensors(actor).items():
        torch.testing.assert_close(held[name], tensor, rtol=0, atol=0)


def test_an_adapter_version_holds_the_adapter_and_says_which(make, tmp_path):
    actor = make(lora={**LORA, "publish": "adapter"})
    train(actor)
    folder = publish(actor, tmp_path)
    manifest = read_manifest(folder)
    assert (manifest.kind, manifest.adapter) == ("adapter", actor.lora.about)
    held = map_version(folder, manifest).tensors
    assert held.keys() == adapter_of(actor).keys()
    assert all(torch.equal(held[name], tensor) for name, tensor in adapter_of(actor).items())


@pytest.mark.parametrize("small", [1 << 26, 0])
@pytest.mark.parametrize("dora", [False, True])
def test_recomputed_activations_give_the_same_adapter(make, dora, small):
    actors = [make(lora={**LORA, "dora": dora}, small=small, checkpoint_activations=again) for again in (False, True)]
    for actor in actors:
        train(actor)
    ours, theirs = map(adapter_of, actors)
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-6, atol=1e-6, msg=name)


def test_the_average_of_an_adapter_is_exported_merged(make, model_of, tmp_path):
    actor = make(ema=0.5)
    train(actor)
    now = adapter_of(actor)
    export(actor, tmp_path / "out", average=True)
    held = load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors")
    assert all(not torch.equal(held[name], tensor) for name, tensor in now.items())
    theirs = PeftModel.from_pretrained(plain(model_of("Qwen2")), tmp_path / "out" / "adapter").merge_and_unload()
    for name, tensor in plain(tmp_path / "out").named_parameters():
        torch.testing.assert_close(tensor, theirs.get_parameter(name), rtol=1e-6, atol=1e-6, msg=name)


def test_the_frozen_base_has_the_type_of_the_forward_pass(make):
    batch = make_batch(1)
    actor = make("Qwen2", lora=LORA, dtype="bfloat16")
    before = logprobs(actor, batch)
    actor.update_policy(batch)
    assert {weight.dtype for weight in actor._frozen.values()} == {torch.bfloat16}
    assert {weight.dtype for weight in actor.parameters.values()} == {torch.float32}
    assert not np.array_equal(logprobs(actor, batch), before)
