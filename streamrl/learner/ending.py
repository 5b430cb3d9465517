"""When a run is over, and what is left behind then: `finished.json`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final, Literal

import msgspec

from streamrl.atomic import write_durably
from streamrl.config import RunConfig
from streamrl.queues.ledger import Ledger
from streamrl.queues.registry import RoleRegistry

logger = logging.getLogger(__name__)
FINISHED_FILE: Final = "finished.json"

Reason = Literal["steps", "accuracy", "data"]
_GOES_ON: Final[dict[Reason, str]] = {
    "steps": "raise learner.steps",
    "accuracy": "raise learner.stop_at_accuracy",
    "data": "raise data.epochs",
}


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    reason: Reason
    step: int
    version: int
    epoch: int
    accuracy: float | None = None  # newest held-out one
    epochs: int | None = None  # passes over the data that the run was to make

    def __str__(self) -> str:
        end = "end of the data" if self.reason == "data" else f"{self.reason} reached"
        return f"finished at step {self.step} ({end})"

    @property
    def hint(self) -> str:
        return f"{_GOES_ON[self.reason]} to train on, or start anew with --fresh"

    def holds(self, config: RunConfig) -> bool:
        """Whether the run is over under this configuration too: somebody may have raised the limit."""
        if self.reason == "steps":
            return config.learner.steps is not None and self.step >= config.learner.steps
        if self.reason == "accuracy":
            limit = config.learner.stop_at_accuracy
            return limit is not None and self.accuracy is not None and self.accuracy >= limit
        epochs = config.data.epochs
        return epochs is not None and self.epochs is not None and epochs <= self.epochs


def read_finished(run_dir: Path) -> Finished | None:
    """None when it is missing or a crash cut it off."""
    try:
        return msgspec.json.decode((run_dir / FINISHED_FILE).read_bytes(), type=Finished)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


async def has_ended(config: RunConfig, run_dir: Path, ledger: Ledger) -> bool:
    """Whether the run has ended and no group came back since (replayed, or with an older state of Redis)."""
    finished = read_finished(run_dir)
    if finished is None or not finished.holds(config):
        return False
    state = await ledger.state()
    return finished.reason != "data" or not (state.live or state.replays)


async def is_over(config: RunConfig, run_dir: Path, ledger: Ledger) -> bool:
    """As `has_ended`; if not, the file of an earlier end goes: whoever starts roles asks whether it is there."""
    if await has_ended(config, run_dir, ledger):
        logger.info("the run is over already", extra={"end": str(read_finished(run_dir))})
        return True
    (run_dir / FINISHED_FILE).unlink(missing_ok=True)
    return False


def write_finished(run_dir: Path, finished: Finished) -> None:
    write_durably(run_dir / FINISHED_FILE, msgspec.json.encode(finished))


class Ending:
    """Looks for the end between steps; the feeder shows the newest held-out accuracy in `roles`."""

    def __init__(self, config: RunConfig, roles: RoleRegistry) -> None:
        self.accuracy: float | None = None
        self._config, self._roles = config.learner, roles

    async def reason(self, step: int) -> Reason | None:
        if self._config.steps is not None and step >= self._config.steps:
            return "steps"
        limit = self._config.stop_at_accuracy
        if limit is None:
            return None
        feeders = await self._roles.read("feeder")
        shown = [fields["accuracy"] for fields in feeders.values() if "accuracy" in fields]
        self.accuracy = float(shown[0]) if shown else None
        return "accuracy" if self.accuracy is not None and self.accuracy >= limit else None
