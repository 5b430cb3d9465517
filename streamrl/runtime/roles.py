"""One role as one process, as `streamrl run ROLE`, the supervisor, Ray and Kubernetes start it.

Signals: the first SIGTERM, SIGINT, SIGHUP or SIGQUIT sets `role.stop` (drain and return), the second cancels the role,
the third ends the process at once. SIGUSR1 writes the stacks of all threads to the log. The exit code tells how it
ended; the table is in `errors.classify`.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import logging
import os
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn, TypeAlias

from streamrl.config import RunConfig
from streamrl.errors import ConfigError, ExitCode, Fenced, StreamrlError, UsageError, unwrap
from streamrl.isolation import lifeline
from streamrl.queues import embedded
from streamrl.runfile import read_saved
from streamrl.runtime.logs import log_as_json
from streamrl.runtime.plan import use_cores
from streamrl.runtime.status_pipe import StatusPipe
from streamrl.waits import first_of
from streamrl.weight_sync.files import allow_many_files

if TYPE_CHECKING:
    from streamrl.queues import Role

logger = logging.getLogger(__name__)

_RUNNERS: Final = {
    "reward_model": ("streamrl.servers.reward_models", "run_reward_model"),
    "feeder": ("streamrl.producers.feeder", "run_feeder"),
    "engine": ("streamrl.servers.engine", "run_engine"),
    "rollout": ("streamrl.producers.worker", "run_rollout"),
    "reward": ("streamrl.consumers.worker", "run_reward_worker"),
    "learner": ("streamrl.learner.leader", "run_learner"),
    "recorder": ("streamrl.learner.recorder", "run_recorder"),
    "player": ("streamrl.producers.player", "run_player"),
}
KINDS: Final = ("redis", *_RUNNERS)
_LOADS_LATER: Final = {
    "feeder": "transformers.models.auto.tokenization_auto",
    "rollout": "streamrl.producers.engines.hf",
}
"""Large modules that a role would import later, where garbage collection costs a fifth of the import time."""
_EXTRAS: Final = frozenset({"torch", "transformers", "safetensors", "tokenizers"})
_READY_POLL: Final = 0.05
Runner: TypeAlias = "Callable[[Role], Awaitable[None]]"
_BEAT: Final = 1.0


def run(kind: str, index: int | None, run_dir: Path, *, until_finished: bool = False) -> NoReturn:
    """Run one role, and end the process with its exit code. `index` None: the first free one.

    `until_finished`: one that was stopped before the run was finished ends with the code of the signal, not with 0.
    It does not wait for threads: a reward that hangs, or a collective without peers, must not delay the end.
    """
    if kind == "redis":
        code = _become_redis(run_dir)
    else:
        status = StatusPipe()
        try:
            code = asyncio.Runner().run(serve(kind, index, run_dir, until_finished=until_finished, status=status))
        except (KeyboardInterrupt, SystemExit) as error:  # no signal: code of the user raised it in a task of its own
            code = _ended_by_code(error, status)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


async def serve(
    kind: str,
    index: int | None,
    run_dir: Path,
    *,
    until_finished: bool = False,
    status: StatusPipe | None = None,
) -> ExitCode:
    """Run one role until it is finished, stopped or failed, and return the exit code of its process.

    Every error becomes a log line, a message to the supervisor and an exit code. Call it once per process: it sets up
    logging, signals and the lifeline.
    """
    status = status or StatusPipe()
    log_as_json(kind if index is None else f"{kind}.{index}")
    allow_many_files()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    stop = asyncio.Event()
    signals = StopSignals(stop)
    try:
        config = read_saved(run_dir / "run.json").config
        supervised = lifeline.hold(config.supervisor.term_grace)
        use_cores(config, kind, index or 0)
        runner = _runner(kind, index, config)
        if not supervised or await _own_redis_answers(config, run_dir, stop):
            async with contextlib.AsyncExitStack() as opened:
                # not needed by the process that becomes Redis
                from streamrl.queues import open_role
                from streamrl.queues.member_index import claimed_index

                if index is None:
                    index = await opened.enter_async_context(claimed_index(kind, config, run_dir))
                    log_as_json(f"{kind}.{index}")
                role = await opened.enter_async_context(open_role(f"{kind}.{index}", config, run_dir, stop))
                await _live(role, runner, status)
    except asyncio.CancelledError:
        return signals.code
    except Exception as error:  # noqa: BLE001 (turned into words and an exit code)
        return _verdict(error, status)
    logger.info("role ended")
    return signals.code if until_finished and stop.is_set() and not _is_finished(run_dir) else ExitCode.OK


def _is_finished(run_dir: Path) -> bool:
    from streamrl.learner.ending import FINISHED_FILE  # not needed by most roles

    return (run_dir / FINISHED_FILE).exists()


async def _own_redis_answers(config: RunConfig, run_dir: Path, stop: asyncio.Event) -> bool:
    """It starts at the same time. False: the role is to stop first."""
    if config.redis.url is not None:
        return True
    await first_of(embedded.wait_ready(run_dir, config.supervisor.start_deadline), stop.wait())
    return not stop.is_set()


async def _live(role: Role, runner: Runner, status: StatusPipe) -> None:
    from streamrl.runtime.health import serve_health  # not needed by the process that becomes Redis

    async with serve_health(role, role.config.health) as url:
        role.status["health"] = url
        pulse = asyncio.create_task(_pulse(role, status))
        try:
            await runner(role)
        finally:
            pulse.cancel()


async def _pulse(role: Role, status: StatusPipe) -> None:
    while not role.is_ready:  # noqa: ASYNC110 (the role sets it without an event to wait for)
        await asyncio.sleep(_READY_POLL)
    status.ready()
    while True:
        status.beat()
        await asyncio.sleep(_BEAT)


def _runner(kind: str, index: int | None, config: RunConfig) -> Runner:
    """Import the coroutine of a role; roles without torch must not load it."""
    kind = kind.partition(".")[0]
    if kind not in _RUNNERS:
        raise UsageError(f"there is no role {kind}", f"roles: {', '.join(_RUNNERS)}")
    if kind == "learner":
        for variable, value in (("RANK", index or 0), ("LOCAL_RANK", index or 0), ("WORLD_SIZE", config.learner.ranks)):
            os.environ.setdefault(variable, str(value))
    module, attribute = _RUNNERS[kind]
    served = kind == "rollout" and bool(config.engines)
    if kind == "feeder":
        _do_without_torch()
    try:
        with no_collection():
            runner: Runner = getattr(import_module(module), attribute)
            if kind in _LOADS_LATER and not served:
                import_module(_LOADS_LATER[kind])
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.partition(".")[0] in _EXTRAS:
            raise ConfigError(f"role {kind} needs {error.name}", "pip install 'streamrl[train]'") from error
        raise
    return runner


def _do_without_torch() -> None:
    """Hide torch from transformers, which imports it with every tokenizer: 200 MB and a second of CPU."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # or it says that PyTorch was not found
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Import without garbage collection, and exclude what is imported from later collections."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def stop_signals() -> tuple[signal.Signals, ...]:
    """Signals that end a process of a run in order. SIGHUP (a closed terminal) is one unless `nohup` ignores it."""
    hangs_up = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, *hangs_up)


class StopSignals:
    """Handlers of `stop_signals`: the first sets `stop`, the second cancels the task, the third ends the process.

    They stay installed until the process ends, so that a late signal does not change its exit code.
    """

    def __init__(self, stop: asyncio.Event) -> None:
        self._stop = stop
        self._count = 0
        self._code = ExitCode.TERMINATED
        self._task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        for number in stop_signals():
            loop.add_signal_handler(number, self._take, number)

    @property
    def code(self) -> ExitCode:
        return self._code

    def _take(self, number: int) -> None:
        self._count += 1
        self._code = ExitCode.INTERRUPTED if number == signal.SIGINT else ExitCode.TERMINATED
        logger.info("signal", extra={"signal": signal.Signals(number).name, "count": self._count})
        self._stop.set()
        if self._count == 2 and self._task is not None:
            self._task.cancel()
        elif self._count > 2:
            os._exit(self._code)


def _verdict(error: Exception, status: StatusPipe) -> ExitCode:
    worst = unwrap(error)
    if isinstance(worst, Fenced):
        logger.warning("a newer process has taken over", extra={"why": worst.message})
        status.fenced(worst.message)
        return worst.exit_code
    if isinstance(worst, StreamrlError):
        hint = f" ({worst.hint})" if worst.hint else ""
        status.error(f"{worst.message}{hint}")
        logger.error("role failed", extra={"why": worst.message, "hint": worst.hint}, exc_info=error)
        return worst.exit_code
    status.error(f"{type(worst).__name__}: {worst}")
    logger.critical("role crashed: this is a bug", exc_info=error)
    return ExitCode.FAILURE


def _ended_by_code(error: BaseException, status: StatusPipe) -> ExitCode:
    place = traceback.extract_tb(error.__traceback__)[-1]
    why = f"code raised {type(error).__name__} at {place.filename}:{place.lineno} in {place.name}"
    status.error(why)
    logger.critical("role crashed", extra={"why": why}, exc_info=error)
    return ExitCode.FAILURE


def _become_redis(run_dir: Path) -> ExitCode:
    """Replace this process by the run's Redis server. Returns only if that fails."""
    status = StatusPipe()
    log_as_json("redis")
    try:
        embedded.exec_server(read_saved(run_dir / "run.json").config.redis, run_dir)
    except (StreamrlError, OSError) as error:
        return _verdict(error, status)
