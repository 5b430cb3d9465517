"""The live screen of a run: does it learn, how stale is it, which side waits, is anything broken."""

from __future__ import annotations

import time
from typing import Final

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from streamrl.monitor import plots
from streamrl.monitor.board import Board
from streamrl.monitor.lines import clock, duration, number, percent, printable
from streamrl.monitor.roles import KnownRole
from streamrl.monitor.tables import stream_name

_STYLES: Final = {
    "ready": "green",
    "starting": "yellow",
    "pending": "dim",
    "draining": "yellow",
    "backoff": "red",
    "failed": "bold red",
    "stopped": "dim",
}
_HIGH_PLOT: Final = 8
_LOW_PLOT: Final = 4


def render(board: Board, width: int) -> RenderableType:
    """The whole screen for a terminal of `width` columns: all panels in two columns from 96 on, else the essentials."""
    if width < 96:
        body = Group(_learning(board, width, _LOW_PLOT), _balance(board, width), _brief(board))
        return Group(_headline(board), *_troubles(board), body, _events(board, width, 2))
    left_width = width * 3 // 5
    right_width = width - left_width
    left = Group(_learning(board, left_width, _HIGH_PLOT), _traffic(board, left_width))
    right = Group(_balance(board, right_width), _staleness(board, right_width), _roles(board, right_width))
    grid = Table.grid(expand=True)
    grid.add_column(width=left_width)
    grid.add_column(width=right_width)
    grid.add_row(left, right)
    return Group(_headline(board), *_troubles(board), grid, _events(board, width, 4))


def _panel(title: str, width: int, *lines: RenderableType) -> Panel:
    return Panel(Group(*lines), title=title, title_align="left", border_style="dim", width=width)


def _headline(board: Board) -> Text:
    steps = board.progress.steps
    step = steps[-1].step if steps else 0
    goal = f"/{board.goal.steps}" if board.goal.steps else ""
    version = board.snapshot.version if board.snapshot is not None else -1
    line = Text()
    line.append(f" {board.name} ", style="bold reverse")
    line.append(f"  {duration(time.time() - board.started)}   step ")
    line.append(f"{step}{goal}", style="bold")
    line.append(f"   weights v{version}" if version >= 0 else "   no weights yet")
    if board.restarts:
        line.append(f"   restarts {board.restarts}", style="red")
    for reward in board.snapshot.rewards if board.snapshot is not None else ():
        if reward.away:
            line.append(f"   no scores from {printable(reward.name)}", style="bold red")
    return line


def _troubles(board: Board) -> list[Text]:
    stalled = [Text(f" stalled: {cause}", style="bold red")] if (cause := board.stalled()) else []
    return stalled + [Text(f" {name}: {printable(trouble)}", style="bold red") for name, trouble in board.troubles()]


def _learning(board: Board, width: int, height: int) -> Panel:
    inner = max(20, width - 12)
    points = board.accuracy()
    lines: list[RenderableType] = []
    if points:
        newest = points[-1]
        head = Text("held-out accuracy by version   ")
        head.append(f"{newest[1]:.3f}", style="bold green")
        head.append(f" at v{newest[0]}, first {points[0][1]:.3f}")
        if board.goal.accuracy is not None:
            head.append(f", ends at {board.goal.accuracy:g}", style="dim")
        lines.append(head)
        curve = plots.area([(float(v), a) for v, a in points], inner, height, 0.0, 1.0)
        lines.extend(Text(row, style="green") for row in curve)
        lines.append(
            Text(f"       v{points[0][0]}{f'v{newest[0]}':>{max(1, inner - len(str(points[0][0])) - 1)}}", "dim")
        )
    else:
        lines.append(Text("held-out accuracy: no version evaluated yet", style="dim"))
    for label, values, style in _series(board):
        row = Text(f"{label:7}")
        row.append(f"{number(values[-1]) if values else '-':>8}  ")
        row.append(plots.spark(values, inner - 14), style=style)
        lines.append(row)
    return _panel("learning", width, *lines)


def _series(board: Board) -> list[tuple[str, list[float], str]]:
    steps = list(board.progress.steps)
    return [
        ("reward", [step.reward for step in steps if step.reward is not None], "cyan"),
        ("loss", [step.loss for step in steps if step.loss is not None], "magenta"),
    ]


def _traffic(board: Board, width: int) -> Panel:
    if board.snapshot is None:
        return _panel("queue", width, Text("waiting for Redis", style="dim"))
    table = Table(box=None, pad_edge=False, header_style="dim", expand=False)
    for heading in ("stream", "waiting", "leased", "in/s", "out/s", "oldest"):
        table.add_column(heading, justify="left" if heading == "stream" else "right", no_wrap=True)
    ledger = board.snapshot.train
    for stream in ledger.streams:
        table.add_row(
            stream_name(stream),
            str(stream.lag),
            str(stream.pending) if stream.name != "scored" else "-",
            number(stream.in_per_second),
            number(stream.out_per_second),
            duration(stream.oldest_waiting_seconds),
        )
    waiting = ledger.live - ledger.held
    budget = board.snapshot.budget or max(1, waiting)
    admission = Text("admission ")
    admission.append(plots.bar(waiting / budget, 16), style="blue")
    admission.append(f" {waiting}/{board.snapshot.budget or '-'} untrained groups")
    counts = Text(f"admitted {ledger.cursor}  dropped {ledger.dropped}  dead letters ")
    counts.append(str(ledger.dead), style="red" if ledger.dead else "")
    counts.append(f"  evaluated {board.progress.accuracy.groups}")
    return _panel("queue", width, table, admission, counts)


def _balance(board: Board, width: int) -> Panel:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("side", "tokens/s", "waits"):
        table.add_column(heading, justify="left" if heading == "side" else "right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for pace in board.paces():
        share = pace.waits
        table.add_row(
            pace.name,
            number(pace.tokens_per_second),
            percent(share),
            plots.bar(share, 10) if share is not None else "",
        )
    verdict = board.verdict()
    lines = [Text(text, style=style) for text, style in ((verdict.text, "dim"), (verdict.advice, "yellow")) if text]
    return _panel("who waits for whom", width, table, *lines)


def _brief(board: Board) -> Text:
    """For a small terminal."""
    text = Text(no_wrap=True)
    if board.snapshot is not None:
        waiting = "  ".join(f"{stream.name} {stream.depth}" for stream in board.snapshot.train.streams)
        text.append(f" queue {waiting}  dead letters {board.snapshot.train.dead}")
    rows = plots.histogram(board.recent_staleness(), 1)
    if rows:
        text.append("   stale " + " ".join(f"{label}:{percent(share)}" for label, share, _ in rows))
    text.append("\n ")
    for name, state in board.sorted_roles():
        text.append_text(_role(name, state, None)).append("  ")
    return text


def _staleness(board: Board, width: int) -> Panel:
    rows = plots.histogram(board.recent_staleness(), max(5, width - 20))
    if not rows:
        return _panel("staleness", width, Text("no step yet", "dim"))
    lines = [Text.assemble(f"{label:>3} ", (drawn, "yellow"), f" {percent(share):>5}") for label, share, drawn in rows]
    return _panel("staleness of tokens (steps, last 20)", width, *lines)


def _roles(board: Board, width: int) -> Panel:
    versions = board.snapshot.role_versions if board.snapshot is not None else {}
    cells = [_role(name, state, versions.get(name)) for name, state in board.sorted_roles()]
    return _panel("roles", width, Columns(cells, padding=(0, 2)))


def _role(name: str, state: KnownRole, version: int | None) -> Text:
    text = Text(no_wrap=True)
    text.append("● ", style=_STYLES.get(state.state, ""))
    text.append(name)
    if state.state != "ready":
        text.append(f" {state.state}", style=_STYLES.get(state.state, ""))
    if version is not None:
        text.append(f" v{version}", style="dim")
    if state.restarts:
        text.append(f" restarted {state.restarts}x", style="red")
    return text


def _events(board: Board, width: int, count: int) -> RenderableType:
    lines = [
        Text(f"{clock(at)} {text}"[: width - 1], style="red" if bad else "dim", no_wrap=True)
        for at, text, bad in board.last_events(count)
    ]
    lines.append(Text(f"{board.footer}.  More: streamrl lag, status, logs -f"[: width - 1], "dim", no_wrap=True))
    return Group(*lines)
