"""Environments are found in a fixed order, and appear in their place when they are whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from streamrl.config.base import SERVER_KINDS
from streamrl.errors import CannotCreate, ConfigError
from streamrl.servers import environments, installation, uv
from streamrl.servers.environments import find_environment, installed
from streamrl.servers.installation import install

NAMES = ("torch", "transformers", "xxhash", "zstandard", "engine")


def environment(folder: Path) -> Path:
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").write_text("")
    return folder


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory without environments above it, and no project beside the package."""
    monkeypatch.delenv(environments.VARIABLE, raising=False)
    monkeypatch.setattr(environments, "__file__", str(tmp_path / "site" / "a" / "b" / "environments.py"))
    folder = tmp_path / "project" / "deep" / "deeper"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    return folder


def test_the_order_is_given_variable_upwards_project(tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch):
    beside = environment(tmp_path / "site" / ".engines" / "vllm")
    assert find_environment(None, "vllm") == beside
    above = environment(tmp_path / "project" / ".engines" / "vllm")
    assert find_environment(None, "vllm") == above
    here = environment(elsewhere / ".engines" / "vllm")
    assert find_environment(None, "vllm") == here
    monkeypatch.setenv(environments.VARIABLE, str(tmp_path / "shared"))
    assert find_environment(None, "vllm") == here, "a variable that names nothing hides nothing"
    shared = environment(tmp_path / "shared" / "vllm")
    assert find_environment(None, "vllm") == shared
    given = environment(tmp_path / "given")
    assert find_environment(given, "vllm") == given
    assert find_environment(Path("../../../given"), "vllm").samefile(given)


def test_environments_are_made_where_they_are_looked_for(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
):
    assert environments.default_folder("sglang") == elsewhere / ".engines" / "sglang"
    (tmp_path / "project" / ".engines").mkdir()
    assert environments.default_folder("sglang") == tmp_path / "project" / ".engines" / "sglang"
    monkeypatch.setenv(environments.VARIABLE, str(tmp_path / "shared"))
    assert environments.default_folder("sglang") == tmp_path / "shared" / "sglang"
    environment(environments.default_folder("sglang"))
    assert find_environment(None, "sglang") == tmp_path / "shared" / "sglang"


def test_a_missing_environment_is_an_error_with_the_command_that_makes_it(tmp_path: Path):
    with pytest.raises(ConfigError, match="no environment for vllm") as error:
        find_environment(None, "vllm")
    assert error.value.hint == "streamrl engines install vllm"
    with pytest.raises(ConfigError, match="bin/python is missing") as error:
        find_environment(tmp_path / "nothing", "sglang")
    assert error.value.hint.startswith(f"streamrl engines install sglang --into {tmp_path / 'nothing'}")


def test_recipes_differ_and_their_lists_are_part_of_them():
    steps = installation._STEPS
    assert steps.keys() == {(kind, cpu) for kind in SERVER_KINDS for cpu in (True, False)}
    assert len({installation.fingerprint(kind, made) for (kind, _), made in steps.items()}) == 4
    for kind in SERVER_KINDS:
        (listed,) = (word for step in steps[kind, True] for word in step if word.endswith("txt"))
        lines = Path(listed).read_text().splitlines()
        assert {"xxhash>=3.5", "zstandard>=0.23"} <= set(lines), "what the plug-in needs inside the server"
        assert not [line for line in lines if line.startswith(("torchvision", "torchaudio", "torchcodec"))]


def wheel(folder: Path, name: str, version: str = "1.0") -> None:
    """The smallest wheel that pip installs."""
    about = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(
            f"{name}/__init__.py", "from types import SimpleNamespace\nversion = SimpleNamespace(cuda=None)\n"
        )
        file.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        file.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{about}/RECORD", "")


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes all from, by the settings of the machine."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


def plan(monkeypatch: pytest.MonkeyPatch, *steps: tuple[str, ...]) -> str:
    """Has vLLM installed by these steps; returns the name of the recipe."""
    monkeypatch.setattr(installation, "_STEPS", {("vllm", True): steps})
    return installation.fingerprint("vllm", steps)


def test_an_environment_appears_when_it_is_whole_and_another_recipe_takes_its_place(
    tmp_path: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    for name in NAMES[:-1]:
        wheel(wheels, name)
    heard: list[str] = []
    recipe, folder = plan(monkeypatch, NAMES[:-1], ("engine==1.0",)), tmp_path / "deep" / "env"
    with pytest.raises(ConfigError, match=r"uv pip install engine==1\.0 ended with code 1") as error:
        install("vllm", folder, cpu=True, say=heard.append)
    assert f"`streamrl engines install vllm --into {folder}` again" in error.value.hint
    said = capfd.readouterr()
    assert "engine was not found" in said.err
    assert said.out == ""
    assert not (folder / "bin").exists()
    wheel(wheels, "engine")
    install("vllm", folder, cpu=True, say=heard.append)
    steps = [
        f"virtual environment in {folder}/unfinished",
        "step 1 of 2: uv pip install torch transformers xxhash zstandard",
        "step 2 of 2: uv pip install engine==1.0",
    ]
    assert heard == [*steps, *steps, f"vllm 1.0 is ready in {folder}"]
    marker = installed(folder)
    assert marker == {"kind": "vllm", "cpu": True, "recipe": recipe, "version": "1.0", "cuda": None}
    assert find_environment(folder, "vllm") == folder
    assert [path.name for path in folder.parent.iterdir()] == ["env"], "it may be a mount point: nothing is beside it"
    assert not (folder / "unfinished").exists()
    done = subprocess.run([folder / "bin" / "python", "-c", "import engine"], check=False)
    assert done.returncode == 0
    heard.clear()
    install("vllm", folder, cpu=True, say=heard.append)
    assert heard == [f"vllm 1.0 is there already, in {folder}"]
    # another recipe takes its place when it is whole
    plan(monkeypatch, ("engine==2.0", *NAMES[:-1]))
    with pytest.raises(ConfigError):
        install("vllm", folder, cpu=True, say=heard.append)
    assert installed(folder) == marker
    wheel(wheels, "engine", "2.0")
    install("vllm", folder, cpu=True, say=heard.append)
    # and so does one whose Python was removed from the machine; a link to the folder stays one
    (folder / "bin" / "python").unlink()
    link = tmp_path / "link"
    link.symlink_to(folder)
    install("vllm", link, cpu=True, say=heard.append)
    assert link.is_symlink()
    assert (installed(folder) or {})["version"] == "2.0"
    assert (folder / "bin" / "python").exists()


def test_the_settings_of_pip_are_those_of_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A file of pip, a variable that hides its entry, and an index that is named for uv."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_", "SSL_"))]:
        monkeypatch.delenv(name)
    (tmp_path / "pip.conf").write_text(
        "[global]\nindex-url = https://me:key@own.example/simple\ntimeout = 60\nfind-links = /elsewhere\n"
        "no-index = false\ncert = /ca.pem\n"
        "[install]\nextra-index-url =\n    https://me:key@a.example\n    https://b.example\nno-index = 1\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_FIND_LINKS", "/opt/wheels https://c.example")
    monkeypatch.setenv("PIP_CONSTRAINT", "/etc/constraints.txt")
    monkeypatch.setenv("UV_INDEX", "https://first.example")
    monkeypatch.setenv("UV_HTTP_TIMEOUT", "90")
    command, environ = uv.install_command()
    options = ["--index-strategy", "unsafe-best-match", "--no-index", "--constraint=/etc/constraints.txt"]
    assert command[1:] == ["pip", "install", *options]
    assert environ["UV_DEFAULT_INDEX"] == "https://me:key@own.example/simple"
    assert environ["UV_INDEX"] == "https://first.example https://me:key@a.example https://b.example"
    assert environ["UV_FIND_LINKS"] == "/opt/wheels,https://c.example"
    assert (environ["SSL_CERT_FILE"], environ["UV_HTTP_TIMEOUT"]) == ("/ca.pem", "90")


def test_without_uv_it_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(uv.sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="uv, which makes") as error:
        install("vllm", tmp_path / "env", cpu=True, say=lambda _: None)
    assert "streamrl[engines]" in error.value.hint
    assert list(tmp_path.glob("env*")) == []


def test_a_folder_that_holds_something_else_is_left_alone(
    tmp_path: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch
):
    plan(monkeypatch, ("engine",))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years of work")
    by_hand = environment(tmp_path / "by hand")
    for folder in (tmp_path / "home", by_hand):
        with pytest.raises(CannotCreate, match="has not made"):
            install("vllm", folder, cpu=True, say=lambda _: None)
    assert (tmp_path / "home" / "thesis.txt").read_text() == "years of work"
    assert (by_hand / "bin" / "python").exists()
    for folder in (tmp_path / "home" / "thesis.txt", tmp_path / "home" / "thesis.txt" / "env"):
        with pytest.raises(CannotCreate):
            install("vllm", folder, cpu=True, say=lambda _: None)


KILLED = """
import sys
from pathlib import Path
from streamrl.servers import installation
installation._STEPS = {("vllm", True): [("torch", "transformers", "xxhash", "zstandard", "engine")]}
installation.install("vllm", Path(sys.argv[1]), cpu=True, say=lambda text: print(text, flush=True))
"""


def test_an_installation_killed_at_any_time_leaves_no_environment(
    tmp_path: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in NAMES:
        wheel(wheels, name)
    folder = tmp_path / "env"
    plan(monkeypatch, NAMES)
    command = [sys.executable, "-c", KILLED, str(folder)]
    for heard in ("virtual environment", "step 1"):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert any(heard in line for line in process.stdout), "it says so before it does it"
        process.send_signal(signal.SIGKILL)
        process.wait()
        with pytest.raises(ConfigError):
            find_environment(folder, "vllm")
        # its orphan holds the folder's lock: the next one waits for it
    install("vllm", folder, cpu=True, say=lambda _: None)
    assert find_environment(folder, "vllm") == folder
    assert (installed(folder) or {})["version"] == "1.0"
