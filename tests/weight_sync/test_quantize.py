"""Quantised versions: bounds of the arithmetic, names and shapes, and that engines get them and nothing else."""

import asyncio

import msgspec
import pytest
import torch
from fetch_kit import following, http_config, open_learner
from hypothesis import given, settings
from hypothesis import strategies as st
from sync_kit import Replica, Stream, publish, same, until

from streamrl.config import WeightsConfig
from streamrl.errors import ConfigError, WeightsError
from streamrl.weight_sync.manifest import decode, encode
from streamrl.weight_sync.publisher import Publisher
from streamrl.weight_sync.quantize import quantise, quantise_all, quantization_config
from streamrl.weight_sync.tensors import map_version

KINDS = ["int8", "fp8_channel", "fp8_block"]
PROJECTIONS = ["model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"]
every_kind = pytest.mark.parametrize("kind", KINDS)


def model_tensors(seed=0, hidden=96, dtype=torch.bfloat16):
    """Names and shapes as of a small Llama: projections, and what has to stay as it is."""
    generator = torch.Generator().manual_seed(seed)
    layer = "model.layers.0"
    shapes = {
        "model.embed_tokens.weight": (40, hidden),
        f"{layer}.self_attn.q_proj.weight": (2 * hidden, hidden),
        f"{layer}.self_attn.q_proj.bias": (2 * hidden,),
        f"{layer}.mlp.gate.weight": (4, hidden),
        f"{layer}.mlp.down_proj.weight": (hidden, 200),
        f"{layer}.post_attention_layernorm.weight": (hidden,),
        "lm_head.weight": (40, hidden),
    }
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


@every_kind
@settings(deadline=None, max_examples=40)
@given(rows=st.integers(1, 300), columns=st.integers(1, 300), seed=st.integers(0, 99), size=st.integers(-30, 30))
def test_no_value_is_off_by_more_than_half_a_step(kind, rows, columns, seed, size):
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 10.0**size
    weight[seed % rows] = 0.0
    values, scales = quantise(kind, weight.bfloat16())
    blocks = (-(-rows // 128), -(-columns // 128))
    assert (values.shape, scales.shape) == (weight.shape, blocks if kind == "fp8_block" else (rows, 1))
    assert (values.dtype, scales.dtype) == (torch.int8 if kind == "int8" else torch.float8_e4m3fn, torch.float32)
    spread = scales if kind != "fp8_block" else scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    step = spread[:rows, :columns].expand(rows, columns)
    found, wanted = values.float() * step, weight.bfloat16().float()
    # e4m3 has 3 bits behind the first one, and 2^-9 between the values below 2^-6.
    bound = step / 2 if kind == "int8" else torch.maximum(wanted.abs() / 16, step * 2**-10)
    assert ((found - wanted).abs() <= bound * 1.001).all()
    assert not found[seed % rows].any()
    if kind != "fp8_block":  # the largest value of each row is met exactly, so the same weights give the same scales
        again, same_scales = quantise(kind, found)
        assert torch.equal(again.float(), values.float())
        torch.testing.assert_close(same_scales, scales, rtol=1e-6, atol=0)


@every_kind
def test_projections_become_two_tensors_and_all_else_stays(kind):
    source = model_tensors()
    found = dict(quantise_all(kind, source.items()))
    scale = "_scale_inv" if kind == "fp8_block" else "_scale"
    assert found.keys() == source.keys() | {name + scale for name in PROJECTIONS}
    assert all(found[name] is source[name] for name in source.keys() - set(PROJECTIONS))
    assert all(found[name].dtype.itemsize == 1 for name in PROJECTIONS)


@pytest.mark.parametrize("kind", ["int8", "fp8_channel"])
def test_a_server_is_told_of_channels_and_tokens(kind):
    said = quantization_config(kind)
    (group,) = said["config_groups"].values()
    assert said["quant_method"] == "compressed-tensors"
    assert said["format"] == {"int8": "int-quantized", "fp8_channel": "float-quantized"}[kind]
    assert (group["weights"]["strategy"], group["input_activations"]["strategy"]) == ("channel", "token")
    assert (group["weights"]["dynamic"], group["input_activations"]["dynamic"]) == (False, True)
    assert group["targets"] == [r"re:.*_proj$"]


def test_a_server_is_told_of_blocks():
    said = quantization_config("fp8_block")
    assert (said["quant_method"], said["weight_block_size"], said["activation_scheme"]) == (
        "fp8",
        [128, 128],
        "dynamic",
    )


def quantised_publisher(tmp_path, kind="int8", **more):
    config = WeightsConfig(transport="directory", shard_bytes=40_000, dtype="bfloat16", quantize=kind, **more)
    return Publisher(config, "r", tmp_path)


@every_kind
def test_a_version_has_both_and_the_quantised_one_is_half_as_large(tmp_path, kind):
    source = model_tensors(hidden=256)
    publisher = quantised_publisher(tmp_path, kind)
    manifest = decode(publish(publisher, 1, source))
    folder = publisher.root / "v-1-1"
    assert {file.name for file in folder.iterdir()} == {"manifest.json", *(shard.file for shard in manifest.files)}
    assert manifest.total_bytes == sum(shard.bytes for shard in manifest.files)
    offered = manifest.offered
    assert len(offered.shards) == len(manifest.shards) > 1
    assert all(shard.file.startswith(f"{kind}-0000") for shard in offered.shards)
    assert same(map_version(folder, msgspec.structs.replace(manifest, quantised=None)).tensors, source)
    taken = map_version(folder, offered).tensors
    assert same(taken, dict(quantise_all(kind, source.items())))
    small = sum(tensor.nbytes for name, tensor in taken.items() if "_proj" in name)
    assert small < 0.53 * sum(tensor.nbytes for name, tensor in source.items() if "_proj" in name)


def test_what_is_not_finite_is_refused_before_anything_is_scaled(tmp_path):
    source = model_tensors()
    source[PROJECTIONS[0]][3, 5] = float("nan")
    publisher = quantised_publisher(tmp_path)
    with pytest.raises(ConfigError, match="not finite"):
        publish(publisher, 1, source)
    assert list(publisher.root.iterdir()) == []


def test_a_model_of_which_nothing_would_be_quantised_is_refused(tmp_path):
    publisher = quantised_publisher(tmp_path)
    with pytest.raises(ConfigError, match=r"no matrix .* matches \.\*_proj"):
        publish(publisher, 1, {"transformer.h.0.attn.c_attn.weight": torch.ones(4, 4)})
    assert list(publisher.root.iterdir()) == []


@pytest.mark.parametrize("change", ["file", "twice", "shard", "none"])
def test_a_manifest_keeps_its_rules_for_both(tmp_path, change):
    manifest = decode(publish(quantised_publisher(tmp_path), 1, model_tensors()))
    quantised = manifest.quantised
    shards, tensors = list(quantised.shards), list(quantised.tensors)
    changed = {
        "file": {"shards": [*shards[:-1], msgspec.structs.replace(shards[-1], file=manifest.shards[0].file)]},
        "twice": {"tensors": [*tensors, tensors[0]]},
        "shard": {"shards": shards[:-1]},
        "none": {"tensors": []},
    }[change]
    data = encode(manifest).replace(
        msgspec.json.encode(quantised), msgspec.json.encode(msgspec.structs.replace(quantised, **changed))
    )
    with pytest.raises(WeightsError, match="not a manifest"):
        decode(data)


@pytest.mark.parametrize("transport", ["http", "collective"])
async def test_over_the_network_only_the_quantised_files_travel(tmp_path, transport):
    source = model_tensors()
    config = http_config(transport=transport, quantize="int8", dtype="bfloat16")
    async with open_learner(config, tmp_path) as learner:
        async with following(learner) as replica:
            manifest = await learner.publish(1, tensors=source)
            await replica.until(1)
        assert same(replica.applied[0][1], dict(quantise_all("int8", source.items())))
        assert replica.follower.traffic.bytes == manifest.offered.total_bytes < 0.65 * manifest.total_bytes


async def test_a_store_has_the_files_of_both(tmp_path):
    config = http_config(quantize="int8", dtype="bfloat16", url=str(tmp_path / "store"))
    async with open_learner(config, tmp_path / "run") as learner, following(learner) as replica:
        manifest = await learner.publish(1, tensors=model_tensors())
        await replica.until(1)
        assert {file.name for file in (tmp_path / "store" / "r" / manifest.folder).iterdir()} == {
            "manifest.json", *(shard.file for shard in manifest.files)
        }  # fmt: skip


@pytest.mark.parametrize("kind", [None, "fp8_channel"])
async def test_a_version_of_another_kind_is_refused(tmp_path, kind):
    publisher = quantised_publisher(tmp_path)
    stream = Stream()
    config = publisher._config.model_copy(update={"quantize": kind})
    replica = Replica(stream, config, tmp_path)
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(replica.follower.run(stop))
        await stream.put(publish(publisher, 1, model_tensors()))
        await until(lambda: replica.follower.refused == 1)
        stop.set()
    assert replica.applied == []
