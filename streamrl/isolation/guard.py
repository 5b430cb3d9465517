"""A process between streamrl and a command: when streamrl ends, for whatever reason, the command ends too.

Runs as a script with the standard library only; `KeptProcess` starts it. Its standard input is a lifeline: the first
line says what to start, a line `stop` asks for an orderly end, and its end kills the command with all its processes.
Without `stop` before, the directory `own` of the order is removed too, because no other process is left to do it. It
prints one line, `{"pid": ...}` or `{"error": ...}`, writes the output to the log without the secrets in it, and ends
with the exit code of the command (128 + signal).
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_TICK = 0.2
_LAST_OUTPUT_SECONDS = 0.5
_KILL_SECONDS = 10.0
_TRACKER_SECONDS = 2.0
_LONGEST_LINE = 1 << 16


class Log:
    """The command's output, line by line, without `secrets`. Over `limit` bytes it is rotated, keeping one old file.

    Output that cannot be written (full disk, missing folder) is lost, and the command continues.
    """

    def __init__(self, path: Path, limit: int, secrets: list[str]) -> None:
        self._path, self._limit = path, limit
        self._secret = re.compile(b"|".join(re.escape(text.encode()) for text in secrets)) if secrets else None
        self._file = path.open("ab", buffering=0)
        self._rest = b""

    def feed(self, data: bytes, *, last: bool = False) -> None:
        whole, newline, rest = (self._rest + data).rpartition(b"\n")
        if last or len(rest) > _LONGEST_LINE:
            whole, rest = whole + newline + rest, b""
        else:
            whole += newline
        self._rest = rest
        if not whole:
            return
        with suppress(OSError):
            self._file.write(self._secret.sub(b"***", whole) if self._secret else whole)
            if self._file.tell() > self._limit:
                self._path.replace(self._path.with_name(self._path.name + ".1"))
                full, self._file = self._file, self._path.open("ab", buffering=0)
                full.close()


class Guard:
    def __init__(self, order: dict[str, Any]) -> None:
        self._grace: float = order["grace"]
        self._log = Log(Path(order["log"]), order["log_bytes"], order["secrets"])
        self._command = subprocess.Popen(  # noqa: S603
            order["argv"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_guard,  # noqa: PLW1509 - this process has one thread
        )
        assert self._command.stdout is not None
        self._output = self._command.stdout.fileno()
        self._deadline = float("inf")
        self.abandoned = False
        os.set_blocking(self._output, False)
        os.set_blocking(0, False)

    @property
    def pid(self) -> int:
        return self._command.pid

    def stop(self) -> None:
        self._deadline = min(self._deadline, time.monotonic() + self._grace)
        with suppress(ProcessLookupError):
            self._command.terminate()

    def keep(self) -> int:
        try:
            self._watch()
        finally:
            self._kill()
        end = time.monotonic() + _LAST_OUTPUT_SECONDS
        while time.monotonic() < end and select.select([self._output], [], [], 0.05)[0] and self._carry():
            pass
        self._log.feed(b"", last=True)
        code = self._command.returncode
        return 128 - code if code is not None and code < 0 else code or 0

    def _watch(self) -> None:
        watched = [0, self._output]
        while self._command.poll() is None and time.monotonic() < self._deadline:
            ready, _, _ = select.select(watched, [], [], _TICK)
            if 0 in ready and not self._listen():
                self.abandoned = self._deadline == float("inf")
                break
            if self._output in ready and not self._carry():
                watched.remove(self._output)
            _reap(self.pid)

    def _listen(self) -> bool:
        data = os.read(0, 4096)
        if b"stop" in data:
            self.stop()
        return bool(data)

    def _carry(self) -> bool:
        try:
            data = os.read(self._output, 1 << 16)
        except BlockingIOError:
            return True
        self._log.feed(data)
        return bool(data)

    def _kill(self) -> None:
        """Kill the remaining processes.

        Python's resource trackers come last: they remove the shared memory of killed processes, and then end.
        """
        begun = time.monotonic()
        while (passed := time.monotonic() - begun) < _KILL_SECONDS:
            left = _left(self.pid)
            for pid in left:
                if passed > _TRACKER_SECONDS or not _tracks(pid):
                    with suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
            self._command.poll()
            _reap(self.pid)
            if self._command.returncode is not None and not left:
                return
            time.sleep(0.02)


def _die_with_guard() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # only Linux has it
    if prctl is not None:
        prctl(option, value, 0, 0, 0)


def _left(group: int) -> list[int]:
    """Processes of the command: its group, and orphans, which become children of this process."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            # the name in parentheses may contain any characters
            state, parent, its_group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            if state != "Z" and (parent == str(os.getpid()) or its_group == str(group)):
                found.append(int(folder.name))
    return found


def _tracks(pid: int) -> bool:
    with suppress(OSError):
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _reap(command: int) -> None:
    with suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != command:
            os.waitpid(ended.si_pid, os.WNOHANG)


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    line = b""
    while not line.endswith(b"\n"):
        if not (byte := os.read(0, 1)):
            return 0
        line += byte
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    order = json.loads(line)
    try:
        guard = Guard(order)
    except OSError as error:
        sys.stdout.write(json.dumps({"error": str(error)}) + "\n")
        return 127
    signal.signal(signal.SIGTERM, lambda *_: guard.stop())
    sys.stdout.write(json.dumps({"pid": guard.pid}) + "\n")
    sys.stdout.flush()
    code = guard.keep()
    if guard.abandoned and order["own"]:
        shutil.rmtree(order["own"], ignore_errors=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
