"""Configuration: precedence, origins, did-you-mean, units, cross-field checks, paths."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import orjson
import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from streamrl.config import EngineConfig, RunConfig
from streamrl.config.base import MODEL, Section
from streamrl.errors import ConfigError
from streamrl.runfile import load, read_saved, save


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def test_defaults_alone_are_a_valid_run():
    assert load(None, environ={}).config == RunConfig()


def test_precedence_and_origin(tmp_path: Path):
    path = write(tmp_path, "seed: 1\nlearner: {lr: 0.1, steps: 5}\nname: fromfile\n")
    environ = {"STREAMRL_LEARNER__LR": "0.2", "STREAMRL_SEED": "2", "STREAMRL_ROLE": "learner", "HOME": "/"}
    loaded = load(path, ["learner.lr=3e-6"], environ)
    assert (loaded.config.learner.lr, loaded.config.seed, loaded.config.learner.steps) == (3e-6, 2, 5)
    assert loaded.origins["learner.lr"] == "--set"
    assert loaded.origins["seed"] == "env STREAMRL_SEED"
    assert loaded.origins["learner.steps"] == f"file {path}"
    assert loaded.origins["max_staleness"] == "default"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("learner.lrr=1", "did you mean lr"),
        ("lerner.lr=1", "did you mean learner"),
        ("rewards=[{use: exact_match, wieght: 2}]", "did you mean weight"),
        ("learner.lr", "no '='"),
        ("seed.x=1", "seed"),
        ("learner=[", "not a YAML value"),
        ("lease.seconds=-1", "lease.seconds"),
        ("learner.sinks=[wandb]", "write learner.report_to"),
        ("archive.files=3", "set max_bytes"),
    ],
)
def test_wrong_keys_and_values_name_themselves(override, message):
    with pytest.raises(ConfigError) as caught:
        load(None, [override], {})
    assert message in str(caught.value)
    assert caught.value.exit_code == 78


INT8 = ["engine.kind=vllm", "weights.quantize=int8"]
OPENAI = ["engine.kind=openai", "engine.url=[http://a:1]"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["sampling.group_size=1"], "min_group"),
        (["learner.advantage.use=remax"], "sampling.greedy_baseline"),
        (["sampling.greedy_baseline=true"], "only learner.advantage.use remax reads"),
        (["learner.ranks=2", "learner.groups_per_step=1"], "ranks"),
        (["learner.ranks=2", "learner.collective_deadline=60"], "redis.patience"),
        (["sampling.max_new_tokens=4096"], "model.context"),
        (["max_staleness=9", "learner.max_token_staleness=3"], "max_token_staleness"),
        (["evaluation.every=5"], "held_out"),
        (["learner.stop_at_accuracy=0.9"], "evaluation.every"),
        (["rewards=[{use: exact_match}, {use: exact_match}]"], "same name"),
        (["redis.maxmemory=1MiB"], "redis.maxmemory"),
        (["engine.kind=openai"], "^engine: engine.kind openai needs engine.url"),
        (["engine.kind=vlm"], "^engine.kind: must be .hf., .vllm., .sglang. or .openai., not .vlm. .--set"),
        (["engine.flags=[--x]"], "engine.flags: must be a mapping: {key: value}"),
        (["engine.url=http://a"], "engine.url: must be a list"),
        (["engine.kind=vllm", "engine.url=[http://a:1]", "engine.servers=2"], "engine.servers"),
        (["engine.kind=vllm", "engine.url=[http://a:1, http://a:1/]"], "twice"),
        (["engine.url=[http://a:1]"], "start `streamrl run rollout"),
        (["engine.url=[ftp://a]"], "not the URL of a server"),
        (["engine.url=[http://me:secret@a:1]"], "api_key_file"),
        (["engine.environment=/tmp"], "engine.environment"),
        (["engine.kind=vllm", "engine.url=[http://a:1]", "engine.flags={seed: 1}"], "engine.flags"),
        (["engine.servers=2"], "engine.servers"),
        (["engine.api_key_file=/tmp/key"], "api_key_file"),
        (["engine.kind=openai", "engine.url=[http://a:1]", "rollout.placement=colocated"], "colocated"),
        (["cluster.resources={agent: {gpus: 1}}"], "names no role by agent"),
        (["engine.kind=vllm", "cluster.resources={rollout: {gpus: 1}}"], "name engine instead"),
        (["learner.critic.kind=head"], "set kind to model, a critic of its own"),
        ([*INT8, "engine.flags={hf_overrides: {}}"], "sets this flag itself: leave out engine.flags.hf_overrides"),
        ([*INT8, "engine.flags={hf-overrides.rope_theta: 3}"], "leave out engine.flags.hf-overrides.rope_theta"),
        (["engine.kind=vllm", "rollout.placement=colocated", "weights.transport=collective"], "weights.transport shm"),
        ([*INT8, "engine.kind=hf"], "weights.quantize: engine.kind hf takes no such weights"),
        ([*INT8, "engine.kind=sglang"], "weights.quantize int8: sglang transposes .* use fp8_block"),
        ([*INT8, "weights.delta.enabled=true"], "leave out weights.delta"),
        ([*INT8, "learner.lora={rank: 4, publish: adapter}"], "set learner.lora.publish merged"),
        ([*INT8, "learner.preset=on_policy"], "weights.quantize: .*base uncorrected ignores that; use decoupled"),
        (["sampling.top_p=0"], "sampling.top_p"),
        (["sampling.stop=['']"], "sampling.stop"),
        (["sampling.min_tokens=257"], "sampling.min_tokens is more than sampling.max_new_tokens"),
        (["sampling.min_tokens=9", "evaluation.max_new_tokens=8"], "evaluation.min_tokens is more"),
        (["evaluation.max_new_tokens=4096"], "evaluation.max_new_tokens leaves no room"),
        ([*OPENAI, "sampling.top_p=0.9"], "sampling.top_p: the log-probabilities of an openai server"),
        ([*OPENAI, "sampling.temperature=0.7"], "sampling.temperature: the log-probabilities of an openai server"),
        ([*OPENAI, "sampling.min_tokens=2"], "set evaluation.min_tokens instead"),
        (["engine.kind=sglang", "sampling.min_p=0.1"], "sampling.min_p: sglang tells .* with sampling.top_k 1 to 4096"),
        (["engine.kind=sglang", "sampling.top_k=5000"], "sampling.top_k: sglang tells"),
        (["engine.kind=sglang", "evaluation.seed=1"], "evaluation.seed: sglang draws for all"),
    ],
)
def test_values_that_do_not_fit_together(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load(None, overrides, {})


@pytest.mark.parametrize(
    "overrides",
    [
        [*OPENAI, "sampling.top_p=0.9", "sampling.temperature=0.7", "engine.flags={processed-logprobs: true}"],
        [*OPENAI, "sampling.stop=[END]", "sampling.seed=1", "evaluation.top_p=0.9", "evaluation.min_tokens=3"],
        ["engine.kind=sglang", "sampling.top_k=4096", "sampling.top_p=0.9", "evaluation.min_p=0.1"],
        ["engine.kind=vllm", "sampling.top_p=0.9", "sampling.min_p=0.1", "sampling.min_tokens=3", "sampling.seed=0"],
    ],
)
def test_options_of_sampling_that_engines_know(overrides):
    load(None, overrides, {})


def test_evaluation_is_drawn_as_training_but_for_its_own_options():
    config = load(None, ["sampling.top_p=0.9", "sampling.stop=[END]", "evaluation.temperature=0"], {}).config
    assert config.drawing(evaluation=False) is config.sampling
    held_out = config.drawing(evaluation=True)
    assert (held_out.temperature, held_out.top_p, held_out.stop) == (0, 0.9, ("END",))
    assert (config.sampling.cuts, held_out.cuts) == ("top_p", "")  # greedy: nothing is drawn
    assert config.reads_text
    assert not load(None, ["sampling.top_k=5", "sampling.seed=1"], {}).config.reads_text
    assert load(None, ["episode.agent={command: agent}"], {}).config.reads_text


def test_units():
    config = load(None, ["redis.maxmemory=2GiB", "lease.seconds=1500ms", "lease.max_hold=10m"], {}).config
    assert (config.redis.maxmemory, config.lease.seconds, config.lease.max_hold) == (2 << 30, 1.5, 600.0)


def test_what_is_gone_is_read_from_a_saved_configuration_and_refused_in_a_new_one(tmp_path):
    path = tmp_path / "run.json"
    items = ["learner.critic.kind=model", "learner.advantage.use=gae", "episode.tools=[m:f]"]
    save(load(None, items, {}), path)
    saved = orjson.loads(path.read_bytes())
    saved["config"]["learner"]["critic"] |= {"coefficient": 0.5, "kind": "head"}
    saved["config"]["learner"]["matmul_precision"] = "auto"
    saved["config"]["episode"]["processes"], saved["config"]["rollout"]["host"] = 2, "0.0.0.0"
    saved["config"]["engine"] |= {"kind": "hf", "url": ["http://a:1"], "api_key_file": "/key"}
    saved["config"]["engine"]["decode"] = "slots"
    saved["config"]["weights"]["relay"] = True
    del saved["config"]["episode"]["scoring_share"]
    saved["config"]["episode"]["shares"] = {"start": 0.25, "model": 1.0, "tools": 1.0, "scoring": 0.2}
    path.write_bytes(orjson.dumps(saved))
    config = read_saved(path).config
    assert config.engine == EngineConfig()
    learner = config.learner
    assert (learner.critic.kind, learner.matmul_precision) == ("model", "highest")
    assert config.episode.scoring_share == 0.2
    for item, said in (
        ("learner.matmul_precision=auto", "set medium with"),
        ("learner.critic.kind=head", "set kind to model"),
        ("learner.critic.coefficient=0.5", "leave it out"),
        ("episode.processes=2", "episode: processes .* set rollout.replicas"),
        ("episode.processes=0", "leave it out"),
        ("rollout.host=0.0.0.0", "rollout: host .* leave it out"),
        ("learner.rows=packed", "rows is gone: leave it out, rows are packed"),
        ("learner.share_prompts=false", "share_prompts is gone: leave it out"),
        ("learner.correction.gates=[{use: m2po, args: {over: step}}]", "over of m2po is gone: leave it out"),
        ("engine.decode=continuous", "decode is gone, there is one decode loop: leave it out, or use kind vllm"),
        ("episode.agent={command: [a], keep: used}", "keep is gone, .*leave it out, and mark"),
        ("reward_models.critic={model: m, wake_at: 3}", "wake_at is gone, .*leave it out"),
        ("reward_models.critic={model: m, sleep: true}", "critic.sleep is for rollout.placement colocated"),
        ("weights.relay=false", "relay is gone: leave it out, and set url"),
        ("weights.url=s3://bucket", "weights.url is for transport http, not shm"),
        (
            "weights={transport: collective, delta: {enabled: true}}",
            "whole versions: leave out weights.delta",
        ),
        ("episode.shares.start=0.5", "leave it out; scoring_share is"),
    ):
        with pytest.raises(ConfigError, match=said):
            load(None, [item], {})


def test_a_greedy_baseline_is_one_more_response():
    sampling = load(None, ["sampling.greedy_baseline=true", "learner.advantage.use=remax"], {}).config.sampling
    assert (sampling.group_size, sampling.responses, sampling.min_responses) == (8, 9, 3)
    own = load(None, ["sampling.greedy_baseline=true", "learner.advantage.use=mine:estimator"], {}).config.sampling
    assert own.responses == 9


@pytest.mark.parametrize(
    ("staleness", "groups", "every", "budget", "hard_cap", "in_background"),
    [(2, 8, 3, 24, 48, 72), (0, 5, 4, 5, 25, 45), (3, 2, 1, 8, 10, 12)],
)
def test_bounds_follow_promise_two(staleness, groups, every, budget, hard_cap, in_background):
    bounds = [f"max_staleness={staleness}", f"learner.groups_per_step={groups}", f"checkpoint.every={every}"]
    config = load(None, [*bounds, "checkpoint.background=false"], {}).config
    assert (config.budget, config.hard_cap) == (budget, hard_cap)
    assert load(None, bounds, {}).config.hard_cap == in_background


def test_servers_that_replicas_started_are_engines_now(tmp_path: Path):
    path = tmp_path / "run.json"
    save(load(None, ["engine.kind=vllm", "engine.servers=2", "rollout.replicas=3"], {}), path)
    saved = orjson.loads(path.read_bytes())
    del saved["config"]["engine"]["host"]
    saved["config"]["cluster"]["resources"] = {"rollout": {"gpus": 1}, "agent": {"cpus": 1}}
    path.write_bytes(orjson.dumps(saved))
    config = read_saved(path).config
    assert (config.engines, config.rollout.replicas, list(config.cluster.resources)) == (6, 3, ["engine"])


def test_servers_have_one_name_and_count_as_slots():
    shared = ["engine.kind=vllm", "engine.slots=8", "rollout.replicas=2"]
    config = load(None, [*shared, "engine.url=[http://a:1/, https://b]"], {}).config
    assert config.engine.url == ("http://a:1", "https://b")
    assert config.slots == 16
    config = load(None, [*shared, "engine.servers=3"], {}).config
    assert (config.engine.managed, config.slots) == (True, 24)


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "\x00", "name: 2024-13-45", "seed: 1" + 5000 * "0"])
def test_a_file_that_is_no_mapping(tmp_path: Path, text):
    with pytest.raises(ConfigError):
        load(write(tmp_path, text), environ={})


def test_a_missing_file_says_how_to_make_one(tmp_path: Path):
    with pytest.raises(ConfigError, match="streamrl init"):
        load(tmp_path / "none.yaml", environ={})


def test_paths_are_relative_to_the_file_and_hub_names_stay(tmp_path: Path):
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    path = write(tmp_path, "data: {train: sub/t.jsonl}\nmodel: {path: models/tiny, tokenizer: org/name}\n")
    config = load(path, environ={}).config
    assert [one.source for one in config.data.train] == [tmp_path / "sub" / "t.jsonl"]
    assert config.model.path == str(tmp_path / "models" / "tiny")
    assert config.model.tokenizer == "org/name"


WITH = {
    "engine.environment": ["engine.kind=vllm"],
    "engine.api_key_file": ["engine.kind=vllm", "engine.url=[http://a:1]"],
    "recording.path": ["recording.mode=read"],
    "episode.agent.directory": ["episode.agent.command=[agent]"],
}
"""What else has to be set so that a key may be."""


def places(section: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key of a run file; `m` is the name of each entry of a mapping."""
    for name, field in section.model_fields.items():
        inner = [kind for kind in (field.annotation, *get_args(field.annotation)) if is_section(kind)]
        for kind in inner:
            entry = ".m" if get_origin(field.annotation) is dict else ""
            yield from places(kind, f"{prefix}{name}{entry}.")
        if not inner:
            yield prefix + name, field


def is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


FILES = [key for key, field in places() if Path in (field.annotation, *get_args(field.annotation))]
MODELS = [key for key, field in places() if MODEL in field.metadata]


@pytest.mark.parametrize("key", [*FILES, *MODELS])
def test_every_path_is_relative_to_the_run_file(tmp_path: Path, key: str):
    (tmp_path / "here").touch()
    value = "[here]" if key == "plugin_paths" else "here"
    model = ["reward_models={m: {model: org/name}}"] if key.startswith("reward_models") else []
    config = load(write(tmp_path, ""), [*model, *WITH.get(key, []), f"{key}={value}"], environ={}).config
    found: Any = config.model_dump(mode="json")
    for name in key.split("."):
        found = found[name] if isinstance(found, dict) else found  # a source of prompts is written as its path alone
    assert (found[-1] if isinstance(found, list) else found) == str(tmp_path / "here")


def test_a_key_that_is_called_after_a_path_has_the_type_of_one():
    called = {key for key, _ in places() if key.endswith(("file", "path", "paths", "directory", "folder"))}
    assert called >= {"learner.reference.api_key_file", "learner.critic.path"}
    assert called - {*FILES, *MODELS} == set()


def test_files_in_the_args_of_rewards_are_relative_to_the_run_file_too(tmp_path: Path):
    (tmp_path / "critic").mkdir()
    path = write(
        tmp_path,
        "rewards: [{use: json_schema, args: {file: a.json}}, {use: code, args: {file: main.py}},"
        " {use: reward_model, args: {model: m, chat_template: b.jinja, tokenizer: critic}}]\n"
        "reward_models: {m: {url: ['http://a:1']}}\n",
    )
    schema, code, model = (reward.args for reward in load(path, environ={}).config.rewards)
    assert schema == {"file": str(tmp_path / "a.json")}
    assert code == {"file": "main.py"}
    assert model == {"model": "m", "chat_template": str(tmp_path / "b.jinja"), "tokenizer": str(tmp_path / "critic")}


def test_saved_configuration_reads_back_the_same(tmp_path: Path):
    loaded = load(None, ["learner.lr=1e-5"], {})
    save(loaded, tmp_path / "run.json")
    assert read_saved(tmp_path / "run.json") == loaded
    with pytest.raises(ConfigError, match="not a run directory"):
        read_saved(tmp_path / "elsewhere" / "run.json")
    (tmp_path / "run.json").write_text('{"config": {"unknown": 1}, "origins": {}}')
    with pytest.raises(ConfigError, match="does not fit"):
        read_saved(tmp_path / "run.json")


def test_an_entry_of_a_list_cannot_be_set_alone(tmp_path: Path):
    path = write(tmp_path, "rewards: [{use: exact_match}]")
    with pytest.raises(ConfigError, match="rewards is not a section") as caught:
        load(path, ["rewards.0.weight=2"], {})
    assert caught.value.hint == "rewards is a list, which is set as a whole"
