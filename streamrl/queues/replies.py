"""From replies of Redis (RESP3, bytes) to records; the one place that knows their shapes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from streamrl.errors import LedgerDamaged
from streamrl.queues.records import ClosedGroup, DeadLetter, LeasedGroup, LedgerState

_DROPPED_FOR: Final = b"dropped:"
"""Before the reason, in fields of the state that count groups dropped for it."""


_NUMBER: Final = re.compile(rb"-?\d{1,18}")
_ENTRY: Final = re.compile(r"\d{1,18}-\d{1,18}", re.ASCII)


def is_number(value: bytes) -> bool:
    """Whether bytes are a decimal number as we write them; longer ones fit into nothing."""
    return _NUMBER.fullmatch(value) is not None


def pairs(flat: Sequence[bytes] | Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """Fields of a hash or of an entry: flat in scripts and streams, a map in the reply of HGETALL."""
    if isinstance(flat, Mapping):
        return dict(flat)
    return dict(zip(flat[::2], flat[1::2], strict=True))


def entries(reply: Iterable[Sequence[Any]] | None) -> list[tuple[str, dict[bytes, bytes]]]:
    """Entries of XRANGE or of one stream of XREADGROUP: (id, fields); deleted ones are left out."""
    return [(entry.decode(), pairs(fields)) for entry, fields in reply or () if fields is not None]


def streams(reply: Mapping[bytes, Any] | None) -> dict[str, list[tuple[str, dict[bytes, bytes]]]]:
    """Reply of XREAD or XREADGROUP: entries by stream; empty when time was over."""
    return {name.decode(): entries(rows) for name, rows in (reply or {}).items()}


def _text(value: bytes | None) -> str | None:
    return None if not value else value.decode(errors="replace")


def ledger_state(reply: Sequence[Any]) -> LedgerState:
    """Reply of the script `state`."""
    fields, live, dead, replays = reply
    known = pairs(fields)

    def number(name: bytes) -> int:
        return int(known.get(name, b"0"))

    return LedgerState(
        cursor=number(b"cursor"),
        fingerprint=_text(known.get(b"fp")),
        done=number(b"done") if b"done" in known else None,
        epochs=number(b"epochs"),
        epoch=number(b"epoch"),
        checkpoint=_text(known.get(b"ckpt")),
        base=_text(known.get(b"base")),
        base_epoch=number(b"base_epoch"),
        held=number(b"held"),
        version=number(b"version"),
        live=live,
        dead=dead,
        retired=number(b"retired"),
        dropped=number(b"dropped"),
        dropped_for={
            name.removeprefix(_DROPPED_FOR).decode(errors="replace"): number(name)
            for name in known
            if name.startswith(_DROPPED_FOR)
        },
        whole=b"whole" in known,
        replays=replays,
    )


def _numbered(known: Mapping[bytes, bytes], letter: bytes) -> dict[int, bytes]:
    """Fields `s:K`, `r:K` or `x:K` by K, ascending; what somebody else named like them is left out."""
    named = ((name[2:], value) for name, value in known.items() if name[:2] == letter + b":")
    found = {int(k): value for k, value in named if k.isdigit() and is_number(k)}
    return dict(sorted(found.items()))


def closed_group(gid: int, reply: Mapping[bytes, bytes]) -> ClosedGroup | None:
    """Reply of HGETALL on a group; None unless it is closed."""
    known = pairs(reply)
    if known.get(b"st") != b"closed":
        return None
    payloads, scores = _numbered(known, b"s"), _numbered(known, b"r")
    if scores.keys() - payloads.keys():
        raise LedgerDamaged(f"group {gid} has scores of samples without a response: its hash in Redis is damaged")
    return ClosedGroup(
        gid=gid,
        size=int(known[b"n"]),
        attempt=int(known[b"a"]),
        version=int(known[b"v"]),
        prompt=known[b"prompt"],
        samples={k: (payloads[k], score) for k, score in scores.items()},
        causes={k: why.decode(errors="replace") for k, why in _numbered(known, b"x").items()},
        crashes=int(known.get(b"t", b"0")),
    )


def waiting_group(reply: Mapping[bytes, bytes], attempt: int) -> LeasedGroup | None:
    """Reply of HGETALL on a group that is leased whole; None unless it is open, and on this attempt."""
    known = pairs(reply)
    if known.get(b"st") != b"open" or int(known[b"a"]) != attempt:
        return None
    dead = _numbered(known, b"x")
    payloads = {k: payload for k, payload in _numbered(known, b"s").items() if k not in dead}
    return LeasedGroup(known[b"prompt"], payloads, int(known[b"m"]), int(known[b"n"]))


def group_trace(gid: int, reply: Mapping[bytes, bytes]) -> dict[str, Any]:
    """Everything a live group's hash says, for people."""
    known = pairs(reply)
    return {
        "gid": gid,
        "state": known[b"st"].decode(errors="replace"),
        "attempt": int(known[b"a"]),
        "version": int(known[b"v"]),
        "samples": int(known[b"n"]),
        "min_group": int(known[b"m"]),
        "without_payload": int(known[b"todo"]),
        "without_score": int(known[b"left"]),
        "crashes": int(known.get(b"t", b"0")),
        "whole": b"whole" in known,
        "doom": _text(known.get(b"doom")),
        "prompt": known[b"prompt"],
        "payloads": _numbered(known, b"s"),
        "scores": _numbered(known, b"r"),
        "causes": {k: why.decode(errors="replace") for k, why in _numbered(known, b"x").items()},
    }


def _statistic(fields: Mapping[bytes, bytes], name: bytes) -> int:
    """A number that is only shown: 0 when it is missing or none."""
    value = fields.get(name, b"")
    return int(value) if is_number(value) else 0


def queued_replays(reply: Mapping[bytes, bytes]) -> dict[int, list[str]]:
    """Reply of HGETALL on the queue of replays: letters by group, ascending, that of the group first.

    What is no id of a group, and what is no letter, is left out: somebody else wrote it.
    """
    known = {
        int(gid): [letter for letter in listed.decode(errors="replace").split(",") if _ENTRY.fullmatch(letter)]
        for gid, listed in pairs(reply).items()
        if gid.isdigit() and is_number(gid)
    }
    return {gid: letters for gid, letters in sorted(known.items()) if letters}


def dead_letter(entry: str, fields: Mapping[bytes, bytes]) -> DeadLetter:
    """One entry of the stream of dead letters."""
    sample = int(fields[b"k"])
    return DeadLetter(
        entry=entry,
        gid=int(fields[b"g"]),
        sample=None if sample < 0 else sample,
        attempt=_statistic(fields, b"a"),
        why=fields[b"why"].decode(errors="replace"),
        stage=fields[b"stage"].decode(errors="replace"),
        deliveries=_statistic(fields, b"deliveries"),
        detail=fields.get(b"detail", b"").decode(errors="replace"),
        at=int(entry.partition("-")[0]) / 1000,
        prompt=fields.get(b"prompt"),
        scored=_statistic(fields, b"n") - _statistic(fields, b"failed"),
    )
