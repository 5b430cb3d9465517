import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from streamrl.commands.role import run_role
from streamrl.cores import share_cores, usable_cores
from streamrl.errors import CannotCreate, ConfigError, DataError, Refused, UsageError
from streamrl.producers.tokenizer import Tokenizer
from streamrl.queues import embedded
from streamrl.runfile import load
from streamrl.runtime import limits, preflight
from streamrl.runtime.launch import describe, prepare_run, supervisor_lock
from streamrl.runtime.plan import computing, divide_cores, plan, threads, use_cores
from tests.producers.test_dataset import TEMPLATE, make_backend
from tests.runtime.test_roles import make_config, save_run


@pytest.fixture
def home(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"dtype": "float32"}')
    (tmp_path / "model" / "model.safetensors").write_bytes(b"x" * 1000)
    (tmp_path / "train.jsonl").write_text('{"prompt": "2+2=", "answer": "4"}\n')
    (tmp_path / "run.yaml").write_text("name: t\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def loaded(home, *overrides):
    return load(home / "run.yaml", overrides, environ={})


def test_a_new_run_gets_its_directory_and_its_resolved_configuration(home):
    prepared = prepare_run(loaded(home, "learner.lr=1e-4"))
    assert (prepared.run_dir.resolve(), prepared.resumed) == (home / "runs" / "t", False)
    saved = json.loads((prepared.run_dir / "run.json").read_bytes())
    assert saved["config"]["learner"]["lr"] == 1e-4
    assert saved["origins"]["learner.lr"] == "--set"
    assert {check.name for check in prepared.checks} >= {"redis", "model", "data", "rewards", "disk"}


def test_a_run_that_is_there_is_resumed_with_what_may_change(home):
    prepare_run(loaded(home))
    again = prepare_run(loaded(home, "learner.lr=1e-4", "checkpoint.every=5"), resume=True)
    assert again.resumed
    assert set(again.changed) == {"learner.lr", "checkpoint.every"}


@pytest.mark.parametrize(
    "override",
    ["seed=1", "sampling.group_size=4", "sampling.temperature=0.7", "data.shuffle=false", "model.context=4096"],
)
def test_what_ledger_and_checkpoints_depend_on_must_stay(home, override):
    prepare_run(loaded(home))
    with pytest.raises(ConfigError, match=override.partition("=")[0]) as caught:
        prepare_run(loaded(home, override))
    assert "--fresh" in caught.value.hint


def test_fresh_puts_the_old_run_aside_and_deletes_nothing(home):
    first = prepare_run(loaded(home)).run_dir
    (first / "checkpoints" / "precious").write_text("x")
    for _ in range(2):
        prepared = prepare_run(loaded(home, "seed=1"), fresh=True)
        assert not prepared.resumed
        assert not (prepared.run_dir / "checkpoints" / "precious").exists()
        assert prepared.put_aside is not None
    aside = list((home / "runs").glob("t.old-*"))
    assert len(aside) == 2
    assert sum((folder / "checkpoints" / "precious").exists() for folder in aside) == 1


@pytest.mark.parametrize("fresh", [True, False])
def test_a_run_that_is_running_is_left_alone(home, fresh):
    run_dir = prepare_run(loaded(home)).run_dir
    before = (run_dir / "run.json").read_bytes()
    with supervisor_lock(run_dir), pytest.raises(Refused, match="running already"):
        prepare_run(loaded(home, "learner.lr=1e-3"), fresh=fresh)
    assert (run_dir / "run.json").read_bytes() == before


def test_wrong_flags_and_directories(home):
    with pytest.raises(UsageError, match="exclude each other"):
        prepare_run(loaded(home), fresh=True, resume=True)
    with pytest.raises(UsageError, match="no run in"):
        prepare_run(loaded(home), resume=True)
    (home / "mine").mkdir()
    (home / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(CannotCreate, match="not empty"):
        prepare_run(loaded(home), home / "mine", fresh=True)
    (home / "file").write_text("x")
    with pytest.raises(CannotCreate):
        prepare_run(loaded(home), home / "file" / "run")


JUDGE = "{use: judge, args: {model: critic}}"
PLUGIN = "tests.consumers.rewards_for_tests"


@pytest.mark.parametrize(
    ("rewards", "refused"),
    [
        ("{use: exact_match}", False),
        (f"{{use: '{PLUGIN}:by_text'}}", False),
        (f"{{use: '{PLUGIN}:Spoilt'}}", False),
        (f"{{use: '{PLUGIN}:NeedsModel'}}", True),
        (JUDGE, True),
        ("{use: judge, args: {model: other}}", False),
    ],
)
def test_what_is_measured_at_the_end_needs_servers_that_outlive_the_run(home, rewards, refused):
    models = "reward_models={critic: {model: m, task: chat}, other: {model: m, task: chat, url: ['http://a:1']}}"
    config = loaded(home, f"rewards=[{rewards}]", models, "evaluation.final_prompts=8").config
    error = next(check.error for check in preflight.check_all(config, home / "runs") if check.name == "rewards")
    if refused:
        assert "evaluation.final_prompts measures after the servers of reward_models.critic have" in str(error)
    else:
        assert error is None


def test_rewards_that_compare_are_no_measure_of_a_version(home):
    compare = ["rewards=[{use: 'tests.consumers.group_rewards_for_tests:Rank'}]", "evaluation.final_prompts=8"]
    with pytest.raises(ConfigError, match=r"Rank compares .* cannot measure"):
        prepare_run(loaded(home, *compare))
    assert prepare_run(loaded(home, *compare[:1])).checks


def test_a_function_for_trl_measures_a_version_unless_it_is_declared_to_compare(home):
    (home / "for_trl.py").write_text(FOR_TRL)
    sys.modules.pop("for_trl", None)
    alone = "rewards=[{use: 'for_trl:other', adapter: trl}]"
    assert prepare_run(loaded(home, alone, "evaluation.final_prompts=8")).checks
    compares = alone.replace("trl}", "trl, group: true}")
    with pytest.raises(ConfigError, match=r"other compares .* cannot measure"):
        prepare_run(loaded(home, compares, "evaluation.final_prompts=8"))


def test_a_directory_that_is_no_model_and_data_that_is_none(home):
    (home / "model" / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="no weights"):
        prepare_run(loaded(home))
    (home / "model" / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        prepare_run(loaded(home))


@pytest.mark.parametrize("line", ["", "\n \n", "{oops\n", "[1]\n", '{"question": "?"}\n'])
def test_data_without_a_first_prompt(home, line):
    (home / "train.jsonl").write_text(line)
    with pytest.raises(DataError, match=r"train\.jsonl"):
        prepare_run(loaded(home))


def test_too_little_space_is_said_with_figures(home):
    with (home / "model" / "model.safetensors").open("r+b") as file:
        file.truncate(1 << 43)  # a sparse file: as large as it says, and takes no space
    with pytest.raises(CannotCreate, match="this run needs"):
        limits.check_disk(loaded(home).config, home)
    with pytest.raises(CannotCreate, match="this run needs"):
        limits.check_shared_memory(loaded(home).config)
    assert limits.check_shared_memory(loaded(home, "weights.transport=directory").config) == "not used"


def test_no_redis_server_says_how_to_get_one(home, monkeypatch):
    monkeypatch.setattr(embedded, "_candidates", list)
    with pytest.raises(ConfigError) as caught:
        prepare_run(loaded(home))
    assert "pip install" in caught.value.hint


@pytest.mark.parametrize(
    ("check", "overrides"),
    [
        ("redis", ["redis.url=redis://nobody.invalid:6379/0"]),
        ("weights", ["weights.transport=http", "weights.host=nobody.invalid"]),
        ("engine", ["engine.kind=vllm", "engine.url=[http://nobody.invalid:8000]"]),
        ("stores", ["checkpoint.store=ftp://nobody.invalid/runs"]),
    ],
)
def test_a_host_name_that_nobody_knows_is_named_with_its_remedy(home, check, overrides):
    found = {one.name: one.error for one in preflight.check_all(loaded(home, *overrides).config, home / "runs")}
    error = found.pop(check)
    assert error is not None
    assert "nobody.invalid" in error.message
    assert "not known" in error.message
    assert error.hint
    assert not any(found.values())


def test_the_plan_has_every_process_of_the_run(home):
    config = loaded(home, "rollout.replicas=2", "learner.ranks=2", "learner.threads=3", "engine.threads=2").config
    units = plan(config, home / "runs" / "t")
    assert [unit.name for unit in units] == ["redis", "learner", "rollout.0", "rollout.1", "reward.0", "feeder.0"]
    assert units[1].processes == ("learner.0", "learner.1")
    first, second = (units[1].command(rank).env for rank in (0, 1))
    assert (first["RANK"], second["RANK"], second["WORLD_SIZE"]) == ("0", "1", "2")
    assert first["OMP_NUM_THREADS"] == "3"
    assert units[2].command(0).env["OMP_NUM_THREADS"] == "2"
    assert units[4].command(0).env["OMP_NUM_THREADS"] == "1"
    assert not list((home).glob("runs/*"))


@pytest.mark.parametrize(
    ("overrides", "cores", "shares"),
    [
        ([], 2, {"learner": 1, "rollout": 1}),
        ([], 16, {"learner": 8, "rollout": 8}),
        (["learner.ranks=2", "rollout.replicas=2"], 16, {"learner": 4, "rollout": 4}),
        (["learner.threads=6"], 16, {"learner": 6, "rollout": 10}),
        (["engine.threads=3", "learner.ranks=2"], 16, {"learner": 6, "rollout": 3}),
        (["engine.kind=vllm", "engine.servers=2", "engine.tensor_parallel=3"], 14, {"learner": 2, "engine": 2}),
        (["engine.kind=vllm", "engine.url=[http://h:1]"], 16, {"learner": 15}),
        (["rollout.placement=colocated"], 16, {"learner": 15, "rollout": 15}),
        (["reward_models.m={model: m, servers: 2}"], 16, {"learner": 4, "reward_model.m": 4, "rollout": 4}),
        (["recording.mode=write"], 16, {"rollout": 15}),
    ],
)
def test_the_cores_of_a_host_are_divided_among_the_roles_that_compute(home, overrides, cores, shares):
    config = loaded(home, *overrides).config
    assert divide_cores(config, cores, computing(config)) == shares


def test_a_number_in_the_run_file_wins_and_a_cluster_gives_what_was_asked_for(home):
    config = loaded(home, "engine.threads=2", "cluster.resources={learner: {cpus: 4}, rollout: {cpus: 8}}").config
    assert "OMP_NUM_THREADS" not in threads(config, "learner")  # its share of the host, when it starts
    assert threads(config, "learner", cluster=True)["OMP_NUM_THREADS"] == "3"
    assert threads(config, "rollout", cluster=True)["OMP_NUM_THREADS"] == "2"
    assert threads(config, "reward", cluster=True)["OMP_NUM_THREADS"] == "1"
    asked = "cluster.resources={rollout: {cpus: 6}, reward_model: {cpus: 3}}"
    servers = loaded(home, asked, "engine.kind=vllm", "engine.servers=4", "reward_models.m={model: m}").config
    assert threads(servers, "rollout", cluster=True)["OMP_NUM_THREADS"] == "1"  # of each server: no more than cores
    assert threads(servers, "reward_model.m", cluster=True)["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize(
    ("index", "alone", "environ", "threads"),
    [(0, False, {}, "4"), (1, False, {}, "2"), (0, True, {}, "7"), (0, True, {"OMP_NUM_THREADS": "5"}, "5")],
)
def test_a_role_takes_its_share_of_the_cores_it_finds(home, monkeypatch, index, alone, environ, threads):
    monkeypatch.setattr("streamrl.runtime.plan.usable_cores", lambda: 8)
    monkeypatch.setattr("os.environ", dict(environ))
    use_cores(loaded(home).config, "rollout", index, alone=alone)
    assert os.environ["OMP_NUM_THREADS"] == threads


def test_a_server_of_a_reward_model_that_joins_has_its_host_for_itself(home, monkeypatch):
    target = SimpleNamespace(config=loaded(home, "reward_models.m={model: m}").config, path=home)
    started = []
    monkeypatch.setattr("streamrl.commands.role.join_run", lambda _: target)
    monkeypatch.setattr("streamrl.runtime.roles.run", lambda name, *_, **__: started.append(name))
    monkeypatch.setattr("streamrl.runtime.plan.usable_cores", lambda: 8)
    monkeypatch.setattr("os.environ", {})
    run_role("reward_model", run="redis://host:1#t", index="0", model=None)
    assert (started, os.environ["OMP_NUM_THREADS"]) == (["reward_model.m"], "7")


def test_a_process_of_a_role_has_its_threads(redis_run, tmp_path):
    """Measured where the learner loads its loss, before it has a model."""
    code = (
        "import pathlib, torch\npathlib.Path(__file__).with_suffix('.txt').write_text(str(torch.get_num_threads()))\n"
    )
    (tmp_path / "looks.py").write_text(code)
    save_run(make_config(redis_run.config, learner={"loss": {"use": "looks:no"}}), redis_run.run_dir)
    environ = {name: value for name, value in os.environ.items() if name not in {"OMP_NUM_THREADS", "MKL_NUM_THREADS"}}
    environ["PYTHONPATH"] = str(tmp_path)
    command = [sys.executable, "-m", "streamrl.runtime", "learner", "0", str(redis_run.run_dir)]
    subprocess.run(command, env=environ, check=False, timeout=120)
    assert (tmp_path / "looks.txt").read_text() == str(share_cores(usable_cores(), 2))


def test_a_foreign_redis_is_not_started_and_a_dry_run_starts_nothing(home):
    config = loaded(home, "redis.url=redis://example").config
    assert plan(config, home / "runs" / "t")[0].kind == "learner"
    lines = describe(loaded(home).config, home / "runs" / "t")
    assert [line.split(":")[0] for line in lines] == ["redis", "learner.0", "rollout.0", "reward.0", "feeder.0"]
    assert not (home / "runs").exists()


@pytest.mark.parametrize(
    ("overrides", "seconds"),
    [
        ([], 0),
        (["engine.kind=vllm", "engine.start_deadline=10m", "weights.deadline=100"], 700),
        (["engine.kind=vllm", "engine.url=[http://host:1]", "engine.start_deadline=50", "weights.deadline=100"], 150),
    ],
)
def test_an_engine_may_take_as_long_to_start_as_its_server(home, overrides, seconds):
    units = {unit.kind: unit for unit in plan(loaded(home, *overrides).config, home)}
    assert units.get("engine", units["rollout"]).start_seconds == seconds
    assert units["rollout"].start_seconds == 0
    assert units["learner"].start_seconds == 0


def test_a_learner_may_take_longer_to_start_with_a_larger_model(home):
    folder = home / "large"
    folder.mkdir()
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(16 << 30)
    settings = [f"model.path={folder}", "supervisor.start_deadline=200", "learner.reference.kind=frozen"]
    units = {unit.kind: unit for unit in plan(loaded(home, *settings).config, home)}
    assert units["learner"].start_seconds == pytest.approx(200 + 2 * 163, abs=2)


def test_a_learner_with_a_store_may_bring_a_checkpoint_before_it_is_ready(home):
    settings = ["checkpoint.store=/store", "checkpoint.deadline=1000", "supervisor.start_deadline=200"]
    units = {unit.kind: unit for unit in plan(loaded(home, *settings).config, home)}
    assert (units["learner"].start_seconds, units["feeder"].start_seconds) == (1200, 0)


FOR_TRL = """
def column(completions, difficulty, **kwargs): return [1.0 for _ in completions]
def other(completions, level=1, **kwargs): return [float(kwargs.get("difficulty") is None) for _ in completions]
"""
CHAT = '{"prompt": [{"role": "user", "content": "2+2="}], "difficulty": 3}\n'


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("column", "column difficulty"),
        ("other", ""),
    ],
)
def test_what_a_function_for_trl_needs_of_the_data_is_said_at_the_start(home, function, said, monkeypatch):
    chats = Tokenizer(make_backend(TEMPLATE), "tiny-chat")
    monkeypatch.setattr(Tokenizer, "load", lambda _: chats)
    (home / "for_trl.py").write_text(FOR_TRL)
    overrides = [f"rewards=[{{use: 'for_trl:{function}', adapter: trl}}]"]
    sys.modules.pop("for_trl", None)
    found = {check.name: check.error for check in preflight.check_all(loaded(home, *overrides).config, home / "runs")}
    assert bool(found["rewards"]) == bool(said)
    if said:
        assert said in found["rewards"].message
        assert "train.jsonl" in found["rewards"].message
    (home / "train.jsonl").write_text(CHAT)
    found = {check.name: check.error for check in preflight.check_all(loaded(home, *overrides).config, home / "runs")}
    assert (found["rewards"], found["data"]) == (None, None)
