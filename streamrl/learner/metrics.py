"""What a step logs: one JSON line, always, and its figures to TensorBoard, Weights & Biases or trackio.

A logger never holds up or ends the training. Lines go out in a thread of their own; one that fails is left out from
then on, and the log says so.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import textwrap
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from pathlib import Path
from threading import Semaphore
from typing import Any, Final

import numpy as np
import orjson

from streamrl import wire
from streamrl.config import RunConfig
from streamrl.errors import ConfigError
from streamrl.learner.algorithms.losses import ValueSums
from streamrl.learner.groups import EpisodeFigures, TrainGroup
from streamrl.learner.optimizer import UpdateStats
from streamrl.learner.step import StepStats
from streamrl.queues.pace import Pace
from streamrl.queues.records import ClosedGroup
from streamrl.sources import series_of

_USUAL_STEPS: Final = 20
"""Least number of steps of which the longest is what a step usually takes; one of them has a checkpoint."""
_RECENT: Final = 64  # groups of a source that its means are of
_MEANS: Final = ("reward_mean", "zero_variance", "length")


class StepMeter:
    """Measures from the end of one step to the end of the next; the first step begins with its first groups."""

    def __init__(self, checkpoint_every: int = 1) -> None:
        self._since: float | None = None
        self._tokens = 0
        self._idle = 0.0
        self._pace = Pace()
        self._seconds: deque[float] = deque(maxlen=max(_USUAL_STEPS, checkpoint_every + 1))
        self._read: Counter[str] = Counter()  # groups by source
        self._recent: dict[str, deque[tuple[float, float, float]]] = {}  # in the order of `_MEANS`

    def begin(self) -> None:
        if self._since is None:
            self._since = time.monotonic()
            self._pace.mark(self._since, 0, 0.0)

    def shown(self) -> dict[str, float]:
        """Fields of the heartbeat: the pace, when the step ended, and the longest of the last ones if known."""
        usual = {"step_seconds": round(max(self._seconds), 3)} if len(self._seconds) > 1 else {}
        return {**self._pace.shown(), "stepped": time.time(), **usual}

    def line(
        self,
        groups: Sequence[TrainGroup],
        stats: StepStats,
        step: int,
        busy: Sequence[tuple[float, float]],
        seen: Sequence[TrainGroup],
    ) -> dict[str, Any]:
        """Close the step and describe it; `busy` are intervals and `seen` the groups read since the last line."""
        read = [len(sample.tokens) for group in seen for sample in group.samples]
        now = time.monotonic()
        seconds, self._since = now - (self._since or now), now
        idle = max(0.0, seconds - sum(end - start for start, end in busy))
        tokens = sum(group.tokens for group in groups)
        self._tokens += tokens
        self._idle += idle
        self._pace.mark(now, self._tokens, self._idle)
        self._seconds.append(seconds)
        return {
            **_groups(groups, step),
            **_learnt(stats),
            "length_read": float(np.mean(read)) if read else None,
            "lengths_read": histogram(read),
            "idle_seconds": idle,
            "busy": [[round(start, 6), round(end, 6)] for start, end in busy],
            "step_seconds": seconds,
            "tokens_per_second": tokens / max(seconds, 1e-9),
            "sources": self._sources(seen),
        }

    def _sources(self, seen: Sequence[TrainGroup]) -> dict[str, dict[str, float]]:
        known = set(self._recent)
        for group in (group for group in seen if group.source):
            name = series_of(group.source, known)
            self._read[name] += 1
            means = float(np.mean(group.rewards)), float(group.zero_variance), group.tokens / len(group.samples)
            self._recent.setdefault(name, deque(maxlen=_RECENT)).append(means)
        return {
            name: {"groups": self._read[name], **dict(zip(_MEANS, np.mean(last, axis=0).tolist(), strict=True))}
            for name, last in self._recent.items()
        }


def _groups(groups: Sequence[TrainGroup], step: int) -> dict[str, Any]:
    tokens = sum(group.tokens for group in groups)
    rewards = np.asarray([reward for group in groups for reward in group.rewards])
    lengths = [len(sample.tokens) for group in groups for sample in group.samples]
    ages: Counter[int] = sum((group.staleness(step - 1) for group in groups), Counter())
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "groups": len(groups),
        "trained": [[group.group_id, max(group.staleness(step - 1), default=0)] for group in groups],
        "zero_advantage_groups": sum(group.zero_gradient for group in groups),
        "zero_variance_groups": sum(group.zero_variance for group in groups),
        "tokens": tokens,
        "prompt_tokens": sum(group.prompt_tokens for group in groups),
        "length_trained": float(np.mean(lengths)),
        "lengths_trained": histogram(lengths),
        "staleness": {str(age): ages[age] for age in sorted(ages)},
        "staleness_mean": sum(age * count for age, count in ages.items()) / max(1, tokens),
        "staleness_max": max(ages, default=0),
        "samples_spanning_versions": sum(group.mixed_version for group in groups),
        **sum((group.episodes for group in groups), EpisodeFigures()).line(),
    }


def _learnt(stats: StepStats) -> dict[str, Any]:
    sums = stats.trained
    return {
        "loss": stats.loss,
        "updates": stats.updates,
        "ess": sums.ess,
        "response_ess": sums.response_ess,
        "mean_squared_log_ratio": sums.mean("squared_log_ratio"),
        "engine_gap": sums.mean("engine_gap") if sums.tokens_0 else None,
        "clip_fraction": sums.mean("clipped"),
        "capped_fraction": sums.mean("capped"),
        "masked_fraction": sums.mean("masked"),
        "masked_by_staleness": sums.masked_by_age,
        "kl_k1": sums.mean("kl_k1"),
        "kl_k3": sums.mean("kl_k3"),
        "kl_reference": sums.mean("kl_reference"),
        "kl_coefficient": stats.kl_coefficient,
        "entropy": sums.mean("entropy"),
        "grad_norm": stats.grad_norm,
        "lr": stats.lr,
        "skipped": stats.skipped,
        **(_criticised(stats.critic) if stats.critic else {}),
    }


def _criticised(critic: Sequence[UpdateStats[ValueSums]]) -> dict[str, Any]:
    def mean(values: Iterable[float]) -> float:
        return sum(values) / len(critic)

    return {
        "critic_loss": mean(stats.trained.mean("loss") for stats in critic),
        "critic_clip_fraction": mean(stats.trained.mean("clipped") for stats in critic),
        "critic_explained_variance": mean(stats.trained.explained_variance for stats in critic),
        "critic_value": mean(stats.trained.mean("values") for stats in critic),
        "critic_return": mean(stats.trained.mean("returns") for stats in critic),
        "critic_grad_norm": mean(stats.grad_norm for stats in critic),
        "critic_lr": mean(stats.lr for stats in critic),
    }


def histogram(lengths: Sequence[int]) -> dict[str, int]:
    """Responses by length: the upper end of the bucket, a power of two, and how many are in it."""
    counts = Counter(1 << max(0, length - 1).bit_length() for length in lengths)
    return {str(bound): counts[bound] for bound in sorted(counts)}


logger = logging.getLogger(__name__)
_PROJECT: Final = "streamrl"
_MOST_WAITING: Final = 256  # lines that wait for slow loggers
_CLOSE_SECONDS: Final = 20.0


_COLUMNS: Final = ("group", "source", "prompt", "response", "score")
_SENT: Final = {"name", "seed", "max_staleness", "model", "data", "sampling", "scoring", "learner", "evaluation"}
_MOST_TEXT: Final = 4000  # characters of a prompt or a response in a table of samples


def sample_rows(closed: ClosedGroup) -> list[list[Any]]:
    """The samples of a group as rows of `_COLUMNS`."""
    prompt = wire.decode(closed.prompt, wire.Prompt)
    about = [closed.group_id, prompt.source, prompt.text[:_MOST_TEXT]]
    return [
        [*about, wire.decode(sample, wire.Sample).text[:_MOST_TEXT], wire.decode(score, wire.SampleScore).value]
        for _, (sample, score) in sorted(closed.samples.items())
    ]


def described(config: RunConfig) -> Any:
    """The configuration as loggers get it: no address, no path and no argument of a reward."""
    rewards = [reward.model_dump(mode="json", exclude={"args"}) for reward in config.rewards]
    return _public({**config.model_dump(mode="json", include=_SENT), "rewards": rewards})


def _public(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: shown for name, one in value.items() if (shown := _public(one)) is not None}
    if isinstance(value, list):
        return [shown for one in value if (shown := _public(one)) is not None]
    return None if isinstance(value, str) and (value.startswith("/") or "://" in value) else value


class TensorBoard:
    def __init__(self, config: RunConfig, run_dir: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(run_dir / "tensorboard"))
        self._text("configuration", orjson.dumps(described(config), option=orjson.OPT_INDENT_2).decode(), 0)

    def log(self, step: int, figures: Mapping[str, float], rows: Sequence[Sequence[Any]]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        if rows:
            lines = ("\n".join(f"{name}: {value}" for name, value in zip(_COLUMNS, row, strict=True)) for row in rows)
            self._text("samples", "\n\n".join(lines), step)

    def _text(self, name: str, text: str, step: int) -> None:
        self._writer.add_text(name, textwrap.indent(text, "    ", lambda _: True), step)  # code, in Markdown

    def close(self) -> None:
        self._writer.close()


class Tracker:
    """A run of a library with the interface of wandb, named as the run."""

    def __init__(self, name: str, config: RunConfig, run_dir: Path) -> None:
        self._library: Any = importlib.import_module(name)
        options = {"dir": str(run_dir)} if name == "wandb" else {}
        self._library.init(project=_PROJECT, name=config.name, config=described(config), **options)

    def log(self, step: int, figures: Mapping[str, float], rows: Sequence[Sequence[Any]]) -> None:
        # Log the step as a figure, because it goes back when a checkpoint is loaded.
        table = {"samples": self._library.Table(columns=[*_COLUMNS], data=[*rows])} if rows else {}
        self._library.log({**figures, **table, "step": step})

    def close(self) -> None:
        self._library.finish()


_MAKERS: Final[dict[str, Callable[[RunConfig, Path], TensorBoard | Tracker]]] = {
    "tensorboard": TensorBoard,
    "wandb": partial(Tracker, "wandb"),
    "trackio": partial(Tracker, "trackio"),
}


class StepLoggers:
    def __init__(self, config: RunConfig, run_dir: Path) -> None:
        self._names = tuple(dict.fromkeys(config.learner.report_to))
        self._every = config.learner.log_samples_every
        for name in self._names:
            if importlib.util.find_spec(name) is None:
                raise ConfigError(
                    f"learner.report_to: {name} is not installed", f"pip install 'streamrl[{name}]', or leave it out"
                )
        self._loggers: dict[str, TensorBoard | Tracker] = {}
        self._free = Semaphore(_MOST_WAITING)
        self._left_out = 0
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="loggers")
        for name in self._names:
            self._executor.submit(self._try, name, partial(self._open, name, config, run_dir))

    def log(self, step: int, line: Mapping[str, Any], closed: ClosedGroup | None = None) -> None:
        """Queue the figures of a step, with the samples of a group if it is time for some, and return at once."""
        if self._names and self._free.acquire(blocking=False):
            rows = sample_rows(closed) if closed and self._every and step % self._every == 0 else []
            self._executor.submit(self._send, step, figures(line), rows)
        elif self._names:
            if not self._left_out:  # once: one that hangs would be in the log at every step
                extra = {"step": step, "loggers": [*self._names]}
                logger.warning("loggers are too slow: lines are left out", extra=extra)
            self._left_out += 1

    def close(self) -> None:
        """Write what is left, for at most `_CLOSE_SECONDS`; it may block."""
        if self._left_out:
            logger.warning("lines of steps are not in the loggers", extra={"lines": self._left_out})
        if self._names:
            try:
                self._executor.submit(self._close).result(_CLOSE_SECONDS)
            except FutureTimeoutError:
                logger.warning("loggers do not end", extra={"loggers": list(self._loggers)})
        self._executor.shutdown(wait=False, cancel_futures=True)

    # ---- in the thread

    def _open(self, name: str, config: RunConfig, run_dir: Path) -> None:
        self._loggers[name] = _MAKERS[name](config, run_dir)

    def _send(self, step: int, values: Mapping[str, float], rows: Sequence[Sequence[Any]]) -> None:
        self._free.release()
        for name, target in list(self._loggers.items()):
            self._try(name, partial(target.log, step, values, rows))

    def _close(self) -> None:
        for name, target in list(self._loggers.items()):
            self._try(name, target.close)

    def _try(self, name: str, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:
            # A foreign library may raise anything; training goes on without it.
            self._loggers.pop(name, None)
            logger.exception("logger left out", extra={"tracker": name, "error": str(error)})


def figures(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a step's line, those of an inner map as `name/key`; lists and texts are left out."""
    found: dict[str, float] = {}
    for name, value in line.items():
        if isinstance(value, Mapping):
            found |= {f"{name}/{key}": number for key, number in figures(value).items()}
        elif isinstance(value, int | float):
            found[name] = float(value)
    return found
