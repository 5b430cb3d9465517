"""Servers of reward models among the roles of a run: plan, order, command line, preflight, status."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from streamrl.cli import run as command_line
from streamrl.config import RunConfig
from streamrl.errors import ConfigError, ExitCode
from streamrl.runfile import load, read_saved
from streamrl.runtime.instance import RoleState
from streamrl.runtime.plan import ROLE_KINDS, plan, processes, role_names, starts_after
from streamrl.runtime.preflight import check_reward_models
from streamrl.servers import environments
from tests.runtime.test_roles import make_config, save_run
from tests.runtime.test_supervisor import Run, unit
from tests.servers.played_model_server import make_environment

MODELS = {
    "critic": {"model": "c", "servers": 2, "start_deadline": 777.0},
    "judge": {"model": "j", "kind": "sglang", "task": "chat"},
    "other": {"model": "o", "url": ["http://a:1"]},
}


def config(**sections):
    return RunConfig.model_validate({"reward_models": MODELS, **sections})


def test_each_server_is_a_role_of_its_own(tmp_path):
    assert processes(config()) == {
        "learner": 1, "reward_model.critic": 2, "reward_model.judge": 1, "rollout": 1, "reward": 1, "feeder": 1
    }  # fmt: skip
    units = {unit.name: unit for unit in plan(config(engine={"threads": 3}), tmp_path)}
    served = units["reward_model.critic.1"]
    assert served.kind == "reward_model"
    assert served.start_seconds >= 777
    command = served.command(0)
    assert command.arguments[-3:] == ("reward_model.critic", "1", str(tmp_path))
    assert "OMP_NUM_THREADS" not in command.env
    assert units["reward.0"].command(0).env["OMP_NUM_THREADS"] == "1"
    named = [name for name in role_names(config()) if name.startswith("reward_model.")]
    assert named == ["reward_model.critic.0", "reward_model.critic.1", "reward_model.judge.0"]
    only_trains = config(recording={"mode": "read", "path": str(tmp_path)})
    assert set(processes(only_trains)) == {"learner", "player"}


def test_only_those_that_score_wait_for_them():
    assert {kind for kind in ROLE_KINDS if "reward_model" in starts_after(kind)} == {"reward"}
    assert {kind for kind, known in ROLE_KINDS.items() if "reward_model" in known.waits_for} == {"reward"}
    assert starts_after("reward_model") == frozenset()
    order = list(ROLE_KINDS)
    assert order.index("reward") < order.index("reward_model")
    assert order[-1] == "redis"
    assert sum(known.drain_share for known in ROLE_KINDS.values()) == pytest.approx(1.0)


async def test_a_replica_starts_beside_a_server_and_a_worker_after_it(tmp_path):
    units = [
        unit(tmp_path, "redis", "ready", "serve"),
        unit(tmp_path, "reward_model.critic.0", "wait-for:go", "ready", "serve"),
        unit(tmp_path, "rollout.0", "ready", "serve"),
        unit(tmp_path, "reward.0", "ready", "serve"),
    ]
    async with Run(tmp_path, *units) as run:
        await run.until(lambda: run.now("rollout.0") is RoleState.READY)
        assert ("reward.0", "start") not in run.journal("start")
        (tmp_path / "go").touch()
        await run.until(lambda: run.now("reward.0") is RoleState.READY)


def test_a_learner_waits_for_a_server_that_loads_on_its_devices(tmp_path):
    """Who loads a model gives the devices back only afterwards; a learner that gave up before would do so for ever."""
    models = {"critic": {"model": "c", "sleep": True, "start_deadline": 777.0}, "other": {"model": "o"}}
    sections = {"reward_models": models, "weights": {"deadline": 100.0}, "supervisor": {"start_deadline": 50.0}}
    shared = RunConfig.model_validate({**sections, "rollout": {"placement": "colocated"}})
    alone = RunConfig.model_validate({**sections, "reward_models": {"other": {"model": "o"}}})
    assert (shared.turn_deadline, alone.turn_deadline) == (877.0, 100.0)
    seconds = {unit.kind: unit.start_seconds for unit in plan(shared, tmp_path)}
    assert seconds["learner"] == 927.0
    assert {unit.kind: unit.start_seconds for unit in plan(alone, tmp_path)}["learner"] == 0


def test_the_preflight_names_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(environments, "has_gpu", lambda: False)
    for_cpu = make_environment(tmp_path / "env", cpu=True)
    ours = {"critic": {"model": "c", "environment": str(for_cpu), "servers": 2}}
    theirs = {"other": MODELS["other"]}
    assert check_reward_models(RunConfig()) == "none"
    found = check_reward_models(RunConfig.model_validate({"reward_models": ours | theirs}))
    assert found == "critic: 2 x vllm; other: http://a:1"
    for folder, said in [
        (tmp_path / "nowhere", r"reward_models\.critic\.environment"),
        (make_environment(tmp_path / "gpu"), "made for GPUs, and this machine has none"),
    ]:
        ours["critic"]["environment"] = str(folder)
        with pytest.raises(ConfigError, match=said):
            check_reward_models(RunConfig.model_validate({"reward_models": ours}))


def test_keys_that_do_not_fit_are_refused(tmp_path):
    file = tmp_path / "run.yaml"
    for text, said in [
        ("reward_models: {a.b: {model: m}}", "must be 1 to 64 letters"),
        ("reward_models: {a: {}}", "needs model"),
        (
            "reward_models: {a: {model: m, url: ['http://b:1'], sleep: true}}",
            "sleep is of servers that streamrl starts",
        ),
        ("reward_models: {a: {kind: openai, model: m}}", "needs url"),
    ]:
        file.write_text(text)
        with pytest.raises(ConfigError, match=said):
            load(file, environ={})


def test_a_model_beside_the_run_file_is_found_from_everywhere(tmp_path):
    (tmp_path / "critic").mkdir()
    (tmp_path / "run.yaml").write_text(
        "reward_models:\n  a: {model: critic}\n  b: {model: owner/name}\n  c: {model: critic, url: ['http://b:1']}\n"
    )
    models = load(tmp_path / "run.yaml", environ={}).config.reward_models
    assert {name: model.model for name, model in models.items()} == {
        "a": str(tmp_path / "critic"), "b": "owner/name", "c": "critic"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["reward_model"], "known: critic, judge"),
        (["reward_model", "--model", "critik"], "did you mean critic?"),
        (["reward_model", "--model", "other"], "known: critic, judge"),
        (["reward", "--model", "critic"], "leave it out"),
    ],
)
def test_run_wants_to_know_which_model(tmp_path, capsys, words, said):
    save_run(config(), tmp_path)
    assert command_line(["run", *words, "--run", str(tmp_path)]) == ExitCode.USAGE
    assert said in capsys.readouterr().err


def children_named(pid, word):
    return [one for one in psutil.Process(pid).children(recursive=True) if word in " ".join(one.cmdline())]


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["server", "role"])
async def test_kill_9_of_a_server_or_of_its_role_is_a_restart_and_leaves_nothing(tmp_path, victim):
    environment = make_environment(tmp_path / "env")
    critic = {"model": "c", "environment": str(environment), "start_deadline": 60.0}
    run_dir = tmp_path / "run"
    save_run(make_config(reward_models={"critic": critic}), run_dir)
    units = [one for one in plan(read_saved(run_dir / "run.json").config, run_dir) if one.kind != "learner"]
    units = [one for one in units if one.kind in {"redis", "reward_model"}]
    async with Run(run_dir, *units, backoff=0.01) as run:
        name = "reward_model.critic.0"
        await run.until(lambda: run.now(name) is RoleState.READY, 60)
        role = run.pid(name)
        (server,) = children_named(role, "played_model_server")
        os.kill(server.pid if victim == "server" else role, signal.SIGKILL)
        await run.until(lambda: run.pid(name) != role and run.now(name) is RoleState.READY, 60)
        _, alive = psutil.wait_procs([server], timeout=30)
        assert not alive
        assert len(children_named(run.pid(name), "played_model_server")) == 1
        os.kill(os.getpid(), signal.SIGINT)
        outcome = await run.outcome(60)
    assert outcome.exit_code == ExitCode.OK
    assert outcome.restarts[name] == 1
    assert not [one for one in psutil.process_iter() if str(run_dir) in " ".join(_words(one))]


def _words(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []
