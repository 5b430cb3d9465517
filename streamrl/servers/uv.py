"""`uv pip install` with the settings of pip: where pip finds its packages, uv finds them too.

    python streamrl/servers/uv.py --python .venv/bin/python --editable .

The Makefile runs this file before anything is installed, so it imports the standard library only.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
from typing import Final

_MANY: Final = {"constraint": "--constraint", "trusted-host": "--allow-insecure-host"}
_SWITCHES: Final = {"no-index": ["--no-index"], "pre": ["--prerelease", "allow"], "no-cache-dir": ["--no-cache"]}
_LISTS: Final = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
}
"""Places, with what separates them. URLs may hold passwords, and every user of the machine can read arguments."""
_VARIABLES: Final = {
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "proxy": "ALL_PROXY",
    "retries": "UV_HTTP_RETRIES",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
}


def find_uv() -> str | None:
    """Return the uv beside this interpreter, else the one on PATH."""
    return shutil.which("uv", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")]))  # noqa: PTH120


def install_command(uv: str) -> tuple[list[str], dict[str, str]]:
    """Return `uv pip install` with its first arguments, and its environment.

    As pip does, uv takes the best version of all indexes, and not that of the first index with any. `UV_INDEX` names
    more indexes, which come before those of pip.
    """
    arguments = ["--index-strategy", "unsafe-best-match"]
    environ = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONHOME"}}
    settings = _pip_settings()
    settings["extra-index-url"] = f"{environ.get('UV_INDEX', '')} {settings.get('extra-index-url', '')}"
    for key, value in settings.items():
        if key in _MANY:
            arguments += [word for each in value.split() for word in (_MANY[key], each)]
        elif key in _LISTS and (places := value.split()):
            variable, separator = _LISTS[key]
            environ[variable] = separator.join(places)
        elif key in _SWITCHES and value.lower() in {"1", "true", "yes", "on"}:
            arguments += _SWITCHES[key]
        elif key in _VARIABLES:
            environ.setdefault(_VARIABLES[key], value)
    return [uv, "pip", "install", *arguments], environ


def _pip_settings() -> dict[str, str]:
    """Return what pip's files and variables (PIP_*) say about `pip install`; nothing where there is no pip."""
    pip = [sys.executable, "-m", "pip"] if importlib.util.find_spec("pip") else [shutil.which("pip") or "false"]
    said = subprocess.run([*pip, "config", "list"], capture_output=True, text=True, check=False)  # noqa: S603
    by_section: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in said.stdout.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        by_section.get(section, {})[key] = ast.literal_eval(value)
    return by_section["global"] | by_section["install"] | by_section[":env:"]


if __name__ == "__main__":
    command, variables = install_command(find_uv() or "uv")
    words = [*command, *sys.argv[1:]]
    os.execvpe(words[0], words, variables)  # noqa: S606
