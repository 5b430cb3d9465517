"""A delta gives back every bit, and whatever is no delta of this part changes nothing."""

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.errors import WeightsError
from streamrl.weight_sync import delta as delta_module
from streamrl.weight_sync.delta import Encoded, changed, decode_into, encode, read_delta_shard, write_delta_shard
from streamrl.weight_sync.files import checksum
from streamrl.weight_sync.manifest import Shard

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.bool]

MAKES = "0" * 32


def bits(tensor):
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def random_bits(count, dtype, seed):
    width = torch.empty((), dtype=dtype).element_size()
    raw = np.random.default_rng(seed).integers(0, 2 if dtype == torch.bool else 256, (count, width), dtype=np.uint8)
    return torch.from_numpy(raw.reshape(-1)).view(dtype).clone()


def flip(tensor, places):
    """Other bits at these elements: the lowest bit is turned over."""
    new = tensor.clone()
    view = new.view(torch.uint8).view(len(new), new.element_size())
    view[places, 0] ^= 1
    return new


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_bit_comes_back(data):
    dtype = data.draw(st.sampled_from(DTYPES))
    count = data.draw(st.sampled_from([0, 1, 2, 254, 255, 256, 257, 511, 1000]))
    places = data.draw(st.sets(st.integers(0, count - 1), max_size=40)) if count else set()
    if data.draw(st.booleans()):
        places = set(range(count)) - places
    old = random_bits(count, dtype, data.draw(st.integers(0, 99)))
    new = flip(old, sorted(places))
    encoded = encode(old, new)
    assert changed(old, new) == len(places)
    if not places:
        assert encoded is None
        return
    assert encoded.count == len(places)
    target = old.clone()
    for _ in range(2):  # a repeat changes nothing
        decode_into(target, encoded)
        assert bits(target) == bits(new)


@pytest.mark.parametrize("places", [[0], [999], [0, 999], [255], [256, 511], list(range(1000)), [500, 501, 502]])
def test_pieces_of_any_size_join(monkeypatch, places):
    new = flip(torch.zeros(1000, dtype=torch.int16), places)
    whole = encode(torch.zeros_like(new), new)
    for chunk in (1, 2, 3, 7, 256):
        monkeypatch.setattr(delta_module, "_CHUNK", chunk)
        old = torch.zeros_like(new)
        encoded = encode(old, new)
        assert encoded.gaps.tolist() == whole.gaps.tolist()
        assert encoded.values.tolist() == whole.values.tolist()
        decode_into(old, encoded)
        assert bits(old) == bits(new)


def test_the_bytes_are_those_of_the_documentation():
    old = torch.zeros(1000, dtype=torch.int16)
    new = old.clone()
    new[3], new[259], new[515] = 0x0102, 0x0304, -1
    encoded = encode(old, new)
    # 3 unchanged; 255 = one escape and 0; again; 484 behind the last = 255 + 229
    assert encoded.gaps.tolist() == [3, 255, 0, 255, 0, 255, 229]
    assert encoded.values.tolist() == [[0x02, 0x04, 0xFF], [0x01, 0x03, 0xFF]]


def test_signed_zero_and_the_payload_of_nan_are_values_like_any_other():
    old = torch.tensor([0.0, float("nan"), 1.0, float("inf")], dtype=torch.bfloat16)
    new = old.clone()
    new.view(torch.int16)[0] = -0x8000  # -0.0, equal to 0.0 as a number
    new.view(torch.int16)[1] = 0x7FC1  # another NaN
    assert changed(old, new) == 2
    target = old.clone()
    decode_into(target, encode(old, new))
    assert bits(target) == bits(new)
    assert encode(new, new.clone()) is None  # a NaN equals itself


@pytest.mark.parametrize("shape", [(), (1,), (3, 4, 5), (0, 7)])
def test_shapes_do_not_matter(shape):
    old = torch.zeros(shape, dtype=torch.bfloat16)
    new = torch.ones(shape, dtype=torch.bfloat16)
    encoded = encode(old, new)
    if old.numel():
        decode_into(old, encoded)
    assert torch.equal(old, new)


def test_a_delta_of_another_part_writes_nothing():
    good = encode(torch.zeros(600), flip(torch.zeros(600), [0, 300, 599]))
    assert good.gaps.tolist() == [0, 255, 44, 255, 43, 0]
    gaps, values = good.gaps, good.values

    def put(place, value):
        other = gaps.copy()
        other[place] = value
        return other

    bad = [
        Encoded(gaps[:-1], values),
        Encoded(gaps[:0], values),
        Encoded(gaps, values[:, :-1]),
        Encoded(gaps, values[:2]),
        Encoded(gaps, values.T.copy()),
        Encoded(gaps, values.reshape(-1)),
        Encoded(gaps.reshape(2, 3), values),
        Encoded(np.concatenate([gaps, gaps[:1]]), values),
        Encoded(put(0, 1), values),
        Encoded(put(2, 43), values),
        Encoded(put(5, 255), values),
        Encoded(put(1, 254), values),
        Encoded(gaps, np.zeros((4, 0), np.uint8)),
    ]
    for encoded in bad:
        target = torch.zeros(600)
        with pytest.raises(WeightsError, match="delta"):
            decode_into(target, encoded)
        assert not target.view(torch.int32).any()
    for count in (0, 1, 599, 601):
        with pytest.raises(WeightsError):
            decode_into(torch.zeros(count), good)
    with pytest.raises(WeightsError):
        decode_into(torch.zeros(600, dtype=torch.bfloat16), good)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=40), st.integers(0, 6), st.integers(0, 12), st.integers(0, 600))
def test_hostile_bytes_never_leave_the_part(gaps, width, count, elements):
    """The part lies in the middle of a larger buffer, whose borders must stay as they are."""
    room = torch.full((elements + 2000,), 7, dtype=torch.int16)
    target = room[1000 : 1000 + elements]
    encoded = Encoded(np.frombuffer(gaps, np.uint8), np.zeros((width, count), np.uint8))
    try:
        decode_into(target, encoded)
    except WeightsError:
        assert room.eq(7).all()
    else:
        assert int(target.ne(7).sum()) == count
        assert room[:1000].eq(7).all()
        assert room[1000 + elements :].eq(7).all()


def test_a_shard_is_one_compressed_safetensors_file(tmp_path):
    names = ["a.weight", "b/gaps/values", "ä"]
    parts = {name: encode(torch.zeros(3000), flip(torch.zeros(3000), [i, 2999])) for i, name in enumerate(names)}
    shard = write_delta_shard(tmp_path / "r000-delta.zst", parts, MAKES, durable=True)
    assert (shard.makes, shard.file) == (MAKES, "r000-delta.zst")
    data = (tmp_path / shard.file).read_bytes()
    assert (len(data), checksum(data)) == (shard.bytes, shard.checksum)
    from safetensors.numpy import load

    plain = load(zstandard.ZstdDecompressor().decompress(data))
    back = read_delta_shard(tmp_path / shard.file, shard)
    assert list(back) == names
    for name, part in parts.items():
        assert back[name].gaps.tolist() == part.gaps.tolist() == plain[f"gaps/{name}"].tolist()
        assert back[name].values.tolist() == part.values.tolist() == plain[f"values/{name}"].tolist()
    empty = write_delta_shard(tmp_path / "r001-delta.zst", {}, MAKES)
    assert read_delta_shard(tmp_path / empty.file, empty) == {}


def entry(data, path):
    path.write_bytes(data)
    return Shard(file=path.name, bytes=len(data), checksum=checksum(data), makes=MAKES)


def test_a_torn_file_is_refused(tmp_path):
    good = tmp_path / "good.zst"
    shard = write_delta_shard(good, {"a": encode(torch.zeros(3000), torch.rand(3000))}, MAKES)
    data = good.read_bytes()
    press = zstandard.ZstdCompressor()
    plain = zstandard.ZstdDecompressor().decompress(data)
    for size in (0, 1, 8, 100, len(data) - 1):
        good.write_bytes(data[:size])
        with pytest.raises(WeightsError, match="checksum"):
            read_delta_shard(good, shard)
    good.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(WeightsError, match="checksum"):
        read_delta_shard(good, shard)
    other = plain.replace(b"values/a", b"walues/a")
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(plain)
    others = {
        "cut off": data[: len(data) // 2],
        "no zstd": plain,
        "empty": b"",
        "no size": unsized,
        "no safetensors": press.compress(b"\xff" * 100),
        "short": press.compress(b"1234"),
        "other names": press.compress(other),
    }
    for what, content in others.items():
        path = tmp_path / "bad.zst"
        with pytest.raises(WeightsError):
            read_delta_shard(path, entry(content, path))
            pytest.fail(what)
    with pytest.raises(FileNotFoundError):
        read_delta_shard(tmp_path / "gone.zst", shard)


def test_a_delta_of_a_real_density_is_at_most_three_per_cent(tmp_path):
    """AdamW at lr 1e-6 moves 1.2 % of bf16 weights (the same simulation as in docs/internals/weights.md)."""
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(1 << 21, generator=generator) * 0.02
    step = (torch.randn(master.shape, generator=generator) * 0.3).clamp(-1, 1) * 1e-6
    old, new = master.bfloat16(), (master - step).bfloat16()
    density = changed(old, new) / old.numel()
    assert 0.008 < density < 0.016
    shard = write_delta_shard(tmp_path / "r000-delta.zst", {"w": encode(old, new)}, MAKES)
    assert shard.bytes <= 0.03 * new.nbytes
    decode_into(old, read_delta_shard(tmp_path / shard.file, shard)["w"])
    assert bits(old) == bits(new)
