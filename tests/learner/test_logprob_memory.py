"""Peak memory of log-probabilities grows with the chunk, not with tokens x vocabulary."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from streamrl.learner.model import token_logprobs

HIDDEN, VOCABULARY = 8, 2001
LOGITS = 4 * VOCABULARY
"""Bytes of the logits of one token."""


class PeakMemory(TorchDispatchMode):
    """Bytes of all storages that operations made and that are alive at the same time, at their peak."""

    def __init__(self):
        super().__init__()
        self.alive, self.peak = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                if storage._cdata not in self.alive:
                    self.alive[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.alive.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self.alive.values()))
        return result


def peak(count, chunk, *, backward=True, entropy=False):
    torch.manual_seed(0)
    weight = torch.randn(VOCABULARY, HIDDEN, requires_grad=True)
    hidden = torch.randn(count, HIDDEN, requires_grad=True)
    targets = torch.randint(VOCABULARY, (count,))
    with PeakMemory() as memory, torch.set_grad_enabled(backward):
        logprobs, spread = token_logprobs(
            lambda states: states @ weight.t(), hidden, targets, temperature=0.7, chunk=chunk, entropy=entropy
        )
        if backward:
            torch.autograd.backward(logprobs.sum() + (spread.sum() if entropy else 0))
    return memory.peak


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_twice_the_tokens_with_the_same_chunk_need_no_more_logits(backward, entropy):
    one, two, four = (peak(count, 20, backward=backward, entropy=entropy) for count in (100, 200, 400))
    # What grows is what is kept of each token outside of the logits: targets, results, hidden states, their gradient.
    per_token = 8 * (4 * HIDDEN + 40)
    assert two - one <= 100 * per_token
    assert four - two <= 200 * per_token
    assert 200 * per_token < 100 * LOGITS / 2, "a logit per token and word would be seen"


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_twice_the_chunk_needs_twice_the_memory(backward, entropy):
    small, large = (peak(400, chunk, backward=backward, entropy=entropy) for chunk in (20, 40))
    fixed = 400 * 8 * (4 * HIDDEN + 40) + 3 * LOGITS * HIDDEN
    assert 20 * LOGITS <= large - small <= 20 * LOGITS * 8
    assert large <= 40 * LOGITS * 8 + fixed


def test_all_at_once_needs_all_logits():
    assert peak(400, 400) >= 400 * LOGITS
    assert peak(400, 20) < 400 * LOGITS / 2
