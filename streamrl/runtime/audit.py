"""The audit: where every admitted group is, from the records of the roles that decided it, not from counters.

* admitted: every id below the cursor of its data set,
* trained: the logs of ids that the greatest valid checkpoint names (its chain), compared with the digest that was kept
  beside its weights,
* evaluated: held-out groups in `evaluation.jsonl`,
* dead, dropped, live: recorded in Redis by id.

What is in none of them is lost; what the surviving weights were trained on more than once is `twice`. Nothing is
written. Needs no torch.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec
import orjson

from streamrl.config import RunConfig
from streamrl.errors import WireError
from streamrl.learner.checkpoint import NOWHERE, Checkpoints, Meta, parse_name
from streamrl.learner.lineage import TrainedDigest, read_trained
from streamrl.queues.damage import damages
from streamrl.queues.ledger import Ledger
from streamrl.queues.ledgers import Ledgers
from streamrl.runtime.structure import structural_faults

EVALUATION_FILE: Final = "evaluation.jsonl"
_LISTED: Final = 100
_LOOKS: Final = 5


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    """Groups by where they are; every id is counted once, and what was trained counts as trained.

    `admitted` = trained + dropped + dead + evaluated + live + lost. `lost` and `twice` must be 0. `dead_samples` are
    responses with a dead letter, also of groups that went on without them. `lost_ids` and
    `twice_ids` list the first hundred, held-out groups as `eval:ID`. `unproved` says why the records prove nothing: the
    checkpoint that Redis retired for is missing, or its log does not fit the weights. `faults` are breaches of the
    structure of the ledger, and trained groups that are also dropped or dead (Redis came back from the past).
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
    """Ids of one key space by where they are; a later place gives way to an earlier one."""

    done: set[int]
    dropped: set[int]
    dead: set[int]
    live: set[int]
    lost: set[int]
    dead_samples: int = 0


async def audit(config: RunConfig, run_dir: Path, ledgers: Ledgers) -> Audit:
    """Say where every group of a run is.

    It may run beside the roles: places are read in the order in which groups move through them, so that a group on the
    move is seen at least once.

    Raises:
        Unreachable: Redis does not answer.
        WireError: `evaluation.jsonl` holds a line that is not valid.
    """
    train = await _look(ledgers.train)
    held_out = await _look(ledgers.evaluation)
    meta, group_ids, unproved = await _chain(run_dir, ledgers.train)
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
    both = (first, second)
    counts = {
        "trained": len(first.done),
        "evaluated": len(second.done),
        "dropped": sum(len(places.dropped) for places in both),
        "dead": sum(len(places.dead) for places in both),
        "live": sum(len(places.live) for places in both),
        "lost": len(lost),
    }
    return Audit(
        **counts,
        admitted=sum(counts.values()),
        twice=sum(repeats.values()),
        dead_samples=train[1].dead_samples + held_out[1].dead_samples,
        lost_ids=lost[:_LISTED],
        twice_ids=[str(group_id) for group_id in sorted(repeats)][:_LISTED],
        checkpoint=meta.name if meta else None,
        unproved=unproved,
        faults=faults,
    )


async def _look(ledger: Ledger) -> tuple[int, _Places]:
    """Cursor and places as Redis has them; the cursor first and the live ones second, since groups only move on."""
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
    return _Places(done, dropped, dead, live, admitted - done - dropped - dead - live)


async def _chain(run_dir: Path, ledger: Ledger) -> tuple[Meta | None, list[int], list[str]]:
    """The greatest valid checkpoint, the ids of its chain, and why they prove nothing."""
    checkpoints = Checkpoints(run_dir / "checkpoints", make=False)
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
    group_ids = read_trained(checkpoints.folder, meta.chain)
    digest = TrainedDigest()
    digest.add(group_ids)
    if (digest.count, digest.hexdigest) != (meta.count, meta.digest):
        unproved.append(
            f"ckpt-{meta.name}: its weights were trained on {meta.count} groups with digest {meta.digest}, the log has"
            f" {digest.count} with {digest.hexdigest}"
        )
    return meta, group_ids, unproved


def read_evaluated(run_dir: Path) -> set[int]:
    """Ids of the evaluated held-out groups; a last line that a crash cut off is left out.

    Raises:
        WireError: another line is no JSON object with a `group_id`.
    """
    path = run_dir / EVALUATION_FILE
    return set(_evaluated(path)) if path.exists() else set()


def _evaluated(path: Path) -> Iterator[int]:
    lines: Iterable[bytes] = path.read_bytes().split(b"\n")[:-1]
    for number, line in enumerate(lines, 1):
        try:
            yield int(orjson.loads(line)["gid"])
        except (ValueError, KeyError, TypeError) as error:
            raise WireError(f"{path} line {number} is no evaluated group: {error}") from error
