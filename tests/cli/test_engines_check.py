"""`streamrl engines check`: what it finds, what it says, and what it says without an engine."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from .run_kit import cli, data_of, process


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["hf", pytest.param("vllm", marks=pytest.mark.engines)])
def test_an_engine_that_works(kind: str):
    """SGLang differs by its dialect alone, and `tests/engines` asks that for more."""
    environ = {name: os.environ[name] for name in {"STREAMRL_ENGINES"} & os.environ.keys()}
    done = process("engines", "check", kind, "--json", env={"OMP_NUM_THREADS": "1"} | environ, seconds=500)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    data = data_of(done.stdout, "streamrl.engines.check/1")
    assert (data["kind"], data["environment"] is None, data["ok"]) == (kind, kind == "hf", True)
    found = {finding["name"]: finding["detail"] for finding in data["findings"] if finding["verdict"] == "yes"}
    assert list(found) == ["start", "log-probabilities", "new weights", "their log-probabilities"]
    for name in ("log-probabilities", "their log-probabilities"):
        count = re.search(r"over (\d+) tokens", found[name])
        assert count is not None
        assert int(count[1]) > 100


def test_without_an_environment_it_names_the_command_that_makes_one(tmp_path: Path):
    done = cli("engines", "check", "vllm", "--environment", str(tmp_path))
    assert done.returncode == 78
    assert "streamrl engines install vllm" in done.stderr


def test_the_log_that_a_failure_names_is_there(tmp_path: Path):
    python = tmp_path / "broken" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho nothing works here; exit 1\n")
    python.chmod(0o755)
    named = str(python.parents[1])
    done = process("engines", "check", "vllm", "--environment", named, "--json", env={"TMPDIR": str(tmp_path)})
    assert done.returncode == 1, done.stderr
    data = data_of(done.stdout, "streamrl.engines.check/1")
    assert (data["environment"], data["ok"]) == (named, False)
    [finding] = data["findings"]
    _, _, log = finding["detail"].partition("the whole log: ")
    assert "nothing works here" in Path(log).read_text()


def test_it_looks_at_the_environment_that_is_named(tmp_path: Path):
    named = tmp_path / "elsewhere"
    missing = cli("engines", "check", "vllm", "--environment", str(named))
    assert missing.returncode == 78
    assert f"--environment {named} is no virtual environment" in missing.stderr
    assert f"streamrl engines install vllm --into {named}" in missing.stderr
    other = cli("engines", "check", "hf", "--environment", str(named))
    assert other.returncode == 2
    assert "hf runs in this process and has no environment" in other.stderr
