"""`streamrl export` and the ways of `up` that record rollouts and train a recording."""

from __future__ import annotations

import base64
import shutil
from pathlib import Path

import orjson
import pytest

from streamrl.archive.reader import Header, RecordedGroup
from streamrl.archive.writer import RecordingWriter
from streamrl.commands.hub import model_card, push_model
from streamrl.config import RunConfig
from streamrl.errors import StreamrlError, Unreachable, UsageError
from streamrl.learner.checkpoint import FORMAT, Checkpoints, Meta, shard_name
from tests.http_kit import answering

from .run_kit import cli, data_of, make_run, process


@pytest.fixture
def trained(tmp_path: Path, tiny: Path) -> Path:
    """A run with one checkpoint, whose weights are those of the model."""
    import torch
    from transformers import AutoModelForCausalLM

    from streamrl.learner.checkpoint_files import write_shard

    run_dir = tmp_path / "run"
    make_run(run_dir, f"model.path={tiny / 'model'}")
    model = AutoModelForCausalLM.from_pretrained(tiny / "model", dtype=torch.float32)
    checkpoints = Checkpoints(run_dir / "checkpoints")
    draft = checkpoints.begin((1, 4))
    shard = write_shard(draft / shard_name(0, 1), {f"actor/weight/{n}": p for n, p in model.named_parameters()})
    checkpoints.finish(Meta(epoch=1, step=4, version=5, format=FORMAT, parts=["actor"], shards=[shard]))
    return run_dir


def test_export_writes_what_transformers_loads_and_never_over_something(tmp_path: Path, trained: Path):
    out = tmp_path / "out"
    arguments = ("export", "--run", str(trained), "--out", str(out))
    done = cli(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    data = data_of(done.stdout, "streamrl.export/1")
    assert (data["checkpoint"], data["step"], data["average"]) == ("1-4", 4, False)
    assert data["bytes"] == sum((out / file).stat().st_size for file in data["files"]) > 0
    assert {path.name for path in out.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    again = cli(*arguments)
    assert again.returncode == 73
    assert "is not empty" in again.stderr
    assert "--force" in again.stderr
    assert cli(*arguments, "--force", "--checkpoint", "4").returncode == 0


def test_exports_that_are_refused(tmp_path: Path, trained: Path):
    def export(*more: str) -> tuple[int, str]:
        done = cli("export", "--run", str(trained), "--out", str(tmp_path / "out"), *more)
        return done.returncode, done.stderr

    code, said = export("--checkpoint", "5")
    assert (code, "no checkpoint of step 5" in said, "steps with a checkpoint: 4" in said) == (78, True, True)
    code, said = export("--ema")
    assert (code, "no average" in said) == (78, True)
    assert cli("export", "--run", str(trained)).returncode == 2  # nowhere to write to
    (tmp_path / "file").touch()
    assert cli("export", "--run", str(trained), "--out", str(tmp_path / "file")).returncode == 73


class Hub:
    """A model hub that is played: it takes whole files in the one commit of a repository."""

    def __init__(self) -> None:
        self.tokens: dict[str, str | None] = {}
        self.made: dict[str, object] = {}
        self.card: dict[str, str] = {}
        self.files: dict[str, bytes] = {}
        self.status = 200

    def __call__(self, request) -> tuple[int, bytes]:
        here = f"http://{request.headers['Host']}"
        self.tokens[request.path] = request.headers.get("Authorization")
        if self.status != 200:
            return self.status, b'{"error": "you may not"}'
        if request.path == "/api/repos/create":
            self.made = orjson.loads(request.body)
            return 200, orjson.dumps({"url": f"{here}/org/sums", "id": "org/sums"})
        if request.path == "/api/validate-yaml":
            self.card = orjson.loads(request.body)
            return 200, b'{"errors": [], "warnings": []}'
        if request.path.endswith("/preupload/main"):
            names = [file["path"] for file in orjson.loads(request.body)["files"]]
            return 200, orjson.dumps(
                {"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]}
            )
        if request.path.endswith("/commit/main"):
            lines = [orjson.loads(line) for line in request.body.splitlines()]
            self.files |= {
                line["value"]["path"]: base64.b64decode(line["value"]["content"])
                for line in lines
                if line["key"] == "file"
            }
            return 200, orjson.dumps({"commitUrl": f"{here}/org/sums/commit/1", "commitOid": "1" * 40})
        return 404, b"{}"


def test_a_model_is_pushed_with_its_card(trained: Path, monkeypatch: pytest.MonkeyPatch):
    """Nothing of the token is in an argument; what is pushed is the model of the checkpoint."""
    sources = {"math": {"groups": 3, "accuracy_before": 0.25, "accuracy_after": 0.75}}
    summary = {"steps": 4, "accuracy_before": 0.125, "accuracy_after": 0.5, "sources": sources}
    (trained / "summary.json").write_bytes(orjson.dumps(summary))
    hub = Hub()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with answering(hub) as url:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)  # of HF_ENDPOINT
        arguments = ("export", "--run", str(trained), "--push", "org/sums", "--json")
        done = cli(*arguments, env={"HF_TOKEN": "hf_played"})
    assert done.returncode == 0, done.stderr
    data = data_of(done.stdout, "streamrl.export/1")
    assert (data["directory"], data["url"]) == (None, f"{url}/org/sums")
    assert (hub.made["name"], hub.made["organization"]) == ("sums", "org")
    about = [path for path in hub.tokens if "repos/create" in path or "org/sums" in path]
    assert [hub.tokens[path] for path in about] == ["Bearer hf_played"] * 3, hub.tokens
    assert hub.files.keys() >= {"config.json", "model.safetensors", "tokenizer.json", "README.md"}
    assert len(hub.files["model.safetensors"]) == data["bytes"]
    card = hub.files["README.md"].decode()
    assert hub.card == {"content": card, "repoType": "model"}
    assert card.startswith("---\nlibrary_name: transformers\ntags:"), "the base model is a directory of this host"
    for line in ("# org/sums", "| run | demo |", "| steps | 4 |", "| data | train |", "| rewards | exact_match |"):
        assert line in card.splitlines()
    assert "| held-out accuracy | 0.125 before training, 0.500 after |" in card
    assert "| held-out accuracy of math | 0.250 before training, 0.750 after |" in card
    assert not list(trained.glob("export-*"))


def test_the_card_of_another_step_has_no_accuracy_and_names_a_model_of_the_hub(tmp_path: Path):
    (tmp_path / "summary.json").write_bytes(orjson.dumps({"steps": 5, "accuracy_before": 0.1, "accuracy_after": 0.2}))
    config = RunConfig.model_validate({"model": {"path": "org/base"}, "data": {"train": "/x/sums.jsonl"}})
    card = model_card(config, tmp_path, 4, "org/sums")
    assert card.startswith("---\nlibrary_name: transformers\nbase_model: org/base\ntags: [streamrl,")
    assert "| data | sums |" in card
    assert "accuracy" not in card


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [(403, 78, "set HF_TOKEN to a token"), (401, 78, "hf auth login"), (503, 69, "HF_ENDPOINT names another hub")],
)
def test_a_hub_that_refuses_or_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, code: int, said: str
):
    hub = Hub()
    hub.status = status
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with answering(hub) as url:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
        with pytest.raises(StreamrlError, match=said) as caught:
            push_model(tmp_path, "org/sums")
    assert caught.value.exit_code == code
    with pytest.raises(Unreachable):  # nobody listens there any more
        push_model(tmp_path, "org/sums")
    with pytest.raises(UsageError, match="write OWNER/NAME"):
        push_model(tmp_path, "a/b/c")


def test_the_plan_of_a_recording(tiny: Path, tmp_path: Path):
    run_file = str(tiny / "run.yaml")
    done = cli("up", run_file, "--dry-run", "--rollout-only", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    started = [line.split()[1].rstrip(":") for line in done.stdout.splitlines() if line.startswith("start ")]
    assert started == ["redis", "recorder.0", "rollout.0", "reward.0", "feeder.0"]
    missing = cli("up", run_file, "--dry-run", "--train-only", str(tmp_path / "none"), cwd=tmp_path)
    assert missing.returncode == 78
    assert "has no recording" in missing.stderr
    header = Header(id="a", run="tiny", model=str(tiny / "model"), temperature=1.0)
    writer = RecordingWriter(tmp_path / "rec", 1, header, 1 << 20)
    writer.add(RecordedGroup(group_id=0, prompt=b"", samples=[]))
    writer.sync()
    writer.close()
    done = cli("up", run_file, "--dry-run", "--train-only", str(tmp_path / "rec"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    started = [line.split()[1].rstrip(":") for line in done.stdout.splitlines() if line.startswith("start ")]
    assert started == ["redis", "learner.0", "player.0"]
    assert "value  data.epochs = 1  (--set)" in done.stdout
    other = cli(
        "up", run_file, "--dry-run", "--train-only", str(tmp_path / "rec"), "--set", "sampling.temperature=0.5",
        cwd=tmp_path,
    )  # fmt: skip
    assert other.returncode == 78
    assert "sampled at temperature 1" in other.stderr
    assert cli("up", run_file, "--rollout-only", "--train-only", "x", cwd=tmp_path).returncode == 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_recording_is_made_and_trained(tiny: Path, tmp_path: Path):
    run_file = str(tiny / "run.yaml")
    done = process("up", run_file, "--rollout-only", "--screen", "logs", cwd=tmp_path, seconds=200)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "groups recorded / dead   12 / 0" in done.stdout
    recorded = tmp_path / "runs" / "tiny" / "recording"
    trace = cli("trace", "3", "--run", str(recorded.parent), "--json")
    assert data_of(trace.stdout, "streamrl.trace/1")["record"]["gid"] == 3
    again = cli("up", run_file, "--train-only", str(recorded), cwd=tmp_path)
    assert again.returncode == 78  # the directory of the run that recorded
    assert "recording.mode was 'write' and is 'read'" in again.stderr
    fresh = cli("up", run_file, "--train-only", str(recorded), "--fresh", cwd=tmp_path)
    assert (fresh.returncode, "would put" in fresh.stderr) == (2, True)
    assert recorded.is_dir()
    done = process(
        "up", run_file, "--train-only", str(recorded), "--run", "t", "--screen", "logs", cwd=tmp_path, seconds=200
    )
    assert done.returncode == 0, done.stderr + done.stdout
    summary = orjson.loads((tmp_path / "t" / "summary.json").read_bytes())
    assert (summary["steps"], summary["groups_trained"], summary["groups_admitted"]) == (3, 12, 12)
    audit = data_of(cli("audit", "--run", str(tmp_path / "t"), "--json").stdout, "streamrl.audit/2")
    assert (audit["trained"], audit["lost"], audit["twice"], audit["faults"]) == (12, 0, 0, [])
    status = data_of(cli("status", "--run", str(tmp_path / "t"), "--json").stdout, "streamrl.status/1")
    assert [role["name"] for role in status["roles"]] == ["redis", "learner.0", "player.0"]
    assert cli("export", "--run", str(tmp_path / "t"), "--out", str(tmp_path / "m")).returncode == 0


def test_export_goes_to_a_store_and_takes_what_is_missing_from_one(tmp_path: Path, trained: Path):
    """A host with the run file and without the checkpoint, as after the loss of a run directory."""
    from transformers import AutoModelForCausalLM

    from streamrl.runfile import LoadedConfig, read_saved, save

    loaded = read_saved(trained / "run.json")
    kept = loaded.config.checkpoint.model_copy(update={"store": f"file://{tmp_path}/kept"})
    config = loaded.config.model_copy(update={"checkpoint": kept})
    save(LoadedConfig(config=config, origins={}), trained / "run.json")
    (tmp_path / "kept" / config.name).mkdir(parents=True)
    shutil.move(trained / "checkpoints", tmp_path / "kept" / config.name)
    url = f"file://{tmp_path}/models/final"
    found = data_of(cli("export", "--run", str(trained), "--out", url, "--json").stdout, "streamrl.export/1")
    assert found["directory"] == url
    AutoModelForCausalLM.from_pretrained(tmp_path / "models" / "final")
    assert not list(trained.glob("export-*"))
    again = cli("export", "--run", str(trained), "--out", url)
    assert (again.returncode, "is not empty" in again.stderr) == (73, True)
    assert cli("export", "--run", str(trained), "--out", url, "--force").returncode == 0
