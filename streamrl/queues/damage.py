"""Damage of a run's keys in Redis: values that the ledger never writes, from another program or a deletion.

It is searched for only after a failure, and by `streamrl audit`. The message then names the damaged key instead of the
line of a script or of Python that failed on it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from streamrl.errors import LedgerDamaged, StreamrlError, leaves
from streamrl.queues.keys import Keys
from streamrl.queues.replies import is_number

if TYPE_CHECKING:
    from streamrl.queues.connection import Connection

_SHOWN: Final = 20
_SECONDS: Final = 5.0
_CHECKPOINT: Final = re.compile(rb"(\d{1,18}-\d{1,18})?")
_STATE: Final = frozenset(
    {b"cursor", b"done", b"epochs", b"epoch", b"base_epoch", b"held", b"version"}
    | {b"admitted", b"retired", b"dropped", b"dead", b"replayed", b"foreign"}
)
_GROUP: Final = ("n", "m", "todo", "left", "nx", "a", "v")


async def damages(connection: Connection, run: str, *, groups: bool = True) -> list[str]:
    """Every damage of the keys of a run, in words; `groups`: also of the hashes of its live groups."""
    found: list[str] = []
    for keys in (Keys(run), Keys(run, evaluation=True)):
        names, arguments = _look(keys, groups=groups)
        found += _named(keys, await connection.call("damage", names, arguments))
    return list(dict.fromkeys(found))  # both key spaces share the keys of roles and servers


async def blame_damage(connection: Connection, run: str, error: BaseException, *, groups: bool = True) -> None:
    """Raise `LedgerDamaged` if a damage of the ledger explains an error; otherwise return.

    Only errors that Redis answered, and those that would be bugs of streamrl, start the search.
    """
    if not any(_unexplained(leaf) for leaf in leaves(error)):
        return
    try:
        async with asyncio.timeout(_SECONDS):
            found = await damages(connection, run, groups=groups)
    except (StreamrlError, TimeoutError):
        return
    if found:
        raise _refusal(run, found) from error


def _unexplained(error: BaseException) -> bool:
    from streamrl.queues.access import ReplyError

    return isinstance(error, ReplyError) or (isinstance(error, Exception) and not isinstance(error, StreamrlError))


def _refusal(run: str, found: Sequence[str]) -> LedgerDamaged:
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return LedgerDamaged(
        f"the data of run {run} in Redis is damaged: {'; '.join(found[:_SHOWN])}{more}",
        "something other than streamrl wrote there. Stop the run, restore RUN_DIR/redis (or your Redis) from a copy, or"
        f" move RUN_DIR/redis away (delete the keys {{sr:{run}}}:*) and go on with `streamrl up --resume`:"
        " the learner's checkpoints then decide what is trained",
    )


def _look(keys: Keys, *, groups: bool) -> tuple[list[str], list[str]]:
    types = {
        keys.state: "hash",
        keys.live: "zset",
        keys.roles: "set",
        keys.prompts: "stream",
        keys.rollouts: "stream",
        keys.scored: "stream",
        keys.dead: "stream",
        keys.dropped: "string",
        keys.replays: "hash",
    }
    if not keys.evaluation:
        types |= {
            keys.weights: "stream",
            keys.hosts: "hash",
            keys.deaths: "hash",
            keys.lives: "hash",
            keys.device_lock: "hash",
            keys.device_engines: "zset",
        }
    group = keys.group(0).removesuffix("0") if groups else ""
    prefixes = [keys.dropped_for(""), keys.role(""), group]
    return list(types), [*types.values(), *prefixes]


def _named(keys: Keys, reply: Sequence[Any]) -> list[str]:
    wrong, state, groups = reply
    found = [f"{shown(key)} holds a {kind.decode()}, not a {wanted.decode()}" for key, kind, wanted in wrong]
    for name, value in zip(state[::2], state[1::2], strict=True):
        if (name in _STATE or name.startswith(b"dropped:")) and not is_number(value):
            found.append(f"{keys.state}, field {shown(name)}: {shown(value)} is no number")
        elif name in {b"ckpt", b"base"} and not keys.evaluation and not _CHECKPOINT.fullmatch(value):
            found.append(f"{keys.state}, field {shown(name)}: {shown(value)} is no checkpoint (EPOCH-STEP)")
    for group_id, prompted, *values, crashes, status in groups:
        key = f"{keys.group(0).removesuffix('0')}{shown(group_id)}"
        if not group_id.isdigit():
            found.append(f"{keys.live}: {shown(group_id)} is no id of a group")
            continue
        for name, value in (*zip(_GROUP, values, strict=True), ("t", crashes or b"0")):
            if value is None:
                found.append(f"{key}: field {name} is missing")
            elif not is_number(value):
                found.append(f"{key}, field {name}: {shown(value)} is no number")
        if not prompted:
            found.append(f"{key}: field prompt is missing")
        if status not in (b"open", b"closed"):
            found.append(f"{key}, field st: {shown(status or b'')} is neither open nor closed")
    return found


def shown(value: bytes) -> str:
    """Foreign bytes for people: one line, at most sixty bytes, escaped if not printable."""
    text = value[:60].decode(errors="backslashreplace")
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text) or "nothing"
