"""What every command writes: data on stdout, diagnostics on stderr, one JSON envelope, colour where wanted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TextIO

import orjson

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

Colour = Literal["auto", "always", "never"]

_WIDE: Final = 200  # columns without a terminal, so that a table in a file or a pipe is never cut
_NOTE_SECONDS: Final = 10.0
_DRAW_SECONDS: Final = 0.2
_chosen: list[Colour] = ["auto"]
_outlives: list[bool] = [False]


def choose_colour(colour: Colour) -> None:
    _chosen[0] = colour


def wants_colour(stream: Any) -> bool:
    """`--color` first, then NO_COLOR and TERM=dumb, then whether `stream` is a terminal."""
    if _chosen[0] != "auto":
        return _chosen[0] == "always"
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return bool(stream.isatty())


def console(stream: Any = None) -> Console:
    """A rich console on `stream` (default: stdout); wide and plain if it is no terminal."""
    from rich.console import Console

    stream = sys.stdout if stream is None else stream
    colour = wants_colour(stream)
    return Console(
        file=stream,
        width=None if stream.isatty() else _WIDE,
        force_terminal=True if colour else None,
        color_system="auto" if colour else None,
        no_color=not colour,
        highlight=False,
        soft_wrap=False,
    )


@contextlib.contextmanager
def painting(*, again: bool) -> Iterator[Callable[[RenderableType], None]]:
    """Yields what shows a table on stdout; with `again`, on a terminal, each is drawn over the one before."""
    shown = console()
    if not again or not sys.stdout.isatty():
        yield shown.print
        return
    from rich.live import Live

    with Live(console=shown, auto_refresh=False) as live:
        yield lambda table: live.update(table, refresh=True)


def envelope(schema: str, data: Any) -> bytes:
    """One line of JSON: `{"schema": ..., "at": seconds since 1970, "data": ...}`; see docs/reference/json.md."""
    return orjson.dumps(
        {"schema": schema, "at": time.time(), "data": data},
        default=_plain,
        option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS,
    )


def _plain(value: Any) -> Any:
    if isinstance(value, (set, frozenset, tuple)):
        return sorted(value) if isinstance(value, (set, frozenset)) else list(value)
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return str(value)


def write_json(schema: str, data: Any) -> None:
    write(envelope(schema, data).decode())


def answer(schema: str, data: Any, lines: Iterable[str], *, json: bool) -> None:
    """Write one envelope with `--json`, else the lines, which are made only then."""
    if json:
        write_json(schema, data)
    else:
        for line in lines:
            write(line)


def outlive_readers() -> None:
    """From now on a closed pipe ends nothing (`streamrl up | head`): what it would get is dropped."""
    _outlives[0] = True


def write(text: str) -> None:
    _put(sys.stdout, text)


def _put(stream: TextIO, text: str) -> None:
    try:
        stream.write(text + "\n")
        stream.flush()
    except BrokenPipeError:
        if not _outlives[0]:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if stream is sys.stdout:
            note("nobody reads this any more; the run goes on (`streamrl logs -f` shows it, `streamrl down` ends it)")


def columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The first row is the heading."""
    from streamrl.monitor.lines import printable

    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (f"{cell:{width}}" for cell, width in zip(row, widths, strict=True))
        yield printable("  ".join(cells).rstrip())


def note(text: str) -> None:
    _put(sys.stderr, text)


class ProgressLine:
    """Progress on stderr: one line that changes on a terminal, elsewhere a line every ten seconds."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._pause = _DRAW_SECONDS if self._terminal else _NOTE_SECONDS
        self._next = time.monotonic() + self._pause
        self._drawn = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._drawn:
            note("")

    def say(self, text: str) -> None:
        """Write a line of its own, in place of the changing one."""
        if self._drawn:
            sys.stderr.write("\r\x1b[K")
        note(text)

    def show(self, text: str, *, last: bool = False) -> None:
        """Show the progress, unless it was shown a moment ago; the last state always."""
        now = time.monotonic()
        if now < self._next and not last:
            return
        self._next = now + self._pause
        if self._terminal:
            self._drawn = True
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()
        else:
            note(text)


async def repeat(once: Callable[[], Awaitable[int]], seconds: float | None) -> int:
    """Call `once`, again every `seconds` unless None, and return its last code; Ctrl-C is the ordinary end."""
    code = 0
    try:
        while True:
            code = await once()
            if seconds is None:
                return code
            await asyncio.sleep(seconds)
    except asyncio.CancelledError:  # asyncio.run makes this of Ctrl-C
        if seconds is None:
            raise
        return code
