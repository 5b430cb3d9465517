"""What the ledger answers: plain frozen records. Payloads are opaque bytes, group ids and samples are integers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamrl.queues.ledger import Ledger


@dataclass(frozen=True)
class Lease:
    """One piece of work that this process holds: a prompt (`sample` is None), a sample, or a group to score `whole`.

    `deliveries` counts how often the work was given out, this time included; clean hand-backs do not count.
    """

    ledger: Ledger
    entry: str
    gid: int
    attempt: int
    sample: int | None
    deliveries: int
    whole: bool = False


class AdmitOutcome(Enum):
    """What became of an attempt to admit a group."""

    ADMITTED = "admitted"
    MOVED = "moved"
    """The cursor is elsewhere: a repeat of a lost reply, a second feeder, or Redis went back."""
    FULL = "full"
    """No room: the budget of untrained groups or the hard cap of live groups is reached."""
    TOO_MANY_DEAD = "too many dead"


@dataclass(frozen=True)
class Admission:
    """Outcome of `admit` and the cursor to go on with."""

    outcome: AdmitOutcome
    cursor: int


@dataclass(frozen=True)
class OpenWork:
    """A leased prompt: `missing` are the samples that have neither payload nor cause of death."""

    prompt: bytes
    samples: int
    attempt: int
    missing: tuple[int, ...]


@dataclass(frozen=True)
class LeasedSample:
    """A leased sample with the prompt it answers."""

    prompt: bytes
    payload: bytes
    sample: int


@dataclass(frozen=True)
class LeasedGroup:
    """A leased group with its prompt: the payload of each sample that was generated and is not dead, by its number.

    `least` is the number of scores below which the group is dead when it closes, `size` of samples that were wanted.
    """

    prompt: bytes
    payloads: dict[int, bytes]
    least: int
    size: int


@dataclass(frozen=True)
class Cause:
    """Why a sample dies, with the end of a traceback."""

    why: str
    detail: str = ""


class ScoreOutcome(IntEnum):
    """What became of a score."""

    LOST = 0
    """Somebody else committed this entry first (or this is a repeat): nothing was written."""
    GONE = -1
    """The group is gone or on another attempt: the entry was removed."""
    SCORED = 1
    CLOSED = 2
    """Written, and the group is now complete and visible to the learner."""
    DEAD = 3
    """Written, and the group is now a dead letter: too few of its samples have a score."""


@dataclass(frozen=True)
class Fence:
    """What the learner learns when it takes over.

    `epoch` is new and greater than all before. `checkpoint` is the `EPOCH-STEP` that groups were last retired for (or
    None); `base` and `base_epoch` are the checkpoint and epoch of the last `resume`: a file is valid when it is the
    base or has at least that epoch.
    """

    epoch: int
    checkpoint: str | None
    version: int
    base: str | None
    base_epoch: int


@dataclass(frozen=True)
class ClosedGroup:
    """A complete group, immutable until it is retired, dropped or buried.

    `samples` maps the number of a sample to its payload and its score; `causes` maps the dead ones to why they died.
    `version` is the version of the weights at admission, `crashes` the number of learner processes that began a step
    with this group and did not finish it.
    """

    gid: int
    size: int
    attempt: int
    version: int
    prompt: bytes
    samples: dict[int, tuple[bytes, bytes]]
    causes: dict[int, str]
    crashes: int


@dataclass(frozen=True)
class LedgerState:
    """Counters of one key space, read in one instant.

    `done` is the cursor at which the data ended (None: not yet), after `epochs` passes. `whole` says that groups are
    put up for scoring as one piece of work each, since their rewards compare them. `held` are closed groups in
    Redis that the learner has trained and not yet retired; `live` all groups that have a hash; `dead` letters of
    samples and groups together, `replays` dead groups that wait to be admitted again; `retired`, `dropped` and
    `dropped_for` (by reason) are statistics.
    """

    cursor: int
    fingerprint: str | None
    done: int | None
    epochs: int
    epoch: int
    checkpoint: str | None
    base: str | None
    base_epoch: int
    held: int
    version: int
    live: int
    dead: int
    retired: int
    dropped: int
    dropped_for: dict[str, int]
    whole: bool
    replays: int


@dataclass(frozen=True)
class DeadLetter:
    """One dead sample, or a whole group (`sample` is None).

    `stage` is `prompt`, `generate`, `reward`, `close` (too few scores) or `learner`; `at` is the server's clock in
    seconds; `detail` is at most 4 KiB of traceback; `prompt` is there for a group, so that it can be replayed, and
    `scored` says how many of its samples had a score.
    """

    entry: str
    gid: int
    sample: int | None
    attempt: int
    why: str
    stage: str
    deliveries: int
    detail: str
    at: float
    prompt: bytes | None
    scored: int = 0


class ReplayOutcome(Enum):
    """What became of an attempt to admit a dead group again."""

    REPLAYED = "replayed"
    QUEUED = "queued"
    """It is admitted again as soon as there is room."""
    GONE = "gone"
    """There is no such letter: replayed or dropped before, or a repeat."""
    LIVE = "live"
    """The group is live already (Redis went back after a replay): only its letters were removed."""
    FULL = "full"
    NO_PROMPT = "no prompt"
    """The letter has no prompt: the group was lost with a checkpoint."""
