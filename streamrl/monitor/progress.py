"""The progress of a run from its files: steps, tokens of each side, held-out accuracy by version."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from streamrl.monitor.tail import Tail

_STEPS_KEPT: Final = 2000
_RATE_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class Step:
    step: int
    version: int
    at: float
    reward: float | None
    loss: float | None
    tokens: int
    staleness: dict[int, int]


@dataclass(slots=True)
class Side:
    """Work of one side over the last seconds: marks of (monotonic seconds, tokens in all, idle seconds in all)."""

    marks: deque[tuple[float, float, float]] = field(default_factory=deque)

    def mark(self, mono: float, tokens: float, idle: float) -> None:
        """Add a mark; marks older than ten seconds before it are forgotten, except the last of them.

        A count that falls means a new process, which starts from zero.
        """
        if self.marks and tokens < self.marks[-1][1]:
            self.marks.clear()
        self.marks.append((mono, tokens, idle))
        while len(self.marks) > 2 and self.marks[1][0] <= mono - _RATE_SECONDS:
            self.marks.popleft()

    @property
    def tokens_per_second(self) -> float | None:
        seconds = self._seconds()
        return None if seconds is None else max(0.0, self.marks[-1][1] - self.marks[0][1]) / seconds

    @property
    def idle_fraction(self) -> float | None:
        seconds = self._seconds()
        if seconds is None:
            return None
        return min(1.0, max(0.0, self.marks[-1][2] - self.marks[0][2]) / seconds)

    def _seconds(self) -> float | None:
        if len(self.marks) < 2 or self.marks[-1][0] <= self.marks[0][0]:
            return None
        return self.marks[-1][0] - self.marks[0][0]


class Accuracy:
    """Held-out accuracy by version, from one line per evaluated group; a repeated group counts once."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._right: Counter[int] = Counter()
        self._samples: Counter[int] = Counter()

    def add(self, line: Mapping[str, Any]) -> None:
        group_id = line.get("gid")
        if group_id is None or group_id in self._seen:
            return
        self._seen.add(group_id)
        version = int(line["round"])
        self._right[version] += int(line["right"])
        self._samples[version] += len(line["scores"])

    @property
    def groups(self) -> int:
        return len(self._seen)

    def points(self, least: int = 1) -> list[tuple[int, float]]:
        """`(version, accuracy)` ascending, for versions with at least `least` samples."""
        return [(v, self._right[v] / n) for v, n in sorted(self._samples.items()) if n >= least]


class Progress:
    def __init__(self, run_dir: Path) -> None:
        self.steps: deque[Step] = deque(maxlen=_STEPS_KEPT)
        self.accuracy = Accuracy()
        self.learner = Side()
        self.rollouts: dict[str, Side] = {}
        self._folder = run_dir / "metrics"
        self._tails: dict[str, Tail] = {}
        self._trained = 0
        self._idle = 0.0
        self._evaluation = Tail(run_dir / "evaluation.jsonl")

    def refresh(self) -> None:
        for path in self._folder.glob("*.jsonl"):
            self._tails.setdefault(path.stem, Tail(path))
        for name, tail in self._tails.items():
            for line in tail.read():
                self._take(name, line)
        for line in self._evaluation.read():
            self.accuracy.add(line)

    def _take(self, name: str, line: Mapping[str, Any]) -> None:
        kind = name.partition(".")[0]
        if kind == "learner" and "loss" in line and "step" in line:
            self._learner_step(line)
        elif kind == "rollout" and "idle_seconds" in line:
            side = self.rollouts.setdefault(name, Side())
            side.mark(float(line["mono"]), float(line["tokens"]), float(line["idle_seconds"]))

    def _learner_step(self, line: Mapping[str, Any]) -> None:
        while self.steps and self.steps[-1].step >= line["step"]:
            self.steps.pop()  # a learner that came back does the steps of the lost branch again
        self._trained += int(line["tokens"])
        self._idle += float(line["idle_seconds"])
        self.learner.mark(float(line["mono"]), self._trained, self._idle)
        self.steps.append(
            Step(
                step=int(line["step"]),
                version=int(line["version"]),
                at=float(line["at"]),
                reward=line["reward_mean"],
                loss=line["loss"],
                tokens=int(line["tokens"]),
                staleness={int(age): int(tokens) for age, tokens in line["staleness"].items()},
            )
        )
