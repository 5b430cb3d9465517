"""Files of the held-out evaluation: one line per evaluated group, and the round that is under way."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Final

import msgspec

from streamrl.atomic import write_durably

logger = logging.getLogger(__name__)
LOG_NAME: Final = "evaluation.jsonl"
ROUND_NAME: Final = "evaluation-round.json"


class EvaluatedGroup(msgspec.Struct, frozen=True):
    """One line of `evaluation.jsonl`.

    `line` is the line of the held-out file (from 0), `round` the version that the round was started for; the tokens
    themselves were sampled by versions `version_min` to `version_max`. `right` counts the scores above the threshold,
    `dead` the responses without a score, which count neither as right nor as wrong.
    """

    gid: int
    line: int
    round: int
    version_min: int
    version_max: int
    scores: list[float]
    right: int
    dead: int = 0


class Round(msgspec.Struct, frozen=True):
    """One pass over some held-out prompts: groups `first` to `end - 1`, admitted for `version`."""

    version: int
    first: int
    end: int


@dataclass
class Tally:
    """Scored responses of one round, and how many of them are right."""

    scored: int = 0
    right: int = 0


class EvaluationLog:
    """Appends evaluated groups durably and remembers which are there, so that none is written twice.

    `gids` are the groups in the file, `rounds` the tally of each round by its version.

    Args:
        run_dir: run directory. A line that a crash cut off at the end of the file is removed.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / LOG_NAME
        self._round_path = run_dir / ROUND_NAME
        self.gids: set[int] = set()
        self.rounds: dict[int, Tally] = {}
        self._read()

    @property
    def watermark(self) -> int:
        """The lowest group that is not in the file."""
        return next(gid for gid in count() if gid not in self.gids)

    def end_of(self, first: int, prompts: int) -> int:
        """The lowest end for which `first` to `end - 1` have so many groups that are not in the file."""
        new = (gid for gid in count(first) if gid not in self.gids)
        return next(islice(new, prompts - 1, None)) + 1

    def append(self, groups: Sequence[EvaluatedGroup]) -> bool:
        """Write the groups that are not there yet and return when they are on disk. A repeat writes nothing.

        Returns:
            False when they cannot be written (full disk): then the file is as before, and the call may be repeated.
        """
        new = [group for group in groups if group.gid not in self.gids]
        if not new:
            return True
        size = self._path.stat().st_size if self._path.exists() else 0
        try:
            with self._path.open("ab") as file:
                file.write(b"".join(msgspec.json.encode(group) + b"\n" for group in new))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            _complain(self._path, error)
            if self._path.exists():
                os.truncate(self._path, size)
            return False
        for group in new:
            self._count(group)
        return True

    def read_round(self) -> Round | None:
        """Return the round that was begun last; None when there was none, or its file is unreadable."""
        try:
            return msgspec.json.decode(self._round_path.read_bytes(), type=Round)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:
            logger.warning("evaluation round unreadable", extra={"file": str(self._round_path), "error": str(error)})
            return None

    def write_round(self, current: Round) -> bool:
        """Remember the round that begins, before its first prompt is admitted; False when it cannot be written."""
        try:
            write_durably(self._round_path, msgspec.json.encode(current))
        except OSError as error:
            _complain(self._round_path, error)
            return False
        return True

    def _read(self) -> None:
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return
        whole = data.rfind(b"\n") + 1
        if whole != len(data):
            os.truncate(self._path, whole)
        for number, line in enumerate(data[:whole].splitlines(), start=1):
            try:
                self._count(msgspec.json.decode(line, type=EvaluatedGroup))
            except msgspec.DecodeError as error:
                logger.warning("line ignored", extra={"file": f"{self._path}:{number}", "error": str(error)})

    def _count(self, group: EvaluatedGroup) -> None:
        if group.gid in self.gids:
            return
        self.gids.add(group.gid)
        tally = self.rounds.setdefault(group.round, Tally())
        tally.scored += len(group.scores)
        tally.right += group.right


def _complain(path: Path, error: OSError) -> None:
    extra = {"file": str(path), "error": str(error), "hint": "make room: it is tried again"}
    logger.warning("evaluation cannot be written", extra=extra)
