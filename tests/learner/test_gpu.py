"""What only a card shows: where memory is, and that a step has run when it is said to have."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from tiny_policy import make_batch, run_config

from streamrl.learner.policy import Actor
from streamrl.learner.ranks import Ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]


@pytest.fixture
def actor(model_of):
    """One rank on a card, with the types that are the default there."""
    ranks = Ranks(rank=0, world=1, device=torch.device("cuda", 0), deadline=60)
    yield Actor(run_config(model_of("Qwen2"), device="cuda", dtype="bfloat16"), ranks)
    ranks.close()


def test_a_model_that_left_the_card_keeps_nothing_of_it(actor):
    batch = make_batch(0)
    before = actor.compute_log_prob(batch).logprobs
    there = torch.cuda.memory_allocated()
    for _ in range(2):
        actor.to_host()
        assert torch.cuda.memory_allocated() < there
        assert actor.ranks.give_back_memory() == torch.cuda.memory_reserved()
        actor.to_device()
    assert all(
        (ours == theirs).all() for ours, theirs in zip(actor.compute_log_prob(batch).logprobs, before, strict=True)
    )


def test_copies_for_a_checkpoint_are_page_locked_once(actor):
    actor.update_policy(make_batch(0))
    first = {name: tensor.data_ptr() for name, tensor in actor.shard_state().items() if tensor.is_pinned()}
    actor.update_policy(make_batch(1))
    state = actor.shard_state()
    assert first == {name: tensor.data_ptr() for name, tensor in state.items() if tensor.is_pinned()}
    assert set(first) == {name for name in state if name != "updates"}
    assert all(torch.equal(state[name], tensor.cpu()) for name, tensor in actor._optimizer.live().items())
