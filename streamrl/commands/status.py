"""`streamrl status`: is every role of the run there and at work?"""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from streamrl.commands import output
from streamrl.commands.options import AnywhereOption, EveryOption, JsonOption, WatchOption
from streamrl.commands.rundir import KnownRun, find_anywhere, live
from streamrl.errors import ExitCode, LedgerDamaged, Unreachable
from streamrl.learner.ending import read_finished
from streamrl.monitor.lines import printable
from streamrl.monitor.reward_figures import RewardView
from streamrl.monitor.roles import KnownRole, Supervised, read_states, states_said
from streamrl.monitor.snapshot import take
from streamrl.monitor.verdict import stalled, unanswered
from streamrl.queues.keys import BEAT_TTL, SUPERVISOR
from streamrl.queues.replies import read_number
from streamrl.queues.supervision import parsed
from streamrl.runtime.plan import role_names

if TYPE_CHECKING:
    from rich.console import RenderableType

_NOT_PROGRESS = frozenset(
    {"pid", "host", "version", "state", "started", "beat", "trouble", "stepped", "salt", "vocabulary"}
)
_READY = KnownRole("ready", 0.0)


def status(
    run: AnywhereOption = None, json: JsonOption = False, watch: WatchOption = False, every: EveryOption = 1.0
) -> int:
    """Show each role: state, pid, restarts, version, progress.

    Exit code: 0 all roles are ready, or the run is finished; 1 a role is not ready or reports trouble, a reward gets no
    scores, or the run is stalled: Redis refuses writes or does not answer, or there is no step for twice as long as
    usual; 69 the run is down.
    """
    target = find_anywhere(run)

    async def once() -> int:
        data = await look(target)
        if json:
            output.write_json("streamrl.status/1", data)
        else:
            show(_table(data))
        return int(_CODES[data["verdict"]])

    with output.painting(again=watch and not json) as show:
        return asyncio.run(output.repeat(once, every if watch else None))


_CODES = {
    "ready": ExitCode.OK,
    "finished": ExitCode.OK,
    "degraded": ExitCode.FAILURE,
    "stalled": ExitCode.FAILURE,
    "down": ExitCode.UNREACHABLE,
}


async def look(run: KnownRun) -> dict[str, Any]:
    """Content of the envelope: `verdict` (a key of `_CODES`), `roles`, `rewards`, `summary` of a finished run.

    Roles come from the plan, from the supervisor and from the heartbeats in Redis: of a role that others started only
    the heartbeat is known.
    """
    board, rewards, reachable, cause = await _board(run)
    said = board.pop(SUPERVISOR, None) if board else None
    supervised = read_states(run.path) if run.path is not None else Supervised(alive=False, roles={})
    if said is not None and not supervised.alive:
        supervised = states_said(said)
    members = (parsed(said, "members") if said is not None else None) or role_names(run.config)
    names = list(dict.fromkeys([*members, *supervised.roles, *sorted(board or ())]))
    roles = [_role(name, supervised, board, reachable=reachable) for name in names]
    if not reachable and (not supervised.alive or supervised.roles.get("redis", _READY).state != "ready"):
        cause = ""  # it is not to answer now
    finished = read_finished(run.path) if run.path is not None else None
    if finished is not None and finished.holds(run.config) and not supervised.alive and not board:
        verdict = "finished"
    elif not reachable and not supervised.alive:
        verdict = "down"
    elif cause:
        verdict = "stalled"
    elif all(role["state"] == "ready" and not role["trouble"] for role in roles) and not any(r.away for r in rewards):
        verdict = "ready"
    else:
        verdict = "degraded"
    return {
        "run": run.name,
        "directory": str(run.path.resolve()) if run.path is not None else None,
        "verdict": verdict,
        "stalled": cause,
        "supervised": supervised.alive,
        "redis": reachable,
        "roles": roles,
        "rewards": [asdict(reward) for reward in rewards],
        "summary": _summary(run.path) if run.path is not None else None,
    }


async def _board(run: KnownRun) -> tuple[dict[str, dict[str, str]] | None, tuple[RewardView, ...], bool, str]:
    """The fields of roles, the rewards, whether Redis answers, and why the run is stalled. A stopped Redis stays so.

    The fields are None if the run's keys are damaged.
    """
    try:
        async with live(run) as connection:
            if connection is None:
                return {}, (), False, unanswered("")
            snapshot = await take(connection, run.name)
            return snapshot.roles, snapshot.rewards, True, stalled(snapshot)
    except Unreachable as error:
        return {}, (), False, unanswered(error.message)
    except LedgerDamaged as error:
        output.note(f"warning: the state that roles report is unknown: {error}")
        return None, (), True, ""


def _role(
    name: str, supervised: Supervised, board: dict[str, dict[str, str]] | None, *, reachable: bool
) -> dict[str, Any]:
    known = supervised.roles.get(name) if supervised.alive else None
    fields = board.get(name, {}) if board is not None else {}
    state = _state(name, known, board, reachable=reachable)
    return {
        "name": name,
        "state": state,
        "pid": known.pid if known is not None and known.pid is not None else _number(fields.get("pid")),
        "host": fields.get("host"),
        "up_seconds": _up_seconds(known, fields),
        "restarts": known.restarts if known is not None else 0,
        "version": _number(fields.get("version")),
        "reason": _reason(state, known),
        "trouble": printable(fields.get("trouble", "")),
        "progress": {key: value for key, value in fields.items() if key not in _NOT_PROGRESS},
    }


def _state(name: str, known: KnownRole | None, board: dict[str, dict[str, str]] | None, *, reachable: bool) -> str:
    shown = None if board is None else board.get(name)
    ready = known is not None and known.state == "ready"
    if known is not None and ready and reachable and board is not None and name.partition(".")[0] != "redis":
        # The supervisor saw it ready, but its event loop may be blocked since then.
        if shown is None and time.time() - known.since > BEAT_TTL:
            return "silent"
        return "blocked" if shown is not None and shown.get("state") == "blocked" else known.state
    if known is not None:
        return known.state
    # No supervisor here: an unexpired heartbeat proves that the role is alive.
    if shown is not None:
        return shown.get("state", "ready")
    return "ready" if name == "redis" and reachable else "down"


def _reason(state: str, known: KnownRole | None) -> str:
    if state == "silent":
        return f"no heartbeat for more than {BEAT_TTL:g} s: its event loop is blocked, or it does not reach Redis"
    return known.reason if known is not None else ""


def _up_seconds(known: KnownRole | None, shown: dict[str, str]) -> float | None:
    # Both are by the clock of the role's host, which may differ from that of this one by hours.
    started, beat = (read_number(shown.get(name, "")) for name in ("started", "beat"))
    if started is not None and beat is not None:
        return round(max(0.0, beat - started), 1)
    return round(time.time() - known.since, 1) if known is not None and known.state == "ready" else None


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.removeprefix("-").isdecimal() else None


def _summary(run_dir: Path) -> dict[str, Any] | None:
    try:
        summary = orjson.loads((run_dir / "summary.json").read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return None
    return summary if isinstance(summary, dict) else None


def _table(data: dict[str, Any]) -> RenderableType:
    from streamrl.monitor.tables import status_table

    verdict = f"run {data['run']}: {data['verdict']}" + (f": {data['stalled']}" if data["stalled"] else "")
    if data["verdict"] == "down":
        verdict += " (`streamrl up --resume` goes on)"
    elif data["verdict"] == "finished" and data["summary"] is not None:
        verdict += " (see summary.json)"
    rewards = [RewardView(**reward) for reward in data["rewards"]]
    return status_table(data["roles"], verdict, rewards, output.console().width)
