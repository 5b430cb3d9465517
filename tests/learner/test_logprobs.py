"""Chunked log-probabilities: the same numbers and gradients as the full logits, without the full logits."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from streamrl.learner.model import token_logprobs

COUNT, HIDDEN, VOCABULARY = 50, 8, 97


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


@pytest.fixture
def problem():
    torch.manual_seed(0)
    weight = torch.randn(VOCABULARY, HIDDEN, requires_grad=True)
    hidden = torch.randn(COUNT, HIDDEN, requires_grad=True)
    return weight, hidden, torch.randint(VOCABULARY, (COUNT,))


def run(problem, chunk, temperature=1.0, entropy=False):
    weight, hidden, targets = problem
    with BiggestTensor() as biggest:
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
    return logprobs.detach(), spread, gradients, biggest.elements


@pytest.mark.parametrize("chunk", [1, 7, 25, 49, 50, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_equals_the_full_softmax(problem, chunk, temperature):
    weight, hidden, targets = problem
    logprobs, spread, gradients, _ = run(problem, chunk, temperature, entropy=True)
    full = torch.log_softmax((hidden.double() @ weight.double().t()) / temperature, dim=-1)
    chosen = full[torch.arange(COUNT), targets]
    entropy = -(full.exp() * full).sum(dim=-1)
    expected = torch.autograd.grad((chosen * torch.linspace(-1, 1, COUNT)).sum() + entropy.sum(), (weight, hidden))
    torch.testing.assert_close(logprobs.double(), chosen, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(spread.double(), entropy, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs.float(), rtol=1e-4, atol=1e-5)


def test_the_biggest_tensor_is_the_chunk_forward_and_backward(problem):
    sizes = {chunk: run(problem, chunk)[3] for chunk in (10, 20, 50)}
    assert sizes == {10: 10 * VOCABULARY, 20: 20 * VOCABULARY, 50: 50 * VOCABULARY}


def test_chunks_hold_without_gradients_too(problem):
    weight, hidden, targets = problem
    with torch.no_grad(), BiggestTensor() as biggest:
        token_logprobs(lambda x: x @ weight.t(), hidden, targets, temperature=1, chunk=10, entropy=True)
    assert biggest.elements == 10 * VOCABULARY


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
