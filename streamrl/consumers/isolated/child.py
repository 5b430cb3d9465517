"""A process that answers requests with one function, one at a time, under limits that the kernel enforces.

Runs as a script, with the standard library and what the function needs. Standard input and output carry one JSON
message per line:

```
in   order (see `main`)                                  first
out  {"ready": true} | {"error": why}                    whether the function could be imported and prepared
in   request                                             any JSON
out  {"phase": name}                                     the function's current phase, any number of times
out  {"result": ...} | {"error": why} | {"memory": true}, with {"last": true} when the process ends after it
```

Limits: address space (`RLIMIT_AS`, on Linux; above it, Python raises MemoryError), CPU time of each phase of a call (a
timer with a signal that nothing catches, so the kernel ends the process), no core dumps, no written files.
Memory that earlier calls left behind does not count against a call's address space. So if a library catches MemoryError
and returns a wrong answer, it does so in every process or in none.
The process ends at the end of its standard input, and on Linux also when its parent ends.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Tell = Callable[[str], None]
Answer = Callable[[Any, Tell], Any]
Write = Callable[[dict[str, Any]], None]

_PR_SET_PDEATHSIG = 1
_LONGEST_ERROR = 500


def read() -> Any:
    line = sys.stdin.buffer.readline()
    return json.loads(line) if line.endswith(b"\n") else None


def main() -> int:
    """Read the order, prepare the function, answer until the input ends.

    The order is `{"script": path, "settings": any, "path": list, "memory": bytes, "cpu": seconds, "calls": number}`.
    `path` is added to `sys.path`; the process ends after `calls` calls.
    """
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output that a library prints must not mix with the messages

    def write(message: dict[str, Any]) -> None:
        output.write(json.dumps(message).encode() + b"\n")
        output.flush()

    order = read()
    if order is None:
        return 0
    _limit(order["memory"])
    sys.path.extend(entry for entry in order["path"] if entry not in sys.path)
    try:
        answer = _prepare(Path(order["script"]), order["settings"])
    except Exception as error:  # noqa: BLE001 (told to the process that started this one)
        write({"error": _why(error)})
        return 1
    write({"ready": True})
    _serve(write, answer, order)
    return 0


def _limit(memory: int) -> None:
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # only Linux has it
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if sys.platform == "linux":
        _limit_address_space(memory)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)


def _prepare(script: Path, settings: Any) -> Answer:
    spec = importlib.util.spec_from_file_location(f"isolated_{script.stem}", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    answer: Answer = module.prepare(settings)
    return answer


def _serve(write: Write, answer: Answer, order: dict[str, Any]) -> None:
    base = used = _address_space()
    allowance = order["memory"] - base  # of one call
    for number in range(1, order["calls"] + 1):
        request = read()
        if request is None:
            return
        if used:
            _limit_address_space(max(base, used) + allowance)
        reply = _call(write, answer, request, order["cpu"])
        used = _address_space()
        if number == order["calls"] or "memory" in reply or used > base + allowance // 2:
            reply["last"] = True
        write(reply)
        if "last" in reply:
            return


def _call(write: Write, answer: Answer, request: Any, cpu: float) -> dict[str, Any]:
    def tell(phase: str) -> None:
        signal.setitimer(signal.ITIMER_PROF, cpu)  # starts anew for each phase
        write({"phase": phase})

    signal.setitimer(signal.ITIMER_PROF, cpu)
    try:
        return {"result": answer(request, tell)}
    except MemoryError:
        return {"memory": True}
    except Exception as error:  # noqa: BLE001 (told to the process that asks)
        return {"error": _why(error)}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _limit_address_space(size: int) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size, most))


def _address_space() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return 0
    return pages * resource.getpagesize()


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]


if __name__ == "__main__":
    sys.exit(main())
