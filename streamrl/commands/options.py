"""Options and arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated
from urllib.parse import urlparse

import typer

from streamrl.errors import UsageError

RunOption = Annotated[
    Path | None,
    typer.Option("--run", metavar="DIR", envvar="STREAMRL_RUN", help="Run directory; the newest in runs/ if left out."),
]
AnywhereOption = Annotated[
    str | None,
    typer.Option(
        "--run",
        metavar="DIR|URL",
        envvar="STREAMRL_RUN",
        help="Run directory; the newest in runs/ if left out; redis://HOST:PORT#NAME of another machine.",
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object (page JSON output of the documentation).")
]
WatchOption = Annotated[bool, typer.Option("--watch", help="Repeat until Ctrl-C.")]
EveryOption = Annotated[float, typer.Option("--every", min=0.1, metavar="SECONDS", help="Pause between repeats.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one value, e.g. learner.lr=1e-6.")
]
EvalOption = Annotated[bool, typer.Option("--eval", help="Held-out groups instead of training groups.")]
GroupArgument = Annotated[int, typer.Argument(min=0, metavar="GROUP", help="Id of the group.")]
RunFile = Annotated[Path | None, typer.Argument(metavar="RUN.yaml", help="Run file; ./run.yaml if left out.")]


def expect_server_url(url: str, hint: str) -> None:
    """Raise UsageError unless `url` is a server's URL without a password; `hint` says where the key belongs."""
    parts = urlparse(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise UsageError(f"{url!r} is not the URL of a server", "write http://HOST:PORT")
    if parts.username or parts.password:
        raise UsageError("a URL with a password would be shown to everybody", hint)


def change_line(server: str, *, present: bool, changed: bool) -> str:
    done = "added" if present else "removed"
    return f"{server} {done}" if changed else f"{server} was {done} before"
