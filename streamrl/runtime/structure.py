"""The invariants of the ledger, checked from the outside.

* a group's hash exists exactly when its id is in `live`,
* some sample has neither payload nor cause of death: exactly then the group has one entry in `prompts`,
* a sample has a payload and neither score nor cause of death: exactly then it has one entry in `rollouts`; a group that
  is scored whole has one for all of them, when none is left to generate,
* every sample has a score or a cause of death: exactly then the group is closed and has one entry in `scored`,
* every delivered entry is pending with a consumer, and every pending entry is in its stream.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from streamrl.queues import replies
from streamrl.queues.damage import shown
from streamrl.queues.keys import ALL_SAMPLES
from streamrl.queues.ledger import Ledger
from streamrl.queues.replies import Row, is_ours

_PAGE: Final = 1000
_COUNTS: Final = ("n", "todo", "left", "nx")


async def structural_faults(ledger: Ledger) -> list[str]:
    """Every breach of the invariants in one key space, in words.

    Exact also while roles are working: the script `structure` reads everything at one instant.
    """
    space = "held-out " if ledger.evaluation else ""
    keys = ledger.keys
    names = [keys.prompts, keys.rollouts, keys.scored, keys.live]
    seen = await _hashes(ledger)
    prefix = keys.group(0).removesuffix("0")
    reply = await ledger.connection.call("structure", names, [prefix, *seen])
    faults: list[str] = []
    prompts = _entries(keys.prompts, reply[0], (b"g", b"a"), faults)
    rollouts = _entries(keys.rollouts, reply[1], (b"g", b"a", b"k"), faults, whole=True)
    scored = _entries(keys.scored, reply[2], (b"g",), faults)
    waiting = Counter(int(fields[b"g"]) for _, fields in prompts)
    samples = Counter((int(fields[b"g"]), fields[b"k"].decode()) for _, fields in rollouts)
    closed = Counter(int(fields[b"g"]) for _, fields in scored)
    faults += [f"group {shown(group_id)}: has a hash and is not in `live`" for group_id in reply[7]]
    for name, counter in (("prompts", waiting), ("rollouts", samples), ("scored", closed)):
        faults += [f"{name}: {count} entries for {what}" for what, count in counter.items() if count > 1]
    listed = set(waiting) | set(closed) | {group_id for group_id, _ in samples}
    live = {int(group_id) for group_id in reply[5] if replies.is_number(group_id)}
    faults += [
        f"{keys.live}: {shown(group_id)} is no id of a group"
        for group_id in reply[5]
        if not replies.is_number(group_id)
    ]
    faults += [f"group {group_id}: has an entry and is not live" for group_id in sorted(listed - live)]
    own: dict[int, set[str]] = {}
    for group_id, sample in samples:
        own.setdefault(group_id, set()).add(sample)
    for name, *known in reply[6]:
        if replies.is_number(name):
            group_id = int(name)
            faults += _group_faults(group_id, known, group_id in waiting, own.get(group_id, set()), group_id in closed)
    for stream, rows, (delivered, pending) in ((keys.prompts, prompts, reply[3]), (keys.rollouts, rollouts, reply[4])):
        held = {entry.decode() for entry in pending}
        faults += _stream_faults(stream, {entry for entry, _ in rows}, delivered.decode(), held)
    return [space + fault for fault in faults]


def _entries(
    stream: str, reply: Sequence[Any], numbers: Sequence[bytes], foreign: list[str], *, whole: bool = False
) -> list[Row]:
    """Our entries of a stream; others are named in `foreign` (roles remove them, an audit does not)."""
    ours = []
    for entry, fields in replies.entries(reply):
        group = whole and fields.get(b"k") == ALL_SAMPLES.encode()
        if is_ours(fields, numbers[:-1] if group else numbers):
            ours.append((entry, fields))
        else:
            foreign.append(f"{stream}: entry {entry} is none of ours")
    return ours


async def _hashes(ledger: Ledger) -> set[bytes]:
    """Ids of all groups that have a hash, as the names of the keys have them."""
    found: set[bytes] = set()
    prefix = ledger.keys.group(0).removesuffix("0")
    cursor = b"0"
    while True:
        cursor, names = await ledger.connection.read("SCAN", cursor, "MATCH", f"{prefix}*", "COUNT", _PAGE)
        found.update(name.removeprefix(prefix.encode()) for name in names)
        if cursor == b"0":
            return found


def _group_faults(group_id: int, known: Sequence[Any], waiting: bool, samples: set[str], closed: bool) -> list[str]:
    """What is wrong with one live group: names of its fields, and the values of `_COUNTS` and `st`."""
    if len(known) == 1:
        return [f"group {group_id}: its key holds a {known[0].decode()}, not a hash"]
    names = {name.decode(errors="replace") for name in known[0]}
    if not names:
        return [f"group {group_id}: in `live`, and has no hash"]
    values = dict(zip(_COUNTS, known[1:], strict=False))
    state = known[-1]
    if state is None or None in values.values():
        return [f"group {group_id}: an incomplete hash"]
    damaged = [f"field {name} is {shown(value)}" for name, value in values.items() if not replies.is_number(value)]
    if state not in (b"open", b"closed"):
        damaged.append(f"field st is {shown(state)}")
    if damaged:
        return [f"group {group_id}: damaged: {', '.join(damaged)}"]
    numbers = {name: int(value) for name, value in values.items()}
    return _breaches(group_id, names, numbers, state.decode(), waiting=waiting, samples=samples, closed=closed)


def _breaches(
    group_id: int,
    names: set[str],
    values: dict[str, int],
    state: str,
    *,
    waiting: bool,
    samples: set[str],
    closed: bool,
) -> list[str]:
    size = values["n"]
    has: dict[str, set[int]] = {letter: set() for letter in "srx"}
    for name in names:
        letter, colon, number = name.partition(":")
        if colon and letter in has and number.isdecimal() and int(number) < size:
            has[letter].add(int(number))
    counts = {"todo": size - len(has["s"] | has["x"]), "left": size - len(has["r"] | has["x"]), "nx": len(has["x"])}
    faults = [f"group {group_id}: {name} is {values[name]}, not {counts[name]}" for name in counts
              if values[name] != counts[name]]  # fmt: skip
    unscored = {str(k) for k in has["s"] - has["r"] - has["x"]}
    if "whole" in names:
        unscored = {ALL_SAMPLES} if unscored and not counts["todo"] else set()
        if state == "open" and has["r"]:
            faults.append(f"group {group_id}: is scored whole, and samples {sorted(has['r'])} have a score alone")
    if unscored != samples:
        faults.append(
            f"group {group_id}: samples {sorted(unscored)} wait for a score, {sorted(samples)} are in rollouts"
        )
    if has["r"] & has["x"]:
        faults.append(f"group {group_id}: samples {sorted(has['r'] & has['x'])} have a score and are dead")
    if waiting != (counts["todo"] > 0):
        faults.append(f"group {group_id}: {counts['todo']} samples to generate, {int(waiting)} entries in prompts")
    if len({closed, counts["left"] == 0, state == "closed"}) != 1:
        faults.append(f"group {group_id}: {state}, {counts['left']} left, {int(closed)} entries in scored")
    return faults


def _stream_faults(stream: str, entries: set[str], delivered: str, pending: set[str]) -> list[str]:
    last = _order(delivered)
    orphans = [entry for entry in entries if _order(entry) <= last and entry not in pending]
    faults = [f"{stream}: entry {entry} was delivered and is with nobody" for entry in sorted(orphans)]
    return faults + [f"{stream}: {entry} is pending and gone" for entry in sorted(pending - entries)]


def _order(entry: str) -> tuple[int, int]:
    first, _, second = entry.partition("-")
    return int(first), int(second)
