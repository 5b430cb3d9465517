"""Curriculum: prompts that are passed over for a while, by what responses to them scored.

The order of the data is that of the seed. At each prompt that comes next, the curriculum says whether it is passed
over; it is told the scores of each group that closed. `curriculum.jsonl` in the run directory has these calls in their
order, and an answer is on the disk before a group is admitted by it. So the prompt of a group is a function of seed,
data, group id and that file, and a feeder that starts again makes the same state by the same calls.
"""

from __future__ import annotations

import os
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import orjson

from streamrl.atomic import append_durably
from streamrl.config import RunConfig
from streamrl.errors import Refused
from streamrl.plugin_import import build_plugin, import_plugin, look_in
from streamrl.producers.order import TrainingPrompts
from streamrl.wire import prompt_key

FILE: Final = "curriculum.jsonl"
_MOST_SKIPPED: Final = 1_000_000


class SkipSolved:
    """Passes over a prompt for `epochs` passes when its last `visits` groups were all solved, or all not.

    A group is solved when each of its scores is above `threshold`, and unsolved when none is: both teach nothing.
    """

    def __init__(self, visits: int = 2, epochs: int = 1, threshold: float = 0.5) -> None:
        if visits < 1 or epochs < 1:
            raise ValueError("visits and epochs are whole numbers from 1 on")
        self._visits, self._epochs, self._threshold = visits, epochs, threshold
        self._recent: dict[str, deque[bool | None]] = {}
        self._left: dict[str, int] = {}

    def skip(self, prompt: str) -> bool:
        left = self._left.get(prompt, 0)
        self._left[prompt] = max(0, left - 1)
        return left > 0

    def scored(self, prompt: str, scores: Sequence[float]) -> None:
        right = {score > self._threshold for score in scores}
        recent = self._recent.setdefault(prompt, deque(maxlen=self._visits))
        recent.append(right.pop() if len(right) == 1 else None)
        if len(recent) == self._visits and set(recent) in ({True}, {False}):
            self._left[prompt] = self._epochs


def open_curriculum(config: RunConfig) -> Any:
    """The curriculum of a run, None without one; `PluginError` if it cannot be imported or built."""
    spec = config.data.curriculum
    if spec is None:
        return None
    own, paths = spec.use != "skip_solved", look_in(config.plugin_paths)
    target = import_plugin(spec.use, paths, role="curriculum") if own else SkipSolved
    return build_plugin(target, f"curriculum {spec.use}", spec.args)


class PassedOver:
    """The prompts of a run without those that a curriculum passes over, by the id of their group.

    `places` are those of the groups in the order of the data. Slow, as `TrainingPrompts`: call in a thread. An OSError,
    of the disk or of a prompt, forgets nothing: the next call goes on.
    """

    def __init__(self, curriculum: Any, run_dir: Path, data: TrainingPrompts) -> None:
        self.places = array("q")
        self.next = 0  # the place that is asked about next
        self._curriculum, self._path, self._data = curriculum, run_dir / FILE, data
        self._known: set[int] = set()  # groups whose scores it was told
        self._unwritten = b""
        lines = self._path.read_bytes() if self._path.exists() else b""
        whole = lines[: lines.rfind(b"\n") + 1]
        if whole != lines:  # a crash cut the last line off
            os.truncate(self._path, len(whole))
        for line in map(orjson.loads, whole.splitlines()):
            if "scores" in line:
                self._told(line["gid"], line["prompt"], line["scores"])
            else:
                self._curriculum.skip(line["prompt"])
                self._answered(skipped=line["skipped"])

    def prompt(self, group_id: int) -> bytes:
        self._decide(group_id + 1)
        return self._data.prompt(self.places[group_id])

    def end(self, before: int) -> int | None:
        """As `TrainingPrompts.end`. Decides the groups up to `before`."""
        self._decide(before)
        end = self._data.end(self.next)
        return None if end is None or self.next < end else bisect_left(self.places, end)

    def epoch(self, _: int) -> int | None:
        return self._data.epoch(self.next)

    def learn(self, scores: Mapping[int, bytes]) -> None:
        """Take in what groups scored: the key of the prompt and its scores, as JSON."""
        for group_id in sorted(scores.keys() - self._known):
            key, values = orjson.loads(scores[group_id])
            self._told(group_id, key, values)
            self._unwritten += orjson.dumps({"gid": group_id, "prompt": key, "scores": values}) + b"\n"
        self._write()

    def _decide(self, count: int) -> None:
        first = self.next
        while len(self.places) < count and ((end := self._data.end(self.next + 1)) is None or self.next < end):
            key = prompt_key(self._data.prompt(self.next))
            skipped = bool(self._curriculum.skip(key))
            self._answered(skipped=skipped)
            self._unwritten += orjson.dumps({"prompt": key, "skipped": skipped}) + b"\n"
            if self.next - first > count + _MOST_SKIPPED:
                raise Refused(f"data.curriculum passed over {_MOST_SKIPPED} prompts in a row", "let it pass over fewer")
        self._write()

    def _answered(self, *, skipped: bool) -> None:
        if not skipped:
            self.places.append(self.next)
        self.next += 1

    def _told(self, group_id: int, prompt: str, scores: Sequence[float]) -> None:
        self._known.add(group_id)
        self._curriculum.scored(prompt, scores)

    def _write(self) -> None:
        if self._unwritten:
            append_durably(self._path, self._unwritten)
            self._unwritten = b""
