"""Options that several commands share; imports nothing heavy, because every command line reads this."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunOption = Annotated[
    Path | None,
    typer.Option("--run", metavar="DIR", envvar="STREAMRL_RUN", help="Run directory; the newest in runs/ if left out."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON envelope on stdout (docs/reference/json.md).")]
WatchOption = Annotated[bool, typer.Option("--watch", help="Again and again until Ctrl-C.")]
EveryOption = Annotated[float, typer.Option("--every", min=0.1, metavar="SECONDS", help="Pause of --watch.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one value, e.g. learner.lr=1e-6.")
]
