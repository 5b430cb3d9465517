"""Environments are found in a fixed order, made in whole, and half of one is never taken for one."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import orjson
import pytest

from streamrl.config.base import SERVER_KINDS
from streamrl.errors import CannotCreate, ConfigError
from streamrl.servers import environments, installation, uv
from streamrl.servers.environments import MARKER, UNFINISHED, EnvironmentRecipe, find_environment, installed
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
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "pyproject.toml").write_text("")
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


def test_a_missing_or_half_environment_is_an_error_with_the_command_that_mends_it(tmp_path: Path, elsewhere: Path):
    with pytest.raises(ConfigError, match="no environment for vllm") as error:
        find_environment(None, "vllm")
    assert error.value.hint == "streamrl engines install vllm"
    with pytest.raises(ConfigError, match="bin/python is missing") as error:
        find_environment(tmp_path / "nothing", "sglang")
    assert error.value.hint.startswith(f"streamrl engines install sglang --into {tmp_path / 'nothing'}")
    half = environment(elsewhere / ".engines" / "vllm")
    (half / UNFINISHED).write_text("{}")
    with pytest.raises(ConfigError, match="half made") as error:
        find_environment(None, "vllm")
    assert error.value.hint == "streamrl engines install vllm"
    with pytest.raises(ConfigError, match="half made") as error:
        find_environment(half, "sglang")
    assert error.value.hint == f"streamrl engines install sglang --into {half}"


def test_recipes_differ_and_their_lists_are_part_of_them():
    prints = {environments.recipe(kind, cpu=cpu).fingerprint for kind in SERVER_KINDS for cpu in (True, False)}
    assert len(prints) == 4
    for kind in SERVER_KINDS:
        (listed,) = (
            word for step in environments.recipe(kind, cpu=True).steps for word in step if word.endswith("txt")
        )
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


def plan(monkeypatch: pytest.MonkeyPatch, *steps: tuple[str, ...]) -> EnvironmentRecipe:
    made = EnvironmentRecipe("vllm", True, steps, "engine")
    monkeypatch.setattr(installation, "recipe", lambda *_, **__: made)
    return made


def test_an_installation_that_fails_is_finished_and_another_recipe_makes_it_anew(
    tmp_path: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    for name in NAMES[:-1]:
        wheel(wheels, name)
    made, heard, folder = plan(monkeypatch, NAMES[:-1], ("engine==1.0",)), [], tmp_path / "deep" / "env"
    with pytest.raises(ConfigError, match=r"uv pip install engine==1\.0 ended with code 1") as error:
        install("vllm", folder, cpu=True, say=heard.append)
    assert f"`streamrl engines install vllm --into {folder}` goes on where this one ended" in error.value.hint
    said = capfd.readouterr()
    assert "engine was not found" in said.err
    assert said.out == ""
    with pytest.raises(ConfigError, match="half made"):
        find_environment(folder, "vllm")
    assert installed(folder) is None
    wheel(wheels, "engine")
    marker = install("vllm", folder, cpu=True, say=heard.append)
    assert [line.split("  ")[-1] for line in heard] == [
        f"virtual environment in {folder}",
        "step 1 of 2: uv pip install torch transformers xxhash zstandard",
        "step 2 of 2: uv pip install engine==1.0",
        f"completing {folder}",
        "step 1 of 2: uv pip install torch transformers xxhash zstandard",
        "step 2 of 2: uv pip install engine==1.0",
        f"vllm 1.0 is ready in {folder}",
    ]
    assert marker == installed(folder)
    assert (marker["version"], marker["recipe"], marker["cuda"]) == ("1.0", made.fingerprint, None)
    assert find_environment(folder, "vllm") == folder
    heard.clear()
    assert install("vllm", folder, cpu=True, say=heard.append) == marker
    assert [line.split("  ")[-1] for line in heard] == [f"vllm 1.0 is there already, in {folder}"]
    # another recipe makes it anew
    wheel(wheels, "engine", "2.0")
    (folder / "left over").write_text("")
    plan(monkeypatch, (*NAMES[:-1], "engine==2.0"))
    assert install("vllm", folder, cpu=True, say=heard.append)["version"] == "2.0"
    assert not (folder / "left over").exists()
    # and so does a Python that was removed from the machine; a link to the folder stays one
    (folder / "bin" / "python").unlink()
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert install("vllm", link, cpu=True, say=heard.append)["version"] == "2.0"
    assert link.is_symlink()
    assert (folder / MARKER).exists()


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
    command, environ = uv.install_command("uv")
    assert command[:5] == ["uv", "pip", "install", "--index-strategy", "unsafe-best-match"]
    assert ("--constraint", "/etc/constraints.txt") in itertools.pairwise(command)
    assert environ["UV_DEFAULT_INDEX"] == "https://me:key@own.example/simple"
    assert environ["UV_INDEX"] == "https://first.example https://me:key@a.example https://b.example"
    assert environ["UV_FIND_LINKS"] == "/opt/wheels,https://c.example"
    assert "me:key" not in " ".join(command)  # every user of the machine can read it
    assert "--no-index" in command
    assert "/elsewhere" not in command
    assert (environ["SSL_CERT_FILE"], environ["UV_HTTP_TIMEOUT"]) == ("/ca.pem", "90")


def test_without_uv_it_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(uv.sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="uv, which makes") as error:
        install("vllm", tmp_path / "env", cpu=True, say=lambda _: None)
    assert "streamrl[engines]" in error.value.hint
    assert list(tmp_path.glob("env*")) == []


def test_a_folder_that_is_no_environment_is_left_alone(tmp_path: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch):
    plan(monkeypatch, ("engine",))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years of work")
    with pytest.raises(CannotCreate, match="something else than a virtual environment"):
        install("vllm", tmp_path / "home", cpu=True, say=lambda _: None)
    assert (tmp_path / "home" / "thesis.txt").read_text() == "years of work"
    with pytest.raises(CannotCreate):
        install("vllm", tmp_path / "home" / "thesis.txt", cpu=True, say=lambda _: None)
    with pytest.raises(CannotCreate):
        install("vllm", tmp_path / "home" / "thesis.txt" / "env", cpu=True, say=lambda _: None)


class Kill(BaseException):
    """Ends an installation where a signal might."""

    def instead(self, *_: object) -> None:
        raise self


KILLED = """
import sys
from pathlib import Path
from streamrl.servers import installation
from streamrl.servers.environments import EnvironmentRecipe
steps = (("torch", "transformers", "xxhash", "zstandard", "engine"),)
installation.recipe = lambda *_, **__: EnvironmentRecipe("vllm", True, steps, "engine")
installation.install("vllm", Path(sys.argv[1]), cpu=True, say=lambda text: print(text, flush=True))
"""


def test_an_installation_killed_at_any_time_is_half_an_environment(
    tmp_path: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in NAMES:
        wheel(wheels, name)
    folder = tmp_path / "env"
    plan(monkeypatch, NAMES)
    with monkeypatch.context() as patch, pytest.raises(Kill):
        patch.setattr(Path, "rename", Kill().instead)
        install("vllm", folder, cpu=True, say=lambda _: None)
    assert len(list(folder.iterdir())) == 1  # the draft of the first mark, which is no obstacle
    command = [sys.executable, "-c", KILLED, str(folder)]
    for heard in ("virtual environment", "step 1"):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert any(heard in line for line in process.stdout), "it says so before it does it"
        process.send_signal(signal.SIGKILL)
        process.wait()
        if (folder / "bin" / "python").exists():
            with pytest.raises(ConfigError, match="half made"):
                find_environment(folder, "vllm")
        # its orphan holds the folder's lock: the next one waits for it and then goes on
    marker = install("vllm", folder, cpu=True, say=lambda _: None)
    assert orjson.loads((folder / MARKER).read_bytes()) == marker
    assert find_environment(folder, "vllm") == folder
