"""Draw what a live run shows as an SVG, for the documentation.

In a second terminal, while `streamrl up` runs (the picture of this site: `streamrl init --template sort`):

    python docs/picture.py runs/sort docs/start/screen.svg          # the live screen
    python docs/picture.py runs/sort docs/guides/lag.svg lag        # `streamrl lag`
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import time
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import MONOKAI

from streamrl.commands.rundir import find_run
from streamrl.commands.up import Look
from streamrl.monitor.board import Board, Goal
from streamrl.monitor.roles import read_states
from streamrl.monitor.screen import render
from streamrl.monitor.tables import lag_table

WIDTHS = {"screen": 110, "lag": 110}
READINGS = 6
"""A second apart, so that the rates are those of about five seconds."""


def draw(run_dir: Path, picture: Path, what: str = "screen") -> None:
    """Read the run a few times and write its screen, or the table of `lag`, as `picture`."""
    run = find_run(run_dir)
    config = run.config
    goal = Goal(config.learner.steps, config.learner.stop_at_accuracy, config.evaluation.prompts)
    console = Console(record=True, width=WIDTHS[what], file=io.StringIO(), force_terminal=True, highlight=False)
    with contextlib.closing(Look(run)) as look:
        board = Board(config.name, run_dir, goal, look, config)
        for name, state in read_states(run_dir).roles.items():
            board.role(name, state)
            board.started = min(board.started, state.since)
        for _ in range(READINGS):
            board.refresh()
            time.sleep(1)
    if board.snapshot is None:
        raise SystemExit(f"{run_dir}: its Redis does not answer")
    table = lag_table(board.snapshot, board.verdict(), console.width)
    console.print(render(board, console.width) if what == "screen" else table)
    title = f"streamrl {'up run.yaml' if what == 'screen' else what}"
    # Without the fonts that rich's format loads from another host.
    plain = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    picture.write_text(console.export_svg(title=title, theme=MONOKAI, code_format=plain, unique_id=what), "utf-8")


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
