"""Schedules against numbers worked out by hand, the average of the weights, and moments that live on the host."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Shard

from streamrl.config.learner import LearnerConfig
from streamrl.errors import Refused
from streamrl.learner.algorithms.tokens import Sums
from streamrl.learner.optimizer import ShardedAdamW, learning_rate


def rates(count, **learner):
    config = LearnerConfig(lr=1.0, **learner)
    return [learning_rate(config, updates) for updates in range(count)]


def test_constant_after_a_linear_warm_up():
    assert rates(6, warmup_steps=4) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])
    assert rates(2) == [1, 1]


def test_linear_to_the_floor():
    # After 2 of 6 steps: x = 0, 1/4, 2/4, 3/4, then 1 for good.
    found = rates(8, warmup_steps=2, steps=6, schedule="linear", lr_floor=0.2)
    assert found == pytest.approx([0.5, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_cosine_to_the_floor():
    found = rates(6, steps=4, schedule="cosine", lr_floor=0.1)
    half = math.sqrt(2) / 2
    expected = [1, 0.1 + 0.9 * (1 + half) / 2, 0.55, 0.1 + 0.9 * (1 - half) / 2, 0.1, 0.1]
    assert found == pytest.approx(expected)


def test_several_updates_of_a_step_are_parts_of_it():
    options = {"warmup_steps": 2, "steps": 6, "schedule": "linear"}
    one, four = rates(12, **options), rates(24, passes=2, mini_batches=2, **options)
    assert four[7] == one[1] == 1
    # At the beginning of each step behind the warm-up the rate is that of one update per step.
    assert [four[4 * step] for step in range(2, 6)] == pytest.approx(one[2:6])


@given(
    st.integers(0, 300),
    st.integers(0, 50),
    st.integers(1, 100),
    st.sampled_from(["constant", "linear", "cosine"]),
    st.floats(0, 1),
    st.integers(1, 3),
)
def test_a_rate_is_between_zero_and_lr_and_falls_after_the_warm_up(updates, warmup, steps, schedule, floor, each):
    config = LearnerConfig(
        lr=2.0, warmup_steps=warmup, steps=steps, schedule=schedule, lr_floor=floor, mini_batches=each
    )
    now, then = learning_rate(config, updates), learning_rate(config, updates + 1)
    assert 0 <= now <= 2
    if updates >= warmup * each:
        assert 2 * floor - 1e-12 <= then <= now + 1e-12


def parameters(one_rank, seed=0):
    torch.manual_seed(seed)
    tensors = {"weight": torch.randn(4, 3), "bias": torch.randn(5)}
    return {
        name: torch.nn.Parameter(DTensor.from_local(tensor, one_rank.mesh, [Shard(0)]))
        for name, tensor in tensors.items()
    }


def average(optimizer):
    """The average by parameter, as a state holds it."""
    return {name.removeprefix("ema/"): rows for name, rows in optimizer.state().items() if name.startswith("ema/")}


def train(optimizer, parameters, steps, lr_factor=lambda _: 1.0):
    """Some steps; the statistics of the last one."""
    for step in range(steps):
        torch.manual_seed(step)
        for parameter in parameters.values():
            gradient = torch.randn(parameter.to_local().shape)
            parameter.grad = DTensor.from_local(gradient, parameter.device_mesh, parameter.placements)
        stats = optimizer.step(1, torch.zeros(2, dtype=torch.float64), Sums, lr_factor)
    return stats


def test_the_average_is_the_recurrence_and_begins_at_the_first_weights(one_rank):
    mine = parameters(one_rank)
    optimizer = ShardedAdamW(mine, LearnerConfig(lr=0.1, ema=0.9), one_rank)
    expected = {name: parameter.to_local().double() for name, parameter in mine.items()}
    for name, tensor in average(optimizer).items():
        assert torch.equal(tensor.double(), expected[name])
    for _ in range(5):
        train(optimizer, mine, 1)
        expected = {name: 0.9 * expected[name] + 0.1 * mine[name].to_local().double() for name in mine}
    for name, tensor in average(optimizer).items():
        torch.testing.assert_close(tensor.double(), expected[name], rtol=1e-6, atol=1e-6)


def test_the_decay_is_per_step_also_with_several_updates(one_rank):
    """Weights that jump once and stay: after one step the average has gone 1 - ema of the way."""
    mine = parameters(one_rank)
    optimizer = ShardedAdamW(mine, LearnerConfig(lr=0.1, ema=0.8, passes=3), one_rank)
    start = average(optimizer)
    with torch.no_grad():
        for parameter in mine.values():
            parameter.to_local().add_(1.0)
    train(optimizer, mine, 3, lr_factor=lambda _: 0.0)
    for name, tensor in average(optimizer).items():
        torch.testing.assert_close(tensor, start[name] + 0.2)


def test_none_is_kept_unless_asked_for(one_rank):
    optimizer = ShardedAdamW(parameters(one_rank), LearnerConfig(), one_rank)
    assert average(optimizer) == {}
    assert not any(name.startswith("ema/") for name in optimizer.state())


def test_the_scale_of_the_learning_rate_is_of_one_update(one_rank):
    halved, plain = parameters(one_rank), parameters(one_rank)
    first, second = (
        ShardedAdamW(halved, LearnerConfig(lr=0.2), one_rank),
        ShardedAdamW(plain, LearnerConfig(lr=0.1), one_rank),
    )
    train(first, halved, 2, lr_factor=lambda _: 0.5)
    train(second, plain, 2)
    for name in plain:
        assert torch.equal(halved[name].to_local(), plain[name].to_local())
    assert train(first, halved, 1).lr == 0.2


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_state_goes_on_bit_for_bit(one_rank, ema):
    config = LearnerConfig(lr=0.1, ema=ema, schedule="cosine", steps=6, warmup_steps=2)
    mine, other = parameters(one_rank), parameters(one_rank, seed=1)
    first, second = ShardedAdamW(mine, config, one_rank), ShardedAdamW(other, config, one_rank)
    train(first, mine, 3)
    second.load(first.state())
    for optimizer, weights in ((first, mine), (second, other)):
        train(optimizer, weights, 2)
    assert same(first.state(), second.state())
    assert first.updates == second.updates


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_an_average_that_comes_later_begins_at_the_loaded_weights_and_one_that_goes_is_left_out(one_rank):
    mine, other = parameters(one_rank), parameters(one_rank, seed=1)
    without, with_ = (
        ShardedAdamW(mine, LearnerConfig(lr=0.1), one_rank),
        ShardedAdamW(other, LearnerConfig(lr=0.1, ema=0.9), one_rank),
    )
    train(without, mine, 2)
    with_.load(without.state())
    for name, tensor in average(with_).items():
        assert torch.equal(tensor, mine[name].to_local())
    train(with_, other, 1)
    without.load(with_.state())
    assert torch.equal(mine["weight"].to_local(), other["weight"].to_local())


def test_half_an_average_is_refused(one_rank):
    optimizer = ShardedAdamW(parameters(one_rank), LearnerConfig(ema=0.9), one_rank)
    state = optimizer.state()
    del state["ema/bias"]
    with pytest.raises(Refused, match="ema/bias"):
        optimizer.load(state)


def test_a_checkpoint_of_weights_that_were_rolled_back_goes_on(one_rank):
    """Earlier code began the moments anew: the first update after that moves every weight by its learning rate."""
    mine = parameters(one_rank)
    optimizer = ShardedAdamW(mine, LearnerConfig(lr=0.1), one_rank)
    state = {name: torch.zeros_like(tensor) for name, tensor in optimizer.state().items()}
    for name, count in (("updates", 5), ("updates_before_moments", 5)):
        state[name] = torch.tensor(count)
    for name in ("updates_of_head_alone", "updates_of_head_alone_before_moments"):
        state[name] = torch.tensor(0)
    optimizer.load(state)
    optimizer.load(optimizer.state())
    assert optimizer.updates == 5
    train(optimizer, mine, 1)
    for parameter in mine.values():
        moved = parameter.to_local().abs()
        torch.testing.assert_close(moved, torch.full_like(moved, 0.1), rtol=1e-4, atol=0)


def test_moments_on_the_host_change_nothing(one_rank):
    config = LearnerConfig(lr=0.1, ema=0.9)
    mine, other = parameters(one_rank), parameters(one_rank)
    still, moved = ShardedAdamW(mine, config, one_rank), ShardedAdamW(other, config, one_rank, offload=True)

    def away():
        return {name for name, tensor in moved.live().items() if not tensor.untyped_storage().nbytes()}

    everything = {f"{kind}/{name}" for kind in ("exp_avg", "exp_avg_sq", "ema") for name in mine}
    for steps in (2, 1):
        assert away() == everything
        for optimizer, weights in ((still, mine), (moved, other)):
            train(optimizer, weights, steps)
    assert same(still.state(), moved.state())
    for name, tensor in average(moved).items():
        assert torch.equal(tensor, average(still)[name])
    moved.load(still.state())
    assert away() == everything
