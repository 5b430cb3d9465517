"""A checkpoint as a Hugging Face directory: what plain transformers loads is what was trained."""

from __future__ import annotations

import shutil

import msgspec
import orjson
import pytest
import torch
from safetensors.torch import load_file
from tiny_policy import make_batch, run_config
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from weights_kit import full_tensors

from streamrl.errors import CannotCreate, ConfigError, Refused
from streamrl.learner.checkpoint import FORMAT, Checkpoints, InvalidCheckpoint, Meta, shard_name
from streamrl.learner.checkpoint_files import RankState, write_shard
from streamrl.learner.export import choose_checkpoint, export_checkpoint
from streamrl.learner.policy import Actor
from streamrl.learner.ranks import rows_of


def train(config, ranks):
    actor = Actor(config, ranks)
    for step in range(2):
        actor.update_policy(make_batch(step))
    return actor


def save(folder, actor, config, *, world=1, step=2, **changed):
    """A checkpoint of an actor, as `world` ranks would have written it."""
    state = RankState(actor.ranks, {"actor": actor}, {} if actor.lora is None else {"lora": actor.lora})
    whole = {f"actor/{name}": tensor for name, tensor in actor.shard_state().items()}
    checkpoints = Checkpoints(folder)
    draft = checkpoints.begin((1, step))
    shards = []
    for rank in range(world):
        mine = {n: t[rows_of(t.shape[0], rank, world)] if t.dim() else t for n, t in whole.items()}
        shards.append(write_shard(draft / shard_name(rank, world), {n: t for n, t in mine.items() if t.numel()}))
    meta = state.describe(Meta(format=FORMAT, epoch=1, step=step, version=3, model=config.model.path))
    written = {"world": world, "shards": shards}
    checkpoints.finish(msgspec.structs.replace(meta, **written, **changed))
    return checkpoints


def export(checkpoints, config, out, *, step=None, average=False):
    meta, told = choose_checkpoint(checkpoints, step), []
    folder = checkpoints.path(meta.position)
    found = export_checkpoint(
        config, folder, meta, out, average=average, on_progress=lambda done, total: told.append((done, total))
    )
    assert told[-1][0] == told[-1][1] > 0
    assert found.files == sorted(path.name for path in out.glob("*.safetensors"))
    return found


def same(folder, tensors) -> None:
    loaded = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor), name


def tokenizer(folder) -> None:
    raw = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>").save_pretrained(folder)


@pytest.mark.parametrize("kind", ["Qwen2", "Llama", "GPTNeoX", "GPT2", "Gemma2", "Qwen3Moe"])
@pytest.mark.parametrize("several", [False, True])
def test_plain_transformers_loads_what_was_trained(tmp_path, model_of, one_rank, monkeypatch, kind, several):
    folder = shutil.copytree(model_of(kind), tmp_path / "model")
    tokenizer(folder)
    config = run_config(folder)
    actor = train(config, one_rank)
    if several:
        monkeypatch.setattr("streamrl.learner.export._FILE_BYTES", 20_000)
    found = export(save(tmp_path / "c", actor, config, world=3 if several else 1), config, tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("ab") == [1, 2]
    assert (len(found.files) > 1) == several
    assert found.checkpoint == "1-2"
    same(tmp_path / "out", full_tensors(actor))
    assert not list(tmp_path.glob("*.draft"))


def test_generation_settings_come_along_unless_they_cannot_be_saved(tmp_path, model_of, one_rank):
    folder = shutil.copytree(model_of("Qwen2"), tmp_path / "model")
    config = run_config(folder)
    checkpoints = save(tmp_path / "c", train(config, one_rank), config)
    for settings, kept in (({"eos_token_id": [5, 6]}, True), ({"temperature": 0.5, "do_sample": False}, False)):
        (folder / "generation_config.json").write_bytes(orjson.dumps(settings))
        export(checkpoints, config, tmp_path / "out")
        found = orjson.loads((tmp_path / "out" / "generation_config.json").read_bytes())
        assert (found.items() >= settings.items()) == kept


def test_files_hold_the_names_that_other_programs_know(tmp_path, model_of, one_rank):
    """transformers keeps the experts of a layer in one tensor; engines look for one of each."""
    from safetensors import safe_open

    config = run_config(model_of("Qwen3Moe"))
    actor = train(config, one_rank)
    export(save(tmp_path / "c", actor, config), config, tmp_path / "out")
    AutoModelForCausalLM.from_pretrained(tmp_path / "out").save_pretrained(tmp_path / "saved")
    with (
        safe_open(tmp_path / "out" / "model.safetensors", "pt") as ours,
        safe_open(tmp_path / "saved" / "model.safetensors", "pt") as theirs,
    ):
        assert sorted(ours.keys()) == sorted(theirs.keys())
        assert all(torch.equal(ours.get_tensor(name), theirs.get_tensor(name)) for name in ours.keys())  # noqa: SIM118


def test_the_average_of_the_weights(tmp_path, model_of, one_rank):
    config = run_config(model_of("Qwen2"), ema=0.5)
    actor = train(config, one_rank)
    checkpoints = save(tmp_path / "c", actor, config)
    export(checkpoints, config, tmp_path / "out", average=True)
    state = actor.shard_state()
    same(tmp_path / "out", {name: state[f"ema/{name}"] for name in actor.parameters})
    plain = run_config(model_of("Qwen2"))
    without = save(tmp_path / "d", train(plain, one_rank), plain)
    with pytest.raises(ConfigError, match="no average"):
        export(without, plain, tmp_path / "none", average=True)


@pytest.mark.parametrize("dora", [False, True])
def test_an_adapter_is_merged_and_stands_by_itself(tmp_path, model_of, one_rank, dora):
    config = run_config(model_of("Qwen2"), lora={"rank": 4, "dora": dora})
    actor = train(config, one_rank)
    export(save(tmp_path / "c", actor, config, world=2), config, tmp_path / "out")
    same(tmp_path / "out", full_tensors(actor))
    held = load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors")
    assert held.keys() == actor.parameters.keys()
    assert all(torch.equal(held[name], parameter.to_local()) for name, parameter in actor.parameters.items())
    about = orjson.loads((tmp_path / "out" / "adapter" / "adapter_config.json").read_bytes())
    assert about == {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.model.path,
        "r": 4,
        "lora_alpha": config.learner.lora.alpha,
        "target_modules": actor.lora.about.targets,
        "use_dora": dora,
        "bias": "none",
        "lora_dropout": 0.0,
        "inference_mode": True,
    }


def test_bfloat16_is_what_a_run_in_bfloat16_exports(tmp_path, model_of, one_rank):
    config = run_config(model_of("Llama"), dtype="bfloat16")
    actor = train(config, one_rank)
    export(save(tmp_path / "c", actor, config), config, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    tensors = full_tensors(actor, torch.bfloat16)
    assert all(torch.equal(parameter, tensors[name]) for name, parameter in loaded.named_parameters())


@pytest.fixture
def saved(tmp_path, model_of, one_rank):
    config = run_config(model_of("Qwen2"))
    return save(tmp_path / "c", train(config, one_rank), config), config


def test_what_cannot_be_exported_is_said(tmp_path, saved, model_of):
    checkpoints, config = saved
    with pytest.raises(ConfigError, match="no checkpoint of step 7") as error:
        choose_checkpoint(checkpoints, 7)
    assert error.value.hint == "steps with a checkpoint: 2"
    with pytest.raises(ConfigError, match="no checkpoint"):
        choose_checkpoint(Checkpoints(tmp_path / "empty"), None)
    other = run_config(model_of("Llama"))
    with pytest.raises(Refused, match="another model"):
        export(checkpoints, other, tmp_path / "out")
    gone = config.model_copy(update={"model": config.model.model_copy(update={"path": str(tmp_path / "gone")})})
    with pytest.raises(ConfigError, match="cannot be read"):
        export(checkpoints, gone, tmp_path / "out")
    shard = checkpoints.path((1, 2)) / shard_name(0, 1)
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(InvalidCheckpoint):
        choose_checkpoint(checkpoints, None)
    assert not (tmp_path / "out").exists()


def test_other_formats_and_recordings_are_refused(tmp_path, saved, one_rank):
    _, config = saved
    actor = Actor(config, one_rank)
    for name, changed, word in (
        ("old", {"format": 1}, "format 1"), ("recording", {"kind": "recording"}, "of a recording")
    ):  # fmt: skip
        with pytest.raises(Refused, match=word):
            choose_checkpoint(save(tmp_path / name, actor, config, **changed), None)


def test_what_was_there_stays_when_there_is_no_room(tmp_path, saved, monkeypatch):
    checkpoints, config = saved
    out = tmp_path / "out"
    export(checkpoints, config, out)
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", full)
    with pytest.raises(CannotCreate, match="No space"):
        export(checkpoints, config, out)
    assert {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()} == before
    assert not list(tmp_path.glob("*.draft"))
