"""Programs that a model might write by accident, and some that it would have to mean."""

from __future__ import annotations

from textwrap import dedent

MIB = 1 << 20

ENDED_BY_A_LIMIT = {
    "endless-loop": ("while True: pass", {"cpu": 1}, "time"),
    "ignores-its-cpu-limit": (
        """
        import signal
        signal.signal(signal.SIGXCPU, signal.SIG_IGN)
        while True: pass
        """,
        {"cpu": 1},
        "time",
    ),
    "sleeps": ("import time; time.sleep(600)", {"wall": 2}, "time"),
    "stops-itself": ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", {"wall": 2}, "time"),
    "ignores-signals-and-closes-its-output": (
        """
        import os, signal
        for number in range(1, 32):
            if number not in (9, 19): signal.signal(number, signal.SIG_IGN)
        for number in range(4): os.close(number)
        signal.sigwait([signal.SIGUSR1])
        """,
        {"wall": 2},
        "time",
    ),
    "endless-output": ("while True: print('x' * 100_000)", {}, "output"),
    "endless-errors": ("import sys\nwhile True: sys.stderr.write('x' * 100_000)", {}, "output"),
    "endless-bytes-that-are-no-text": ("import os\nwhile True: os.write(1, b'\\xff' * 65536)", {}, "output"),
    "endless-results": ("import os\nwhile True: os.write(3, b'\\0' * 65536)", {}, "output"),
    "memory-of-many-processes": (
        """
        import os, time
        for _ in range(8):
            if os.fork() == 0:
                kept = b"x" * 60_000_000
                time.sleep(600)
        time.sleep(600)
        """,
        {"memory": 256 * MIB},
        "memory",
    ),
    "segmentation-fault": ("import ctypes; ctypes.string_at(0)", {}, "signal"),
    "kills-itself": ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", {}, "signal"),
}
"""By name: the program, the limits, the outcome."""

REFUSED_BY_THE_KERNEL = {
    "one-allocation": ("kept = bytearray(8 << 30)", "ended.*MemoryError"),
    "many-allocations": ("kept = []\nwhile True: kept.append(bytearray(1 << 20))", "memory|MemoryError"),
    "doubling": ("text = 'a'\nwhile True: text += text", "memory|MemoryError"),
    "disk": ("open('big', 'wb').write(bytes(100 << 20))", "ended.*(No space left on device|File too large)"),
    "recursion": (
        "import sys; sys.setrecursionlimit(1 << 30)\ndef f(n): return f(n + 1) + 1\nf(0)",
        "memory|MemoryError|signal",
    ),
    "open-files": ("files = [open('/dev/null') for _ in range(1000)]", "ended.*Too many open files"),
}
"""Programs that fail under limits alone: by name, the program and a pattern of its outcome and its last words."""

REFUSED_BY_NAMESPACES = {
    "fork-bomb": ("import os\nwhile True: os.fork()", "ended.*BlockingIOError"),
    "threads": (
        """
        import threading, time
        for _ in range(100): threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        """,
        "ended.*can't start new thread",
    ),
    "inodes": ("for i in range(100_000): open(f'file-{i}', 'w').close()", "ended.*No space left on device"),
    "disk-in-parts": (
        "for i in range(60):\n  with open(f'part-{i}', 'wb') as file: file.write(bytes(10 << 20))",
        "ended.*No space left on device",
    ),
    "removes-a-system-file": ("import os\nos.unlink('/usr/bin/env')", "ended.*(Read-only file system|denied)"),
    "writes-to-the-root": ("open('/evil', 'w')", "ended.*(Read-only file system|denied)"),
    "writes-to-proc": ("open('/proc/self/oom_score_adj', 'w').write('0')", "ended.*Read-only file system"),
    "becomes-root": ("import os\nos.setuid(0)", "ended.*(not permitted|Invalid argument)"),
    "new-user-namespace": ("calling('unshare', 0x10000000)", "ended.*not permitted"),
    "ptrace": ("calling('ptrace', 0, 0, 0, 0)", "ended.*not permitted"),
    "vsock": ("import socket\nsocket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)", "ended.*not permitted"),
    "netlink": ("import socket\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW)", "ended.*not permitted"),
    "hidden-memory": ("import os\nos.memfd_create('hidden')", "ended.*not permitted"),
}
"""Programs that fail where they have namespaces of their own and a filter of system calls; likewise."""

CALLING = """
import ctypes, os
def calling(name, *words):
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*words) == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
"""
"""`calling`: a call of the C library, which raises when it fails."""

LEAVES_PROCESSES = {
    "a-child": "spawn()",
    "a-daemon": """
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                spawn().wait()
        while True:
            time.sleep(0.1)
    """,
    "dies-before-its-child": "spawn(); os.kill(os.getpid(), 9)",
    "is-killed-with-many": "for _ in range(5): spawn()\ntime.sleep(600)",
    "signals-its-parent": """
        import signal
        spawn()
        os.kill(os.getppid(), signal.SIGINT)
        os.kill(os.getppid(), signal.SIGTERM)
    """,
}
"""Programs that start others (`spawn`), which are to end with them."""

SEES_NOTHING = """
    import os
    assert not os.path.exists({secret!r}) and not os.path.exists({test!r})
    known = 'PATH HOME LANG PYTHONHASHSEED PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS OPENBLAS_NUM_THREADS'.split()
    assert set(os.environ) <= {{*known, 'PWD', 'SHLVL', '_', 'LC_CTYPE'}}, os.environ
    descriptors = sorted(map(int, os.listdir('/proc/self/fd')))
    assert descriptors[:4] == [0, 1, 2, 3] and len(descriptors) == 5, descriptors  # the last is of this listing
    processes = [pid for pid in os.listdir('/proc') if pid.isdigit()]
    assert len(processes) < 6, processes
    assert os.getuid() == 65534, os.getuid()
    print('nothing')
"""

DEEP = """
    import os
    for _ in range(1500):
        os.mkdir('d'); os.chdir('d')
    open('file', 'w').close(); os.chmod('.', 0)
"""


def spawning(text: str, mark: str) -> str:
    """A program with `spawn`, which starts a process that has `mark` in its command line."""
    start = f"""
        import os, subprocess, sys, time
        def spawn():
            return subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)", {mark!r}])
    """
    return f"{dedent(start)}\n{dedent(text)}"
