"""Versions that are an adapter: the sum by hand, what the manifest says, every transport, files."""

import msgspec
import numpy as np
import pytest
import torch
from fetch_kit import following, http_config, open_learner
from hypothesis import given, settings
from hypothesis import strategies as st
from sync_kit import publish, same

from streamrl.config import RunConfig, WeightsConfig
from streamrl.errors import CannotCreate, WeightsError
from streamrl.weight_sync.adapter import adapted, merge, names_of, write_adapter
from streamrl.weight_sync.manifest import Adapter, decode, encode
from streamrl.weight_sync.publisher import Publisher
from streamrl.weight_sync.tensors import map_version

ABOUT = Adapter(base="models/base", rank=2, alpha=4.0, targets=["q_proj"])
MODULE = "model.layers.0.self_attn.q_proj"


def tensors(seed=0, *, dora=False):
    generator = torch.Generator().manual_seed(seed)
    names = names_of(MODULE, dora=dora)
    made = {names.lora_a: torch.randn(2, 6, generator=generator), names.lora_b: torch.randn(5, 2, generator=generator)}
    return made | ({names.magnitude: torch.rand(5, generator=generator)} if names.magnitude else {})


def test_the_sum_by_hand():
    weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    low, high = torch.tensor([[1.0, -1.0]]), torch.tensor([[2.0], [0.5]])
    expected = torch.tensor([[7.0, -4.0], [4.5, 2.5]])
    assert torch.equal(merge(weight, low, high, scale=3.0), expected)
    lengths = torch.tensor([2.0, 5.0])
    by_hand = np.array([[7.0, -4.0], [4.5, 2.5]])
    by_hand *= (np.array([2.0, 5.0]) / np.sqrt((by_hand**2).sum(1)))[:, None]
    merged = merge(weight, low, high, scale=3.0, magnitude=lengths)
    np.testing.assert_allclose(merged.numpy(), by_hand, rtol=1e-6)


@settings(deadline=None)
@given(st.integers(0, 1000), st.integers(1, 9), st.booleans())
def test_rows_are_independent_and_a_zero_adapter_is_nothing(seed, cut, dora):
    generator = torch.Generator().manual_seed(seed)
    weight, low = torch.randn(10, 7, generator=generator), torch.randn(3, 7, generator=generator)
    high = torch.randn(10, 3, generator=generator)
    lengths = torch.rand(10, generator=generator) + 0.5 if dora else None
    whole = merge(weight, low, high, scale=0.7, magnitude=lengths)
    parts = [
        merge(weight[rows], low, high[rows], scale=0.7, magnitude=None if lengths is None else lengths[rows])
        for rows in (slice(0, cut), slice(cut, 10))
    ]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-5, atol=1e-6)
    lengths = torch.linalg.norm(weight, dim=1) if dora else None
    assert torch.equal(merge(weight, low, torch.zeros_like(high), scale=0.7, magnitude=lengths), weight)


def test_the_manifest_says_what_it_is(tmp_path):
    publisher = Publisher(WeightsConfig(transport="directory"), "r", tmp_path)
    manifest = decode(publish(publisher, 1, tensors(1), adapter=ABOUT))
    assert (manifest.kind, manifest.adapter, publisher.manifest.kind) == ("adapter", ABOUT, "adapter")
    assert (ABOUT.scale, ABOUT.kind, msgspec.structs.replace(ABOUT, dora=True).kind) == (2.0, "LoRA", "DoRA")
    version = map_version(publisher.root / manifest.folder, manifest)
    assert version.adapter == ABOUT
    assert list(adapted(ABOUT, version.tensors)) == [MODULE]
    with pytest.raises(WeightsError, match="not a manifest"):  # an adapter is never a delta
        decode(encode(manifest).replace(b'"base":null', b'"base":[1,0]'))


@pytest.mark.parametrize("change", [{"rank": 0}, {"alpha": 0.0}, {"targets": "all"}, {"code": "import os"}])
def test_a_manifest_with_nonsense_is_refused(tmp_path, change):
    publisher = Publisher(WeightsConfig(transport="directory"), "r", tmp_path)
    data = msgspec.json.decode(publish(publisher, 1, tensors(1), adapter=ABOUT))
    data["adapter"] |= change
    with pytest.raises(WeightsError, match="not a manifest"):
        decode(msgspec.json.encode(data))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda found: found.pop(names_of(MODULE, dora=False).lora_b),
        lambda found: found.pop(names_of(MODULE, dora=False).lora_a),
        lambda found: found.update({"model.embed_tokens.weight": torch.zeros(2)}),
        lambda found: found.clear(),
        lambda found: found.update(tensors(dora=True)),
    ],
)
def test_what_is_no_whole_adapter_is_refused(spoil):
    found = tensors()
    spoil(found)
    with pytest.raises(WeightsError, match="no whole LoRA adapter"):
        adapted(ABOUT, found)


async def test_it_arrives_like_all_weights(tmp_path):
    async with open_learner(http_config(), tmp_path) as learner, following(learner) as replica:
        for number in (1, 2):
            manifest = await learner.publish(number, tensors=tensors(number), adapter=ABOUT)
            await replica.until(number)
            assert manifest.adapter == ABOUT
            assert same(replica.applied[-1][1], tensors(number))


def test_a_directory_of_peft_replaces_the_one_before_or_leaves_it(tmp_path):
    write_adapter(tmp_path / "a", ABOUT, tensors(1))
    write_adapter(tmp_path / "a", ABOUT, tensors(2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CannotCreate, match="cannot be written"):
        write_adapter(tmp_path / "file" / "b", ABOUT, tensors())


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"engine": {"kind": "vllm"}, "weights": {"delta": {"enabled": True}}}, "weights.delta"),
        ({"engine": {"kind": "hf"}}, "engine.kind hf loads no adapters; set publish: merged"),
        ({"engine": {"kind": "vllm"}, "learner": {"lora": {"dora": True}}}, "DoRA"),
        ({"engine": {"kind": "sglang"}, "learner": {"lora": {"dora": True}}}, "DoRA"),
        ({"engine": {"kind": "vllm"}, "learner": {"lora": {"rank": 513}}}, "512"),
        ({"learner": {"lora": {"rank": 0}}}, "learner.lora.rank"),
    ],
)
def test_what_cannot_arrive_is_refused_at_start(changes, match):
    lora = {"rank": 4, "publish": "adapter", **changes.get("learner", {}).get("lora", {})}
    with pytest.raises(ValueError, match=match):
        RunConfig.model_validate({**changes, "learner": {"lora": lora}})


def test_the_same_runs_may_publish_merged_versions():
    for kind in ("vllm", "sglang", "hf"):
        lora = {"rank": 513, "dora": True}
        RunConfig.model_validate(
            {"engine": {"kind": kind}, "weights": {"delta": {"enabled": True}}, "learner": {"lora": lora}}
        )
