"""The audit: where every admitted group is, from the records of the roles that decided it, not from counters.

* admitted: every id below the cursor of its data set,
* trained: the ids that the greatest valid checkpoint names, compared with the count of groups whose updates were
  applied to its weights,
* evaluated: held-out groups in `evaluation.jsonl`,
* dead, dropped, live: recorded in Redis by id.

What is in none of them is lost; what the surviving weights were trained on more than once is `twice`. Nothing is
written. Needs no torch.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import orjson

from streamrl.config import RunConfig
from streamrl.errors import WireError
from streamrl.learner.checkpoint import NOWHERE, Checkpoints, Meta, parse_name
from streamrl.learner.lineage import ids_of
from streamrl.queues import replies
from streamrl.queues.damage import damages, shown
from streamrl.queues.keys import ALL_SAMPLES
from streamrl.queues.ledger import Ledger
from streamrl.queues.ledgers import Ledgers
from streamrl.queues.replies import Row, is_ours

EVALUATION_FILE: Final = "evaluation.jsonl"
_LISTED: Final = 100
_LOOKS: Final = 5
_PAGE: Final = 1000
_COUNTS: Final = ("n", "todo", "left", "nx")


class HeldOut(msgspec.Struct, frozen=True, kw_only=True):
    admitted: int = 0
    dropped: int = 0
    dead: int = 0
    live: int = 0
    lost: int = 0
    dead_samples: int = 0


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    """Groups by where they are; every id is counted once, and what was trained counts as trained.

    `admitted` = trained + dropped + dead + live + lost, of training groups. `held_out.admitted` = evaluated and those
    of `held_out`. `lost` (of both) and `twice` must be 0. `dead_samples` are responses with a dead letter, also of
    groups that went on without them. `lost_ids` and `twice_ids` list the first hundred, held-out groups as `eval:ID`.
    `unproved` says why the records prove nothing: the checkpoint that Redis retired for is missing, or its ids do not
    fit the weights. `faults` are breaches of the structure of the ledger, and trained groups that are also dropped or
    dead (Redis came back from the past).
    """

    admitted: int
    trained: int
    dropped: int
    dead: int
    evaluated: int
    live: int
    lost: int
    twice: int
    dead_samples: int = 0
    held_out: HeldOut = HeldOut()
    lost_ids: list[str]
    twice_ids: list[str]
    checkpoint: str | None
    unproved: list[str]
    faults: list[str]

    @property
    def proved(self) -> bool:
        """Nothing lost, nothing trained twice, and the records that say so fit together."""
        return self.lost == 0 and self.twice == 0 and not self.unproved


class _Places(msgspec.Struct):
    done: set[int]
    dropped: set[int]
    dead: set[int]
    live: set[int]
    lost: set[int]
    dead_samples: int = 0

    def counts(self) -> dict[str, int]:
        ends = {name: len(getattr(self, name)) for name in ("dropped", "dead", "live", "lost")}
        return {**ends, "admitted": len(self.done) + sum(ends.values()), "dead_samples": self.dead_samples}


async def audit(config: RunConfig, run_dir: Path, ledgers: Ledgers) -> Audit:
    """Find where every group of a run is.

    It may run beside the roles: places are read in the order in which groups move through them, so that a moving group
    is seen at least once. WireError: `evaluation.jsonl` holds an invalid line.
    """
    train = await _look(ledgers.train)
    held_out = await _look(ledgers.evaluation)
    meta, group_ids, unproved = await _chain(Checkpoints.of(config, run_dir), ledgers.train)
    both_ways = set(group_ids) & (train[1].dropped | train[1].dead)
    if both_ways:  # looked at again: a dead group may have been replayed and trained since the first look
        again = (await _look(ledgers.train))[1]
        both_ways &= again.dropped | again.dead
    faults = [f"group {group_id} is trained, and dropped or dead as well" for group_id in sorted(both_ways)[:_LISTED]]
    repeats = {group_id: count - 1 for group_id, count in Counter(group_ids).items() if count > 1}
    first = _settle(train, set(group_ids))
    second = _settle(held_out, await asyncio.to_thread(read_evaluated, run_dir))
    faults += await damages(ledgers.connection, config.name, groups=False)
    for ledger in (ledgers.train, ledgers.evaluation):
        faults.extend(await structural_faults(ledger))
    lost = [str(group_id) for group_id in sorted(first.lost)] + [f"eval:{group_id}" for group_id in sorted(second.lost)]
    return Audit(
        **{**first.counts(), "lost": len(lost)},
        trained=len(first.done),
        evaluated=len(second.done),
        twice=sum(repeats.values()),
        held_out=HeldOut(**second.counts()),
        lost_ids=lost[:_LISTED],
        twice_ids=[str(group_id) for group_id in sorted(repeats)][:_LISTED],
        checkpoint=meta.name if meta else None,
        unproved=unproved,
        faults=faults,
    )


async def _look(ledger: Ledger) -> tuple[int, _Places]:
    """Cursor and places in Redis; the cursor first and the live ones second, since groups only move on."""
    cursor = (await ledger.state()).cursor
    live = set(await ledger.live())
    letters = await ledger.dead_letters()
    dead = {letter.group_id for letter in letters if letter.sample is None}
    samples = sum(letter.sample is not None for letter in letters)
    dropped = set(await ledger.dropped())
    return cursor, _Places(set(), dropped, dead, live, set(), samples)


def _settle(seen: tuple[int, _Places], done: set[int]) -> _Places:
    """Count every id once.

    A trained id at or above the cursor is legal after Redis went back: it will be admitted again, and be retired
    untrained.
    """
    cursor, places = seen
    admitted = set(range(cursor)) | places.live | done
    dropped = (places.dropped & admitted) - done
    dead = (places.dead & admitted) - done - dropped
    live = places.live - done - dropped - dead
    lost = admitted - done - dropped - dead - live
    return _Places(done, dropped, dead, live, lost, places.dead_samples)


async def _chain(checkpoints: Checkpoints, ledger: Ledger) -> tuple[Meta | None, list[int], list[str]]:
    """The greatest valid checkpoint, the ids of its groups, and reasons why they prove nothing."""
    state = await ledger.state()
    meta = await asyncio.to_thread(checkpoints.greatest, state.base, state.base_epoch, state.checkpoint)
    for _ in range(_LOOKS):
        if meta is not None or (now := await ledger.state()).checkpoint == state.checkpoint:
            break
        # A running learner has saved and retired meanwhile, and removed what was being read.
        state = now
        meta = await asyncio.to_thread(checkpoints.greatest, state.base, state.base_epoch, state.checkpoint)
    unproved = []
    if meta is None and parse_name(state.checkpoint) != NOWHERE:
        unproved.append(f"Redis retired for ckpt-{state.checkpoint}: no valid checkpoint goes on from it")
        meta = await asyncio.to_thread(checkpoints.greatest, state.base, state.base_epoch)
    if meta is None:
        return None, [], unproved
    group_ids = ids_of(meta.trained)
    if len(group_ids) != meta.count:
        unproved.append(
            f"ckpt-{meta.name}: its weights were trained on {meta.count} groups, and it names {len(group_ids)} of them"
        )
    return meta, group_ids, unproved


def read_evaluated(run_dir: Path) -> set[int]:
    """Ids of the evaluated held-out groups, without a last line that a crash cut off."""
    path = run_dir / EVALUATION_FILE
    return set(_evaluated(path)) if path.exists() else set()


def _evaluated(path: Path) -> Iterator[int]:
    lines: Iterable[bytes] = path.read_bytes().split(b"\n")[:-1]
    for number, line in enumerate(lines, 1):
        try:
            yield int(orjson.loads(line)["gid"])
        except (ValueError, KeyError, TypeError) as error:
            raise WireError(f"{path} line {number} is not an evaluated group: {error}") from error


async def structural_faults(ledger: Ledger) -> list[str]:
    """Every breach of the invariants of the ledger in one key space, in words.

    * a group's hash exists exactly when its id is in `live`,
    * some sample has neither payload nor cause of death: exactly then the group has one entry in `prompts`,
    * a sample has a payload and neither score nor cause of death: exactly then it has one entry in `rollouts`; a group
      that is scored whole has one for all of them, when none is left to generate,
    * a sample with a journal has neither payload nor cause of death,
    * every sample has a score or a cause of death: exactly then the group is closed and has one entry in `scored`,
    * every delivered entry is pending with a consumer, and every pending entry is in its stream.

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
        f"{keys.live}: {shown(group_id)} is not the id of a group"
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
            foreign.append(f"{stream}: entry {entry} is foreign")
    return ours


async def _hashes(ledger: Ledger) -> set[bytes]:
    found: set[bytes] = set()
    prefix = ledger.keys.group(0).removesuffix("0")
    cursor = b"0"
    while True:
        cursor, names = await ledger.connection.read("SCAN", cursor, "MATCH", f"{prefix}*", "COUNT", _PAGE)
        found.update(name.removeprefix(prefix.encode()) for name in names)
        if cursor == b"0":
            return found


def _group_faults(group_id: int, known: Sequence[Any], waiting: bool, samples: set[str], closed: bool) -> list[str]:
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
    has: dict[str, set[int]] = {letter: set() for letter in "srxj"}
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
    ended = has["j"] & (has["s"] | has["x"])
    if ended:
        faults.append(f"group {group_id}: samples {sorted(ended)} have ended and still have a journal")
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
    faults = [f"{stream}: entry {entry} was delivered, and no consumer holds it" for entry in sorted(orphans)]
    return faults + [f"{stream}: {entry} is pending and gone" for entry in sorted(pending - entries)]


def _order(entry: str) -> tuple[int, int]:
    first, _, second = entry.partition("-")
    return int(first), int(second)
