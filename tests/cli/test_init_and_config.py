"""What a new user meets first: init, config, version."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import orjson
import pytest

from streamrl.consumers.plugins import load_rewards
from streamrl.consumers.reward import RewardPrompt, RewardSample
from streamrl.runfile import load
from streamrl.servers import environments
from streamrl.wire import pack_int32, unpack_int32
from tests.producers.episodes.chat_kit import make_tokenizer

from .run_kit import cli, data_of, make_run


async def test_init_writes_files_that_work(tmp_path: Path):
    done = cli("init", str(tmp_path / "new"))
    assert done.returncode == 0
    assert [line.split("/")[-1] for line in done.stdout.split("\n")[:-1]] == [
        "run.yaml",
        "my_rewards.py",
        "train.jsonl",
        ".env.example",
    ]
    config = load(tmp_path / "new" / "run.yaml", (), {}).config
    rewards = {reward.name: reward for reward in load_rewards(config)}
    prompts = [orjson.loads(line) for line in config.data.train[0].source.read_bytes().splitlines()]
    assert all(("prompt" in line) != ("messages" in line) and line["answer"] for line in prompts)
    prompt = RewardPrompt(text="", messages=None, answer="1234", metadata={}, tokens=None, line=0, evaluation=False)
    tokens = unpack_int32(pack_int32([1] * 50))
    sample = RewardSample(text="so it is 1,234", prompt=prompt, tokens=tokens, finish="stop")
    (first, second) = rewards.values()
    assert (await first.call(sample)).value == 1.0
    assert second.call(sample) == 0.75


def test_init_overwrites_nothing_unless_told(tmp_path: Path):
    (tmp_path / "my_rewards.py").write_text("mine")
    done = cli("init", str(tmp_path))
    assert (done.returncode, "my_rewards.py already" in done.stderr) == (73, True)
    assert [path.name for path in tmp_path.iterdir()] == ["my_rewards.py"]
    assert cli("init", str(tmp_path), "--force").returncode == 0
    assert (tmp_path / "my_rewards.py").read_text() != "mine"


def test_init_names_the_run_as_its_directory(tmp_path: Path):
    for folder, name in (
        ("my-reverse", "my-reverse"),
        ("zwei Wörter", "zwei-W-rter"),
        ("..", tmp_path.name),
        ("_", "my-run"),
    ):
        assert cli("init", str(tmp_path / "x" / folder), "--force").returncode == 0
        assert load(tmp_path / "x" / folder / "run.yaml", (), {}).config.name == name


def test_init_names_the_package_of_the_agent(tmp_path: Path):
    (tmp_path / "cache").mkdir()  # made before
    done = cli("init", str(tmp_path), "--template", "agent")
    assert (done.returncode, "pip install openai" in done.stderr) == (0, True)


def test_init_where_no_directory_can_be(tmp_path: Path):
    (tmp_path / "file").touch()
    assert cli("init", str(tmp_path / "file" / "new")).returncode == 73


def test_config_show_says_where_each_value_comes_from(tmp_path: Path):
    (tmp_path / "run.yaml").write_text("name: mine\nlearner: {lr: 0.5}\n")
    done = cli(
        "config",
        "show",
        str(tmp_path / "run.yaml"),
        "--origin",
        "--set",
        "seed=7",
        env={"STREAMRL_LEARNER__WARMUP_STEPS": "3"},
    )
    lines = {line.split()[0]: line.split(maxsplit=2)[1:] for line in done.stdout.splitlines()}
    assert lines["name"][0] == '"mine"'
    assert lines["name"][1].startswith("file ")
    assert lines["learner.lr"][0] == "0.5"
    assert lines["learner.warmup_steps"] == ["3", "env STREAMRL_LEARNER__WARMUP_STEPS"]
    assert lines["seed"] == ["7", "--set"]
    assert lines["max_staleness"] == ["1", "default"]
    data = data_of(cli("config", "show", str(tmp_path / "run.yaml"), "--json").stdout, "streamrl.config/1")
    assert data["config"]["learner"]["lr"] == 0.5


def test_config_show_of_a_run(tmp_path: Path):
    make_run(tmp_path, "seed=9")
    data = data_of(cli("config", "show", "--run", str(tmp_path), "--json").stdout, "streamrl.config/1")
    assert (data["config"]["seed"], data["origins"]["seed"]) == (9, "--set")
    assert cli("config", "show", "--run", str(tmp_path), "--set", "seed=1").returncode == 2
    assert cli("config", "show", "run.yaml", "--run", str(tmp_path)).returncode == 2


@pytest.fixture
def runnable(tmp_path: Path) -> Path:
    """A run file with all that its run needs; the model has the files of one and no more."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"dtype": "float32"}')
    (tmp_path / "model" / "model.safetensors").write_bytes(b"x" * 1000)
    (tmp_path / "train.jsonl").write_text('{"prompt": "2+2=", "answer": "4"}\n')
    (tmp_path / "chats.jsonl").write_text('{"prompt": "a"\n{}\n{"prompt": "b"\n')
    (tmp_path / "half.jinja").write_text("{% for message in messages %}")
    (tmp_path / "run.yaml").write_text("name: mine\n")
    return tmp_path


def test_config_validate(runnable: Path):
    file = runnable / "run.yaml"
    data = data_of(cli("config", "validate", str(file), "--json").stdout, "streamrl.config.validate/1")
    assert (data["valid"], data["name"]) == (True, "mine")
    assert cli("config", "validate", cwd=runnable).stdout.endswith("run.yaml: valid\n")
    file.write_text("lerner: {lr: 1}\n")
    done = cli("config", "validate", str(file))
    assert (done.returncode, "did you mean learner?" in done.stderr) == (78, True)
    assert cli("config", "validate", str(runnable / "none.yaml")).returncode == 78


ASKED = "reward_models={m: {url: ['http://127.0.0.1:9']}}"


@pytest.mark.parametrize(
    ("overrides", "check", "says"),
    [
        (["rewards=[{use: nonsense}]"], "rewards", "nonsense is unknown"),
        (
            ["rewards=[{use: reward_model, args: {model: m, chat_template: half.jinja}}]", ASKED],
            "rewards",
            "the chat template of",
        ),
        (["model.path=nowhere"], "model", "nowhere does not exist"),
        (["data.train=nothing.jsonl"], "data", "cannot read the prompts"),
        (["data.train=chats.jsonl"], "data", "chats.jsonl:1: no JSON: "),
        (["learner.device=cuda"], "devices", "learner.device is cuda, and this machine has no NVIDIA GPU"),
        (["engine.device=cuda:1"], "devices", "engine.device is cuda:1, and this machine has no NVIDIA GPU"),
        (["learner.device=gpu"], "devices", "learner.device 'gpu' is no device"),
        (["learner.report_to=[trackio]"], "loggers", "learner.report_to trackio needs trackio"),
        (["health.port=18090"], "health", "health.port 18090 is one port"),
        (["engine.kind=vllm", "engine.environment=nowhere"], "engine", "nowhere"),
    ],
)
def test_config_validate_finds_what_a_dry_run_finds(
    runnable: Path, overrides: list[str], check: str, says: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(environments, "has_gpu", lambda: False)
    monkeypatch.setattr("streamrl.errors.find_spec", lambda name: None if name == "trackio" else find_spec(name))
    file = str(runnable / "run.yaml")
    settings = [part for override in overrides for part in ("--set", override)]
    if "half.jinja" in overrides[0]:
        (runnable / "run.yaml").write_text(f"{overrides[0].replace('=', ': ', 1)}\n{ASKED.replace('=', ': ', 1)}\n")
        settings = []
    done = cli("config", "validate", file, *settings, "--json")
    assert done.returncode == 78, done
    assert says in done.stderr
    data = data_of(done.stdout, "streamrl.config.validate/1")
    assert not data["valid"]
    assert {row["name"] for row in data["checks"] if row["error"]} == {check}
    dry = cli("up", file, *settings, "--dry-run", cwd=runnable)
    assert (dry.returncode, dry.stderr) == (done.returncode, done.stderr)


def test_config_validate_says_how_responses_are_drawn_and_what_that_means(runnable: Path):
    make_tokenizer("{% for m in messages %}{{ m.content if deep else '' }}{% endfor %}").backend.save_pretrained(
        runnable / "model"
    )
    file = runnable / "run.yaml"
    done = cli("config", "validate", str(file))
    assert "check  sampling: training by the defaults; evaluation by the defaults\n" in done.stdout
    assert "check  chats" not in done.stdout
    file.write_text(
        "name: mine\nsampling: {top_p: 0.9, seed: 1}\nevaluation: {temperature: 0}\ndata: {held_out: train.jsonl}\n"
        "model: {template_args: {deep: true, dep: 1}, system_prompt: Be brief.}\n"
    )
    done = cli("config", "validate", str(file))
    assert "check  sampling: training top_p 0.9, seed 1; evaluation temperature 0.0, top_p 0.9, seed 1" in done.stdout
    assert "WARNING: sampling.top_p cuts the distribution" in done.stdout
    assert f"check  chats: template of {runnable / 'model'} with deep, dep; WARNING: it never names dep" in done.stdout
    assert done.returncode == 0


def test_config_schema_is_a_json_schema():
    schema = orjson.loads(cli("config", "schema").stdout)
    assert schema["properties"]["learner"]
    assert schema["additionalProperties"] is False


def test_version():
    data = data_of(cli("version", "--json").stdout, "streamrl.version/1")
    assert data["streamrl"]
    said = cli("version").stdout
    assert said.startswith(f"streamrl {data['streamrl']}\n")
    assert cli("--version").stdout == said


def test_a_password_in_the_url_is_never_shown(tmp_path: Path):
    (tmp_path / "run.yaml").write_text("redis: {url: 'redis://me:secret@host:6379/0'}\n")
    for more in ([], ["--json"], ["--origin"]):
        done = cli("config", "show", str(tmp_path / "run.yaml"), *more)
        assert "secret" not in done.stdout
        assert "redis://me:***@host:6379/0" in done.stdout
