"""Namespaces, a root directory, files and limits for one program.

`build_root` runs in the first process of new namespaces; `confine` runs in the process that becomes the program, right
before its exec.
"""

from __future__ import annotations

import os
import resource
import stat
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import kernel

NOBODY = 65534
WORK = "/tmp"  # noqa: S108 - of the sandbox's own root
_REMOVE_SECONDS = 30.0
_SPARE_PROCESSES = 2  # ours, which the kernel counts with the program's if both have one user id
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives", "/etc/localtime")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "shm": WORK}


def namespaces(network: bool) -> int:
    """Flags for `unshare`. A new network namespace has no interface that is up, not even loopback."""
    flags = kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
    return flags if network else flags | kernel.CLONE_NEWNET


def map_ids(pid: int) -> None:
    """Set the users of the new user namespace of `pid`: `NOBODY`, and for root also 0, who builds.

    The program is `NOBODY` inside. If root started it, it has no rights outside either. If another user did, it is that
    user, and sees only the new root directory. OSError: root that may not map both; the program would be root outside.
    """
    folder = Path(f"/proc/{pid}")
    if os.geteuid() == 0:
        try:
            (folder / "uid_map").write_text(f"0 0 1\n{NOBODY} {NOBODY} 1\n")
            (folder / "gid_map").write_text(f"0 0 1\n{NOBODY} {NOBODY} 1\n")
        except PermissionError as error:
            raise OSError(
                f"root that may not become user {NOBODY} would run programs as root: run as another user, or allow"
                " CAP_SETUID and CAP_SETGID"
            ) from error
        return
    (folder / "setgroups").write_text("deny")
    (folder / "uid_map").write_text(f"{NOBODY} {os.geteuid()} 1\n")
    (folder / "gid_map").write_text(f"{NOBODY} {os.getegid()} 1\n")


def build_root(visible: Sequence[Sequence[str]], disk: int) -> None:
    """Replace the root directory by one in memory, read-only except `WORK`, which holds `disk` bytes.

    `visible` are pairs of a real path of the host and the path inside. The root goes with the namespace.
    """
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    quiet = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("tmpfs", WORK, "tmpfs", quiet, "mode=755,size=1m,nr_inodes=4096")
    os.mkdir(f"{WORK}/old")  # noqa: PTH102 - paths are text here, as mount(2) has them
    kernel.pivot_root(WORK, f"{WORK}/old")
    os.chdir("/")
    for path in (*SYSTEM, *SYSTEM_FILES):
        _show(f"/old{path}", path)
    Path(WORK).mkdir()
    kernel.mount("tmpfs", WORK, "tmpfs", quiet, f"mode=1777,size={disk},nr_inodes=4096")
    for source, target in visible:  # may be below WORK
        _show(f"/old{source}", target)
    for name in _DEVICES:
        _show(f"/old/dev/{name}", f"/dev/{name}", writable=True)
    for name, target in _LINKS.items():
        with suppress(OSError):
            Path(f"/dev/{name}").symlink_to(target)
    _mount_proc()
    kernel.detach("/old")
    os.rmdir("/old")  # noqa: PTH106
    kernel.read_only("/", recursive=False)
    kernel.set_hostname("sandbox")


def write_files(folder: str, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = Path(folder) / name
        path.write_bytes(text.encode("utf-8", "replace"))
        path.chmod(0o644)


def remove_folder(folder: str) -> None:
    """Remove a directory and all that a program made in it, whatever its depth, mode or name; at most 30 s a step."""
    for command in (["chmod", "-R", "u+rwX", "--", folder], ["rm", "-rf", "--", folder]):
        process = subprocess.Popen(  # noqa: S603
            command, env={"PATH": os.defpath}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            process.wait(_REMOVE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def confine(limits: Mapping[str, Any], *, privileged: bool, jailed: bool) -> None:
    """Give up all rights and set the limits; the caller then calls exec.

    `privileged`: this process is root of its namespace and becomes `NOBODY`. If `jailed`, the user is counted apart, so
    the number of processes can be limited.
    """
    if privileged:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    os.umask(0o022)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_CPU, limits["cpu"], limits["cpu"] + 1)
    _limit(resource.RLIMIT_FSIZE, limits["disk"])
    _limit(resource.RLIMIT_NOFILE, limits["open_files"])
    _limit(resource.RLIMIT_MEMLOCK, 0)
    _limit(resource.RLIMIT_MSGQUEUE, 0)
    if limits["address_space"] is not None:
        _limit(resource.RLIMIT_AS, limits["address_space"])
    if jailed:
        _limit(resource.RLIMIT_NPROC, limits["processes"] + _SPARE_PROCESSES)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.refuse_calls()


def _limit(kind: int, soft: int, hard: int | None = None) -> None:
    _, most = resource.getrlimit(kind)
    hard = soft if hard is None else hard
    if most != resource.RLIM_INFINITY:
        soft, hard = min(soft, most), min(hard, most)
    resource.setrlimit(kind, (soft, hard))


def _show(source: str, target: str, *, writable: bool = False) -> None:
    try:
        mode = os.lstat(source).st_mode
    except FileNotFoundError:
        return
    shown = Path(target)
    if shown.is_symlink() or (shown.exists() and not shown.is_dir()):
        return  # one of the system's directories already contains it
    shown.parent.mkdir(parents=True, exist_ok=True)
    if stat.S_ISLNK(mode):
        shown.symlink_to(os.readlink(source))  # noqa: PTH115
        return
    if stat.S_ISDIR(mode):
        shown.mkdir(exist_ok=True)
    else:
        shown.touch()
    kernel.mount(source, target, None, kernel.MS_BIND | kernel.MS_REC)
    if not writable:
        kernel.read_only(target)


def _mount_proc() -> None:
    """Mount /proc of the new process namespace read-only, and forbid nested user namespaces.

    Containers that mask parts of their /proc refuse the mount; the program then has no /proc.
    """
    Path("/proc").mkdir()
    try:
        kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    except OSError:
        return
    with suppress(OSError):
        Path("/proc/sys/user/max_user_namespaces").write_text("0")
    kernel.read_only("/proc")
