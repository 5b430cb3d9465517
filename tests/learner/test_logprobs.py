"""Chunked log-probabilities: the same numbers and gradients as the full logits, in the memory of a chunk."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from streamrl.learner.model import token_logprobs

COUNT, HIDDEN, VOCABULARY = 50, 8, 97


@pytest.fixture
def problem():
    torch.manual_seed(0)
    weight = torch.randn(VOCABULARY, HIDDEN, requires_grad=True)
    hidden = torch.randn(COUNT, HIDDEN, requires_grad=True)
    return weight, hidden, torch.randint(VOCABULARY, (COUNT,))


def run(problem, chunk, temperature=1.0, entropy=False):
    weight, hidden, targets = problem
    logprobs, spread = token_logprobs(
        lambda states: states @ weight.t(),
        hidden,
        targets,
        temperature=temperature,
        chunk=chunk,
        entropy=entropy,
        entropy_gradient=entropy,
    )
    scale = torch.linspace(-1, 1, COUNT)
    gradients = torch.autograd.grad((logprobs * scale).sum() + (spread.sum() if entropy else 0), (weight, hidden))
    return logprobs.detach(), spread, gradients


@pytest.mark.parametrize("chunk", [1, 7, 25, 49, 50, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_equals_the_full_softmax(problem, chunk, temperature):
    weight, hidden, targets = problem
    logprobs, spread, gradients = run(problem, chunk, temperature, entropy=True)
    full = torch.log_softmax((hidden.double() @ weight.double().t()) / temperature, dim=-1)
    chosen = full[torch.arange(COUNT), targets]
    entropy = -(full.exp() * full).sum(dim=-1)
    expected = torch.autograd.grad((chosen * torch.linspace(-1, 1, COUNT)).sum() + entropy.sum(), (weight, hidden))
    torch.testing.assert_close(logprobs.double(), chosen, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(spread.double(), entropy, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs.float(), rtol=1e-4, atol=1e-5)


def test_softmax_is_in_float32_for_bfloat16_logits(problem):
    weight, hidden, targets = problem
    logprobs, _ = token_logprobs(
        lambda x: x @ weight.bfloat16().t(), hidden.bfloat16(), targets, temperature=1, chunk=16
    )
    assert logprobs.dtype == torch.float32
    logits = (hidden.bfloat16() @ weight.bfloat16().t()).float()
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1)[torch.arange(COUNT), targets])


def test_entropy_of_a_certain_distribution_is_zero():
    logits = torch.tensor([[0.0, -torch.inf, -torch.inf]])
    _, entropy = token_logprobs(lambda _: logits, logits, torch.tensor([0]), temperature=1, chunk=4, entropy=True)
    assert entropy.item() == 0


WORDS = 2001
LOGITS = 4 * WORDS
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
    weight = torch.randn(WORDS, HIDDEN, requires_grad=True)
    hidden = torch.randn(count, HIDDEN, requires_grad=True)
    targets = torch.randint(WORDS, (count,))
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


def test_all_at_once_needs_all_logits():
    assert peak(400, 400) >= 400 * LOGITS
    assert peak(400, 20) < 400 * LOGITS / 2
