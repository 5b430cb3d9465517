"""Making the virtual environment of an engine with uv: one installation at a time per folder."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeAlias

import orjson

from streamrl.atomic import write_whole
from streamrl.config.base import ServerKind
from streamrl.errors import CannotCreate, ConfigError, writing
from streamrl.servers import uv
from streamrl.servers.environments import MARKER, UNFINISHED, EnvironmentRecipe, install_command, installed, recipe

Say: TypeAlias = Callable[[str], None]

_ASK: Final = """
import json, platform, sys
from importlib.metadata import version
import torch, xxhash, zstandard
packages = {name: version(name) for name in sys.argv[1:]}
print(json.dumps({"packages": packages, "python": platform.python_version(), "cuda": torch.version.cuda}))
"""


def install(kind: ServerKind, folder: Path, *, cpu: bool, say: Say) -> dict[str, Any]:
    """Make the environment of `kind` in `folder` and return what its marker says; `say` gets one line per step.

    A finished environment of the same recipe stays as it is, half an environment is finished, one of another recipe is
    made anew. Two calls for one folder wait for each other. uv gets the settings of pip on this machine (pip.conf,
    PIP_*), prints to stderr, and keeps what it has downloaded. A link to a folder on a larger disk stays a link.

    Raises:
        ConfigError: uv is missing or failed.
        CannotCreate: the folder holds something else, or cannot be written.
    """
    folder = folder.expanduser().resolve()  # uv refuses a link
    found = uv.find_uv()
    if found is None:
        raise ConfigError(
            "uv, which makes environments of engines, is not installed", "pip install 'streamrl[engines]'"
        )
    with writing(inside=folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder, say) as lock:
            return _Installation(recipe(kind, cpu=cpu), folder, found, lock, say).run()


class _Installation:
    def __init__(self, wanted: EnvironmentRecipe, folder: Path, found: str, lock: int, say: Say) -> None:
        self._recipe = wanted
        self._folder = folder
        self._python = str(folder / "bin" / "python")
        self._uv = found
        self._lock = lock
        self._say = say
        self._started = time.monotonic()

    def run(self) -> dict[str, Any]:
        found = installed(self._folder)
        works = self._works()
        if works and found is not None and found.get("recipe") == self._recipe.fingerprint:
            self._tell(f"{self._recipe.kind} {found.get('version')} is there already, in {self._folder}")
            return found
        if works and found is None and self._half_of() in {None, self._recipe.fingerprint}:
            self._tell(f"completing {self._folder}")
            self._mark()
        else:
            self._make()
        command, environ = uv.install_command(self._uv)
        command += ["--python", self._python, *([] if sys.stderr.isatty() else ["--quiet"])]
        for number, step in enumerate(self._recipe.steps, 1):
            shown = " ".join(Path(word).name if word.endswith(".txt") else word for word in step)
            self._tell(f"step {number} of {len(self._recipe.steps)}: uv pip install {shown}")
            self._run([*command, *step], f"uv pip install {shown}", environ)
        return self._finish()

    def _works(self) -> bool:
        try:
            done = subprocess.run([self._python, "-c", ""], check=False, timeout=60)  # noqa: S603
        except (OSError, subprocess.TimeoutExpired):
            return False
        return done.returncode == 0

    def _half_of(self) -> str | None:
        """Return the recipe that half an environment was made by; None for one that was made by hand."""
        try:
            return str(orjson.loads((self._folder / UNFINISHED).read_bytes())["recipe"])
        except FileNotFoundError:
            return None

    def _mark(self) -> None:
        """From here on this folder is never taken for a whole environment."""
        write_whole(self._folder / UNFINISHED, orjson.dumps({"recipe": self._recipe.fingerprint}))

    def _make(self) -> None:
        """Make a virtual environment without packages, in the place of what is there."""
        empty = not self._folder.exists() or (self._folder.is_dir() and not any(self._folder.iterdir()))
        ours = ("pyvenv.cfg", f"{UNFINISHED}*")  # a kill may leave no more than a draft
        if not empty and not any(any(self._folder.glob(name)) for name in ours):
            raise CannotCreate(
                f"{self._folder} holds something else than a virtual environment",
                "name an empty or new folder with --into",
            )
        self._tell(f"virtual environment in {self._folder}")
        self._folder.mkdir(exist_ok=True)
        self._mark()
        for path in self._folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != UNFINISHED:
                path.unlink()
        # Engines run on two versions; uv looks on PATH for one where this process has another, or downloads it.
        python = sys.executable if sys.version_info[:2] in {(3, 11), (3, 12)} else "3.12"
        words = ["venv", "--quiet", "--no-project", "--allow-existing", "--python", python, str(self._folder)]
        self._run([self._uv, *words], "uv venv", os.environ)

    def _run(self, argv: Sequence[str], what: str, environ: Mapping[str, str]) -> None:
        # The child holds the lock too: when this process is killed, no other call writes beside an orphaned uv.
        done = subprocess.run(argv, stdout=2, env=environ, pass_fds=(self._lock,), check=False)  # noqa: S603
        if done.returncode != 0:
            raise ConfigError(
                f"{what} ended with code {done.returncode}, its message is above",
                f"`{install_command(self._recipe.kind)} --into {self._folder}` goes on where this one ended",
            )

    def _finish(self) -> dict[str, Any]:
        """Ask the environment for its versions, and only then mark it as whole."""
        names = (self._recipe.distribution, "torch", "transformers", "xxhash", "zstandard")
        done = subprocess.run([self._python, "-c", _ASK, *names], capture_output=True, check=False, timeout=300)  # noqa: S603
        if done.returncode != 0:
            why = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
            raise ConfigError(
                f"the environment in {self._folder} does not work: {' '.join(why) or 'no message'}",
                "remove it and install again",
            )
        found = orjson.loads(done.stdout)
        if self._recipe.cpu and found["cuda"] is not None:
            self._tell(
                "torch is a CUDA build: it works, but is large; let PIP_EXTRA_INDEX_URL name an index of CPU builds"
            )
        marker = {
            "kind": self._recipe.kind,
            "version": found["packages"][self._recipe.distribution],
            "cpu": self._recipe.cpu,
            "recipe": self._recipe.fingerprint,
            **found,
        }
        write_whole(self._folder / MARKER, orjson.dumps(marker, option=orjson.OPT_INDENT_2))
        (self._folder / UNFINISHED).unlink()
        self._tell(f"{marker['kind']} {marker['version']} is ready in {self._folder}")
        return marker

    def _tell(self, text: str) -> None:
        self._say(f"{time.monotonic() - self._started:5.0f} s  {text}")


@contextmanager
def _lock(folder: Path, say: Say) -> Iterator[int]:
    """Hold the folder's lock file, so that no other call writes into the folder; yields its descriptor."""
    with folder.with_name(f"{folder.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another installation is making {folder}: waiting")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()
