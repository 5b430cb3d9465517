"""A read-only picture of a whole run, taken in one round trip.

`lag` of a stream is depth - pending, of `scored` the groups that are not trained yet. It is never the native lag of
Redis (absent on 6.2, NULL or wrong after out-of-order deletes on 7 and 8); it is exact here because an ack deletes the
entry. Ages come from the server's clock and the ids of the entries, so the reader's clock does not matter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from streamrl.errors import Unreachable
from streamrl.monitor.reward_figures import RewardView, reward_views, source_figures, with_reward_rates
from streamrl.queues.access import ReplyError
from streamrl.queues.connection import Connection
from streamrl.queues.damage import blame_damage
from streamrl.queues.keys import REWARD_FIGURES, SOURCE_FIGURES, Keys
from streamrl.queues.replies import pairs, read_number, text

MOST_PENDING: Final = 10_000
_RATE_SECONDS: Final = 5.0
_STREAMS: Final = ("prompts", "rollouts", "scored")
_KEYS: Final = (*_STREAMS, "live", "dead", "state", "dropped", "roles")


@dataclass(frozen=True, slots=True)
class Consumer:
    name: str
    pending: int
    idle_seconds: float


@dataclass(frozen=True, slots=True)
class StreamView:
    """One stream of ids; docs/guides/lag.md says what each figure means."""

    name: str
    depth: int
    pending: int
    lag: int
    oldest_waiting_seconds: float | None
    oldest_leased_seconds: float | None
    silent_seconds: float
    retried: int
    added: int | None = None
    in_per_second: float | None = None
    out_per_second: float | None = None
    consumers: tuple[Consumer, ...] = ()
    unit: str = "groups"
    drain_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class LedgerView:
    """The training or the evaluation ledger. Counts are of groups.

    `finished` groups were ever trained (or evaluated) or dropped; `state` is the whole state hash as text.
    """

    streams: tuple[StreamView, ...]
    live: int
    held: int
    dead: int
    dropped: int
    cursor: int
    done: int | None
    version: int
    epoch: int
    finished: int = 0
    state: dict[str, str] = field(default_factory=dict)

    def stream(self, name: str) -> StreamView:
        for view in self.streams:
            if view.name == name:
                return view
        raise KeyError(name)


@dataclass(frozen=True, slots=True)
class ServerView:
    """The Redis server. Bytes; `memory_limit_bytes` 0 means no limit."""

    version: str
    uptime_seconds: int
    memory_bytes: int
    memory_limit_bytes: int
    evicted_keys: int
    aof_delayed_fsync: int
    aof_ok: bool


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that Redis knows of a run at one instant (`at`, by its clock); `version` is -1 before the first."""

    run: str
    at: float
    server: ServerView
    train: LedgerView
    evaluation: LedgerView
    budget: int | None = None
    hard_cap: int | None = None
    version: int = -1
    roles: dict[str, dict[str, str]] = field(default_factory=dict)
    rewards: tuple[RewardView, ...] = ()
    sources: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def role_versions(self) -> dict[str, int]:
        return {
            name: int(status["version"])
            for name, status in sorted(self.roles.items())
            if status.get("version", "").removeprefix("-").isdecimal()
        }


async def take(connection: Connection, run: str, budget: int | None = None, hard_cap: int | None = None) -> Snapshot:
    """Take a snapshot in one pipelined round trip; nothing is written.

    A run that has not begun gives zeros. Works on Redis 6.2 to 8. LedgerDamaged: keys of the run hold foreign values.
    """
    spaces = (Keys(run), Keys(run, evaluation=True))
    calls = [
        connection.call("snapshot", [getattr(keys, key) for key in _KEYS], [MOST_PENDING, keys.role("")])
        for keys in spaces
    ]
    try:
        replies = await asyncio.gather(connection.read("TIME"), connection.read("INFO"), *calls)
        return _snapshot(run, replies, budget, hard_cap)
    except (ReplyError, ValueError) as error:
        await blame_damage(connection, run, error, groups=False)
        if isinstance(error, ReplyError):
            raise Unreachable(f"Redis refuses to be looked at: {error}") from error
        raise


def _snapshot(run: str, replies: list[Any], budget: int | None, hard_cap: int | None) -> Snapshot:
    at = int(replies[0][0]) + int(replies[0][1]) / 1e6
    train, evaluation = (_ledger(reply, at) for reply in replies[2:4])
    roles = {text(name): _text_map(flat) for name, flat in sorted(replies[2][5])}
    rewards = reward_views(roles)
    return Snapshot(
        run=run,
        at=at,
        server=_server(replies[1]),
        train=_shown_rates(train, roles),
        evaluation=evaluation,
        budget=budget,
        hard_cap=hard_cap,
        version=train.version,
        roles={
            name: {key: value for key, value in status.items() if key not in (REWARD_FIGURES, SOURCE_FIGURES)}
            for name, status in roles.items()
        },
        rewards=rewards,
        sources=source_figures(roles),
    )


def with_rates(now: Snapshot, before: Snapshot) -> Snapshot:
    """`now` with the rates of its streams since `before`; unchanged if no time has passed."""
    seconds = now.at - before.at
    if seconds <= 0:
        return now
    return replace(
        now,
        train=_rated(now.train, before.train, seconds),
        evaluation=_rated(now.evaluation, before.evaluation, seconds),
        rewards=with_reward_rates(now.rewards, before.rewards, seconds),
    )


class Rates:
    """Adds the rates of its streams to each snapshot of a run, over about five seconds where there are as many.

    Such rates are steadier than those between two snapshots.
    """

    def __init__(self) -> None:
        self._before: Snapshot | None = None

    def of(self, snapshot: Snapshot) -> Snapshot:
        before = self._before
        if before is None or snapshot.at - before.at >= _RATE_SECONDS:
            self._before = snapshot
        return snapshot if before is None else with_rates(snapshot, before)


def _shown_rates(ledger: LedgerView, roles: Mapping[str, Mapping[str, str]]) -> LedgerView:
    """Rates known from one snapshot: reward workers report how many samples a second they score."""
    rates = [read_number(status["per_second"]) for status in roles.values() if "per_second" in status]
    shown = [rate for rate in rates if rate is not None]
    if not shown or ledger.stream("rollouts").unit != "samples":
        return ledger
    scored = sum(shown)
    streams = [_with_rates(s, None, scored) if s.name == "rollouts" else s for s in ledger.streams]
    return replace(ledger, streams=tuple(streams))


def _rated(now: LedgerView, before: LedgerView, seconds: float) -> LedgerView:
    views = []
    for new, old in zip(now.streams, before.streams, strict=True):
        # What leaves is what came in, less what is there more than before; of one of the three the server may know
        # nothing (Redis 6.2 does not count entries).
        more = (new.lag + new.pending - old.lag - old.pending) / seconds
        if new.name == "scored":
            left = max(0, now.finished - before.finished) / seconds
            views.append(_with_rates(new, max(0.0, left + more), left))
        elif new.name == "prompts":
            put = max(0, now.cursor - before.cursor) / seconds
            views.append(_with_rates(new, put, max(0.0, put - more)))
        elif new.out_per_second is not None:
            views.append(_with_rates(new, max(0.0, new.out_per_second + more), new.out_per_second))
        elif new.added is not None and old.added is not None:
            put = max(0, new.added - old.added) / seconds
            views.append(_with_rates(new, put, max(0.0, put - more)))
        else:
            views.append(new)
    return replace(now, streams=tuple(views))


def _with_rates(stream: StreamView, put: float | None, left: float) -> StreamView:
    waits = stream.lag + stream.pending
    return replace(
        stream, in_per_second=put, out_per_second=left, drain_seconds=waits / left if waits and left else None
    )


def _ledger(reply: list[Any], at: float) -> LedgerView:
    streams, flat, live, dead, dropped, _ = reply
    state = _text_map(flat)
    held = int(state.get("held", 0))
    views = [_stream(name, _unit(name, state), parts, at) for name, parts in zip(_STREAMS, streams, strict=True)]
    return LedgerView(
        streams=tuple(replace(s, lag=max(0, s.depth - held)) if s.name == "scored" else s for s in views),
        live=live,
        held=held,
        dead=dead,
        dropped=dropped,
        cursor=int(state.get("cursor", 0)),
        done=int(state["done"]) if "done" in state else None,
        version=int(state.get("version", -1)),
        epoch=int(state.get("epoch", 0)),
        finished=int(state.get("retired", 0)) + held + dropped,
        state=state,
    )


def _unit(name: str, state: Mapping[str, str]) -> str:
    return "samples" if name == "rollouts" and "whole" not in state else "groups"


def _stream(name: str, unit: str, parts: list[Any], at: float) -> StreamView:
    depth, pending, added, _, waiting, silent, retried, leased, consumers = parts
    return StreamView(
        name=name,
        depth=depth,
        pending=pending,
        lag=depth - pending,
        oldest_waiting_seconds=_age(waiting, at),
        oldest_leased_seconds=_age(leased, at),
        silent_seconds=silent / 1000,
        retried=retried,
        added=added,
        consumers=tuple(Consumer(text(who), held, idle / 1000) for who, held, idle in consumers),
        unit=unit,
    )


def _age(entry: bytes | None, at: float) -> float | None:
    """Seconds since an entry was put, from its id; 0 if the server's clock was set back."""
    return None if entry is None else max(0.0, at - int(entry.split(b"-")[0]) / 1000)


def _server(reply: bytes) -> ServerView:
    lines = (line.partition(":") for line in reply.decode(errors="replace").splitlines() if ":" in line)
    info = {key: value for key, _, value in lines}
    return ServerView(
        version=info.get("valkey_version") or info.get("redis_version", "?"),
        uptime_seconds=int(info.get("uptime_in_seconds", 0)),
        memory_bytes=int(info.get("used_memory", 0)),
        memory_limit_bytes=int(info.get("maxmemory", 0)),
        evicted_keys=int(info.get("evicted_keys", 0)),
        aof_delayed_fsync=int(info.get("aof_delayed_fsync", 0)),
        aof_ok=info.get("aof_last_write_status", "ok") == "ok",
    )


def _text_map(flat: list[bytes]) -> dict[str, str]:
    return {text(key): text(value) for key, value in pairs(flat).items()}
