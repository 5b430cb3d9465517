"""What is checked of the values of a version: one that is not finite is found wherever it is, in any type."""

import itertools

import pytest
import torch

from streamrl.weight_sync.tensors import is_finite

SIZES = (1, 2, 15, 16, 17, 33, 64, 1023, 40_001)
WIDE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_value_that_is_not_finite_is_found_at_any_place(dtype, value):
    for size in SIZES:
        for place in {0, size // 3, size // 2, size - 1}:
            values = torch.ones(size).to(dtype)
            values[place] = value
            assert not is_finite(values)


@pytest.mark.parametrize("dtype", WIDE)
def test_the_largest_numbers_of_a_type_are_finite(dtype):
    info = torch.finfo(dtype)
    for size, value in itertools.product(SIZES, (info.max, info.min, info.tiny, -0.0)):
        assert is_finite(torch.full((size,), value, dtype=dtype))
    assert is_finite(torch.empty(0, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8(dtype):
    values = torch.ones(64).to(dtype)
    assert is_finite(values)
    values[40] = float("nan")
    assert not is_finite(values)
