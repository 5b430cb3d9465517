"""Figures of each step to TensorBoard, Weights & Biases or trackio, besides the JSON lines, which are always written.

A sink is for looking at: it never holds up or ends the training. Lines go out in a thread of their own; a sink that
fails is left out from then on, and the log says so.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

from streamrl.config import RunConfig
from streamrl.errors import ConfigError

logger = logging.getLogger(__name__)
PROJECT: Final = "streamrl"
_MOST_WAITING: Final = 256
"""Lines that wait for slow sinks; further ones are left out."""
_CLOSE_SECONDS: Final = 20.0


class Sink(Protocol):
    """One place that figures go to; used by one thread."""

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Add the figures of a step."""

    def close(self) -> None:
        """Write what is left."""


class TensorBoard:
    """Event files in `RUN_DIR/tensorboard`."""

    def __init__(self, config: RunConfig, run_dir: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        del config
        self._writer: Any = SummaryWriter(str(run_dir / "tensorboard"))

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """See `Sink.log`."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """See `Sink.close`."""
        self._writer.close()


class Tracker:
    """A run of a library with the interface of wandb (Weights & Biases, trackio), named as the run.

    Args:
        library: the imported module.
        config: of the run; settings of the learner are sent along, addresses and paths are not.
        options: further arguments of `init`.
    """

    def __init__(self, library: Any, config: RunConfig, **options: Any) -> None:
        about = config.learner.model_dump(mode="json", exclude={"reference", "critic", "device"})
        self._library = library
        library.init(project=PROJECT, name=config.name, config=about, **options)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """See `Sink.log`; the step is a figure of its own, since it goes back when a checkpoint is loaded."""
        self._library.log({**figures, "step": step})

    def close(self) -> None:
        """See `Sink.close`."""
        self._library.finish()


def _wandb(config: RunConfig, run_dir: Path) -> Sink:
    import wandb

    return Tracker(wandb, config, dir=str(run_dir))


def _trackio(config: RunConfig, run_dir: Path) -> Sink:
    import trackio

    del run_dir
    return Tracker(trackio, config)


_MAKERS: Final[dict[str, Callable[[RunConfig, Path], Sink]]] = {
    "tensorboard": TensorBoard,
    "wandb": _wandb,
    "trackio": _trackio,
}


class Sinks:
    """All sinks of a run (`learner.sinks`).

    Args:
        config: of the run.
        run_dir: of the run.

    Raises:
        ConfigError: a library that is named is not installed.
    """

    def __init__(self, config: RunConfig, run_dir: Path) -> None:
        self._names = tuple(dict.fromkeys(config.learner.sinks))
        for name in self._names:
            if importlib.util.find_spec(name) is None:
                raise ConfigError(
                    f"learner.sinks: {name} is not installed", f"pip install 'streamrl[{name}]', or leave it out"
                )
        self._config, self._run_dir = config, run_dir
        self._sinks: dict[str, Sink] = {}
        self._last: Future[None] | None = None
        self._waiting = self._left_out = 0
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="sinks")
        if self._names:
            self._last = self._executor.submit(self._open)

    def log(self, step: int, line: Mapping[str, Any]) -> None:
        """Send the figures of a step on; returns at once. The event loop calls it, and nobody else."""
        if not self._names:
            return
        if self._waiting >= _MOST_WAITING:
            self._left_out += 1
            if self._left_out == 1:
                logger.warning("sinks are too slow: lines are left out", extra={"sinks": list(self._names)})
            return
        self._waiting += 1
        self._last = self._executor.submit(self._send, step, figures(line))

    def close(self) -> None:
        """Write what is left, for at most some seconds; it may block."""
        if self._names:
            try:
                self._executor.submit(self._close).result(_CLOSE_SECONDS)
            except FutureTimeoutError:
                logger.warning("sinks do not end", extra={"sinks": list(self._sinks)})
        self._executor.shutdown(wait=False, cancel_futures=True)

    # ---- in the thread

    def _open(self) -> None:
        for name in self._names:
            self._try(name, partial(self._make, name))

    def _make(self, name: str) -> None:
        self._sinks[name] = _MAKERS[name](self._config, self._run_dir)

    def _send(self, step: int, values: Mapping[str, float]) -> None:
        self._waiting -= 1
        for name, sink in list(self._sinks.items()):
            self._try(name, partial(sink.log, step, values))

    def _close(self) -> None:
        for name, sink in list(self._sinks.items()):
            self._try(name, sink.close)

    def _try(self, name: str, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:
            # A foreign library may raise anything; training goes on without it.
            self._sinks.pop(name, None)
            logger.exception("sink left out", extra={"sink": name, "error": str(error)})


def figures(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a step's line; those of a map below it as `name/key`. Lists and texts are left out."""
    found: dict[str, float] = {}
    for name, value in line.items():
        inner = value if isinstance(value, Mapping) else {"": value}
        for key, number in inner.items():
            if isinstance(number, int | float):
                found[f"{name}/{key}" if key else name] = float(number)
    return found
