"""A process between the one that asks for programs and the programs: if either ends, it kills and removes what is left.

Its standard input is a lifeline: the first line is an order (what runs, where, within which limits), every further line
`{"stdin": "..."}` asks for one run. When it ends, for whatever reason, the keeper kills the run and ends. It answers
each run with one line: `{"outcome": ..., ...}`, or `{"error": ...}` if the sandbox itself failed. Expected answers of
tests never come here.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from . import jail, kernel, processes

_TICK = 0.05
_KILL_SECONDS = 10.0
_CHUNK = 1 << 16
_SAMPLED = 0.3
"""Seconds of processor time that a look may have missed before the kernel killed a program for its limit."""
_FIRST_FREE = 10


class Abandoned(Exception):
    """The lifeline has ended."""


class ParentPipe:
    def __init__(self) -> None:
        self._data = bytearray()

    def line(self) -> dict[str, Any] | None:
        while b"\n" not in self._data:
            if not self._read():
                return None
        line, _, rest = self._data.partition(b"\n")
        self._data = rest
        found: dict[str, Any] = json.loads(line)
        return found

    def check(self) -> None:
        if not self._read():
            raise Abandoned

    def _read(self) -> bool:
        data = os.read(0, _CHUNK)
        self._data += data
        return bool(data)


class Run:
    """One run of the program of an `order` with a text as its standard input, in `folder` unless it has its own root.

    The order has `jailed`, `network`, `argv`, `environ`, `files`, `visible`, `limits`.
    The lifeline is watched while the program runs.
    """

    def __init__(self, order: dict[str, Any], text: str, folder: str, lifeline: ParentPipe) -> None:
        self._order, self._folder, self._lifeline = order, folder, lifeline
        self._limits = order["limits"]
        self._jailed = order["jailed"]
        self._stdin = os.memfd_create("stdin")
        with os.fdopen(os.dup(self._stdin), "wb") as file:
            file.write(text.encode("utf-8", "replace"))
        os.lseek(self._stdin, 0, os.SEEK_SET)
        pipes = [os.pipe() for _ in range(4)]
        self._reads = [read for read, _ in pipes]
        self._writes = [write for _, write in pipes]
        for read in self._reads:
            os.set_blocking(read, False)
        self._ran, self._delay = 0.0, 0.0
        self._captured: dict[int, bytearray] = {read: bytearray() for read in self._reads}

    def finish(self) -> dict[str, Any]:
        began = time.monotonic()
        starved = processes.starved()
        try:
            self._start()
            forced = self._watch(began)
        finally:
            dead = processes.kill_all(_KILL_SECONDS)
        self._drain()
        if self._size() > self._limits["output"]:
            forced = forced or "output"
        for descriptor in (*self._reads, self._stdin):
            os.close(descriptor)
        wall = time.monotonic() - began
        if not dead:
            return {"error": f"processes of a program cannot be killed within {_KILL_SECONDS:g} s"}
        out, err, result, status = (bytes(self._captured[read]) for read in self._reads)
        said: dict[str, Any] = json.loads(status.partition(b"\n")[0] or b"{}")  # the first report counts
        if "error" in said:
            return said
        if not said and forced is None and self._jailed:
            return {"error": "the first process of the sandbox was killed; is there enough memory?"}
        code, cpu = said.get("code"), max(said.get("cpu", 0.0), self._ran)
        if forced is None and code == -signal.SIGKILL and processes.starved() > starved:
            return {"error": "the host ran out of memory, and its kernel may have killed the program for that"}
        return {
            "outcome": forced or self._outcome(code, cpu),
            "code": code,
            "stdout": out.decode("utf-8", "replace"),
            "stderr": err.decode("utf-8", "replace"),
            "result": result.decode("utf-8", "replace"),
            "cpu": cpu,
            "wall": wall,
            "delay": self._delay,
        }

    def _outcome(self, code: int | None, cpu: float) -> str:
        if code is None:
            return "signal"  # the program killed the process that waits for it
        if code == -signal.SIGXCPU or (code == -signal.SIGKILL and cpu >= self._limits["cpu"] - _SAMPLED):
            return "time"
        return "signal" if code < 0 else "ended"

    # --- the keeper's side --------------------------------------------------------------------------------------------

    def _start(self) -> None:
        ready_read, ready_write = os.pipe()
        go_read, go_write = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(ready_read)
            os.close(go_write)
            self._guarded(lambda: self._enter(ready_write, go_read))
        for descriptor in (*self._writes, ready_write, go_read):
            os.close(descriptor)
        try:
            if os.read(ready_read, 1) and self._jailed:
                jail.map_ids(pid)
            os.write(go_write, b"1")
        except BrokenPipeError:
            pass  # the child has reported its error on the status pipe
        finally:
            os.close(ready_read)
            os.close(go_write)

    def _watch(self, began: float) -> str | None:
        """Carry its output until it ends. Returns the exceeded limit, or None."""
        status = self._reads[3]
        open_ = set(self._reads)
        look_at = 0.0
        while status in open_:
            now = time.monotonic()
            if now >= look_at:
                look_at = now + _TICK
                if (over := self._look(now - began)) is not None:
                    return over
            ready, _, _ = select.select([0, *open_], [], [], _TICK)
            if 0 in ready:
                self._lifeline.check()
                ready.remove(0)
            for descriptor in ready:
                if not self._read(descriptor):
                    open_.discard(descriptor)
            if self._size() > self._limits["output"]:
                return "output"
        return None

    def _look(self, passed: float) -> str | None:
        """Return the limit of memory or time that the processes exceed, or None.

        Whether a program is too slow must not depend on other work on the host. So time in which other programs had the
        processor does not count.
        """
        pids = processes.descendants(os.getpid())
        if processes.memory(pids) > self._limits["memory"]:
            return "memory"
        ran, self._delay = processes.processor_time(pids)
        self._ran = max(self._ran, ran)
        wall = self._limits["wall"]
        kept_waiting = passed - self._delay < wall and ran < self._limits["cpu"]
        if passed < wall or (kept_waiting and passed < self._limits["slowest"] * wall):
            return None
        if kept_waiting:
            raise OSError(f"the host is too busy: a program waited {self._delay:.1f} s for a processor")
        return "time"

    def _read(self, descriptor: int) -> bool:
        data = os.read(descriptor, _CHUNK)
        self._captured[descriptor] += data
        return bool(data)

    def _drain(self) -> None:
        for descriptor in self._reads:
            with contextlib.suppress(BlockingIOError):
                while self._size() <= self._limits["output"] and self._read(descriptor):
                    pass

    def _size(self) -> int:
        return sum(map(len, self._captured.values()))

    # --- the sandbox's side: processes that end by exec or _exit ------------------------------------------------------

    def _enter(self, ready: int, go: int) -> None:
        kernel.die_with_parent()
        if self._jailed:
            kernel.unshare(jail.namespaces(self._order["network"]))
        os.write(ready, b"1")
        if not os.read(go, 1):
            os._exit(1)
        if self._jailed:
            kernel.die_with_parent()  # new credentials forget it
            self._isolate()
            jail.build_root(self._order["visible"], self._limits["disk"])
            self._folder = jail.WORK
        else:
            os.setsid()
            kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        jail.write_files(self._folder, self._order["files"])
        self._keep_first()

    def _isolate(self) -> None:
        """Return in the first process of the new process namespace, which ends with its parent."""
        leash_read, leash_write = os.pipe()
        pid = os.fork()
        if pid:
            for descriptor in (leash_read, self._stdin, *self._writes):
                os.close(descriptor)
            os.waitpid(pid, 0)
            os._exit(0)
        os.close(leash_write)
        kernel.die_with_parent()
        if select.select([leash_read], [], [], 0)[0]:
            os._exit(1)  # its parent has ended before `die_with_parent`

    def _keep_first(self) -> NoReturn:
        """Start the program, reap orphans until it ends, and report. The end of this process kills what is left."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        pid = os.fork()
        if not pid:
            self._guarded(self._become)
        for descriptor in (self._stdin, *self._writes[:3]):
            os.close(descriptor)
        while True:
            ended, status = os.wait()
            if ended == pid:
                break
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        report = {"code": os.waitstatus_to_exitcode(status), "cpu": usage.ru_utime + usage.ru_stime}
        os.write(self._writes[3], json.dumps(report).encode() + b"\n")
        os._exit(0)

    def _become(self) -> None:
        os.setsid()
        kernel.die_with_parent()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        sources = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE) for fd in (self._stdin, *self._writes[:3])]
        for target, source in enumerate(sources):
            os.dup2(source, target, inheritable=True)
        os.chdir(self._folder)
        privileged = self._jailed and os.getuid() == 0
        jail.confine(self._limits, privileged=privileged, jailed=self._jailed)
        argv = self._order["argv"]
        os.execve(argv[0], argv, self._order["environ"])  # noqa: S606

    def _guarded(self, step: Any) -> NoReturn:
        try:
            step()
        except BaseException as error:  # noqa: BLE001 - told to the keeper
            os.write(self._writes[3], json.dumps({"error": f"{type(error).__name__}: {error}"}).encode() + b"\n")
        finally:
            os._exit(1)


def serve(lifeline: ParentPipe, order: dict[str, Any]) -> None:
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        raise OSError("this kernel does not tell the children of a process (CONFIG_PROC_CHILDREN)")
    limits = order["limits"]
    limits["cpu"] = math.ceil(limits["cpu"])
    while (request := lifeline.line()) is not None:
        folder = tempfile.mkdtemp(dir=order["folder"]) if order["folder"] else ""
        _answer(Run(order, request["stdin"], folder, lifeline).finish())
        if folder:
            jail.remove_folder(folder)


def _answer(message: dict[str, Any]) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(1, data) :]


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the lifeline decides
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    lifeline = ParentPipe()
    order = lifeline.line()
    if order is None:
        sys.exit(0)
    try:
        serve(lifeline, order)
    except (Abandoned, BrokenPipeError):
        pass
    except Exception as error:  # noqa: BLE001 - told to the worker
        where = "" if isinstance(error, OSError) else f" {traceback.format_tb(error.__traceback__)[-1].strip()}"
        with contextlib.suppress(OSError):
            _answer({"error": f"{type(error).__name__}: {error}{where}"})
    finally:
        if order["folder"]:
            jail.remove_folder(order["folder"])
