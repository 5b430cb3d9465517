"""Two real processes under FSDP against one: the same weights, half of every parameter each, and no silent hang."""

import functools

import orjson
import plays
import pytest
import torch
from plays import ADAPTERS, RECIPES, UNITS
from safetensors.torch import load_file
from test_families import FAMILIES
from test_families import same as same_gradients
from tiny_policy import KINDS, VOCABULARY, make_model, run_config, without_key_biases
from transformers import AutoModelForCausalLM
from tree_kit import make_episodes
from world_kit import TwoRanks, start

from streamrl.cards import choose_device
from streamrl.errors import ConfigError, Unreachable
from streamrl.learner.model_loading import load_model
from streamrl.learner.ranks import Ranks
from streamrl.weight_sync.manifest import read_manifest
from streamrl.weight_sync.tensors import map_version
from tests.redis_kit import free_port
from tests.vision_kit import KINDS as VISION_KINDS
from tests.vision_kit import make_vision_model

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    made = TwoRanks(tmp_path_factory.mktemp("meet"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def played(two_ranks, model_of, one_rank, tmp_path_factory):
    """What a play found by one rank and by two; each is played once."""

    @functools.cache
    def get(play, kind="Qwen2"):
        return two_ranks.beside(play, model_of(kind), one_rank, tmp_path_factory.mktemp(play))

    return get


def assert_close(ours, theirs):
    ours, theirs = without_key_biases(ours), without_key_biases(theirs)
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-5, msg=name)


def same_files(runs, file):
    """Tensors of two ranks are those of one."""
    assert_close(load_file(runs.folders["two"] / file), load_file(runs.folders["one"] / file))


@pytest.mark.parametrize("kind", ["Qwen2", "Qwen3Moe", "GPT2", "Gemma3Text", "HrmText"])
def test_the_rows_of_the_ranks_are_the_whole_model(two_ranks, tmp_path, kind):
    """Tied weights, experts that files hold one by one, and (HrmText) projections that they hold as one tensor."""
    model = make_model(kind, tmp_path, **KINDS.get(kind, KINDS["Llama"]))
    two_ranks.begin("rows", model, tmp_path)
    two_ranks.end()
    first, second = (load_file(tmp_path / f"rows-{rank}.safetensors") for rank in (0, 1))
    whole = load_model(run_config(model).model)
    for name, weight in whole.named_parameters():
        assert torch.equal(torch.cat([first[name], second[name]]), weight), name
    for name, buffer in whole.named_buffers():
        assert torch.equal(first[name], buffer), name
        assert torch.equal(second[name], buffer), name


@pytest.mark.slow
def test_no_rank_holds_the_whole_model_while_it_loads(tmp_path, monkeypatch):
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")  # what is freed goes, as it does with larger tensors
    two_ranks = TwoRanks(tmp_path)
    size = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 24, "num_attention_heads": 8}
    model = make_model("Llama", tmp_path, **size, vocab_size=VOCABULARY, max_position_embeddings=128)
    two_ranks.begin("loading", model, tmp_path)
    two_ranks.end()
    two_ranks.close()
    whole = (model / "model.safetensors").stat().st_size
    assert whole > 300e6
    for rank in (0, 1):
        assert whole / 2 <= orjson.loads((tmp_path / f"found-{rank}.json").read_bytes())["most"] < 0.9 * whole


@pytest.mark.parametrize("kind", VISION_KINDS)
def test_a_rank_with_images_beside_one_without(two_ranks, one_rank, tmp_path, kind):
    """Frozen and trained towers, as one unit and as one per layer: no rank waits for a collective of the other."""
    model = make_vision_model(tmp_path / "model", kind)
    runs = two_ranks.beside("images", model, one_rank, tmp_path)
    for units in UNITS:
        for train_vision in (False, True):
            same_files(runs, f"{units}-{train_vision}.safetensors")


@pytest.mark.parametrize("units", UNITS)
def test_the_same_weights_and_statistics_as_one_rank(played, units):
    runs = played("policy")
    same_files(runs, f"{units}-0.safetensors")
    assert_close(*(load_file(runs.folders["one"] / f"{name}-0.safetensors") for name in (units, "whole")))
    first, second = (found[f"{units}.records"] for found in runs.two)
    assert first == second
    assert len(first) == plays.STEPS
    for ours, theirs in zip(first, runs.one[f"{units}.records"], strict=True):
        for key in ("loss", "norm", "tokens", "ess"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-4), key
    assert [found[f"{units}.continued"] for found in (runs.one, *runs.two)] == [True] * 3, "bit for bit"


def test_episodes_are_learnt_by_two_ranks_as_by_one(played):
    for layout in ("rows of like length", "packed"):
        same_files(played("episodes"), f"{layout}.safetensors")


@pytest.mark.parametrize("units", UNITS)
def test_two_ranks_hold_half_each(played, units):
    shapes = [found[f"{units}.shapes"] for found in played("policy").two]
    assert shapes[0].keys() == shapes[1].keys()
    held = [0, 0]
    for name, (first, whole, placement) in shapes[0].items():
        second = shapes[1][name][0]
        assert placement == "(Shard(dim=0),)"
        assert first[1:] == second[1:] == whole[1:]
        assert first[0] == -(-whole[0] // 2)
        assert first[0] + second[0] == whole[0]
        for rank, shape in enumerate((first, second)):
            held[rank] += torch.Size(shape).numel()
    # 61 rows of the embedding are no even number: one row more here than there.
    assert abs(held[0] - held[1]) <= 32


def test_log_probs_of_each_rank_are_of_its_own_samples(played):
    runs = played("policy")
    both = [values for found in runs.two for values in found["whole.logprobs"]]
    for ours, theirs in zip(both, runs.one["whole.logprobs"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


def test_export_of_two_ranks_is_whole(played):
    folders = played("policy").folders
    assert_close(
        *(
            dict(AutoModelForCausalLM.from_pretrained(folders[name] / "export").named_parameters())
            for name in ("two", "one")
        )
    )


@pytest.mark.parametrize("name", ["one", "two"])
def test_a_version_of_two_ranks_is_the_whole_model(played, name):
    root = played("policy").folders[name]
    folder = root / "run" / "weights" / "v-1-1"
    manifest = read_manifest(folder)
    ours, theirs = dict(map_version(folder, manifest).tensors), load_file(root / "published.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_samples_travel_from_rank_0_to_the_others(played):
    sent = [sample.tokens.tolist() for sample in make_episodes(5, groups=2, size=3)]
    assert [found["dealt"] for found in played("policy").two] == [sent[:2], sent]


def test_small_collectives(played):
    for found in played("policy").two:
        assert found["broadcast"] == [3, -(1 << 62), 5]
        assert found["broadcast_empty"] == []
        assert found["max"] == [1, 0]
        assert found["min"] == [0, -1]
        assert found["sum"] == [4.0]


@pytest.mark.parametrize("name", RECIPES)
def test_two_ranks_learn_in_a_step_what_one_learns(played, name):
    runs, number = played("steps"), list(RECIPES).index(name)
    assert runs.two[0][name] == runs.two[1][name]
    for ours, theirs in zip(runs.two[0][name], runs.one[name], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    same_files(runs, f"{number}-0.safetensors")


def test_each_recipe_did_something(played):
    one = played("steps").one
    first, second = one["kl in the reward, adaptive"]
    assert second[3] < first[3] == 0.1, "there is no distance yet, so the coefficient falls"
    warm, learning = one["gae with a critic"]
    assert warm[1] == 0, "the policy waits for the critic"
    assert learning[1] > 0
    assert len(warm) == len(learning) == 5 + 2, "one value loss per pass"


@pytest.mark.parametrize("units", UNITS)
def test_a_critic_and_a_reference_are_those_of_one_rank(played, units):
    runs = played("values")
    for what in ("values", "reference", "norms"):
        key = f"{units}.{what}"
        assert runs.two[0][key] == runs.two[1][key]
        assert runs.two[0][key] == pytest.approx(runs.one[key], rel=1e-5, abs=1e-5)
    same_files(runs, f"{units}-critic-0.safetensors")
    assert "value_head.weight" in load_file(runs.folders["two"] / f"{units}-critic-0.safetensors")
    assert all(found[f"{units}.continued"] for found in (runs.one, *runs.two))


@pytest.mark.parametrize("kind", [f"{name}-{units}" for name in ADAPTERS for units in UNITS])
def test_an_adapter_is_that_of_one_rank(played, kind):
    """The same merged weights, versions and statistics; each rank has half of it, and one may have no rows of A."""
    runs = played("adapters")
    same_files(runs, f"{kind}/merged.safetensors")
    same_files(runs, f"{kind}/export/model.safetensors")
    thin, held = kind.startswith("thin"), []
    for folder in runs.folders.values():
        version = folder / kind / "weights" / "v-1-1"
        manifest = read_manifest(version)
        assert manifest.kind == ("adapter" if thin else "full")
        held.append(dict(map_version(version, manifest).tensors))
    assert_close(*held)
    if not thin:
        assert_close(held[1], load_file(runs.folders["two"] / kind / "merged.safetensors"))
    one, first, second = (found[kind] for found in (runs.one, *runs.two))
    assert first["records"] == second["records"]
    for ours, theirs in zip(first["records"], one["records"], strict=True):
        for key in ("loss", "norm", "tokens"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-6), key
    for name, shape in one["parameters"].items():
        halves = first["parameters"][name], second["parameters"][name]
        assert halves[0][0] == -(-shape[0] // 2)
        assert halves[0][0] + halves[1][0] == shape[0]
    assert one["base_unchanged"]
    assert first["base_unchanged"]
    assert second["base_unchanged"]


def test_ranks_without_a_common_run_directory_go_on_elsewhere_bit_for_bit(played):
    runs = played("no_shared_fs")
    first, second = runs.two
    shards = ["rank-0-of-2.safetensors", "rank-1-of-2.safetensors"]
    assert first["sent"] == second["sent"] == shards
    assert first["here"] == second["here"] == ["ckpt-1-1", "lock", *shards]
    assert first["same"]
    assert second["same"]
    assert list((runs.folders["two"] / "first-1").rglob("*.safetensors")) == [], "its shard is in the store"
    assert second["published"] == 0, "rank 0 writes the versions alone"
    for world in ("one", "two"):
        folder = runs.folders[world]
        published, merged = (load_file(folder / f"{name}.safetensors") for name in ("published", "merged"))
        assert published.keys() == merged.keys()
        assert all(torch.equal(published[name], merged[name].to(published[name].dtype)) for name in merged)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_family_computes_what_it_computes_on_one_rank(played, kind):
    folders = played("family", kind).folders
    whole = load_file(folders["one"] / "whole-gradients.safetensors")
    for world, units in (("one", "layers"), ("two", "whole"), ("two", "layers")):
        same_gradients(load_file(folders[world] / f"{units}-gradients.safetensors"), whole)
    for units in UNITS:
        expected = load_file(folders["one"] / f"{units}-logprobs-0.safetensors")
        found = {
            index: values
            for rank in (0, 1)
            for index, values in load_file(folders["two"] / f"{units}-logprobs-{rank}.safetensors").items()
        }
        assert found.keys() == expected.keys()
        for index, values in found.items():
            torch.testing.assert_close(values, expected[index], rtol=1e-5, atol=1e-5, msg=f"{units} {index}")


RANK = """
import os, sys, torch
from streamrl.learner.ranks import Ranks
rank, deadline, rendezvous = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
try:
    ranks = Ranks(rank=rank, world=2, device=torch.device("cpu"), deadline=deadline, rendezvous=rendezvous)
    if rank == 0:
        ranks.all_max(1)
except Exception as error:
    print(type(error).__name__, error, flush=True)
os._exit(0)  # without a word to the other one
"""


def test_a_dead_rank_is_noticed(tmp_path):
    pair = [start(["-c", RANK, rank, 90, f"file://{tmp_path / 'rendezvous'}"]) for rank in (0, 1)]
    assert pair[0].communicate(timeout=110)[0].startswith(("Unreachable", "DeadlineExceeded"))
    assert pair[1].communicate(timeout=110)[0] == ""


def test_a_rank_that_never_comes_ends_the_wait(tmp_path):
    lonely = start(["-c", RANK, 0, 1, f"file://{tmp_path / 'rendezvous'}"])
    assert "DeadlineExceeded joining the process group of rank 0 of 2" in lonely.communicate(timeout=110)[0]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_on_another_host_that_never_comes_ends_the_wait(rank):
    """Rank 0 waits for the others where it listens; the others wait for rank 0."""
    lonely = start(["-c", RANK, rank, 1, f"tcp://127.0.0.1:{free_port()}"])
    said = lonely.communicate(timeout=110)[0]
    assert f"DeadlineExceeded joining the process group of rank {rank} of 2: not all ranks came within 1 s" in said


def test_ranks_need_a_rendezvous_and_the_configured_number(tmp_path):
    config = run_config(tmp_path, ranks=2, device="cpu")
    with pytest.raises(ConfigError, match="rendezvous"):
        Ranks.from_environment(config, {"RANK": "0", "WORLD_SIZE": "2"})
    with pytest.raises(ConfigError, match=r"1 ranks were started, learner\.ranks is 2"):
        Ranks.from_environment(config, {})


def test_an_address_that_other_hosts_do_not_reach_is_named(one_rank):
    said = one_rank._named("joining", RuntimeError("Gloo connectFullMesh failed with timed out connecting"))
    assert (type(said), "GLOO_SOCKET_IFNAME" in said.hint) == (Unreachable, True)


def test_one_rank_needs_no_collective(one_rank):
    assert one_rank.broadcast_ints([1, 2]) == [1, 2]
    assert (one_rank.all_max(3), one_rank.all_min(4)) == ([3], [4])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_an_absent_device_is_a_configuration_error():
    assert choose_device("auto", "float32", section="learner") == torch.device("cpu")
    assert choose_device("cpu", "bfloat16", section="learner") == torch.device("cpu")
    for name in ("cuda", "cuda:1", "nonsense"):
        with pytest.raises(ConfigError, match=r"learner\.device"):
            choose_device(name, "float32", section="learner")
