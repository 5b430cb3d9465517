"""`streamrl init --template sort`: a run that works as it is, without network, from the commands that are printed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch

from streamrl.demo import prepare
from streamrl.runfile import load

from .run_kit import cli, process

ROOT = Path(__file__).parents[2]
OFFLINE = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model that was trained for two steps, and few prompts, made in a second; `tools` in it has another task."""
    folder = tmp_path_factory.mktemp("made")
    sizes = {"STEPS": 2, "WARM_UP": 1, "DECAY_FROM": 1, "BATCH": 16, "TRAINING_PROMPTS": 20, "HELD_OUT_PROMPTS": 10}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in sizes.items():
            patch.setattr(prepare, name, value)
        assert prepare.main([str(folder), "--force"]) == 0
        assert prepare.main([str(folder / "tools"), "--task", "tools", "--force"]) == 0
        yield folder


@pytest.fixture
def new(made: Path, tmp_path: Path) -> Path:
    """A directory in which the model and the prompts are already made."""
    return Path(shutil.copytree(made, tmp_path / "new"))


@pytest.mark.slow
def test_the_commands_that_are_printed_run(new: Path):
    done = process("init", str(new), "--template", "sort", env=OFFLINE, seconds=120)
    assert done.returncode == 0, done
    (command,) = re.findall(r"^next: `(.*)`$", done.stderr, re.MULTILINE)
    assert command == f"cd {new} && streamrl up run.yaml"
    short = ["learner.steps=2", "evaluation.every=0", "learner.stop_at_accuracy=null", "evaluation.final_prompts=0"]
    run = process("up", "run.yaml", "--screen", "plain", *(part for value in short for part in ("--set", value)),
                  env=OFFLINE, cwd=new, seconds=300)  # fmt: skip
    assert run.returncode == 0, run
    assert json.loads((new / "runs" / "sort" / "summary.json").read_text())["steps"] == 2
    assert process("audit", cwd=new).returncode == 0


@pytest.mark.parametrize("moment", ["torch is loaded", "the model is trained"])
def test_ctrl_c_ends_the_preparation_without_a_traceback(tmp_path: Path, moment: str):
    command = [sys.executable, "-m", "streamrl", "init", str(tmp_path / "new"), "--template", "sort"]
    if moment == "the model is trained":
        command = [sys.executable, "-m", "streamrl.demo.prepare", str(tmp_path / "new"), "--force"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as running:
        assert running.stderr is not None
        said = ""
        if moment == "torch is loaded":
            loads = False
            while not loads:
                for child in psutil.Process(running.pid).children():
                    loads = "libtorch" in Path(f"/proc/{child.pid}/maps").read_text()
        else:
            while "warm start" not in said:
                said += running.stderr.readline()
        os.killpg(running.pid, signal.SIGINT)
        said += running.stderr.read()
    assert running.returncode == 130
    assert "Traceback" not in said
    assert not (tmp_path / "new" / "cache").exists()


def test_two_preparations_at_once_make_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    begun, go = threading.Semaphore(0), threading.Event()

    def slowly(folder: Path, *_: object, **__: object) -> None:
        begun.release()
        assert go.wait(30)
        (folder / "cache").mkdir()

    monkeypatch.setattr(prepare, "prepare", slowly)
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(prepare.main, [str(tmp_path)]) for _ in range(2)]
        assert begun.acquire(timeout=30)
        assert not begun.acquire(timeout=0.2)
        go.set()
        assert [one.result(30) for one in both] == [0, 0]
    assert not begun.acquire(blocking=False)


@pytest.mark.parametrize(("template", "code"), [("sort", ""), ("tools", "my_tools.py"), ("agent", "agent.py")])
def test_its_run_file_is_that_of_the_demo(new: Path, template: str, code: str):
    if template != "sort":
        shutil.rmtree(new / "cache")
        (new / "tools" / "cache").rename(new / "cache")
    assert cli("init", str(new), "--template", template).returncode == 0
    example = ROOT / "examples" / template
    demo = shutil.copy(example / "run.yaml", new / "demo.yaml")  # the same paths, which exist
    ours, theirs = (load(file, environ={}).config.model_dump(mode="json") for file in (new / "run.yaml", Path(demo)))
    assert ours | {"name": theirs["name"]} == theirs
    assert not code or (new / code).read_text() == (example / code).read_text()
    assert cli("config", "validate", str(new / "run.yaml"), env=OFFLINE).returncode == 0


def test_model_and_prompts_are_made_once_and_leave_the_process_as_it_was(made: Path, tmp_path: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert torch.get_float32_matmul_precision() == "highest"
    cache = made / "cache"
    assert [len((cache / f"{name}.jsonl").read_text().splitlines()) for name in ("train", "held_out")] == [20, 10]
    model, tokenizer = (kind.from_pretrained(cache / "model") for kind in (AutoModelForCausalLM, AutoTokenizer))
    assert model.generate(**tokenizer("41=", return_tensors="pt"), max_new_tokens=2).shape[0] == 1
    stamp = (cache / "model" / "config.json").stat().st_mtime_ns
    assert prepare.main([str(made)]) == 0
    assert (cache / "model" / "config.json").stat().st_mtime_ns == stamp
    (tmp_path / "file").touch()
    assert prepare.main([str(tmp_path / "file")]) == 73


def test_nothing_is_written_where_it_cannot_be(new: Path, tmp_path: Path):
    (tmp_path / "file").touch()
    done = cli("init", str(tmp_path / "file" / "new"), "--template", "sort")
    assert done.returncode == 73
    assert "Not a directory" in done.stderr
    assert "Traceback" not in done.stderr
    (new / "run.yaml").write_text("mine")
    assert cli("init", str(new), "--template", "sort").returncode == 73
    assert (new / "run.yaml").read_text() == "mine"
    assert cli("init", str(new), "--template", "none").returncode == 2
