"""Tables of `streamrl lag` and `streamrl status`. Their values come from `snapshot`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from streamrl.monitor.lines import duration, latency, number, printable, size
from streamrl.monitor.reward_figures import RewardView
from streamrl.monitor.snapshot import LedgerView, Snapshot, StreamView
from streamrl.monitor.verdict import Verdict, stalled
from streamrl.queues.replies import read_number

_ALL_COLUMNS: Final = 110
"""From this width on, tables have all their columns."""
_LAG_COLUMNS: Final = (
    "DEPTH", "LAG", "PENDING", "IN/s", "OUT/s", "DRAIN", "OLDEST", "LEASED", "SILENT", "RETRIED", "AT WORK",
)  # fmt: skip
_WIDE_ONLY: Final = frozenset({"DEPTH", "SILENT", "RETRIED"})
_GOOD: Final = {"ready": "green", "stopped": "dim", "starting": "yellow", "draining": "yellow"}


def lag_table(snapshot: Snapshot, verdict: Verdict, width: int) -> RenderableType:
    """A narrow terminal gets fewer columns, because a cut value says nothing."""
    wide = width >= _ALL_COLUMNS
    table = Table(box=None, pad_edge=False, collapse_padding=not wide, header_style="bold")
    table.add_column("STREAM", no_wrap=True)
    shown = [heading for heading in _LAG_COLUMNS if wide or heading not in _WIDE_ONLY]
    for heading in shown:
        table.add_column(heading, justify="right", no_wrap=True)
    for prefix, ledger in (("", snapshot.train), ("eval ", snapshot.evaluation)):
        if prefix and not ledger.cursor:
            continue
        for stream in ledger.streams:
            cells = _stream_cells(stream, "feeder" if prefix else "learner")
            table.add_row(prefix + stream_name(stream), *(cells[heading] for heading in shown))
    lines = [Text(_ledger_line("groups", snapshot.train, snapshot.budget, snapshot.hard_cap))]
    if snapshot.evaluation.cursor:
        lines.append(Text(_ledger_line("held-out", snapshot.evaluation, None, None)))
    rewards = [rewards_table(snapshot.rewards)] if snapshot.rewards else []
    rewards += [_sources_table(snapshot.sources)] if snapshot.sources else []
    end = [Text(f"stalled  {cause}", style="bold red")] if (cause := stalled(snapshot)) else []
    end += [Text(verdict.text, style="bold"), *([Text(f"to fix it: {verdict.advice}")] if verdict.advice else [])]
    return Group(_server_line(snapshot), table, *lines, Text(_weights_line(snapshot)), *rewards, *end)


def rewards_table(rewards: Sequence[RewardView]) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("REWARD", overflow="fold")
    tokens = any(reward.tokens for reward in rewards)
    for heading in ("SCORED", "/s", "MEAN", "P50", "P95", "FAILED", "RETRIED", "DEAD", *(["TOKENS"] if tokens else [])):
        table.add_column(heading, justify="right", no_wrap=True)
    for reward in rewards:
        table.add_row(
            Text(printable(reward.name)),
            str(reward.ok),
            number(reward.per_second),
            number(reward.mean),
            latency(reward.p50),
            latency(reward.p95),
            Text(str(reward.failed), style="yellow" if reward.failed else ""),
            str(reward.retried),
            Text(str(reward.dead), style="red" if reward.dead else ""),
            *([str(reward.tokens)] if tokens else []),
        )
    lines = [printable(f"{reward.name}  {line}") for reward in rewards for line in reward.trouble]
    trouble = [Text(line, style="red") for line in lines]
    return Group(table, *trouble)


def _sources_table(sources: Mapping[str, Mapping[str, float]]) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("SOURCE", overflow="fold")
    columns = {"GROUPS": "groups", "REWARD": "reward_mean", "ZERO VAR": "zero_variance", "LENGTH": "length"}
    for heading in (*columns, "ACCURACY"):
        table.add_column(heading, justify="right", no_wrap=True)
    for source, figures in sources.items():
        cells = [number(figures.get(key)) for key in (*columns.values(), "accuracy")]
        table.add_row(Text(printable(source)), *cells)
    return table


def stream_name(stream: StreamView) -> str:
    return f"{stream.name} (groups)" if stream.name == "rollouts" and stream.unit == "groups" else stream.name


def _stream_cells(stream: StreamView, reader: str) -> dict[str, str]:
    # `scored` has no consumer group: one reader takes all of it, so leased means nothing there.
    grouped = stream.name != "scored"
    working = sum(consumer.pending > 0 for consumer in stream.consumers)
    return {
        "DEPTH": str(stream.depth),
        "LAG": str(stream.lag),
        "PENDING": str(stream.pending) if grouped else "-",
        "IN/s": number(stream.in_per_second),
        "OUT/s": number(stream.out_per_second),
        "DRAIN": duration(stream.drain_seconds),
        "OLDEST": duration(stream.oldest_waiting_seconds),
        "LEASED": duration(stream.oldest_leased_seconds),
        "SILENT": duration(stream.silent_seconds) if stream.pending else "-",
        "RETRIED": str(stream.retried) if grouped else "-",
        "AT WORK": f"{working}/{len(stream.consumers)}" if grouped else reader,
    }


def _server_line(snapshot: Snapshot) -> Text:
    server = snapshot.server
    limit = f" / {size(server.memory_limit_bytes)}" if server.memory_limit_bytes else ""
    line = Text(f"run {snapshot.run}  redis {server.version} up {duration(server.uptime_seconds)}")
    line.append(f"  memory {size(server.memory_bytes)}{limit}")
    if server.evicted_keys:
        line.append(f"  {server.evicted_keys} keys EVICTED", style="bold red")
    if not server.aof_ok:
        line.append("  AOF WRITE FAILED", style="bold red")
    return line


def _ledger_line(name: str, ledger: LedgerView, budget: int | None, hard_cap: int | None) -> str:
    waiting = ledger.live - ledger.held
    return (
        f"{name}  admitted {ledger.cursor}  untrained {waiting}{f'/{budget}' if budget is not None else ''}"
        f"  live {ledger.live}{f'/{hard_cap}' if hard_cap is not None else ''}  held {ledger.held}"
        f"  dropped {ledger.dropped}  dead letters {ledger.dead}"
        + (f"  end of data at {ledger.done}" if ledger.done is not None else "")
    )


def _weights_line(snapshot: Snapshot) -> str:
    newest = snapshot.version
    foreign = read_number(snapshot.train.state.get("foreign", "0"))
    removed = [f"{foreign:.0f} foreign entries removed from their stream"] if foreign else []
    if newest < 0:
        return "  ".join(["weights  none published yet", *removed])
    kinds = {name.split(".")[0] for name in snapshot.role_versions}
    holder = "engine" if "engine" in kinds else "rollout"
    readers = [
        f"{name} v{version}" + (f" ({newest - version} behind)" if version < newest else "")
        for name, version in snapshot.role_versions.items()
        if name.split(".")[0] == holder
    ]
    return "  ".join(["weights", f"v{newest} of learner epoch {snapshot.train.epoch}", *readers, *removed])


def status_table(
    roles: Sequence[Mapping[str, Any]], verdict: str, rewards: Sequence[RewardView], width: int
) -> RenderableType:
    """One row per role (as `streamrl.status/1` has it), one per reward, and the verdict below.

    On a narrow terminal the progress of the roles is a table of its own, so that no value is cut.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("ROLE", "STATE", "PID", "UP", "RESTARTS", "VERSION"):
        table.add_column(heading, justify="left" if heading in ("ROLE", "STATE") else "right", no_wrap=True)
    beside = width >= _ALL_COLUMNS
    below = Table(box=None, pad_edge=False, header_style="bold")
    below.add_column("ROLE", no_wrap=True)
    (table if beside else below).add_column("PROGRESS", overflow="fold")
    for role in roles:
        cells = [
            role["name"],
            Text(role["state"], style=_GOOD.get(role["state"], "red")),
            _shown(role["pid"]),
            duration(role["up_seconds"]),
            str(role["restarts"]),
            _shown(role["version"]),
        ]
        progress = _progress(role)
        table.add_row(*cells, *([progress] if beside else []))
        if progress:
            below.add_row(role["name"], progress)
    parts = [table, *([] if beside else [below]), *([rewards_table(rewards)] if rewards else [])]
    return Group(*parts, Text(verdict))


def _progress(role: Mapping[str, Any]) -> Text:
    """What is wrong with a role, else how far it is."""
    trouble = role["reason"] or role["trouble"]
    progress = " ".join(f"{key}={_short(value)}" for key, value in role["progress"].items())
    return Text(trouble or progress, style="red" if trouble else "")


def _shown(value: int | None) -> str:
    return "-" if value is None else str(value)


def _short(value: str) -> str:
    return number(float(value)) if re.fullmatch(r"-?\d+\.\d+", value) else value
