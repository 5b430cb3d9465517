"""What the ledger answers, as frozen records; how each is read from a reply of Redis; dead letters by cause.

Payloads are opaque bytes, ids of groups and numbers of samples are integers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any, Final, NamedTuple

from streamrl.errors import LedgerDamaged
from streamrl.queues.replies import is_number, pairs, text

_DROPPED_FOR: Final = b"dropped:"
"""Before the reason, in fields of the state that count the groups dropped for it."""
_ENTRY: Final = re.compile(r"\d{1,18}-\d{1,18}", re.ASCII)
# What differs from sample to sample in the messages of one error: quotations and numbers.
_OF_ONE_SAMPLE: Final = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[-+]?\d+(?:[.,]\d+)*")
_ERROR: Final = re.compile(r"^([\w. ]{1,60}):")
_REWARD: Final = re.compile(r"\[([^\]]*)\]$")
_FRAME: Final = re.compile(r'^  File "([^"]*", line \d+), in ', re.MULTILINE)


class AdmitOutcome(Enum):
    ADMITTED = "admitted"
    MOVED = "moved"
    """The cursor is elsewhere: a repeat of a lost reply, a second feeder, or Redis went back."""
    FULL = "full"
    """No room: the budget of untrained groups or the hard cap of live groups is reached."""
    TOO_MANY_DEAD = "too many dead"


@dataclass(frozen=True)
class Admission:
    outcome: AdmitOutcome
    cursor: int


@dataclass(frozen=True)
class OpenWork:
    """A leased prompt; `missing` samples have neither payload nor cause of death."""

    prompt: bytes
    missing: tuple[int, ...]


@dataclass(frozen=True)
class LeasedSample:
    prompt: bytes
    payload: bytes
    sample: int


@dataclass(frozen=True)
class LeasedGroup:
    """A leased group: the payload of each sample that was generated and is not dead, by its number.

    With fewer than `least` scores it is dead when it closes; `size` samples were wanted.
    """

    prompt: bytes
    payloads: dict[int, bytes]
    least: int
    size: int

    @classmethod
    def of(cls, reply: Mapping[bytes, bytes], attempt: int) -> LeasedGroup | None:
        """None unless the group is open, and on this attempt."""
        known = pairs(reply)
        if known.get(b"st") != b"open" or int(known[b"a"]) != attempt:
            return None
        dead = _numbered(known, b"x")
        payloads = {k: payload for k, payload in _numbered(known, b"s").items() if k not in dead}
        return cls(known[b"prompt"], payloads, int(known[b"m"]), int(known[b"n"]))


class RecordedTurns(NamedTuple):
    """The journal of a sample: its turns, and the state of its environment after the last turn that has one."""

    turns: list[bytes]
    state: bytes | None = None


@dataclass(frozen=True)
class Cause:
    why: str
    detail: str = ""


class ScoreOutcome(IntEnum):
    LOST = 0
    """Another process committed this entry first (or this is a repeat): nothing was written."""
    GONE = -1
    """The group is gone or on another attempt: the entry was removed."""
    SCORED = 1
    CLOSED = 2
    """Written, and the group is now complete and visible to the learner."""
    DEAD = 3
    """Written, and the group is now a dead letter: too few of its samples have a score."""


@dataclass(frozen=True)
class Fence:
    """What the learner gets when it takes over.

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
    """A complete group, immutable until it is retired, dropped or dead.

    `samples` maps the number of a sample to its payload and its score; `causes` maps the dead ones to why they died.
    `version` is the version of the weights at admission, `crashes` the number of learner processes that began a step
    with this group and did not finish it.
    """

    group_id: int
    size: int
    attempt: int
    version: int
    prompt: bytes
    samples: dict[int, tuple[bytes, bytes]]
    causes: dict[int, str]
    crashes: int

    @classmethod
    def of(cls, group_id: int, reply: Mapping[bytes, bytes]) -> ClosedGroup | None:
        """None unless the group is closed."""
        known = pairs(reply)
        if known.get(b"st") != b"closed":
            return None
        payloads, scores = _numbered(known, b"s"), _numbered(known, b"r")
        if scores.keys() - payloads.keys():
            raise LedgerDamaged(
                f"group {group_id} has scores of samples without a response: its hash in Redis is damaged"
            )
        return cls(
            group_id=group_id,
            size=int(known[b"n"]),
            attempt=int(known[b"a"]),
            version=int(known[b"v"]),
            prompt=known[b"prompt"],
            samples={k: (payloads[k], score) for k, score in scores.items()},
            causes={k: text(why) for k, why in _numbered(known, b"x").items()},
            crashes=int(known.get(b"t", b"0")),
        )


def group_trace(group_id: int, reply: Mapping[bytes, bytes]) -> dict[str, Any]:
    known = pairs(reply)
    return {
        "gid": group_id,
        "state": text(known[b"st"]),
        "attempt": int(known[b"a"]),
        "version": int(known[b"v"]),
        "samples": int(known[b"n"]),
        "min_group": int(known[b"m"]),
        "without_payload": int(known[b"todo"]),
        "without_score": int(known[b"left"]),
        "crashes": int(known.get(b"t", b"0")),
        "whole": b"whole" in known,
        "doom": text(known[b"doom"]) if known.get(b"doom") else None,
        "prompt": known[b"prompt"],
        "payloads": _numbered(known, b"s"),
        "scores": _numbered(known, b"r"),
        "causes": {k: text(why) for k, why in _numbered(known, b"x").items()},
        "journaled": {k: int(count) for k, count in _numbered(known, b"j").items()},
    }


def _numbered(known: Mapping[bytes, bytes], letter: bytes) -> dict[int, bytes]:
    """Fields `s:K`, `r:K` or `x:K` by K, ascending; foreign fields with such names are left out."""
    named = ((name[2:], value) for name, value in known.items() if name[:2] == letter + b":")
    found = {int(k): value for k, value in named if k.isdigit() and is_number(k)}
    return dict(sorted(found.items()))


@dataclass(frozen=True)
class LedgerState:
    """Counters of one key space, read in one instant.

    `done` is the cursor at which the data ended (None: not yet), after `epochs` passes. `group_scored` says that groups
    are put up for scoring as one piece of work each, since their rewards compare samples. `unretired` are closed groups
    in Redis that the learner has trained and not yet retired; `live` all groups that have a hash; `dead` letters of
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
    unretired: int
    version: int
    live: int
    dead: int
    retired: int
    dropped: int
    dropped_for: dict[str, int]
    group_scored: bool
    replays: int

    @classmethod
    def of(cls, reply: Sequence[Any]) -> LedgerState:
        fields, live, dead, replays = reply
        known = pairs(fields)

        def number(name: bytes) -> int:
            return int(known.get(name, b"0"))

        def named(name: bytes) -> str | None:
            return text(known[name]) if known.get(name) else None

        return cls(
            cursor=number(b"cursor"),
            fingerprint=named(b"fp"),
            done=number(b"done") if b"done" in known else None,
            epochs=number(b"epochs"),
            epoch=number(b"epoch"),
            checkpoint=named(b"ckpt"),
            base=named(b"base"),
            base_epoch=number(b"base_epoch"),
            unretired=number(b"held"),
            version=number(b"version"),
            live=live,
            dead=dead,
            retired=number(b"retired"),
            dropped=number(b"dropped"),
            dropped_for={
                text(name.removeprefix(_DROPPED_FOR)): number(name) for name in known if name.startswith(_DROPPED_FOR)
            },
            group_scored=b"whole" in known,
            replays=replays,
        )


@dataclass(frozen=True)
class DeadLetter:
    """One dead sample, or a whole group (`sample` is None).

    `stage` is `prompt`, `generate`, `reward`, `close` (too few scores) or `learner`; `at` is the server's clock in
    seconds; `detail` is at most 4 KiB of traceback; `prompt` is there for a group, so that it can be replayed, and
    `scored` says how many of its samples had a score.
    """

    entry: str
    group_id: int
    sample: int | None
    attempt: int
    why: str
    stage: str
    deliveries: int
    detail: str
    at: float
    prompt: bytes | None
    scored: int = 0

    @classmethod
    def of(cls, entry: str, fields: Mapping[bytes, bytes]) -> DeadLetter:
        """An invalid count is shown as 0."""

        def count(name: bytes) -> int:
            value = fields.get(name, b"")
            return int(value) if is_number(value) else 0

        sample = int(fields[b"k"])
        return cls(
            entry=entry,
            group_id=int(fields[b"g"]),
            sample=None if sample < 0 else sample,
            attempt=count(b"a"),
            why=text(fields[b"why"]),
            stage=text(fields[b"stage"]),
            deliveries=count(b"deliveries"),
            detail=text(fields.get(b"detail", b"")),
            at=int(entry.partition("-")[0]) / 1000,
            prompt=fields.get(b"prompt"),
            scored=count(b"n") - count(b"failed"),
        )


@dataclass(frozen=True, slots=True)
class DeadCause:
    letters: tuple[DeadLetter, ...]

    @property
    def newest(self) -> DeadLetter:
        """The last letter that has a traceback, else the last one."""
        return next((letter for letter in reversed(self.letters) if letter.detail), self.letters[-1])

    @property
    def samples(self) -> int:
        return sum(letter.sample is not None for letter in self.letters)

    @property
    def groups(self) -> int:
        return len(self.letters) - self.samples

    @property
    def messages(self) -> int:
        """How many messages the letters have, numbers and quotations aside."""
        return len({_words(letter.why) for letter in self.letters})


def by_cause(letters: Sequence[DeadLetter]) -> list[DeadCause]:
    """Letters of one stage with the same type and place of the error; the largest cause first.

    Without a traceback: with the same words, numbers and quotations aside.
    """
    found: dict[tuple[object, ...], list[DeadLetter]] = {}
    for letter in letters:
        frames = _FRAME.findall(letter.detail)
        alike = (_kind(letter.why), frames[-1]) if frames else (_words(letter.why),)
        found.setdefault((letter.stage, *alike), []).append(letter)
    return sorted((DeadCause(tuple(alike)) for alike in found.values()), key=lambda cause: -len(cause.letters))


def same_kind(letters: Sequence[DeadLetter]) -> bool:
    """Whether all died at one stage of one kind of error, of one reward: `ValueError: ... [my_reward]`."""
    return len({(letter.stage, _kind(letter.why)) for letter in letters}) == 1


def _kind(why: str) -> tuple[str, str]:
    kind, reward = _ERROR.match(why), _REWARD.search(why)
    return (kind[1] if kind else _words(why)), (reward[1] if reward else "")


def _words(why: str) -> str:
    return _OF_ONE_SAMPLE.sub("...", why)


class ReplayOutcome(Enum):
    REPLAYED = "replayed"
    QUEUED = "queued"
    """It is admitted again as soon as there is room."""
    GONE = "gone"
    """No such letter: it was replayed or dropped, or this is a repeat."""
    LIVE = "live"
    """The group is live already (Redis went back after a replay): only its letters were removed."""
    FULL = "full"
    NO_PROMPT = "no prompt"
    """The letter has no prompt: the group was lost with a checkpoint."""


def queued_replays(reply: Mapping[bytes, bytes]) -> dict[int, list[str]]:
    """From HGETALL of the queue of replays: letters by group, ascending, that of the group first."""
    known = {
        int(group_id): [entry for entry in text(listed).split(",") if _ENTRY.fullmatch(entry)]
        for group_id, listed in pairs(reply).items()
        if group_id.isdigit() and is_number(group_id)
    }
    return {group_id: letters for group_id, letters in sorted(known.items()) if letters}
