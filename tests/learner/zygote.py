"""Forks learners: torch is imported once, and each learner is a real process that can be killed.

Reads one JSON object per line from stdin, answers one line each: {"start": RUN_DIR, "kill": POINT | null, ...} -> pid;
{"wait": PID} -> exit status as `os.waitpid` gives it, negative for a signal.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import json
import logging
import os
import resource
import signal
import sys
import time
import traceback
from pathlib import Path

from streamrl import runfile
from streamrl.errors import Fenced, StreamrlError
from streamrl.learner import leader, recorder
from streamrl.producers import player
from streamrl.queues.role import open_role

RUNNERS = {"learner": leader.run_learner, "recorder": recorder.run_recorder, "player": player.run_player}
FENCED = 40
"""Exit status of a fenced learner here, to tell it from one that finished (both are 0 for the shell)."""


def kill_at(point: str) -> None:
    """`module:Class.function:before|after|pause|none|never:N`: kill -9 myself before or after the N-th call.

    `pause` stops before it, `none` lets it return None, `never` it and all later ones. `wait:FILE` has every call of a
    function wait until there is such a file.
    """
    module_name, path, when, count = point.split(":")
    owner = importlib.import_module(module_name)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original = getattr(owner, name)
    calls = 0

    def strike() -> None:
        os.kill(os.getpid(), signal.SIGSTOP if when == "pause" else signal.SIGKILL)

    def due() -> bool:
        nonlocal calls
        while when == "wait" and not Path(count).exists():
            time.sleep(0.01)
        calls += 1
        if when == "wait":
            return False
        return calls == int(count) or (when == "never" and calls > int(count))

    if inspect.iscoroutinefunction(original):

        @functools.wraps(original)
        async def hooked(*args, **kwargs):
            hit = due()
            if hit and when in {"before", "pause"}:
                strike()
            if hit and when in {"none", "never"}:
                return None
            result = await original(*args, **kwargs)
            if hit and when == "after":
                strike()
            return result

    else:

        @functools.wraps(original)
        def hooked(*args, **kwargs):
            hit = due()
            if hit and when in {"before", "pause"}:
                strike()
            if hit and when in {"none", "never"}:
                return None
            result = original(*args, **kwargs)
            if hit and when == "after":
                strike()
            return result

    setattr(owner, name, hooked)


async def learn(run_dir: Path, name: str) -> int:
    loaded = runfile.read_saved(run_dir / "run.json")
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    try:
        async with open_role(name, loaded.config, run_dir, stop) as role:
            await RUNNERS[name.partition(".")[0]](role)
    except Fenced as error:
        print(f"Fenced: {error}", flush=True)
        return FENCED
    except StreamrlError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return int(error.exit_code)
    return 0


def child(order: dict) -> int:
    run_dir = Path(order["start"])
    name = order.get("name", "learner.0")
    log = os.open(run_dir / f"{name}.log", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    os.environ.update(order.get("environ", {}))
    if order.get("kill"):
        kill_at(order["kill"])
    if order.get("file_limit"):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (order["file_limit"], resource.RLIM_INFINITY))
    try:
        return asyncio.run(learn(run_dir, name))
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        return 41


def main() -> None:
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            print(os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1]), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            os._exit(child(order))
        print(pid, flush=True)


if __name__ == "__main__":
    main()
