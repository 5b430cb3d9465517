"""Rows under a block mask give what each response gives alone, and nothing of width^2 is made for them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_families import FAMILIES, gradient_of, same
from tiny_policy import lay_out, make_batch, run_config
from torch.nn.attention.flex_attention import create_block_mask
from transformers import AutoModelForCausalLM
from tree_kit import make_episodes

from streamrl.learner.batch import RowLimits, pack
from streamrl.learner.model import block_mask, dense_mask, set_rows_attention, takes_flex
from streamrl.learner.policy import Actor

BATCHES = st.one_of(
    st.builds(make_batch, st.integers(0, 10_000), st.integers(1, 8), st.integers(1, 8)),
    st.builds(make_episodes, st.integers(0, 10_000), st.integers(1, 8), st.integers(1, 8)),
)


@settings(max_examples=30, deadline=None)
@given(BATCHES)
def test_the_blocks_of_packed_rows_are_those_of_the_mask(batch):
    for part in pack(batch, RowLimits(tokens=1024, shared=512, packed=True)):
        until = torch.from_numpy(part.visible_until)
        rows, width = until.shape
        expected = create_block_mask(
            lambda row, _, query, key, until=until: (key <= query) & (query < until[row, key]),
            rows,
            None,
            width,
            width,
            device="cpu",
        )
        found = block_mask(until)
        for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
            assert torch.equal(getattr(found, name), getattr(expected, name)), name
        assert torch.equal(found.to_dense(), expected.to_dense())


def test_a_block_mask_of_16k_tokens_is_small():
    mask = block_mask(torch.full((1, 1 << 14), 1 << 14))
    tensors = [value for value in vars(mask).values() if isinstance(value, torch.Tensor)]
    assert sum(tensor.nbytes for tensor in tensors) < 1 << 19


@pytest.mark.slow
def test_flex_attention_gives_what_a_dense_mask_gives(model_of):
    """The forward pass; on a CPU flex attention has no other."""
    model = AutoModelForCausalLM.from_pretrained(model_of("Qwen3"), attn_implementation="sdpa").eval()
    (part,) = pack(make_batch(0, groups=6), RowLimits(tokens=1024, shared=1024, packed=True))
    until, ids = torch.from_numpy(part.visible_until), torch.from_numpy(part.input_ids)
    places = torch.from_numpy(part.position_ids)
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=dense_mask(until, torch.float32), position_ids=places).logits
        plain = model(input_ids=ids).logits
        set_rows_attention(model)
        found = model(input_ids=ids, attention_mask=block_mask(until), position_ids=places).logits
        assert torch.equal(model(input_ids=ids).logits, plain), "without a mask it is sdpa"
    real = until[0] < 1 << 30
    torch.testing.assert_close(found[:, real], expected[:, real], rtol=1e-5, atol=1e-5)


def test_missing_flex_attention_is_said_with_its_price(model_of, caplog, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(model_of("Qwen3"))
    assert not takes_flex(model, torch.device("cpu"), "sdpa")
    assert not caplog.records, "a CPU has no fast kernels of it"
    monkeypatch.setattr("streamrl.learner.model.is_torch_flex_attn_available", lambda: False)
    assert not takes_flex(model, torch.device("cuda"), "sdpa")
    assert "rows are shared up to 2048 tokens only" in caplog.text


def test_flex_attention_that_fails_leaves_rows_under_a_dense_mask(model_of, one_rank, caplog, monkeypatch):
    def takes(model, *_):
        set_rows_attention(model)
        return True

    def fail(_):
        raise RuntimeError("no compiler")

    monkeypatch.setattr("streamrl.learner.model_loading.takes_flex", takes)
    monkeypatch.setattr("streamrl.learner.model.block_mask", fail)
    actor = Actor(on_sdpa(run_config(model_of("Qwen3"))), one_rank)
    assert "flex attention fails" in caplog.text
    assert "no compiler" in caplog.text
    assert "pass of its own" not in caplog.text
    assert not actor.limits.packed
    assert actor.limits.shared
    assert len(actor.compute_log_prob(make_batch(0, groups=2)).logprobs) == len(make_batch(0, groups=2))


def on_sdpa(config):
    return config.model_copy(update={"model": config.model.model_copy(update={"attention": "sdpa"})})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind != "Gemma2"])  # its soft caps need eager
def test_packed_rows_on_a_gpu_equal_each_response_alone(model_of, kind, dtype):
    from streamrl.learner.ranks import Ranks

    ranks = Ranks(rank=0, world=1, device=torch.device("cuda:0"), deadline=60)
    try:
        batch = make_batch(0, groups=6) + make_episodes(1)
        batch = [replace(sample, group_id=number // 4) for number, sample in enumerate(batch)]
        actor = Actor(on_sdpa(run_config(model_of(kind), dtype=dtype)), ranks)
        assert actor.limits.packed
        assert actor.limits.shared
        tolerance = 1e-4 if dtype == "float32" else 5e-2
        packed = actor.compute_log_prob(batch).logprobs
        actor.accumulate(batch)
        gradients = gradient_of(actor)
        actor.discard()
        apart = lay_out(actor, "apart").compute_log_prob(batch).logprobs
        for ours, theirs in zip(packed, apart, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)
        if dtype == "float32":
            actor.accumulate(batch)
            same(gradients, gradient_of(actor))
    finally:
        ranks.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_of_shared_rows_on_a_gpu_is_linear_in_their_length(model_of):
    from streamrl.learner.ranks import Ranks

    ranks, peaks = Ranks(rank=0, world=1, device=torch.device("cuda:0"), deadline=60), []
    try:
        for tokens in (8192, 16384):
            actor = Actor(on_sdpa(run_config(model_of("Llama"), tokens_per_microbatch=tokens)), ranks)
            assert actor.limits.shared == tokens
            batch = make_batch(0, groups=tokens // 64, size=4)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            actor.accumulate(batch)
            peaks.append(torch.cuda.max_memory_allocated() - before)
        assert peaks[1] < 2.5 * peaks[0]
    finally:
        ranks.close()
