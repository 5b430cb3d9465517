"""The progress of a run from its files: steps, and held-out accuracy by version."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from streamrl.monitor.tail import Tail
from streamrl.pass_at_k import at_k, in_words

_STEPS_KEPT: Final = 2000


@dataclass(frozen=True, slots=True)
class Step:
    step: int
    version: int
    at: float
    reward: float | None
    loss: float | None
    tokens: int
    staleness: dict[int, int]


class Accuracy:
    """Held-out accuracy by version, from one line per evaluated group; a repeated group counts once."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._prompts: dict[int, list[tuple[int, int]]] = {}

    def add(self, line: Mapping[str, Any]) -> None:
        group_id = line.get("gid")
        if group_id is None or group_id in self._seen:
            return
        self._seen.add(group_id)
        self._prompts.setdefault(int(line["round"]), []).append((len(line["scores"]), int(line["right"])))

    @property
    def groups(self) -> int:
        return len(self._seen)

    def several(self, version: int) -> str:
        """avg@k and pass@k of a version, in words; empty where each prompt has one response."""
        prompts = self._prompts[version]
        return in_words(at_k(prompts, max(scored for scored, _ in prompts)))

    def points(self, least: int = 1) -> list[tuple[int, float]]:
        """`(version, accuracy)` ascending, for versions with at least `least` samples."""
        sums = {version: [sum(each) for each in zip(*found, strict=True)] for version, found in self._prompts.items()}
        return [(version, right / n) for version, (n, right) in sorted(sums.items()) if n >= least]


class Progress:
    def __init__(self, run_dir: Path) -> None:
        self.steps: deque[Step] = deque(maxlen=_STEPS_KEPT)
        self.accuracy = Accuracy()
        self._learner = Tail(run_dir / "metrics" / "learner.0.jsonl")
        self._evaluation = Tail(run_dir / "evaluation.jsonl")

    def refresh(self) -> None:
        for line in self._learner.read():
            if "loss" in line and "step" in line:
                self._learner_step(line)
        for line in self._evaluation.read():
            self.accuracy.add(line)

    def _learner_step(self, line: Mapping[str, Any]) -> None:
        while self.steps and self.steps[-1].step >= line["step"]:
            self.steps.pop()  # a learner that came back does the steps of the lost branch again
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
