"""The run directory: made, resumed or moved away before a run, locked by one supervisor, cleaned after a death."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from streamrl.config import RunConfig
from streamrl.cores import THREADS, usable_cores
from streamrl.errors import CannotCreate, ConfigError, Refused, UsageError, writing
from streamrl.queues import embedded
from streamrl.queues.supervision import Published
from streamrl.runfile import RUN_DIGEST, RUNS, LoadedConfig, parse_saved, read_saved, save
from streamrl.runtime.placement.local import RENDEZVOUS
from streamrl.runtime.plan import computing, divide_cores, plan
from streamrl.runtime.preflight import Check, preflight
from streamrl.weight_sync.files import make_token, memory_of, release_memory

FIXED: Final = (
    "name",
    "seed",
    "redis.url",
    "model.path",
    "model.tokenizer",
    "model.chat_template",
    "model.system_prompt",
    "data.train",
    "data.held_out",
    "data.columns",
    "data.prompt",
    "data.chat",
    "data.shuffle",
    "data.max_prompt_tokens",
    "model.context",
    "model.image_processor",
    "images.url",
    "sampling.group_size",
    "sampling.temperature",
    "recording.mode",
    "recording.path",
    "sampling.greedy_baseline",
)
"""Values that a run keeps for life: ledger, data order, checkpoints and waiting groups depend on them."""

_OURS: Final = frozenset({"logs", "metrics", "checkpoints", "supervisor.lock"})


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A run directory for a supervisor; `changed` are keys whose values differ from the last time."""

    run_dir: Path
    config: RunConfig
    resumed: bool
    changed: tuple[str, ...]
    put_aside: Path | None
    checks: tuple[Check, ...]


def prepare_run(
    loaded: LoadedConfig,
    run_dir: Path | None = None,
    *,
    fresh: bool = False,
    resume: bool = False,
    published: Published | None = None,
    here: bool = True,
) -> PreparedRun:
    """Check everything, then make or resume the run directory, and write `run.json`.

    A directory that holds a run is resumed, or with `fresh` moved to `DIR.old-TIME`. A repeat does no harm. What the
    run has `published` before is compared as a directory is, and its token is kept. `here` as for `check_all`. Refused:
    the run is running. ConfigError: keys that the run must keep have changed, or the preflight failed. UsageError: both
    flags, or `resume` without a run.
    """
    config = loaded.config
    folder = run_dir if run_dir is not None else RUNS / config.name
    if fresh and resume:
        raise UsageError("--fresh and --resume exclude each other")
    there = (folder / "run.json").exists()
    recording = config.recording.path
    if fresh and recording is not None and recording.is_relative_to(folder.resolve()):
        raise UsageError(f"--fresh would put {recording} aside", "train it in a directory of its own: --run DIR")
    if resume and not there:
        raise UsageError(f"there is no run in {folder} to resume", "leave out --resume to start one")
    if folder.exists() and not there and not all(map(_is_ours, folder.iterdir())):
        raise CannotCreate(f"{folder} is not empty and holds no run", "name another directory with --run, or remove it")
    changed = _changed(config, folder) if there and not fresh else ()
    if published is not None and not fresh:
        _expect_published(config, published)
    checks = tuple(preflight(config, folder, here=here))
    put_aside = None
    with writing(inside=folder):
        if there:
            with supervisor_lock(folder):  # refused while the run is running
                put_aside = _put_aside(folder) if fresh else None
        for name in ("logs", "metrics", "checkpoints"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        save(loaded, folder / "run.json")
    if config.weights.pulled or config.engine.managed:
        # here, so that nobody waits for the learner to write it
        make_token(folder, published.weights_token if published is not None else None)
    return PreparedRun(folder, config, there and not fresh, changed, put_aside, checks)


def _is_ours(path: Path) -> bool:
    """Whether an earlier start may have left it, before it wrote `run.json`."""
    return path.name in _OURS or path.suffix == ".draft"


def describe(config: RunConfig, run_dir: Path) -> list[str]:
    lines = []
    for unit in plan(config, run_dir):
        for position, name in enumerate(unit.processes):
            command = unit.command(position)
            env = " ".join(f"{key}={value}" for key, value in sorted(command.env.items()))
            lines.append(f"{name}: {env} {sys.executable} {' '.join(command.arguments)}")
    return lines


def describe_threads(config: RunConfig) -> str:
    if THREADS in os.environ:
        return f"{THREADS}={os.environ[THREADS]} of the environment, for each process without a number of its own"
    cores = usable_cores()
    shares = divide_cores(config, cores, computing(config))
    return f"{', '.join(f'{kind} {count}' for kind, count in shares.items())} (this host has {cores} cores)"


def _changed(config: RunConfig, folder: Path) -> tuple[str, ...]:
    """Dotted keys whose values differ from the run's; raises for those that it must keep."""
    before = read_saved(folder / "run.json").config
    differ = tuple(_differences(before, config))
    if values := _broken(before, config, FIXED):
        raise ConfigError(f"{folder} has a run with other values: {values}", "--fresh starts anew, --run DIR elsewhere")
    return differ


def _expect_published(config: RunConfig, published: Published) -> None:
    """Raise ConfigError if the run in Redis is not one that this configuration goes on with."""
    before = parse_saved(published.run_file, f"the run file of {config.name} in Redis").config
    # How Redis is reached may differ from host to host.
    if values := _broken(before, config, [key for key in FIXED if key != "redis.url"]):
        raise ConfigError(f"Redis has run {config.name} with other values: {values}", "give this run another name")
    if published.digest and published.digest == os.environ.get(RUN_DIGEST) and _differences(before, config):
        keys = ", ".join(_differences(before, config))
        raise ConfigError(
            f"the manifests were rendered before {keys} changed, so roles would not wait for the new values",
            "render and apply them again",
        )


def _broken(before: RunConfig, now: RunConfig, kept: Sequence[str]) -> str:
    """The values of a run that must not differ and do, in words."""
    differ = _differences(before, now)
    keys = [key for key in kept if any(f"{one}.".startswith(f"{key}.") for one in differ)]
    return ", ".join(f"{key} was {_value(before, key)!r} and is {_value(now, key)!r}" for key in keys)


def _differences(before: RunConfig, now: RunConfig) -> list[str]:
    return sorted(_walk(before.model_dump(mode="json"), now.model_dump(mode="json")))


def _walk(before: Any, now: Any, key: str = "") -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for name in {*before, *now}:
            yield from _walk(before.get(name), now.get(name), f"{key}.{name}" if key else name)
    elif before != now:
        yield key


def _value(config: RunConfig, key: str) -> Any:
    value: Any = config.model_dump(mode="json")
    for part in key.split("."):
        value = value[part]
    return value


def _put_aside(folder: Path) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    names = (folder.with_name(f"{folder.name}.old-{stamp}{suffix}") for suffix in ("", *(f"-{n}" for n in range(100))))
    target = next(name for name in names if not name.exists())
    folder.rename(target)
    return target


@contextlib.contextmanager
def supervisor_lock(run_dir: Path) -> Iterator[None]:
    """Hold `supervisor.lock` of a run for this block; Refused if another process holds it.

    No child inherits the lock, and the kernel releases it when its holder dies.
    """
    path = run_dir / "supervisor.lock"
    with writing(path):
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Refused(
                f"{run_dir} is running already{_holder(path)}", "stop it first, or give this run a name"
            ) from error
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
        os.ftruncate(handle, 0)
        os.pwrite(handle, orjson.dumps(holder), 0)
        yield
    finally:
        os.close(handle)


def supervising_pid(run_dir: Path) -> int | None:
    """The process on this machine that supervises a run, from its first moment on; None if there is none."""
    path = run_dir / "supervisor.lock"
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        with contextlib.suppress(OSError, orjson.JSONDecodeError, KeyError, TypeError):
            return int(orjson.loads(path.read_bytes())["pid"])
    except OSError:
        pass  # no run, or not ours to look at
    return None


def _holder(path: Path) -> str:
    try:
        holder = orjson.loads(path.read_bytes())
        return f": supervised by process {holder['pid']} on {holder['host']}"
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError):
        return ""  # the holder has not written its name yet


async def sweep(run_dir: Path) -> list[str]:
    """Remove what dead processes of a run left behind; return one line each. A repeat finds nothing.

    | what | where |
    |---|---|
    | a Redis server whose supervisor was killed | `redis/server.lock` names it |
    | files of a killed rewrite of the append-only file | `redis/temp-*.aof`, `redis/temp-*.rdb` |
    | files in which the ranks of a learner found each other | `rendezvous/` |
    | weights in shared memory | `/dev/shm/streamrl-UID-HASH*` |

    Only for the holder of the supervisor's lock: then no process of the run is alive except, for a few seconds, roles
    of a killed supervisor (which keep what they have mapped) and commands that read the run with a Redis of their own.
    """
    found = ["a Redis server of a killed process"] if await embedded.end_orphan(run_dir) else []
    rendezvous = run_dir / RENDEZVOUS
    rendezvous.mkdir(exist_ok=True)
    files = [*rendezvous.iterdir(), *await embedded.sweep_stopped(run_dir)]
    found += [str(path) for path in (*files, *memory_of(run_dir))]
    for file in files:
        file.unlink(missing_ok=True)
    release_memory(run_dir)
    return found
