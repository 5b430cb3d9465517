"""The invariants of the ledger, checked from the outside.

* a group's hash exists exactly when its id is in `live`,
* some sample has neither payload nor cause of death: exactly then the group has one entry in `prompts`,
* a sample has a payload and neither score nor cause of death: exactly then it has one entry in `rollouts`; a group that
  is scored whole has one for all of them, when none is left to generate,
* every sample has a score or a cause of death: exactly then the group is closed and has one entry in `scored`,
* an entry that was delivered is pending with somebody, and what is pending is there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from streamrl.queues import replies
from streamrl.queues.foreign import Row, is_ours
from streamrl.queues.keys import GROUP, WHOLE
from streamrl.queues.ledger import Ledger

_PAGE: Final = 1000
_FIELDS: Final = ("n", "todo", "left", "nx", "st")


async def structural_faults(ledger: Ledger) -> list[str]:
    """Every breach of the invariants in one key space, in words. Exact when no role is running."""
    space = "held-out " if ledger.evaluation else ""
    keys = ledger.keys
    live = set(await ledger.live())
    hashes = await _hashes(ledger)
    foreign: list[str] = []
    prompts = await _entries(ledger, keys.prompts, (b"g", b"a"), foreign)
    rollouts = await _entries(ledger, keys.rollouts, (b"g", b"a", b"k"), foreign, whole=True)
    scored = await _entries(ledger, keys.scored, (b"g",), foreign)
    waiting = Counter(int(fields[b"g"]) for _, fields in prompts)
    samples = Counter((int(fields[b"g"]), fields[b"k"].decode()) for _, fields in rollouts)
    closed = Counter(int(fields[b"g"]) for _, fields in scored)
    faults = foreign + [f"group {gid}: in `live` or a hash, not both" for gid in sorted(hashes ^ live)]
    for name, counter in (("prompts", waiting), ("rollouts", samples), ("scored", closed)):
        faults += [f"{name}: {count} entries for {what}" for what, count in counter.items() if count > 1]
    listed = set(waiting) | set(closed) | {gid for gid, _ in samples}
    faults += [f"group {gid}: has an entry and is not live" for gid in sorted(listed - live)]
    for gid in sorted(hashes & live):
        own = {sample for group, sample in samples if group == gid}
        faults += await _group_faults(ledger, gid, gid in waiting, own, gid in closed)
    for name, rows in ((keys.prompts, prompts), (keys.rollouts, rollouts)):
        faults += await _stream_faults(ledger, name, {entry for entry, _ in rows})
    return [space + fault for fault in faults]


async def _entries(
    ledger: Ledger, stream: str, numbers: Sequence[bytes], foreign: list[str], *, whole: bool = False
) -> list[Row]:
    """Our entries of a stream; those of nobody of ours are named in `foreign` (the roles remove them, an audit not)."""
    rows = replies.entries(await ledger.connection.read("XRANGE", stream, "-", "+"))
    ours = []
    for entry, fields in rows:
        group = whole and fields.get(b"k") == WHOLE.encode()
        if is_ours(fields, numbers[:-1] if group else numbers):
            ours.append((entry, fields))
        else:
            foreign.append(f"{stream}: entry {entry} is none of ours")
    return ours


async def _hashes(ledger: Ledger) -> set[int]:
    found: set[int] = set()
    pattern = ledger.keys.group(0).removesuffix("0") + "*"
    cursor = b"0"
    while True:
        cursor, names = await ledger.connection.read("SCAN", cursor, "MATCH", pattern, "COUNT", _PAGE)
        found.update(int(name.rpartition(b":")[2]) for name in names)
        if cursor == b"0":
            return found


async def _group_faults(ledger: Ledger, gid: int, waiting: bool, samples: set[str], closed: bool) -> list[str]:
    key = ledger.keys.group(gid)
    names = {name.decode() for name in await ledger.connection.read("HKEYS", key)}
    values = dict(zip(_FIELDS, await ledger.connection.read("HMGET", key, *_FIELDS), strict=True))
    if None in values.values():
        return [f"group {gid}: an incomplete hash"]
    size = int(values["n"])
    has = {letter: {k for k in range(size) if f"{letter}:{k}" in names} for letter in "srx"}
    everyone = set(range(size))
    counts = {
        "todo": len(everyone - has["s"] - has["x"]),
        "left": len(everyone - has["r"] - has["x"]),
        "nx": len(has["x"]),
    }
    faults = [f"group {gid}: {name} is {int(values[name])}, not {counts[name]}" for name in counts
              if int(values[name]) != counts[name]]  # fmt: skip
    unscored = {str(k) for k in has["s"] - has["r"] - has["x"]}
    if "whole" in names:
        unscored = {WHOLE} if unscored and not counts["todo"] else set()
        if values["st"] == b"open" and has["r"]:
            faults.append(f"group {gid}: is scored whole, and samples {sorted(has['r'])} have a score alone")
    if unscored != samples:
        faults.append(f"group {gid}: samples {sorted(unscored)} wait for a score, {sorted(samples)} are in rollouts")
    if has["r"] & has["x"]:
        faults.append(f"group {gid}: samples {sorted(has['r'] & has['x'])} have a score and are dead")
    if waiting != (counts["todo"] > 0):
        faults.append(f"group {gid}: {counts['todo']} samples to generate, {int(waiting)} entries in prompts")
    if len({closed, counts["left"] == 0, values["st"] == b"closed"}) != 1:
        faults.append(f"group {gid}: {values['st'].decode()}, {counts['left']} left, {int(closed)} entries in scored")
    return faults


async def _stream_faults(ledger: Ledger, stream: str, entries: set[str]) -> list[str]:
    read = ledger.connection.read
    pending: set[str] = set()
    start = "-"
    while True:
        rows = await read("XPENDING", stream, GROUP, start, "+", _PAGE)
        pending.update(row[0].decode() for row in rows)
        if len(rows) < _PAGE:
            break
        start = f"({rows[-1][0].decode()}"
    delivered = max(_order(_text(group, "last-delivered-id")) for group in await read("XINFO", "GROUPS", stream))
    orphans = [entry for entry in entries if _order(entry) <= delivered and entry not in pending]
    faults = [f"{stream}: entry {entry} was delivered and is with nobody" for entry in sorted(orphans)]
    return faults + [f"{stream}: {entry} is pending and gone" for entry in sorted(pending - entries)]


def _order(entry: str) -> tuple[int, int]:
    first, _, second = entry.partition("-")
    return int(first), int(second)


def _text(fields: Mapping[bytes, Any] | list[Any], name: str) -> str:
    return str(replies.pairs(fields)[name.encode()].decode())
