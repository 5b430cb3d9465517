"""Roles as processes of their own that can be killed: forks of a server that has imported torch and transformers once.

The server starts with its first fork in a test session and ends with it. A fork gets the environment, the directory and
the import path that the test has at that moment.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import logging
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from unittest import mock

from streamrl import runfile
from streamrl.errors import Fenced, StreamrlError
from streamrl.queues.role import Role, open_role

IMPORTED = (
    "__main__",
    "streamrl.learner.leader",
    "streamrl.learner.recorder",
    "streamrl.producers.feeder",
    "streamrl.producers.player",
    "streamrl.producers.worker",
    "streamrl.producers.engines.hf",
    "transformers.models.qwen2.modeling_qwen2",
)
FENCED = 40
"""Exit status of a fenced learner here, to tell it from one that finished (both are 0 for the shell)."""


@functools.cache
def server() -> ForkServerContext:
    """Returns when it has imported all, after about seven seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):
        context.Process().start()
    return context


def fork(
    run: Callable[[Role], Awaitable[None]],
    run_dir: Path,
    name: str,
    *,
    kill: str | None = None,
    environ: Mapping[str, str] | None = None,
    file_limit: int | None = None,
) -> ForkServerProcess:
    """Start a role in a directory that has its `run.json`; NAME.log there gets what it prints."""
    arguments = run, run_dir, name, kill, {**os.environ, **(environ or {})}, file_limit
    process = server().Process(target=_become, args=arguments, name=name, daemon=True)
    process.start()
    return process


def kill(process: ForkServerProcess) -> None:
    process.kill()
    process.join(10)


def _become(
    run: Callable[[Role], Awaitable[None]],
    run_dir: Path,
    name: str,
    kill: str | None,
    environ: Mapping[str, str],
    file_limit: int | None,
) -> None:
    log = os.open(run_dir / f"{name}.log", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    os.environ.clear()
    os.environ.update(environ)
    if kill is not None:
        kill_at(kill)
    if file_limit is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, resource.RLIM_INFINITY))
    os._exit(asyncio.run(_play(run, run_dir, name)))  # threads that hang do not hold it


async def _play(run: Callable[[Role], Awaitable[None]], run_dir: Path, name: str) -> int:
    config = runfile.read_saved(run_dir / "run.json").config
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    try:
        async with open_role(name, config, run_dir, stop) as role:
            await run(role)
    except Fenced as error:
        print(f"Fenced: {error}", flush=True)
        return FENCED
    except StreamrlError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return int(error.exit_code)
    return 0


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
        # To this thread: with SIGSTOP for the process it would run on until another thread has stopped all.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP if when == "pause" else signal.SIGKILL)

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
