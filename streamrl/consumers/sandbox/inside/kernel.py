"""The calls to the Linux kernel that Python 3.11 has no functions for."""

from __future__ import annotations

import ctypes
import os

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
MNT_DETACH = 2
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID = 1, 2
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_SYS_MOUNT_SETATTR = 442  # the same on every architecture; Linux 5.12

_libc = ctypes.CDLL(None, use_errno=True)
_ZEROS = (ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))


class _MountAttributes(ctypes.Structure):
    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


def unshare(flags: int) -> None:
    """Move this process, and its children for CLONE_NEWPID, into new namespaces; `OSError` when the kernel refuses."""
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str, target: str, kind: str | None = None, flags: int = 0, data: str | None = None) -> None:
    """Mount; `OSError` names the target."""
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind, data)]
    _check(_libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]), f"mount on {target}")


def read_only(path: str, *, recursive: bool = True) -> None:
    """Make the mount at `path`, with all mounts below it unless told, read-only and deaf to set-uid bits."""
    attributes = _MountAttributes(MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID, 0, 0, 0)
    result = _libc.syscall(
        ctypes.c_long(_SYS_MOUNT_SETATTR),
        ctypes.c_int(_AT_FDCWD),
        ctypes.c_char_p(os.fsencode(path)),
        ctypes.c_uint(_AT_RECURSIVE if recursive else 0),
        ctypes.byref(attributes),
        ctypes.c_size_t(ctypes.sizeof(attributes)),
    )
    _check(result, f"make {path} read-only")


def pivot_root(new: str, old: str) -> None:
    """Make `new` the root of this mount namespace; the old root is then at `old`, below it."""
    number = {"x86_64": 155, "aarch64": 41}.get(os.uname().machine)
    if number is None:
        raise OSError(f"pivot_root of {os.uname().machine} is not known here")
    _check(_libc.syscall(ctypes.c_long(number), os.fsencode(new), os.fsencode(old)), "pivot_root")


def detach(path: str) -> None:
    """Unmount with all that is mounted below."""
    _check(_libc.umount2(os.fsencode(path), ctypes.c_int(MNT_DETACH)), f"unmount {path}")


def set_hostname(name: str) -> None:
    """Of this UTS namespace."""
    data = os.fsencode(name)
    _check(_libc.sethostname(data, ctypes.c_size_t(len(data))), "sethostname")


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process that takes one argument."""
    _check(_libc.prctl(ctypes.c_int(option), ctypes.c_ulong(value), *_ZEROS), f"prctl {option}")


def install_filter(program: bytes) -> None:
    """Give this process, and all it starts, a seccomp filter; needs PR_SET_NO_NEW_PRIVS.

    Args:
        program: `struct sock_filter[]`, 8 bytes for each instruction.
    """

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))

    filled = Program(len(program) // 8, program)
    pr_set_seccomp, mode_filter = 22, 2
    _check(_libc.prctl(pr_set_seccomp, ctypes.c_ulong(mode_filter), ctypes.byref(filled), *_ZEROS[1:]), "seccomp")


def _check(result: int, what: str) -> None:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
