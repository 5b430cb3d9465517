"""Programs that isolate where the kernel lets them and not us, and the interpreter that programs of tests get."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from streamrl.consumers.sandbox.execution import Limits, Program, SandboxError

ENVIRON: Final[Mapping[str, str]] = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",  # noqa: S108 - of the sandbox
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
"""All that a program finds in its environment; threads count as processes, so libraries start none by themselves."""

_SYSTEM: Final = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
_SYSTEM_FILES: Final = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
_NOBODY: Final = "65534"
_DEVICES: Final = ("null", "zero", "full", "random", "urandom")
_LIMIT_PROCESSES: Final = 'ulimit -p "$0" 2>/dev/null || ulimit -u "$0"; exec "$@"'
"""`-p` is dash's name of the limit; bash has it as `-u`, and refuses `-p`."""

_BE_INIT: Final = '"$0" "$@"; exit $?'
"""The first process of a namespace is deaf to signals, those of its limits too, so it must not be the program."""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python: its absolute path, and the directories it needs besides those of the system."""

    path: str
    visible: tuple[str, ...]


def interpreter(python: str = "") -> Interpreter:
    """Return `python`, or the Python that runs streamrl without the packages of its environment.

    Args:
        python: path of an interpreter; one of a virtual environment brings its packages with it.
    """
    path = Path(python or os.path.realpath(sys.executable)).absolute()
    prefixes = (path.parent.parent, Path(os.path.realpath(path)).parent.parent)
    visible = dict.fromkeys(
        str(prefix) for prefix in prefixes if str(prefix) != "/" and not _of_the_system(str(prefix))
    )
    return Interpreter(str(path), tuple(visible))


def _of_the_system(path: str) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in _SYSTEM)


def _bubblewrap(program: Program, limits: Limits, network: bool) -> list[str]:
    words = [_executable("bwrap"), "--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts"]
    if not network:
        words += ["--unshare-net"]
    words += ["--die-with-parent", "--new-session", "--cap-drop", "ALL", "--uid", _NOBODY, "--gid", _NOBODY]
    words += ["--hostname", "sandbox", "--dev", "/dev", "--proc", "/proc"]
    words += ["--bind", "{folder}", "/tmp", "--chdir", "/tmp"]  # noqa: S108
    for path in (*_SYSTEM, *_SYSTEM_FILES, *program.visible):
        words += ["--ro-bind-try", path, path]
    words += ["--"]
    return [*words, "/bin/sh", "-c", _LIMIT_PROCESSES, str(limits.processes), *program.argv]


def _nsjail(program: Program, limits: Limits, network: bool) -> list[str]:
    words = [_executable("nsjail"), "--mode", "o", "--really_quiet", "--time_limit", "0", "--keep_env"]
    words += ["--nice_level", str(os.nice(0))]  # by itself it takes 19, which on a busy host is nothing
    if network:
        words += ["--disable_clone_newnet"]
    else:
        words += ["--iface_no_lo"]
    words += ["--user", _NOBODY, "--group", _NOBODY, "--hostname", "sandbox", "--pass_fd", "3"]
    for name in ("as", "cpu", "fsize", "nofile"):
        words += [f"--rlimit_{name}", "soft"]  # as they are: they were set before
    words += ["--rlimit_nproc", str(limits.processes)]
    words += ["--bindmount", "{folder}:/tmp", "--cwd", "/tmp"]  # noqa: S108
    for path in (*_SYSTEM, *_SYSTEM_FILES, *program.visible):
        if Path(path).exists():
            words += ["--bindmount_ro", path]
    for name in _DEVICES:
        words += ["--bindmount", f"/dev/{name}"]
    return [*words, "--", "/bin/sh", "-c", _BE_INIT, *program.argv]


def _executable(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise SandboxError(f"{name} is not installed")
    return path


WRAPPERS: Final[Mapping[str, Callable[[Program, Limits, bool], list[str]]]] = {
    "bubblewrap": _bubblewrap,
    "nsjail": _nsjail,
}
"""By isolation: the command line that runs a program in it; `{folder}` is where its files are."""
