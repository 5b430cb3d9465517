"""Tensors that move to the host and back under whoever holds them."""

from __future__ import annotations

import pytest
import torch

from streamrl.learner.optimizer import Offload


def test_views_and_optimizer_go_on_bit_for_bit_as_if_nothing_had_moved():
    def steps(moving: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        flat = torch.randn(64)
        weight, bias = flat[:48].view(6, 8).requires_grad_(), flat[48:54].requires_grad_()
        adamw = torch.optim.AdamW([weight, bias], lr=0.1)
        offload = None
        for _ in range(5):
            (torch.randn(3, 8) @ weight.T + bias).square().sum().backward()
            adamw.step()
            adamw.zero_grad()
            if moving:
                states = [value for state in adamw.state.values() for value in state.values()]
                offload = offload or Offload([weight, bias, *states])
                offload.to_host()
                assert weight.untyped_storage().nbytes() == 0
                offload.to_device()
        return [weight.detach(), bias.detach()]

    for still, moved in zip(steps(False), steps(True), strict=True):
        assert torch.equal(still, moved)


def test_repeats_do_nothing_and_shared_storages_move_once():
    tensor = torch.arange(10.0)
    offload = Offload([tensor, tensor[2:], tensor.view(2, 5)])
    for _ in range(2):
        offload.to_host()
        assert tensor.untyped_storage().nbytes() == 0
    for _ in range(2):
        offload.to_device()
        assert tensor.untyped_storage().nbytes() == 40
    assert torch.equal(tensor, torch.arange(10.0))


def test_a_device_without_room_leaves_everything_on_the_host(monkeypatch):
    tensors = [torch.full((10,), float(number)) for number in range(3)]
    offload = Offload(tensors)
    offload.to_host()
    original = torch.UntypedStorage.resize_
    grown = []

    def full(storage, size):
        if size and len(grown) == 2:
            raise RuntimeError("out of memory")
        grown.append(size)
        return original(storage, size)

    with monkeypatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "resize_", full)
        with pytest.raises(RuntimeError, match="out of memory"):
            offload.to_device()
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
    offload.to_device()
    assert [float(tensor[3]) for tensor in tensors] == [0.0, 1.0, 2.0]


def test_what_is_constant_is_copied_once():
    tensor = torch.arange(10.0)
    offload = Offload([tensor], constant=True)
    offload.to_host()
    offload.to_device()
    tensor.zero_()  # nobody does that to what is constant; here it shows that nothing is copied
    offload.to_host()
    offload.to_device()
    assert torch.equal(tensor, torch.arange(10.0))
