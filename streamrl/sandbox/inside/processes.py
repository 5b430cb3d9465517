"""Finds, measures and kills the processes that a program started."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

_PAUSE = 0.002
_TICKS = os.sysconf("SC_CLK_TCK")
_COUNTED = ("RssAnon:", "RssShmem:")


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    waiting = [pid]
    while waiting:
        children = _children(waiting.pop())
        found.extend(children)
        waiting.extend(children)
    return found


def memory(pids: list[int]) -> int:
    """Bytes of memory that processes own or share; shared memory counts once per process."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith(_COUNTED):
                    total += int(line.split()[1]) << 10
    return total


def processor_time(pids: list[int]) -> tuple[float, float]:
    """Seconds that processes have run, and the longest wait of a thread for a processor that other programs had.

    Includes reaped children. Both are 0 if the kernel does not keep these figures.
    """
    run = 0.0
    threads: list[tuple[float, float]] = []
    for pid in pids:
        ran_alive = ran_in_all = 0.0
        with suppress(OSError, ValueError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                ran, waited = (int(word) / 1e9 for word in (task / "schedstat").read_text().split()[:2])
                threads.append((ran, waited))
                ran_alive += ran
            words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ran_in_all = sum(map(int, words[11:15])) / _TICKS  # own and children's, as user and in the kernel
        run += max(ran_alive, ran_in_all)
    return run, kept_waiting(threads, run)


def kept_waiting(threads: list[tuple[float, float]], run: float) -> float:
    """The longest time that a thread waited for a processor that other programs had.

    `threads` are the seconds that each has run and waited. The wait of a thread while others of the program ran does
    not count, since those may have caused it.
    """
    return max((waited - max(run - ran, 0.0) for ran, waited in threads if waited > run - ran), default=0.0)


def starved() -> int:
    with suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def kill_all(deadline: float) -> bool:
    """Kill everything below this process, the reaper of orphans; False if it takes longer than `deadline` seconds.

    All are stopped first, so that they cannot fork faster than they are killed.
    """
    end = time.monotonic() + deadline
    stopped: set[int] = set()
    while left := descendants(os.getpid()):
        for pid in left:
            if pid not in stopped:
                _signal(pid, signal.SIGSTOP)
        if stopped.issuperset(left):
            for pid in left:
                _signal(pid, signal.SIGKILL)
        stopped.update(left)
        reap()
        if time.monotonic() > end:
            return False
        time.sleep(_PAUSE)
    return True


def reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - called for each process twenty times a second
            with suppress(OSError):
                found.extend(map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split()))
    return found


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(OSError):
        os.kill(pid, number)
