"""Calls to the Linux kernel for which Python 3.11 has no functions, and a filter of calls without any library.

The filter lists calls that programs of tests never need but attacks on the kernel do, so that any language's runtime
works. A refused call fails with EPERM. `clone3` fails with ENOSYS, so that C libraries use `clone`, whose flags a
filter can read. Unknown architectures get no filter (the namespaces remain).
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import struct
from collections.abc import Iterable

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH = 2
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID = 1, 2
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 1, 22, 2
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
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str, target: str, kind: str | None = None, flags: int = 0, data: str | None = None) -> None:
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind, data)]
    _check(_libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]), f"mount on {target}")


def read_only(path: str, *, recursive: bool = True) -> None:
    """Make the mount at `path`, with all mounts below it if `recursive`, read-only and without set-uid bits."""
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
    number = {"x86_64": 155, "aarch64": 41}.get(os.uname().machine)
    if number is None:
        raise OSError(f"pivot_root of {os.uname().machine} is not known here")
    _check(_libc.syscall(ctypes.c_long(number), os.fsencode(new), os.fsencode(old)), "pivot_root")


def detach(path: str) -> None:
    _check(_libc.umount2(os.fsencode(path), ctypes.c_int(MNT_DETACH)), f"unmount {path}")


def set_hostname(name: str) -> None:
    data = os.fsencode(name)
    _check(_libc.sethostname(data, ctypes.c_size_t(len(data))), "sethostname")


def prctl(option: int, value: int) -> None:
    _check(_libc.prctl(ctypes.c_int(option), ctypes.c_ulong(value), *_ZEROS), f"prctl {option}")


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends. A change of credentials cancels this."""
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _check(result: int, what: str) -> None:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


# --- the filter of calls ----------------------------------------------------------------------------------------------

# name: (x86_64, aarch64); None: the architecture has no such call
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "setns": (308, 268),
    "unshare": (272, 97),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "mount_setattr": (442, 442),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "open_by_handle_at": (304, 265),
    "memfd_create": (319, 279),  # memory that neither the resident size of a process nor the disk limit counts
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "personality": (135, 92),
    "setpriority": (141, 140),  # a lower priority makes a program wait forever on a busy host, without being too slow
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
}
_SOCKET, _CLONE, _CLONE3 = (41, 198), (56, 220), (435, 435)
_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6: a network namespace holds these; vsock, for one, passes it by
_NEW_NAMESPACES = 0x7E020000  # every CLONE_NEW flag of clone
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_X32 = 0x40000000

_LOAD, _EQUAL, _ABOVE, _ANY, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050000 | 1, 0x00050000 | 38
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def refuse_calls() -> None:
    """Install the filter for this process and its children; needs PR_SET_NO_NEW_PRIVS.

    Does nothing if the kernel was built without seccomp.
    """
    machine = os.uname().machine
    if machine not in _ARCHITECTURES:
        return
    instructions = b"".join(_program(*_ARCHITECTURES[machine]))
    program = ctypes.byref(_Program(len(instructions) // 8, instructions))
    result = _libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), program, *_ZEROS)
    if result == -1 and ctypes.get_errno() != errno.EINVAL:
        _check(result, "seccomp")


def _program(column: int, audit: int) -> Iterable[bytes]:
    """Yield the instructions. Each check skips its own answer only, so it does not depend on the length of others."""
    yield _do(_LOAD, _ARCHITECTURE)
    yield from _answer_unless(_EQUAL, audit, _KILL)  # 32-bit calls have other numbers
    yield _do(_LOAD, _NUMBER)
    yield from _answer_if(_ABOVE, _X32, _EPERM)
    for numbers in _REFUSED.values():
        number = numbers[column]
        if number is not None:
            yield from _answer_if(_EQUAL, number, _EPERM)
    yield from _answer_if(_EQUAL, _CLONE3[column], _ENOSYS)
    yield _do(_EQUAL, _CLONE[column], 0, 3)
    yield _do(_LOAD, _FIRST_ARGUMENT)
    yield from _answer_if(_ANY, _NEW_NAMESPACES, _EPERM)
    yield _do(_LOAD, _NUMBER)  # not clone, or the number again after its flags: the same check for both
    yield _do(_EQUAL, _SOCKET[column], 0, len(_FAMILIES) + 2)
    yield _do(_LOAD, _FIRST_ARGUMENT)
    for number, family in enumerate(_FAMILIES):
        yield _do(_EQUAL, family, len(_FAMILIES) - number, 0)
    yield _do(_RETURN, _EPERM)
    yield _do(_RETURN, _ALLOW)


def _answer_if(test: int, value: int, answer: int) -> Iterable[bytes]:
    yield _do(test, value, 0, 1)
    yield _do(_RETURN, answer)


def _answer_unless(test: int, value: int, answer: int) -> Iterable[bytes]:
    yield _do(test, value, 1, 0)
    yield _do(_RETURN, answer)


def _do(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
