"""Each edge of cutting tensors into files."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sync_kit import tensors

from streamrl.config import WeightsConfig
from streamrl.weight_sync.manifest import decode
from streamrl.weight_sync.publisher import Publisher
from streamrl.weight_sync.tensors import buckets


def cut(sizes, limit):
    named = [(str(place), torch.zeros(size, dtype=torch.uint8)) for place, size in enumerate(sizes)]
    return [[tensor.nbytes for _, tensor in bucket] for bucket in buckets(named, limit)]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([0], [[0]]),
        ([10], [[10]]),
        ([4, 6], [[4, 6]]),  # exactly full
        ([4, 7], [[4], [7]]),  # one byte over
        ([11], [[11]]),  # too large for any: its own
        ([1, 11, 1], [[1], [11], [1]]),
        ([11, 12], [[11], [12]]),
        ([10, 0, 1], [[10, 0], [1]]),
        ([5, 5, 5, 5], [[5, 5], [5, 5]]),
    ],
)
def test_the_limit_is_a_size_that_is_allowed(sizes, expected):
    assert cut(sizes, 10) == expected


@given(st.lists(st.integers(0, 30), max_size=30), st.integers(1, 30))
def test_nothing_is_lost_and_no_bucket_could_take_one_more(sizes, limit):
    found = cut(sizes, limit)
    assert [size for bucket in found for size in bucket] == sizes
    assert all(sum(bucket) <= limit or len(bucket) == 1 for bucket in found)
    for bucket, following in itertools.pairwise(found):
        assert sum(bucket) + following[0] > limit


def test_tensors_are_taken_one_by_one():
    taken = []

    def source():
        for place in range(6):
            taken.append(place)
            yield str(place), torch.zeros(4, dtype=torch.uint8)

    walk = buckets(source(), 8)
    assert [name for name, _ in next(walk)] == ["0", "1"]
    assert taken == [0, 1, 2]  # the bucket and the tensor that did not fit


def test_every_tensor_is_aligned_for_its_type(tmp_path):
    """A reader views the values where they lie, which needs addresses that are multiples of the element size."""
    config = WeightsConfig(transport="directory", shard_bytes=1 << 20)
    odd = {"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(5), "c": torch.ones(3, dtype=torch.int64)}
    publisher = Publisher(config, "r", tmp_path)
    manifest = decode(publisher.publish(epoch=1, version=1, step=0, tensors=[*odd.items(), *tensors().items()]))
    [shard] = manifest.shards
    data = (publisher.root / manifest.folder / shard.file).read_bytes()
    import orjson

    start = 8 + int.from_bytes(data[:8], "little")
    assert start % 64 == 0
    widths = {"U8": 1, "F32": 4, "I64": 8}
    for entry in orjson.loads(data[8:start]).values():
        assert (start + entry["data_offsets"][0]) % widths[entry["dtype"]] == 0
