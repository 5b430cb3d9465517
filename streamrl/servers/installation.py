"""Making the virtual environment of an engine: resumable, one installation at a time per folder."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeAlias

import orjson

from streamrl.atomic import write_whole
from streamrl.config.base import ServerKind
from streamrl.errors import CannotCreate, ConfigError, DeadlineExceeded, writing
from streamrl.servers.environments import (
    MARKER,
    UNFINISHED,
    EnvironmentRecipe,
    install_command,
    installed,
    recipe,
)

Say: TypeAlias = Callable[[str], None]

_PYTHONS: Final = ((3, 11), (3, 12))
_STEP_DEADLINE: Final = 3600.0
_LOCK_DEADLINE: Final = 7200.0
_LOOK: Final = 15.0
_TAIL: Final = 20
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
    made anew. Two calls for one folder wait for each other. pip uses the settings of this machine (pip.conf, PIP_*) and
    writes to `FOLDER.log`. Ctrl-C ends pip and leaves half an environment. A missing folder is made; a link to a folder
    on a larger disk stays a link.

    Raises:
        ConfigError: pip failed (the message has the end of its log), or no Python is here that engines run on.
        CannotCreate: the folder holds something else, or cannot be written.
        DeadlineExceeded: pip took over an hour for one step, or another installation two for this folder.
    """
    folder = folder.expanduser().resolve()  # venv refuses a link
    python = _python()
    with writing(inside=folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder, say) as lock:
            return _Installation(recipe(kind, cpu=cpu), folder, python, lock, say).run()


class _Installation:
    def __init__(self, wanted: EnvironmentRecipe, folder: Path, python: str, lock: int, say: Say) -> None:
        self._recipe = wanted
        self._folder = folder
        self._python = python
        self._lock = lock
        self._say = say
        self._log = folder.with_name(f"{folder.name}.log")
        self._started = time.monotonic()

    def run(self) -> dict[str, Any]:
        found = installed(self._folder)
        if found is not None and found.get("recipe") == self._recipe.fingerprint and self._works():
            self._tell(f"{self._recipe.kind} {found.get('version')} is there already, in {self._folder}")
            return found
        for number in range(self._begin(), len(self._recipe.steps)):
            self._pip(number, self._recipe.steps[number])
            self._record(number + 1)
        return self._finish()

    def _begin(self) -> int:
        """Prepare the folder for pip and return how many steps are done."""
        empty = not self._folder.exists() or (self._folder.is_dir() and not any(self._folder.iterdir()))
        ours = ("pyvenv.cfg", f"{UNFINISHED}*")  # a kill may leave no more than a draft
        if not empty and not any(any(self._folder.glob(name)) for name in ours):
            raise CannotCreate(
                f"{self._folder} holds something else than a virtual environment",
                "name an empty or new folder with --into",
            )
        done = None if empty else self._done()
        if done is not None:
            self._tell(f"completing {self._folder} after step {done} of {len(self._recipe.steps)}")
            self._record(done)
            return done
        self._tell(f"virtual environment in {self._folder}")
        self._folder.mkdir(exist_ok=True)
        # The mark comes first: from here on this folder is never taken for a whole environment.
        self._record(0)
        for path in self._folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != UNFINISHED:
                path.unlink()
        self._log.write_bytes(b"")
        self._run([self._python, "-m", "venv", str(self._folder)], "venv")
        return 0

    def _done(self) -> int | None:
        """Steps of this recipe that are done in a folder that is not empty; None: it has to be made anew."""
        if not self._works() or installed(self._folder) is not None:
            return None
        with suppress(FileNotFoundError, orjson.JSONDecodeError):
            state = orjson.loads((self._folder / UNFINISHED).read_bytes())
            return int(state["done"]) if state["recipe"] == self._recipe.fingerprint else None
        return 0  # made by hand: pip finds most of it there

    def _works(self) -> bool:
        command = [str(self._folder / "bin" / "python"), "-m", "pip", "--version"]
        try:
            return subprocess.run(command, capture_output=True, check=False, timeout=60).returncode == 0  # noqa: S603
        except (OSError, subprocess.TimeoutExpired):
            return False

    def _pip(self, number: int, step: Sequence[str]) -> None:
        shown = " ".join(Path(word).name if word.endswith(".txt") else word for word in step)
        self._tell(f"step {number + 1} of {len(self._recipe.steps)}: pip install {shown}")
        argv = [str(self._folder / "bin" / "python"), "-m", "pip", "install", "--no-input", "--progress-bar", "off"]
        self._run([*argv, *step], f"pip install {shown}")

    def _run(self, argv: list[str], what: str) -> None:
        """Run one command with its output in the log, and report progress now and then."""
        environ = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONHOME"}}
        with self._log.open("ab") as log:
            log.write(f"\n$ {' '.join(argv)}\n".encode())
            log.flush()
            # The child holds the lock too: when this process is killed, no other call writes beside an orphaned pip.
            process = subprocess.Popen(  # noqa: S603
                argv, stdout=log, stderr=log, env=environ, start_new_session=True, pass_fds=(self._lock,)
            )
        try:
            code = self._wait(process, what)
        finally:
            _end(process)
        if code != 0:
            raise ConfigError(
                f"{what} ended with code {code}:\n" + "\n".join(_tail(self._log, _TAIL)),
                f"the whole log is {self._log}; "
                f"`{install_command(self._recipe.kind)} --into {self._folder}` goes on where this one ended",
            )

    def _wait(self, process: subprocess.Popen[bytes], what: str) -> int:
        end = time.monotonic() + _STEP_DEADLINE
        while True:
            try:
                return process.wait(_LOOK)
            except subprocess.TimeoutExpired:
                if time.monotonic() > end:
                    raise DeadlineExceeded(f"{what} took over {_STEP_DEADLINE:.0f} s", f"see {self._log}") from None
                self._tell(f"... {_at_work(self._log)}")

    def _record(self, done: int) -> None:
        _write(self._folder / UNFINISHED, {"recipe": self._recipe.fingerprint, "done": done})

    def _finish(self) -> dict[str, Any]:
        """Ask the environment for its versions, and only then mark it as whole."""
        names = (self._recipe.distribution, "torch", "transformers", "xxhash", "zstandard")
        argv = [str(self._folder / "bin" / "python"), "-c", _ASK, *names]
        done = subprocess.run(argv, capture_output=True, check=False, timeout=300)  # noqa: S603
        if done.returncode != 0:
            why = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
            raise ConfigError(
                f"the environment in {self._folder} does not work: {' '.join(why) or 'no message'}",
                f"remove it and install again; pip's log is {self._log}",
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
        _write(self._folder / MARKER, marker)
        (self._folder / UNFINISHED).unlink()
        self._tell(f"{marker['kind']} {marker['version']} is ready in {self._folder}")
        return marker

    def _tell(self, text: str) -> None:
        self._say(f"{time.monotonic() - self._started:5.0f} s  {text}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command and all processes that it has started."""
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def _tail(path: Path, count: int) -> list[str]:
    return [line for line in path.read_text(errors="replace").splitlines() if line.strip()][-count:]


def _at_work(log: Path) -> str:
    """Return what pip does now: the last line of its log that is no warning, at most 100 characters."""
    for line in reversed(_tail(log, 200)):
        text = line.strip()
        if text.startswith(("WARNING:", "DEPRECATION:", "[notice]")):
            continue
        if text.startswith("Installing collected packages: "):
            return f"installing {text.count(',') + 1} packages"
        return text if len(text) <= 100 else f"{text[:97]}..."
    return "pip has not said anything yet"


def _write(path: Path, value: Any) -> None:
    write_whole(path, orjson.dumps(value, option=orjson.OPT_INDENT_2))


def _python() -> str:
    """Return the interpreter for environments: that of this process when engines run on it, else one from PATH."""
    if sys.version_info[:2] in _PYTHONS:
        return sys.executable
    for major, minor in _PYTHONS:
        found = shutil.which(f"python{major}.{minor}")
        if found is not None:
            return found
    known = " or ".join(f"{major}.{minor}" for major, minor in _PYTHONS)
    raise ConfigError(f"vLLM and SGLang run on Python {known}, this is {sys.version.split()[0]}", "put one into PATH")


@contextmanager
def _lock(folder: Path, say: Say) -> Iterator[int]:
    """Hold the folder's lock file, so that no other call writes into the folder; yields its descriptor."""
    path = folder.with_name(f"{folder.name}.lock")
    end = time.monotonic() + _LOCK_DEADLINE
    with path.open("w") as file:
        waited = 0
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise DeadlineExceeded(
                        f"another installation holds {path}", "end that installation first"
                    ) from None
                if not waited:
                    say(f"another installation is making {folder}: waiting")
                waited += 1
                time.sleep(0.5)
        yield file.fileno()
