"""Layers that are recomputed or compiled, and an output layer in float32: the same numbers."""

import logging

import pytest
import torch
from tiny_policy import VOCABULARY
from torch import nn
from transformers import AutoModelForCausalLM

from streamrl.config.learner import LearnerConfig
from streamrl.errors import ConfigError
from streamrl.learner.model import LogProbModel, compile_layers, decoder_layers, set_up_layers


def load(path, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")


def rows(width=24):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (3, width), generator=generator)
    positions = torch.arange(3 * width).reshape(3, width)[:, :-1].flatten()
    return {
        "input_ids": ids,
        "visible_until": None,
        "position_ids": None,
        "positions": positions,
        "targets": ids[:, 1:].flatten(),
    }


def results(model, width=24):
    """Log-probabilities, gradients, and bytes that autograd keeps between forward and backward."""
    wrapped, kept = LogProbModel(model, temperature=1.0, chunk=1000), {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logprobs, _ = wrapped(**rows(width))
    torch.autograd.backward((logprobs * torch.linspace(-1, 1, len(logprobs))).sum())
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return logprobs.detach(), gradients, sum(kept.values())


def assert_same(left, right, tolerance=1e-5):
    torch.testing.assert_close(left[0], right[0], rtol=tolerance, atol=tolerance)
    assert left[1].keys() == right[1].keys()
    for name in left[1]:
        torch.testing.assert_close(left[1][name], right[1][name], rtol=tolerance, atol=tolerance, msg=name)


def warnings(caplog):
    """Ours: torch writes a trace of its own while it compiles."""
    return [record for record in caplog.records if record.name.startswith("streamrl")]


@pytest.mark.parametrize("kind", ["Qwen2", "GPTNeoX", "Gemma2", "Qwen3Moe"])
def test_recomputed_layers_give_the_same_bits_and_keep_less(model_of, kind):
    plain, recomputed = load(model_of(kind)), load(model_of(kind))
    names = [name for name, _ in recomputed.named_parameters()]
    set_up_layers(recomputed, LearnerConfig(checkpoint_activations=True))
    assert [name for name, _ in recomputed.named_parameters()] == names
    first, second = results(plain), results(recomputed)
    assert_same(second, first, tolerance=0)
    assert second[2] < first[2] * 0.8


@pytest.mark.parametrize("kind", ["Qwen2", "Gemma2"])
@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_layers_give_the_same_for_all_shapes(model_of, kind, recompute):
    """Traced and differentiated ahead of time as for a real backend, which here runs the operations one by one."""
    plain, compiled = load(model_of(kind)), load(model_of(kind))
    compile_layers(decoder_layers(compiled), backend="aot_eager")
    set_up_layers(compiled, LearnerConfig(checkpoint_activations=recompute))
    for width in (24, 16, 40):
        assert_same(results(compiled, width), results(plain, width))


@pytest.mark.slow
def test_compiled_by_a_real_compiler(model_of, caplog, monkeypatch):
    # Otherwise it compiles and runs a program for every instruction set of this processor.
    monkeypatch.setattr("torch._inductor.config.cpp.vec_isa_ok", True)
    plain, compiled = load(model_of("Llama")), load(model_of("Llama"))
    with caplog.at_level(logging.WARNING, "streamrl"):
        set_up_layers(compiled, LearnerConfig(compile=True))
        for width in (24, 40):
            assert_same(results(compiled, width), results(plain, width))
    assert not warnings(caplog)


@pytest.mark.parametrize("option", ["compile", "checkpoint_activations"])
def test_a_model_without_known_layers_is_refused(model_of, option):
    model = load(model_of("Qwen2"))
    model._no_split_modules = None
    with pytest.raises(ConfigError, match=f"learner.{option}.*Qwen2ForCausalLM") as caught:
        set_up_layers(model, LearnerConfig(**{option: True}))
    assert "false" in caught.value.hint
    set_up_layers(model, LearnerConfig())


@pytest.mark.parametrize("kind", ["Qwen2", "Llama", "Gemma2", "GPTNeoX"])
def test_logits_in_float32_from_a_model_in_bfloat16(model_of, kind):
    """Exactly the float32 product of the bfloat16 numbers; without it the logits have 8 bits."""
    rough, exact = load(model_of(kind), torch.bfloat16), load(model_of(kind), torch.bfloat16)
    set_up_layers(exact, LearnerConfig(head_float32=True))
    hidden = torch.randn(50, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    heads = [LogProbModel(model, temperature=1.0, chunk=64).logits(hidden) for model in (rough, exact)]
    assert heads[1].dtype == torch.float32
    expected = load(model_of(kind)).bfloat16().float()
    truth = LogProbModel(expected, temperature=1.0, chunk=64).logits(hidden.float())
    torch.testing.assert_close(heads[1], truth, rtol=1e-5, atol=1e-5)
    assert (heads[0].float() - truth).abs().max() > 100 * (heads[1] - truth).abs().max()
    _, gradients, _ = results(exact)
    assert all(bool(gradient.any()) for name, gradient in gradients.items() if "bias" not in name)


def test_an_output_layer_that_is_no_plain_one_is_refused(model_of):
    model = load(model_of("Qwen2"))
    model.set_output_embeddings(nn.Sequential(nn.Linear(32, VOCABULARY)))
    with pytest.raises(ConfigError, match=r"learner\.head_float32.*Sequential"):
        set_up_layers(model, LearnerConfig(head_float32=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_logits_in_float32_on_a_gpu_are_those_of_float32_copies(model_of):
    exact, plain = (load(model_of("Llama"), torch.bfloat16).cuda() for _ in range(2))
    set_up_layers(exact, LearnerConfig(head_float32=True))
    hidden = torch.randn(1, 9, exact.config.hidden_size, device="cuda", dtype=torch.bfloat16)
    ours, head = exact.get_output_embeddings()(hidden), plain.get_output_embeddings()
    expected = torch.nn.functional.linear(hidden.float(), head.weight.float())
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    torch.autograd.backward([ours.sum(), expected.sum()])
    torch.testing.assert_close(exact.get_output_embeddings().weight.grad, head.weight.grad, rtol=1e-2, atol=1e-2)
